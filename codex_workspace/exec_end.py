"""The end of a codex that was started for one thing, with all that it has started, but not in mid-refresh of a login.

Who may begin is left to `exec_login`, what was said and done to those who started it.
"""

import signal
import subprocess
from contextlib import suppress
from typing import Final

import anyio

from app_server import KILL_GRACE_S, MARK, Process
from codex_workspace.exec_login import LoginGate
from codex_workspace.processes import end_kin, end_marked, kin_of, sweep, sweep_kin

TERM_GRACE_S: Final = 1.5
"""How long codex may take to end after SIGTERM before it gets SIGKILL."""

KILLED_S: Final = 1.0
"""How long a process that got SIGKILL is waited for where nothing else may run; it takes a few milliseconds."""


async def end_codex(process: Process, mark: str, gate: LoginGate | None, term_grace_s: float = TERM_GRACE_S) -> None:
    """End codex and all that it started, if it runs still; whoever is cancelled ends it too.

    Args:
        process: codex, the leader of its own group.
        mark: what its processes bear in their environment.
        gate: of the login that it goes by, and may be refreshing; None where it goes by none.
        term_grace_s: how long it may take after SIGTERM.
    """
    # Codex gives its MCP servers, and a command its own, an environment without the mark; killed, it ends none.
    kin = kin_of(process.popen.pid)
    is_ended = False
    try:
        with anyio.CancelScope(shield=True):
            if process.exit_code is None and gate is not None:
                await gate.spared(lambda: process.exit_code is not None)
                kin = kin_of(process.popen.pid, kin)
            if process.exit_code is None:
                process.signal_group(signal.SIGTERM)
                if not await process.ended_within(term_grace_s):
                    process.signal_group(signal.SIGKILL)
                    await process.ended_within(KILL_GRACE_S)
            await sweep_kin(process.popen.pid, kin)
            await sweep(MARK, mark)
            is_ended = True
    finally:
        if not is_ended:
            # A shield does not hold what asyncio itself cancels, and there may be no further chance.
            process.signal_group(signal.SIGKILL)
            end_kin(process.popen.pid, kin)
            end_marked(MARK, mark)
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(KILLED_S)
