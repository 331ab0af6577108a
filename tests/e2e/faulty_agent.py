"""The agent with a fault: it kills itself at one step of a delivery. Usage: python -m tests.e2e.faulty_agent STEP.

The faults are patched into the real methods here; the agent has no code for them.
"""

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Final

from a2a.server.context import ServerCallContext
from a2a.types import Task

from codex_workspace.__main__ import main
from codex_workspace.backends.codex_exec.thread import ExecThread
from codex_workspace.codex.thread import CodexThread
from codex_workspace.common.a2a_terms import TERMINAL
from codex_workspace.storage.deliveries import Deliveries
from codex_workspace.storage.tasks import TaskStore


def kill_self() -> None:
    """End this process like a power failure."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before(owner: type, name: str) -> None:
    """Make a method kill the process instead of running."""
    assert hasattr(owner, name)

    async def trap(*_arguments: object, **_named: object) -> None:
        kill_self()

    setattr(owner, name, trap)


def kill_after(owner: type[Deliveries], name: str) -> None:
    """Make a method kill the process after it has run, and after what it has deferred is on the disk."""
    real: Callable[..., Awaitable[object]] = getattr(owner, name)

    async def trap(self: Deliveries, *arguments: object) -> None:
        await real(self, *arguments)
        await self._database.flush()
        kill_self()

    setattr(owner, name, trap)


def kill_before_turn() -> None:
    """Make both backends kill the process instead of starting a turn."""
    kill_before(CodexThread, "_send_turn")
    kill_before(ExecThread, "_start_with_servers")


def kill_when_task_ends(*, after: bool) -> None:
    """Kill the process before or after it saves a task's terminal state."""
    real = TaskStore.save

    async def save(self: TaskStore, task: Task, context: ServerCallContext) -> None:
        if task.status.state in TERMINAL and not after:
            kill_self()
        await real(self, task, context)
        if task.status.state in TERMINAL:
            await self.flush()
            kill_self()

    setattr(TaskStore, "save", save)  # noqa: B010


STEPS: Final[dict[str, Callable[[], None]]] = {
    "before accepting": lambda: kill_before(Deliveries, "accept"),
    "after accepting": lambda: kill_after(Deliveries, "accept"),
    "before the turn request": kill_before_turn,
    "after the turn start": lambda: kill_before(Deliveries, "mark_started"),
    "after storing the turn": lambda: kill_after(Deliveries, "mark_started"),
    "before storing the answer": lambda: kill_before(Deliveries, "mark_answered"),
    "after storing the answer": lambda: kill_after(Deliveries, "mark_answered"),
    "before saving the final state": lambda: kill_when_task_ends(after=False),
    "after saving the final state": lambda: kill_when_task_ends(after=True),
}

if __name__ == "__main__":
    STEPS[sys.argv[1]]()
    sys.exit(main(["serve"]))
