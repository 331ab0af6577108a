"""Which tasks may be asking something, and in which conversation: there the next message is the answer.

For senders that name no task, as the platform and its runtime: they see a question as an answer like any other.
"""

from typing import Final

from a2a.server.context import ServerCallContext

from codex_workspace.store import Store
from codex_workspace.task_states import ASKING, AT_WORK

MAX_ASKED: Final = 1000
"""So many conversations are remembered, those that were noted last: nobody may ever speak in them again."""


class Asked:
    """Remembers tasks that ask, or may come to it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tasks: dict[tuple[str, str], str] = {}

    def note(self, owner: str, context_id: str, task_id: str) -> None:
        """Remember the task that was last at work in a conversation."""
        self._tasks.pop((owner, context_id), None)
        self._tasks[owner, context_id] = task_id
        if len(self._tasks) > MAX_ASKED:
            del self._tasks[next(iter(self._tasks))]

    async def task_in(self, owner: str, context_id: str, call: ServerCallContext) -> str | None:
        """Return the task that asks something in a conversation, None where nothing is asked."""
        task_id = self._tasks.get((owner, context_id))
        if task_id is None:
            return None
        task = await self._store.tasks.get(task_id, call)
        if task is None or task.status.state not in AT_WORK:
            # What has ended asks no more; what asks gets its answer now.
            self._tasks.pop((owner, context_id), None)
        return task_id if task is not None and task.status.state in ASKING else None
