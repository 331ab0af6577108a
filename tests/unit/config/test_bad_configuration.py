"""Whatever is wrong with a configuration, the command line says it in one sentence, and ends with exit code 2.

Covers `config.loading`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from codex_workspace.__main__ import EXIT_CONFIG, main
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
