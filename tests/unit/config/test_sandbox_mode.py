"""What `codex.sandbox: auto` becomes; `tests/e2e/test_sandbox.py` runs agents whose kernel forbids it."""

import shutil
from pathlib import Path

import pytest

from codex_workspace.config.loading import load_settings
from codex_workspace.config.sandbox_mode import why_blocked
from codex_workspace.config.settings import Settings
from tests.support.bad_configuration import GOOD

IMAGE = {"SANDBOX_FALLBACK": "container"}


def blocked_codex(folder: Path, script: str = 'echo "bwrap: No permissions to create a namespace." >&2; exit 1') -> str:
    """Return a program whose `sandbox` command fails, as codex's does under Docker's default seccomp profile."""
    program = folder / "codex"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    return str(program)


def loaded(folder: Path, codex: str = "{}", **env: str) -> Settings:
    (folder / "config.yaml").write_text(f"{GOOD}codex: {codex}\n")
    return load_settings({"HOME": str(folder), **env}, config_path=folder, cwd=folder, root=folder)


@pytest.mark.parametrize(
    ("codex", "env", "mode"),
    [
        ("{}", {}, "workspace-write"),
        ("{}", IMAGE, "container"),
        ("{sandbox: auto}", IMAGE, "container"),
        ("{hide_secrets: true}", IMAGE, "workspace-write"),
        ("{sandbox: workspace-write}", IMAGE, "workspace-write"),
        ("{sandbox: read-only}", IMAGE, "read-only"),
        ("{sandbox: container}", {}, "container"),
    ],
)
def test_auto_relies_on_the_container_only_in_the_image(
    tmp_path: Path, codex: str, env: dict[str, str], mode: str
) -> None:
    settings = loaded(tmp_path, codex, CODEX_BIN=blocked_codex(tmp_path), **env)
    assert settings.config.codex.sandbox == mode
    is_fallback = mode == "container" and codex != "{sandbox: container}"
    assert settings.sandbox_blocked == ("bwrap: No permissions to create a namespace" if is_fallback else None)


def test_auto_is_codex_s_own_sandbox_where_it_works(tmp_path: Path) -> None:
    settings = loaded(tmp_path, **IMAGE)
    assert (settings.config.codex.sandbox, settings.sandbox_blocked) == ("workspace-write", None)


def test_a_codex_that_cannot_run_does_not_turn_the_sandbox_off(tmp_path: Path) -> None:
    settings = loaded(tmp_path, CODEX_BIN="/nowhere/codex", **IMAGE)
    assert (settings.config.codex.sandbox, settings.sandbox_blocked) == ("workspace-write", None)


def test_the_probe_ignores_the_environment_and_the_operator_s_config_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "codex-home"
    home.mkdir()
    (home / "config.toml").write_text("not toml")
    monkeypatch.setenv("CODEX_HOME", str(home))
    real = loaded(tmp_path, CODEX_HOME=str(home)).codex_bin
    assert real is not None
    assert shutil.which(str(real))
    assert why_blocked(real, tmp_path) is None


def test_a_failure_without_a_message_names_the_exit_code(tmp_path: Path) -> None:
    assert why_blocked(Path(blocked_codex(tmp_path, "exit 7")), tmp_path) == "exit code 7"
