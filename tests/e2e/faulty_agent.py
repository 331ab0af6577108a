"""The agent with a trap in it: it kills itself at one step of a delivery. Usage: python -m tests.e2e.faulty_agent STEP.

The traps are laid here, around the real methods; the agent itself knows nothing of them.
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
from codex_workspace.storage.store import DebouncedTaskStore


def kill_self() -> None:
    """End this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before(owner: type, name: str) -> None:
    """Make a method kill the process instead of doing its work."""
    assert hasattr(owner, name)

    async def trap(*_arguments: object, **_named: object) -> None:
        kill_self()

    setattr(owner, name, trap)


def kill_after(owner: type, name: str) -> None:
    """Make a method kill the process once its work is done."""
    real: Callable[..., Awaitable[object]] = getattr(owner, name)

    async def trap(*arguments: object, **named: object) -> None:
        await real(*arguments, **named)
        kill_self()

    setattr(owner, name, trap)


def kill_before_turn() -> None:
    """Make either backend kill the process instead of asking codex for a turn."""
    kill_before(CodexThread, "_try_start_turn")
    kill_before(ExecThread, "_start_with_servers")


def kill_when_task_ends(*, after: bool) -> None:
    """Make the saving of a task's terminal state kill the process, before or after it."""
    real = DebouncedTaskStore.save

    async def save(self: DebouncedTaskStore, task: Task, context: ServerCallContext) -> None:
        if task.status.state in TERMINAL and not after:
            kill_self()
        await real(self, task, context)
        if task.status.state in TERMINAL:
            kill_self()

    setattr(DebouncedTaskStore, "save", save)  # noqa: B010


STEPS: Final[dict[str, Callable[[], None]]] = {
    "before it is accepted": lambda: kill_before(Deliveries, "accept"),
    "after it is accepted": lambda: kill_after(Deliveries, "accept"),
    "before the turn is asked for": kill_before_turn,
    "after the turn has begun": lambda: kill_before(Deliveries, "mark_started"),
    "after the turn is written down": lambda: kill_after(Deliveries, "mark_started"),
    "before the answer is written down": lambda: kill_before(Deliveries, "mark_answered"),
    "after the answer is written down": lambda: kill_after(Deliveries, "mark_answered"),
    "before the task's end is saved": lambda: kill_when_task_ends(after=False),
    "after the task's end is saved": lambda: kill_when_task_ends(after=True),
}

if __name__ == "__main__":
    STEPS[sys.argv[1]]()
    sys.exit(main(["serve"]))
