"""Open and answered questions of tasks, as the request handler sees them."""

from typing import Final

from a2a.server.context import ServerCallContext
from a2a.types import ListTasksRequest, Task, TaskState, TaskStatus

from codex_workspace.common.a2a_terms import AWAITING_INPUT
from codex_workspace.storage.tasks import TaskStore

MAX_REMEMBERED_TASKS: Final = 10_000
"""How many tasks' last questions are remembered."""


class AnsweredQuestions:
    """Remembers the last answered question of each task, so that a second answer does not answer the next question.

    A question is identified by its time, because the SDK removes its message from the status when it gets an answer.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, str]] = {}

    def claim(self, task: Task, message_id: str) -> bool:
        """Claim a task's question for a message; return False if another message answered it."""
        asked_at = task.status.timestamp.ToNanoseconds()
        known = self._last.pop(task.id, (0, ""))
        is_new = known[0] != asked_at
        # Inserted again, so that the first entry is the oldest.
        self._last[task.id] = (asked_at, message_id) if is_new else known
        if len(self._last) > MAX_REMEMBERED_TASKS:
            del self._last[next(iter(self._last))]
        return is_new or not asked_at or known[1] == message_id

    def release(self, task_id: str, message_id: str) -> None:
        """Release the question of a message that was rejected."""
        if self._last.get(task_id, (0, ""))[1] == message_id:
            del self._last[task_id]

    def is_answered(self, task_id: str, status: TaskStatus) -> bool:
        """Whether a status is an answered question; the task has not sent its next status yet."""
        asked_at = status.timestamp.ToNanoseconds()
        return status.state in AWAITING_INPUT and asked_at > 0 and self._last.get(task_id, (0, ""))[0] == asked_at


async def asking_task(tasks: TaskStore, context_id: str, context: ServerCallContext) -> str | None:
    """Return the ID of the only task of a context that asks a question."""
    asking = TaskState.TASK_STATE_INPUT_REQUIRED
    found = await tasks.list(ListTasksRequest(context_id=context_id, status=asking, page_size=2), context)
    return found.tasks[0].id if len(found.tasks) == 1 else None
