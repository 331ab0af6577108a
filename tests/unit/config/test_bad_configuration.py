"""Whatever is wrong with a configuration, the command line says it in one sentence, and ends with exit code 2.

Covers `config.loading`.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pytest

from codex_workspace.__main__ import EXIT_CONFIG, main
from codex_workspace.cli import probe as healthcheck
from codex_workspace.common.errors import ConfigError, ConfigLocation
from codex_workspace.common.files import MAX_CONFIG_BYTES
from codex_workspace.config.login import AUTH_NAME, refresh_due_at, stored_login
from codex_workspace.platform.client import read_secret
from codex_workspace.server.card import card_signer
from tests.e2e.agent_process import REPOSITORY
from tests.support.bad_configuration import BAD, CREDENTIAL, GOOD, Bad


def environment_of(bad: Bad, root: Path) -> dict[str, str]:
    """Write what is there, and return the agent's environment."""
    for folder in ("configs", "state", "workspace"):
        (root / folder).mkdir()
    (root / "configs" / "config.yaml").write_text(bad.config)
    for name, content in bad.files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    usual = {
        "HOME": str(root),
        "OPENAI_API_KEY": "sk-secret-1234",
        "WORKSPACE_CONFIG_PATH": str(root / "configs"),
        "WORKSPACE_STATE_DIR": str(root / "state"),
        "WORKSPACE_DIR": str(root / "workspace"),
    }
    return usual | {name: value.replace("{root}", str(root)) for name, value in bad.env.items()}


def files_in(root: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in root.rglob("*") if file.is_file()}


def assert_is_told(said: str, bad: Bad, root: Path) -> None:
    assert said.startswith(f"configuration: {bad.place.replace('{root}', str(root))}")
    assert bad.words in said
    sentence = said.removesuffix("\n")
    assert "\n" not in sentence
    assert ". " not in sentence
    assert not sentence.endswith(".")
    assert len(sentence.replace(str(root), "")) < 420
    assert CREDENTIAL not in said


def test_there_are_more_than_fifty_kinds() -> None:
    assert len(BAD) > 100


@pytest.mark.parametrize("kind", [kind for kind, bad in BAD.items() if bad.command == "prepare"])
def test_each_error_is_one_sentence_and_exit_code_2(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = BAD[kind]
    env = environment_of(bad, tmp_path)
    before = files_in(tmp_path)
    assert main(["prepare"], env) == EXIT_CONFIG
    told = capsys.readouterr()
    assert told.out == ""
    assert_is_told(told.err, bad, tmp_path)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    "kind",
    [
        *("a misspelled key of a section", "a key with a line break", "a config.toml with a key twice"),
        *(kind for kind, bad in BAD.items() if bad.command == "serve"),
    ],
)
def test_the_agent_refuses_to_start_with_the_same_sentence(tmp_path: Path, kind: str) -> None:
    bad = BAD[kind]
    env = environment_of(bad, tmp_path)
    ran = subprocess.run(
        [sys.executable, "-m", "codex_workspace", "serve"], env=env, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert ran.returncode == EXIT_CONFIG
    assert ran.stdout == ""
    assert_is_told(ran.stderr.splitlines()[-1], bad, tmp_path)


def test_valid_settings_are_not_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = environment_of(Bad(GOOD, "", ""), tmp_path)
    assert main(["prepare"], env) == 0
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "state" / "codex" / "config.toml").is_file()


def make_large(file: Path) -> None:
    file.write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))


NOT_READ: Final[Mapping[str, tuple[Callable[[Path], None], str]]] = {
    "a pipe": (os.mkfifo, "it is a pipe or a device; write its content to a regular file"),
    "an endless device": (lambda file: file.symlink_to("/dev/zero"), "it is a pipe or a device"),
    "a large file": (make_large, f"it has more than {MAX_CONFIG_BYTES} bytes"),
}

PLACES: Final[Mapping[str, tuple[str, Bad]]] = {
    "config.yaml": ("configs/config.yaml", Bad("", "{root}/configs/config.yaml: ", "cannot be read (")),
    "a token": (
        "given",
        Bad(GOOD, "environment: A2A_TOKEN_FILE: ", "cannot be read (", env={"A2A_TOKEN_FILE": "{root}/given"}),
    ),
    "a credential": (
        "given",
        Bad(
            GOOD,
            "environment: OPENAI_API_KEY_FILE: ",
            "cannot be read (",
            env={"OPENAI_API_KEY": "", "OPENAI_API_KEY_FILE": "{root}/given"},
        ),
    ),
    "a login": (
        "given",
        Bad(GOOD, "environment: CODEX_AUTH_JSON_FILE: ", "cannot be read (", {"CODEX_AUTH_JSON_FILE": "{root}/given"}),
    ),
    "a principal's token": (
        "configs/ada.token",
        Bad(
            f"{GOOD}principals: [{{name: ada, token_file: ada.token}}]\n",
            "{root}/configs/config.yaml: principals[0].token_file: ",
            "cannot be read (",
        ),
    ),
    "an MCP server's variable": (
        "given",
        Bad(
            f"{GOOD}mcp_servers: [{{name: one, command: one, env: {{A: '${{TICKETS}}'}}}}]\n",
            "environment: TICKETS_FILE: ",
            "cannot be read (",
            env={"TICKETS_FILE": "{root}/given"},
        ),
    ),
    "codex's config.toml": (
        "state/codex/config.toml",
        Bad(GOOD, "", "cannot be used as part of CODEX_HOME ("),
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", NOT_READ)
def test_only_regular_files_of_a_megabyte_are_read(
    tmp_path: Path, place: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (name, bad), (make, why) = PLACES[place], NOT_READ[kind]
    env = environment_of(bad, tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    assert main(["prepare"], env) == EXIT_CONFIG
    said = capsys.readouterr().err
    assert_is_told(said, bad, tmp_path)
    assert why in said
    assert "##" not in said


def test_the_output_of_a_command_is_refused_as_a_secret(tmp_path: Path) -> None:
    """A shell's `<(…)` is a pipe that another process may never close."""
    env = environment_of(Bad(GOOD, "", ""), tmp_path)
    shown = f"A2A_TOKEN_FILE=<(echo {CREDENTIAL}) exec {sys.executable} -m codex_workspace prepare"
    ran = subprocess.run(["bash", "-c", shown], env=env, cwd=REPOSITORY, capture_output=True, text=True)
    assert ran.returncode == EXIT_CONFIG
    assert "A2A_TOKEN_FILE: names a file that cannot be read (it is a pipe or a device; write its" in ran.stderr
    assert CREDENTIAL not in ran.stderr


def test_a_secret_that_kubernetes_mounts_is_read(tmp_path: Path) -> None:
    """Such a file is a link to a link."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "token").write_text("token-0123456789")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "token").symlink_to("..data/token")
    env = environment_of(Bad(GOOD, "", "", {"A2A_TOKEN_FILE": "{root}/token"}), tmp_path)
    assert main(["prepare"], env) == 0


@pytest.mark.parametrize("kind", NOT_READ)
def test_files_that_are_read_later_are_bounded_as_well(tmp_path: Path, kind: str) -> None:
    make, _ = NOT_READ[kind]
    make(tmp_path / AUTH_NAME)
    assert stored_login(tmp_path) is None
    assert refresh_due_at(tmp_path) is None
    assert read_secret(tmp_path / AUTH_NAME) is None
    with pytest.raises(ConfigError, match=r"config.yaml: a2a.signing_key_file: names .*, which cannot be read \(it "):
        card_signer(tmp_path / AUTH_NAME, ConfigLocation("config.yaml", "a2a.signing_key_file"))


@pytest.mark.parametrize("kind", ["a pipe", "an endless device"])
def test_the_healthcheck_reads_no_such_file(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # No agent listens there.
    monkeypatch.setattr(healthcheck, "DEFAULT_PORT", 1)
    make, _ = NOT_READ[kind]
    make(tmp_path / "config.yaml")
    assert "the agent does not answer" in str(healthcheck.probe({"WORKSPACE_CONFIG_PATH": str(tmp_path)}))
