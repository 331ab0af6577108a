"""How a stream brings the artifact `answer`: in pieces, in pieces and then whole, or whole only.

No sequence of updates is shown once by every client, so each stream has a mode. It is a view: the executor always sends
pieces and then the whole answer with `last_chunk`, which tasks and webhooks keep. Each subscriber of a task can
therefore have its own mode, also after a restart.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Final, NamedTuple

from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.types import Part, Task, TaskArtifactUpdateEvent
from google.protobuf.struct_pb2 import Struct

from codex_workspace.common.a2a_terms import ANSWER, HEADERS, OFFSET, TERMINAL, is_protocol_0_3
from codex_workspace.config.a2a_server import AnswerMode, AnswerUpdates
from codex_workspace.server.errors import invalid

MODES: Final[Mapping[AnswerMode, str]] = {
    "pieces": "in pieces, the last of them with lastChunk",
    "pieces-then-whole": "in pieces, then whole with lastChunk",
    "whole": "whole, in one update",
}
"""The modes, described for the card."""

DEFAULT: Final[AnswerMode] = "pieces"

ANSWER_UPDATES: Final = "urn:codex-workspace:answer-updates"
"""Key of a message's metadata, whose value is a mode. With `:` and a mode, the extension that requests the mode."""


class KnownClient(NamedTuple):
    """A client's mode; `agent` is the beginning of its User-Agent, `is_0_3` whether it speaks A2A 0.3 (None: any)."""

    agent: str
    is_0_3: bool | None
    mode: AnswerMode


KNOWN_CLIENTS: Final = (
    # Google ADK keeps only the parts of the update with `lastChunk`.
    KnownClient("python-httpx/", False, "pieces-then-whole"),
    # CrewAI joins the texts of all updates with a space, and BeeAI shows the artifact that appeared last.
    KnownClient("python-httpx/", True, "whole"),
    # These print updates as they come, or join what they bring: Microsoft Agent Framework, the Go SDK, the JavaScript
    # SDK on Node.
    KnownClient("agent-framework-python/", None, "pieces"),
    KnownClient("Go-http-client/", None, "pieces"),
    KnownClient("node", None, "pieces"),
)
"""The first row that matches a request without a wish decides; without a match, `DEFAULT` does."""


def answer_updates(context: ServerCallContext, metadata: Struct | None, usual: AnswerUpdates) -> AnswerMode:
    """Return the mode of a stream: by its message's metadata, else its extensions, else `usual`, else its client.

    Raises:
        InvalidParamsError: the metadata name no mode.
    """
    if metadata is not None and ANSWER_UPDATES in metadata:
        wish = metadata[ANSWER_UPDATES]
        for mode in MODES:
            if mode == wish:
                return mode
        raise invalid(f"message.metadata.{ANSWER_UPDATES}", f"must be one of {', '.join(MODES)}")
    for mode in MODES:
        if f"{ANSWER_UPDATES}:{mode}" in context.requested_extensions:
            return mode
    return _mode_by_client(context) if usual == "by-client" else usual


def _mode_by_client(context: ServerCallContext) -> AnswerMode:
    headers, is_0_3 = context.state.get(HEADERS), is_protocol_0_3(context)
    agent = str(headers.get("user-agent", "")) if isinstance(headers, dict) else ""
    found = (each for each in KNOWN_CLIENTS if agent.startswith(each.agent) and each.is_0_3 in (None, is_0_3))
    return next((each.mode for each in found), DEFAULT)


async def shaped(events: AsyncGenerator[Event, None], mode: AnswerMode) -> AsyncGenerator[Event, None]:
    """Yield the events of a stream, with those of the answer as `mode` wants them."""
    view = AnswerView(mode)
    async with aclosing(events):
        async for event in events:
            shown = view.of(event)
            if shown is not None:
                yield shown


class AnswerView:
    """One stream's view of the answer."""

    def __init__(self, mode: AnswerMode) -> None:
        self._mode = mode
        self._start = 0
        # What the stream has brought of the answer, from the character `_start` on.
        self._pieces: list[str] = []

    def of(self, event: Event) -> Event | None:
        """Return what this stream brings for an event; None for nothing. The event itself, which is shared, stays."""
        match event:
            case Task() if self._mode != "pieces-then-whole":
                return self._of_task(event)
            case TaskArtifactUpdateEvent() if event.artifact.artifact_id == ANSWER:
                return self._of_update(event)
            case _:
                return event

    def _of_task(self, task: Task) -> Task:
        """Note what a snapshot has of the answer; leave out an unfinished one if the stream brings the whole later."""
        growing = [each for each in task.artifacts if each.artifact_id == ANSWER]
        if self._mode == "pieces":
            self._start, self._pieces = 0, [part.text for each in growing for part in each.parts]
        elif growing and task.status.state not in TERMINAL:
            others = [each for each in task.artifacts if each.artifact_id != ANSWER]
            task = _copy(task)
            del task.artifacts[:]
            task.artifacts.extend(others)
        return task

    def _of_update(self, update: TaskArtifactUpdateEvent) -> TaskArtifactUpdateEvent | None:
        if self._mode == "pieces":
            return self._last_piece(update) if update.last_chunk else self._piece(update)
        return update if update.last_chunk or self._mode != "whole" else None

    def _piece(self, update: TaskArtifactUpdateEvent) -> TaskArtifactUpdateEvent:
        if not update.append:
            self._start, self._pieces = 0, []
        elif not self._pieces and isinstance(offset := dict(update.metadata).get(OFFSET), float):
            # The stream of an answer to a question continues the stream before it.
            self._start = int(offset)
        self._pieces += [part.text for part in update.artifact.parts]
        return update

    def _last_piece(self, update: TaskArtifactUpdateEvent) -> TaskArtifactUpdateEvent:
        """Return what the whole answer adds to the pieces; the whole answer if they differ from its beginning."""
        sent = "".join(self._pieces)
        whole = update.artifact.parts[0].text if len(update.artifact.parts) == 1 else ""
        if not sent or update.append or not whole.startswith(sent, self._start):
            return update
        last = TaskArtifactUpdateEvent(
            task_id=update.task_id, context_id=update.context_id, append=True, last_chunk=True
        )
        last.artifact.artifact_id, last.artifact.name = update.artifact.artifact_id, update.artifact.name
        offset = self._start + len(sent)
        last.artifact.parts.append(Part(text=whole[offset:]))
        last.metadata[OFFSET] = offset
        return last


def _copy(task: Task) -> Task:
    copy = Task()
    copy.CopyFrom(task)
    return copy
