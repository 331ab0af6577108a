"""Decides what `codex.sandbox: auto` means on this machine, once for each start."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Final

from codex_workspace.common.errors import CodexCannotStart
from codex_workspace.config.settings import Settings

PROBE_TIMEOUT_S: Final = 20.0
"""The probe takes 0.05 s, and seconds on a busy machine."""

NEUTRAL: Final = "/proc"
"""The probe's CODEX_HOME and folder: it exists, contains no configuration, and nothing can be written to it."""

_REFUSAL: Final = re.compile(
    r"bwrap: (?!execvp).*(No permissions|not permitted|Permission denied|not implemented|Invalid argument|not support)"
)
"""What codex's helper (bubblewrap) says if the kernel forbids namespaces or mounts: seccomp, AppArmor, sysctl."""

_MAX_NAMESPACES: Final = Path("/proc/sys/user/max_user_namespaces")
"""0 forbids namespaces. Another limit can be used up for a while, which is no refusal."""


def settle_sandbox(settings: Settings) -> Settings:
    """Return settings in which `codex.sandbox` is never `auto`.

    `auto` is workspace-write, unless the kernel forbids codex's sandbox and SANDBOX_FALLBACK names another mode. With
    `hide_secrets` or approvals the configuration relies on codex's sandbox, so there is no other mode.

    Raises:
        CodexCannotStart: as `why_blocked`.
    """
    codex, fallback = settings.config.codex, settings.environment.SANDBOX_FALLBACK
    if codex.sandbox != "auto":
        return settings
    why = None
    relies_on_it = codex.hide_secrets or codex.approval_policy != "never"
    if fallback is not None and settings.codex_bin is not None and not relies_on_it:
        why = why_blocked(settings.codex_bin)
    mode = "workspace-write" if why is None else fallback
    chosen = settings.config.model_copy(update={"codex": codex.model_copy(update={"sandbox": mode})})
    return replace(settings, config=chosen, sandbox_blocked=why)


def why_blocked(codex: Path) -> str | None:
    """Run a command in codex's sandbox; return why the kernel forbids that, None if it worked or codex cannot be run.

    Raises:
        CodexCannotStart: it failed for another reason, or does not end.
    """
    try:
        probe = subprocess.run(
            [codex, "sandbox", "--", "true"],
            cwd=NEUTRAL,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": NEUTRAL, "CODEX_HOME": NEUTRAL},
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
    # Codex warns that it cannot write to CODEX_HOME.
    lines = [each for each in probe.stderr.decode(errors="replace").splitlines() if not each.startswith("WARNING: ")]
    said = " ".join(" ".join(lines).split())[:300].rstrip(".")
    if probe.returncode == 1 and _is_refusal(said):
        return said
    ended = f"exit code {probe.returncode}" if probe.returncode > 0 else f"signal {-probe.returncode}"
    raise CodexCannotStart(
        "codex.sandbox: auto: a command in codex's sandbox failed, and not because the kernel forbids it: "
        f"{f'{ended}, {said}' if said else ended}; remove the cause, or set codex.sandbox in config.yaml"
    )


def _is_refusal(said: str) -> bool:
    if said.startswith("bwrap: ") and "(ENOSPC)" in said:
        return _MAX_NAMESPACES.read_text().strip() == "0"
    return _REFUSAL.match(said) is not None
