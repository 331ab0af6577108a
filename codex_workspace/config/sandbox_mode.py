"""Decides what `codex.sandbox: auto` means on this machine, once for each start."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Final

from codex_workspace.common.errors import CodexCannotStart
from codex_workspace.config.settings import Settings

PROBE_TIMEOUT_S: Final = 20.0
"""The probe takes 0.05 s, and seconds on a busy machine."""

EMPTY_HOME: Final = "/proc"
"""The probe's CODEX_HOME: it exists, contains no config.toml, and nothing can be written to it."""


def settle_sandbox(settings: Settings) -> Settings:
    """Return settings in which `codex.sandbox` is never `auto`.

    `auto` is workspace-write, unless the kernel forbids codex's sandbox and SANDBOX_FALLBACK names another mode. With
    `hide_secrets` the configuration relies on codex's sandbox, so there is no other mode.

    Raises:
        CodexCannotStart: as `why_blocked`.
    """
    codex, fallback = settings.config.codex, settings.environment.SANDBOX_FALLBACK
    if codex.sandbox != "auto":
        return settings
    why = None
    if fallback is not None and settings.codex_bin is not None and not codex.hide_secrets:
        why = why_blocked(settings.codex_bin, settings.workspace_dir)
    mode = "workspace-write" if why is None else fallback
    chosen = settings.config.model_copy(update={"codex": codex.model_copy(update={"sandbox": mode})})
    return replace(settings, config=chosen, sandbox_blocked=why)


def why_blocked(codex: Path, folder: Path) -> str | None:
    """Run a command in codex's sandbox, in `folder`; return why it failed, None if it worked or codex cannot be run.

    Raises:
        CodexCannotStart: it does not end.
    """
    try:
        probe = subprocess.run(
            [codex, "sandbox", "--", "true"],
            cwd=folder,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": EMPTY_HOME, "CODEX_HOME": EMPTY_HOME},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CodexCannotStart(f"a command in codex's sandbox did not end within {PROBE_TIMEOUT_S:g} s") from error
    except OSError:
        # The start of codex fails as well, and its error says how to correct that.
        return None
    if probe.returncode == 0:
        return None
    lines = probe.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {probe.returncode}"]
    return lines[-1][:300].rstrip(".")
