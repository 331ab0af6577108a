"""Which tasks may be asking something, and in which conversation: there the next message is the answer.

For senders that name no task, as the platform and its runtime: they see a question as an answer like any other.

Which questions somebody has answered already: a second word would be on the next one, which nobody has seen.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from a2a.server.context import ServerCallContext
from a2a.types import Task, TaskStatus

from codex_workspace.common.a2a_terms import AWAITING_INPUT, WORKING
from codex_workspace.storage.store import Store

MAX_OPEN: Final = 1000
"""So many conversations are remembered, those that were noted last: nobody may ever speak in them again."""


class OpenQuestions:
    """Remembers tasks that ask, or may come to it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tasks: dict[tuple[str, str], str] = {}

    def record(self, owner: str, context_id: str, task_id: str) -> None:
        """Remember the task that was last at work in a conversation."""
        self._tasks.pop((owner, context_id), None)
        self._tasks[owner, context_id] = task_id
        if len(self._tasks) > MAX_OPEN:
            del self._tasks[next(iter(self._tasks))]

    async def find(self, owner: str, context_id: str, call: ServerCallContext) -> str | None:
        """Return the task that asks something in a conversation, None where nothing is asked."""
        task_id = self._tasks.get((owner, context_id))
        if task_id is None:
            return None
        task = await self._store.tasks.get(task_id, call)
        if task is None or task.status.state not in WORKING:
            # What has ended asks no more; what asks gets its answer now.
            self._tasks.pop((owner, context_id), None)
        return task_id if task is not None and task.status.state in AWAITING_INPUT else None


MAX_TASKS: Final = 10_000
"""Remembered; a task asks for an hour at most, and a word is worked on within milliseconds."""


@dataclass(frozen=True, slots=True)
class _Question:
    """Which question it is: the id of the message that asks, and when that was, in ns of Unix time.

    As soon as an answer comes in, the SDK takes the message out of the status, and the time alone is left; a host's own
    executor may give neither.
    """

    message_id: str
    asked_at_ns: int

    @classmethod
    def of(cls, status: TaskStatus) -> "_Question":
        return cls(status.message.message_id, status.timestamp.ToNanoseconds())

    @property
    def can_be_told(self) -> bool:
        return bool(self.message_id or self.asked_at_ns)

    def is_same(self, other: "_Question") -> bool:
        if self.message_id and other.message_id:
            return self.message_id == other.message_id
        return bool(self.asked_at_ns) and self.asked_at_ns == other.asked_at_ns


class AnsweredQuestions:
    """Remembers of each task the last question that was answered, and with which message."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, tuple[_Question, str]] = OrderedDict()

    def claim(self, task: Task, message_id: str) -> bool:
        """Take a message for the answer to what a task asks; False where another one was before it.

        What is asked without a message and a time cannot be told from what is asked next, and takes every answer.
        """
        asked = _Question.of(task.status)
        if not asked.can_be_told:
            return True
        known = self._last.get(task.id)
        if known is not None and known[0].is_same(asked):
            return known[1] == message_id
        self._last[task.id] = (asked, message_id)
        self._last.move_to_end(task.id)
        if len(self._last) > MAX_TASKS:
            self._last.popitem(last=False)
        return True

    def release(self, task_id: str, message_id: str) -> None:
        """Take note that a message is no answer, because it was refused."""
        known = self._last.get(task_id)
        if known is not None and known[1] == message_id:
            del self._last[task_id]

    def is_answered(self, task_id: str, status: TaskStatus) -> bool:
        """Tell whether a status asks something that was answered: the task has only not said yet that it goes on."""
        known = self._last.get(task_id)
        return status.state in AWAITING_INPUT and known is not None and known[0].is_same(_Question.of(status))
