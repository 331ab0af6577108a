"""An agent that is restarted whenever it ends, with the same port and folders, as by a container engine."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
import psutil

from tests.e2e.agent_process import AgentSetup, spawn
from tests.support.waiting import eventually

RESTART_PAUSE_S: Final = 0.1
STOP_WITHIN_S: Final = 10.0
"""Docker's default."""

GONE_WITHIN_S: Final = 6.0
"""A codex whose agent was killed exits within this time."""


@dataclass(slots=True)
class Supervised:
    """The running agent, None during a restart; `exits` are the exit codes of earlier ones, negative for signals."""

    setup: AgentSetup
    process: psutil.Popen | None = None
    exits: list[int] = field(default_factory=list)
    stopping: bool = False

    def codex(self) -> psutil.Process | None:
        """The agent's codex, or None."""
        if self.process is not None:
            with suppress(psutil.Error):
                for child in self.process.children():
                    if "app-server" in child.cmdline():
                        return child
        return None

    async def keep_running(self) -> None:
        """Start the agent, and restart it whenever it ends, until `stop` is called."""
        while not self.stopping:
            self.process = spawn(self.setup)
            code = await anyio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)
            self.exits.append(int(code))
            self.process = None
            await anyio.sleep(RESTART_PAUSE_S)

    def stop(self) -> None:
        """Stop the agent and do not restart it."""
        self.stopping = True
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)


@asynccontextmanager
async def supervised(setup: AgentSetup) -> AsyncIterator[Supervised]:
    """Run an agent while the block is open; at its end stop it, or kill it after a grace period."""
    agent = Supervised(setup)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.keep_running)
            try:
                yield agent
            finally:
                agent.stop()
                with anyio.move_on_after(STOP_WITHIN_S, shield=True):
                    await eventually(lambda: agent.process is None)
                tasks.cancel_scope.cancel()
    finally:
        if agent.process is not None:
            agent.process.kill()


def processes_of(root: Path) -> list[psutil.Process]:
    """Return all processes of the agent in `root`, found by their environment or working folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            values = process.environ().values() if process.pid != os.getpid() else []
            if any(str(root) in value for value in values) or process.cwd().startswith(str(root)):
                found.append(process)
    return found


async def end_processes_of(root: Path) -> list[str]:
    """Wait until the agent's processes have ended; kill and describe the remaining ones."""
    with anyio.move_on_after(GONE_WITHIN_S):
        await eventually(lambda: not processes_of(root), poll_s=0.05)
    left = processes_of(root)
    described = [_described(process) for process in left]
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return described


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.status()}): {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"{process.pid}"
