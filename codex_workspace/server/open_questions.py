"""Rejects a second answer to a question of a task, which would be applied to the next question."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from a2a.types import Task, TaskStatus

from codex_workspace.common.a2a_terms import AWAITING_INPUT

MAX_TASKS: Final = 10_000
"""How many tasks are remembered; a question is open for an hour at most."""


@dataclass(frozen=True, slots=True)
class _Question:
    """Identifies a question by the ID of its message and its time (Unix, ns).

    When an answer comes in, the SDK removes the message from the status and only the time is left. Another executor may
    set neither.
    """

    message_id: str
    asked_at_ns: int

    @classmethod
    def of(cls, status: TaskStatus) -> "_Question":
        return cls(status.message.message_id, status.timestamp.ToNanoseconds())

    @property
    def is_identifiable(self) -> bool:
        return bool(self.message_id or self.asked_at_ns)

    def is_same(self, other: "_Question") -> bool:
        if self.message_id and other.message_id:
            return self.message_id == other.message_id
        return bool(self.asked_at_ns) and self.asked_at_ns == other.asked_at_ns


class AnsweredQuestions:
    """Remembers the last answered question of each task, and the message that answered it."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, tuple[_Question, str]] = OrderedDict()

    def claim(self, task: Task, message_id: str) -> bool:
        """Claim a task's question for a message; return False if another message answered it.

        A question without a message ID and a time accepts every answer.
        """
        asked = _Question.of(task.status)
        if not asked.is_identifiable:
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
        """Release the question of a message that was rejected."""
        known = self._last.get(task_id)
        if known is not None and known[1] == message_id:
            del self._last[task_id]

    def is_answered(self, task_id: str, status: TaskStatus) -> bool:
        """Whether a status is a question that was answered; the task has not sent its next status yet."""
        known = self._last.get(task_id)
        return status.state in AWAITING_INPUT and known is not None and known[0].is_same(_Question.of(status))
