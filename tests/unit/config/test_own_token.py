"""The generated token: when a start has one, and what is stored of it."""

import hashlib
import os
from pathlib import Path

import pytest

from codex_workspace.common.errors import ConfigError
from codex_workspace.config.loading import load_settings
from codex_workspace.config.own_token import FILE_NAME, NewToken, OwnToken
from codex_workspace.config.settings import Settings
from tests.support.bad_configuration import GOOD

PRINCIPALS = "principals: [{name: ada, token_env: ADA}]\n"


def loaded(folder: Path, new: NewToken = "never", text: str = "", **env: str) -> Settings:
    (folder / "config.yaml").write_text(GOOD + text)
    env = {"HOME": str(folder), "WORKSPACE_STATE_DIR": str(folder), "A2A_HOST": "0.0.0.0", "ADA": "a" * 20, **env}
    return load_settings(env, config_path=folder, cwd=folder, root=folder, new_token=new)


def stored(folder: Path) -> OwnToken:
    token = OwnToken.generate()
    token.store(folder)
    return token


def test_only_the_digest_is_stored(tmp_path: Path) -> None:
    token = stored(tmp_path)
    assert token.text is not None
    file = tmp_path / FILE_NAME
    assert file.read_text() == f"{hashlib.sha256(token.text.reveal().encode()).hexdigest()}\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert OwnToken.read(tmp_path) == OwnToken(token.digest)
    assert token.text.reveal() not in repr(token)


def test_a_start_on_a_terminal_generates_a_token_and_stores_it_later(tmp_path: Path) -> None:
    first, second = (loaded(tmp_path, "if missing").own_token for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.text is not None
    assert len(first.text.reveal()) == 43
    assert first != second
    assert not (tmp_path / FILE_NAME).exists()


@pytest.mark.parametrize("new", ["never", "if missing"])
def test_a_stored_token_is_used_with_and_without_a_terminal(tmp_path: Path, new: NewToken) -> None:
    token = stored(tmp_path)
    assert loaded(tmp_path, new).own_token == OwnToken(token.digest)


def test_rotation_replaces_a_stored_token(tmp_path: Path) -> None:
    token = stored(tmp_path)
    new = loaded(tmp_path, "always").own_token
    assert new is not None
    assert new.text is not None
    assert new.digest != token.digest
    (tmp_path / FILE_NAME).write_text("broken")
    assert loaded(tmp_path, "always").own_token is not None


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("", {"A2A_TOKEN": "t" * 20}),
        ("", {"A2A_ALLOW_ANONYMOUS": "1"}),
        ("", {"A2A_HOST": "localhost"}),
        (PRINCIPALS, {}),
    ],
)
def test_a_generated_token_is_not_used_beside_another_rule(tmp_path: Path, text: str, other: dict[str, str]) -> None:
    stored(tmp_path)
    for new in ("never", "if missing"):
        assert loaded(tmp_path, new, text, **other).own_token is None
    with pytest.raises(ConfigError, match="--rotate-token: this agent uses no generated token, because"):
        loaded(tmp_path, "always", text, **other)


@pytest.mark.parametrize("content", ["", "0" * 63, "0" * 65, "G" * 64, "0" * 64 + "\n\n", "0" * 5000])
def test_a_broken_file_is_rejected(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(ConfigError, match=f"{FILE_NAME}: must contain 64 hexadecimal digits; `serve --rotate-token`"):
        loaded(tmp_path)


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(ConfigError, match=f"{FILE_NAME}: cannot be read: Is a directory"):
        loaded(tmp_path)
    with pytest.raises(ConfigError, match=f"{FILE_NAME}: cannot be written: Is a directory"):
        stored(tmp_path)


def test_a_pipe_in_place_of_the_file_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(ConfigError, match=f"{FILE_NAME}: cannot be read: it is a pipe or a device"):
        loaded(tmp_path)
