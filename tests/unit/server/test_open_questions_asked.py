"""Where the next message is an answer: for as long as a task asks, and for so many conversations."""

from pathlib import Path

from a2a.server.context import ServerCallContext
from a2a.types import Task, TaskState, TaskStatus

from codex_workspace.common.a2a_terms import AuthenticatedUser
from codex_workspace.server import open_questions as asked
from codex_workspace.server.open_questions import OpenQuestions
from codex_workspace.storage.store import open_store

CALL = ServerCallContext(user=AuthenticatedUser("ada"))


async def test_a_task_is_found_while_it_asks_and_the_oldest_are_forgotten(tmp_path: Path) -> None:
    async with open_store(f"sqlite+aiosqlite:///{tmp_path / 'store.sqlite3'}") as store:
        places = OpenQuestions(store)
        for number, state in enumerate(
            [TaskState.TASK_STATE_WORKING, TaskState.TASK_STATE_INPUT_REQUIRED, TaskState.TASK_STATE_COMPLETED]
        ):
            task = Task(id=f"task-{number}", context_id=f"context-{number}", status=TaskStatus(state=state))
            await store.tasks.save(task, CALL)
            places.record("ada", task.context_id, task.id)
        assert [await places.find("ada", f"context-{number}", CALL) for number in range(4)] == [
            None,
            "task-1",
            None,
            None,
        ]
        assert await places.find("bob", "context-1", CALL) is None
        # What is at work may ask later.
        await store.tasks.save(
            Task(id="task-0", context_id="context-0", status=TaskStatus(state=TaskState.TASK_STATE_INPUT_REQUIRED)),
            CALL,
        )
        assert await places.find("ada", "context-0", CALL) == "task-0"
        places.record("ada", "context-1", "task-1")
        for number in range(asked.MAX_OPEN):
            places.record("ada", f"other-{number}", "task-2")
        assert await places.find("ada", "context-1", CALL) is None
