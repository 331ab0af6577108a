"""Which questions somebody has answered already: a second word would be on the next one, which nobody has seen."""

from collections import OrderedDict
from typing import Final

from a2a.types import Task, TaskStatus

from codex_workspace.task_states import ASKING

MAX_TASKS: Final = 10_000
"""Remembered; a task asks for an hour at most, and a word is worked on within milliseconds."""


class Answered:
    """Remembers of each task the last question that was answered, and with which message."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def claim(self, task: Task, message_id: str) -> bool:
        """Take a message for the answer to what a task asks; False where another one was before it.

        What is asked without a message cannot be told from what is asked next, and takes every answer.
        """
        asked = task.status.message.message_id
        if not asked:
            return True
        known, by = self._last.get(task.id, ("", ""))
        if known == asked and by != message_id:
            return False
        self._last[task.id] = (asked, message_id)
        self._last.move_to_end(task.id)
        if len(self._last) > MAX_TASKS:
            self._last.popitem(last=False)
        return True

    def give_back(self, task_id: str, message_id: str) -> None:
        """Take note that a message is no answer, because it was refused."""
        if self._last.get(task_id, ("", ""))[1] == message_id:
            del self._last[task_id]

    def holds(self, task_id: str, status: TaskStatus) -> bool:
        """Tell whether a status asks something that was answered: the task has only not said yet that it goes on."""
        known, _ = self._last.get(task_id, ("", ""))
        return status.state in ASKING and bool(known) and known == status.message.message_id
