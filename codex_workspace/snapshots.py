"""A task as a reader was given it, and which of the events on their way are in it already.

The SDK begins to collect a new reader's events before it reads the task for him: what happens in between comes twice.
"""

import math
from collections.abc import Iterable

from a2a.server.events import Event
from a2a.types import Part, Task, TaskArtifactUpdateEvent, TaskStatusUpdateEvent

from codex_workspace.task_states import OFFSET


class Snapshot:
    """What a reader knows of a task."""

    def __init__(self, task: Task) -> None:
        self._chars = {artifact.artifact_id: _chars(artifact.parts) for artifact in task.artifacts}
        self._said = {message.message_id for message in task.history}
        self._said.add(task.status.message.message_id)

    def holds(self, event: Event) -> bool:
        """Whether the reader knows what an event has to tell; if not, he knows it from now on."""
        match event:
            case TaskArtifactUpdateEvent():
                return self._has_piece(event)
            case TaskStatusUpdateEvent() if event.status.message.message_id:
                is_known = event.status.message.message_id in self._said
                self._said.add(event.status.message.message_id)
                return is_known
            case _:
                return False

    def _has_piece(self, update: TaskArtifactUpdateEvent) -> bool:
        name, chars = update.artifact.artifact_id, _chars(update.artifact.parts)
        known = self._chars.get(name, 0)
        if not update.append:
            self._chars[name] = chars
            return False
        if OFFSET in update.metadata and _number(update.metadata[OFFSET]) < known:
            return True
        self._chars[name] = known + chars
        return False


def _number(value: object) -> float:
    return value if isinstance(value, float) else math.inf


def _chars(parts: Iterable[Part]) -> int:
    return sum(len(part.text) for part in parts)
