"""What `codex.sandbox: auto` becomes; `tests/e2e/test_sandbox.py` runs agents whose kernel forbids it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from codex_workspace.common.errors import CodexCannotStart
from codex_workspace.config.loading import load_settings
from codex_workspace.config.sandbox_mode import why_blocked
from codex_workspace.config.settings import Settings
from tests.support.bad_configuration import GOOD
from tests.support.waiting import HANG_S

IMAGE = {"SANDBOX_FALLBACK": "container"}


NOTICE = "WARNING: proceeding, even though we could not create PATH aliases: No such file or directory (os error 2)"


def failing_codex(folder: Path, end: str, *said: str) -> str:
    """Return a program that prints lines to stderr, the first as codex's own, and ends with a line of a script."""
    (folder / "said").write_text("\n".join((NOTICE, *said)) + "\n")
    program = folder / "codex"
    program.write_text(f"#!/bin/sh\ncat {folder / 'said'} >&2\n{end}\n")
    program.chmod(0o700)
    return str(program)


def blocked_codex(folder: Path, said: str = "bwrap: No permissions to create a namespace.") -> str:
    """Return a program whose `sandbox` command fails, as codex's does under Docker's default seccomp profile."""
    return failing_codex(folder, "exit 1", said)


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
        ("{approval_policy: on-request}", IMAGE, "workspace-write"),
        ("{approval_policy: untrusted}", IMAGE, "workspace-write"),
        ("{}", {"SANDBOX_FALLBACK": ""}, "workspace-write"),
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
    assert why_blocked(real) is None


def broken_folder(file: Path) -> None:
    file.mkdir()


@pytest.mark.parametrize("create", [broken_folder, os.mkfifo], ids=["folder", "pipe"])
def test_a_broken_project_configuration_in_the_workspace_does_not_turn_the_sandbox_off(
    tmp_path: Path, create: Callable[[Path], None]
) -> None:
    (tmp_path / ".codex").mkdir()
    create(tmp_path / ".codex" / "config.toml")
    settings = loaded(tmp_path, **IMAGE)
    assert (settings.config.codex.sandbox, settings.sandbox_blocked) == ("workspace-write", None)


@pytest.mark.parametrize(
    "said",
    [
        # Codex 0.158 and 0.163 print the same: without user namespaces in the seccomp profile, in the kernel, …
        "bwrap: No permissions to create a new namespace, likely because the kernel does not allow non-privileged user "
        "namespaces. On e.g. debian this can be enabled with 'sysctl kernel.unprivileged_userns_clone=1'.",
        "bwrap: Creating new namespace failed, likely because the kernel does not support user namespaces.  bwrap must "
        "be installed setuid on such systems.",
        # … and without mounts, as with AppArmor.
        "bwrap: Creating new namespace failed: Function not implemented",
        "bwrap: Failed to make / slave: Operation not permitted",
        "bwrap: Failed to make / slave: Permission denied",
        "bwrap: Failed to make / slave: Invalid argument",
        "bwrap: Failed to make / slave: Function not implemented",
        "bwrap: pivot_root: Operation not permitted",
        "bwrap: unshare user ns: Operation not permitted",
        "bwrap: setting up uid map: Permission denied",
        "bwrap: loopback: Failed to look up lo: Operation not permitted",
    ],
)
def test_a_refusal_of_the_kernel_blocks_the_sandbox(tmp_path: Path, said: str) -> None:
    settings = loaded(tmp_path, CODEX_BIN=blocked_codex(tmp_path, said), **IMAGE)
    assert (settings.config.codex.sandbox, settings.sandbox_blocked) == (
        "container",
        " ".join(said.rstrip(".").split()),
    )


@pytest.mark.parametrize(
    ("end", "said", "why"),
    [
        ("exit 7", (), "exit code 7"),
        ("kill -KILL $$", (), "signal 9"),
        ("kill -SEGV $$", ("bwrap: Failed to make / slave: Permission denied",), "Permission denied"),
        ("exit 1", ("Error: Resource temporarily unavailable (os error 11)",), "os error 11"),
        ("exit 1", ("bwrap: Creating new namespace failed: Resource temporarily unavailable",), "unavailable"),
        ("exit 1", ("bwrap: Failed to make / slave: Cannot allocate memory",), "Cannot allocate memory"),
        (
            "exit 1",
            ("bwrap: Creating new namespace failed: nesting depth or max_*_namespaces exceeded (ENOSPC)",),
            "ENOSPC",
        ),
        ("exit 1", ("bwrap: execvp /opt/codex/bin/codex: Permission denied",), "execvp"),
        ("exit 1", ("Error: Failed to read project config file x: Permission denied (os error 13)",), "config file x"),
        (
            "exit 101",
            (
                "thread 'main' (31572) panicked at linux-sandbox/src/linux_run_main.rs:1453:9:",
                "failed to fork for bubblewrap: Resource temporarily unavailable (os error 11)",
                "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace",
            ),
            "failed to fork for bubblewrap",
        ),
    ],
)
def test_another_failure_does_not_turn_the_sandbox_off(
    tmp_path: Path, end: str, said: tuple[str, ...], why: str
) -> None:
    with pytest.raises(CodexCannotStart) as raised:
        loaded(tmp_path, CODEX_BIN=failing_codex(tmp_path, end, *said), **IMAGE)
    sentence = str(raised.value)
    assert sentence.startswith("codex.sandbox: auto: a command in codex's sandbox failed, and not because the kernel")
    assert why in sentence
    assert "WARNING" not in sentence
    assert "\n" not in sentence


def test_a_machine_without_user_namespaces_blocks_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(GOOD)
    limit = "echo 0 > /proc/sys/user/max_user_namespaces"
    code = (
        "import os; from codex_workspace.config.loading import load_settings; "
        "print(load_settings(os.environ).config.codex.sandbox)"
    )
    env = {**os.environ, **IMAGE, "HOME": str(tmp_path), "WORKSPACE_CONFIG_PATH": str(tmp_path)}
    words = ["unshare", "--map-root-user", "sh", "-ec", f'{limit}; exec "$@"', "sh", sys.executable, "-c", code]
    ran = subprocess.run(words, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert (ran.stdout, ran.stderr) == ("container\n", "")
