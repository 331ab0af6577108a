"""Converts the events of a task's turns into A2A events, from the task object to the terminal status.

Pure: the time is an argument, and the caller sends the returned events. A client receives, in terms of A2A 1.0:

* artifact `answer`: the agent's message as it grows, then one update that replaces it with the whole text; messages
  before tool calls are remarks, and the answer is the last artifact;
* artifacts `patch-1`, `patch-2`, …: a unified diff for each change of files; artifact `plan`: the latest plan;
* `TASK_STATE_WORKING` with a message for every other step; `kind` in the message's metadata is one of commentary,
  reasoning, command, tool, search, notice;
* one terminal status, with the token usage and the failure code in its metadata.
"""

import json
import logging
import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from a2a.types import (
    Artifact,
    Message,
    Part,
    Role,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct, Value

from codex_workspace.common.a2a_terms import ANSWER, OFFSET
from codex_workspace.common.redact import Redactor
from codex_workspace.common.telemetry import TaskOutcome
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.codex_events import TokenUsage, TurnCompleted, TurnError, describe_failure, error_metadata
from codex_workspace.protocol.jsonrpc import safe_text
from codex_workspace.runtimes import markdown
from codex_workspace.runtimes.events import (
    AgentEvent,
    AgentMessage,
    Done,
    FileChange,
    Plan,
    ReasoningSummary,
    RunWarning,
    Text,
    ToolResult,
    ToolUse,
)
from codex_workspace.tasks.live_output import LiveOutput
from codex_workspace.tasks.scheduling import UPDATE_INTERVAL_S
from codex_workspace.tasks.tool_notes import end_note, start_note

logger = logging.getLogger(__name__)

STOPPED: Final = (
    "The agent stopped before the turn was done. The text so far is kept; send the message again to continue."
)
NOT_BEGUN: Final = "The agent stopped before it started on this message; send it again."
STOPPING: Final = "The agent is stopping and accepts no new messages."
SUPERSEDED: Final = "A newer message in this context replaced this one."
INTERNAL_ERROR: Final = "Internal error; see the agent's log."

USAGE: Final = "urn:codex-workspace:usage"
"""Metadata key of the terminal status: the tokens of the turn and of the thread."""

FAILURE: Final = "urn:codex-workspace:failure"
"""Metadata key of a failed task's terminal status: `code`, and `httpStatus` if a model endpoint returned one."""

MAX_LOGGED_CHARS: Final = 2000
"""At most this much of a model endpoint's failure is logged; some send whole pages."""

TASK_OUTCOMES: Final = {
    TaskState.TASK_STATE_COMPLETED: TaskOutcome.COMPLETED,
    TaskState.TASK_STATE_FAILED: TaskOutcome.FAILED,
    TaskState.TASK_STATE_CANCELED: TaskOutcome.CANCELED,
    TaskState.TASK_STATE_REJECTED: TaskOutcome.REJECTED,
}
"""The metrics' outcome of each terminal state."""

COPIED_CHARS_PER_S: Final = 1_000_000
"""The SDK copies the task with every update and keeps the copies for slow readers. This bounds that memory: answers of
more than 100,000 characters are updated less often."""

MAX_REMARK_CHARS: Final = 200
MAX_REMARK_S: Final = 1.0
"""A message without a phase can be the answer or a remark before a tool call, as many models do not tell. It is shown
as the answer when it is longer, or has grown for longer, than such remarks usually do, or at the turn's end."""

A2AEvent = Task | TaskStatusUpdateEvent | TaskArtifactUpdateEvent


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a task ends: its state, a sentence for people, and metadata for programs."""

    state: TaskState
    sentence: str = ""
    metadata: JsonObject = field(default_factory=dict)


class Reply:
    """The A2A events of one task.

    Args:
        task_id: the task.
        context_id: its context.
        live: the live output, if the client requested that extension.
        before: the artifacts that an earlier process created.
        interval_s: returns the seconds between two updates of the answer.
    """

    def __init__(
        self,
        task_id: str,
        context_id: str,
        live: LiveOutput | None = None,
        before: Sequence[Artifact] = (),
        interval_s: Callable[[], float] = lambda: UPDATE_INTERVAL_S,
    ) -> None:
        self._live = live
        self._task_id = task_id
        self._context_id = context_id
        self._answer = _Answer()
        self._interval_s = interval_s
        self._text_at = -math.inf
        # Continues the numbering of an earlier process.
        self._artifacts = {each.artifact_id: each for each in before if each.artifact_id != ANSWER}
        self._answer_shown = False
        self._final: str | None = None
        self._patches = sum(name.startswith("patch-") for name in self._artifacts)
        self._open_tools: dict[str, ToolUse] = {}
        # The item whose start is the last thing that was shown.
        self._started: str | None = None

    @property
    def due(self) -> float | None:
        """When `flush` has something to send, on the clock of `now`; None while nothing waits."""
        interval_s = self._interval_s()
        dues = [self._answer.due(interval_s), self._live.due(interval_s) if self._live is not None else None]
        return min((due for due in dues if due is not None), default=None)

    @property
    def text_by(self) -> float:
        """When further pieces of a text are needed, on the clock of `now`; the first piece is needed at once."""
        return self._text_at + self._interval_s()

    def opened(self, message: Message | None) -> Task:
        """Return the task object, which is sent first and only once."""
        history = [message] if message is not None else []
        status = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
        status.timestamp.GetCurrentTime()
        return Task(id=self._task_id, context_id=self._context_id, status=status, history=history)

    def working(self) -> TaskStatusUpdateEvent:
        """Return the status of a running turn."""
        return self._status(TaskState.TASK_STATE_WORKING)

    def notice(self, text: str) -> TaskStatusUpdateEvent:
        """Return a status that informs people about the agent itself."""
        return self._note("notice", markdown.shortened(text))

    def waits(self, text: str) -> TaskStatusUpdateEvent:
        """Return a status that says why the task has not started."""
        return self._status(TaskState.TASK_STATE_SUBMITTED, text, {"kind": "notice"})

    def asking(self, prompt: str, about: JsonObject) -> TaskStatusUpdateEvent:
        """Return the status that asks a question: `prompt` for people, `about` for programs."""
        status = self._status(TaskState.TASK_STATE_INPUT_REQUIRED, prompt, {"kind": "question"})
        status.status.message.parts.append(Part(data=ParseDict(_safe(about), Value())))
        return status

    @property
    def files(self) -> list[Artifact]:
        """The files that were handed over so far."""
        return [each for name, each in self._artifacts.items() if name.startswith("file-")]

    def handed_over(self, artifact: Artifact) -> TaskArtifactUpdateEvent:
        """Return the event that hands over a file; the artifact stays in the task."""
        self._started = None
        self._artifacts[artifact.artifact_id] = artifact
        return TaskArtifactUpdateEvent(
            task_id=self._task_id, context_id=self._context_id, artifact=artifact, last_chunk=True
        )

    def apply(self, event: AgentEvent, now: float) -> list[A2AEvent]:
        """Return what to send for an event. Text waits for `flush` if the last update is too recent."""
        out = self._apply(event, now)
        return out if self._live is None else [*out, *self._live.see(event)]

    def _apply(self, event: AgentEvent, now: float) -> list[A2AEvent]:
        match event:
            case Text(item, text, replaces, phase):
                return [*self._switch_to(item, phase), *self._grown(text, now, replaces=replaces)]
            case AgentMessage(item, phase=phase):
                out = self._switch_to(item, phase)
                self._answer.is_complete = True
                return out + (self._remark(self._answer) if phase == "commentary" else [])
            case ReasoningSummary(sections=sections):
                return [self._note("reasoning", markdown.shortened(each)) for each in sections if each.strip()]
            case ToolUse():
                return self._tool_started(event)
            case FileChange(item_id=item, changes=changes):
                self._patches += 1
                part = Part(text=safe_text(markdown.unified_diff(changes)), media_type="text/x-diff")
                shown = markdown.markdown(self._open_tools[item])
                return [self._artifact(f"patch-{self._patches}", [part], last=True, description=shown)]
            case ToolResult():
                return self._tool_finished(self._open_tools.pop(event.id), event)
            case Plan(steps=steps, explanation=explanation):
                statuses = {"in_progress": "inProgress"}
                listed: list[JsonValue] = [
                    {"step": step.text, "status": statuses.get(step.status, step.status)} for step in steps
                ]
                part = Part(data=ParseDict(_safe({"explanation": explanation, "steps": listed}), Value()))
                return [self._artifact("plan", [part], last=True, description=markdown.markdown(event))]
            case RunWarning(message=message, will_retry=will_retry):
                if will_retry and not self._answer.is_complete:
                    self._answer.start_over()
                return [self.notice(message)]
            case Done(text=text):
                self._final = text
                return []
            case _:
                return []

    def interrupted(self) -> list[A2AEvent]:
        """Return what to send before the answer starts again: the text so far becomes a remark."""
        before, self._answer = self._answer, _Answer(last_update=self._answer.last_update)
        return [] if before.remarked else self._remark(before)

    def before_question(self, now: float) -> list[A2AEvent]:
        """Return what to send before a question; like a tool call, it makes a complete message a remark."""
        return [*self.flush(now), *self._remark_if_complete()]

    def flush(self, now: float) -> list[A2AEvent]:
        """Return the text that waits, whether it is due or not."""
        live = self._live.flush(now) if self._live is not None else []
        waiting, offset = self._answer.take(now)
        if not waiting:
            return list(live)
        self._answer_shown = True
        update = self._artifact(ANSWER, [_text_part(waiting)], append=offset is not None)
        if offset is not None:
            update.metadata[OFFSET] = offset
        return [*live, update]

    def ended(self, outcome: Outcome, final: str | None = None) -> Task:
        """Return the finished task, to be stored and replayed.

        Args:
            outcome: how the task ends.
            final: the answer, if the turn's end was found in codex's history.
        """
        known = self._final if final is None else final
        text = self._answer.text if known is None else known
        # A retracted answer is replaced with an empty one.
        shown = bool(text) or self._answer_shown
        answer = [Artifact(artifact_id=ANSWER, name=ANSWER, parts=[_text_part(text)])]
        status = self._status(outcome.state, outcome.sentence).status
        task = Task(id=self._task_id, context_id=self._context_id, status=status)
        task.artifacts.extend([*self._artifacts.values(), *(answer if shown else [])])
        task.metadata.CopyFrom(_struct(outcome.metadata))
        return task

    def ended_as(self, other: Task) -> Task:
        """Return the end of another task, whose turn this task joined, as the end of this task."""
        task = Task()
        task.CopyFrom(other)
        task.id, task.context_id = self._task_id, self._context_id
        if task.status.HasField("message"):
            task.status.message.task_id = self._task_id
        return task

    def _switch_to(self, item: str, phase: str | None) -> list[A2AEvent]:
        """Start another message; the previous one was not the answer and becomes a remark."""
        before = self._answer
        if before.item == item:
            before.phase = phase or before.phase
            return []
        self._answer = _Answer(item, phase, last_update=before.last_update)
        return [] if before.remarked else self._remark(before)

    def _remark_if_complete(self) -> list[A2AEvent]:
        """Return a complete message as a remark: a message before a tool call is usually not the answer."""
        return self._remark(self._answer) if self._answer.is_complete and not self._answer.remarked else []

    def _remark(self, message: "_Answer") -> list[A2AEvent]:
        message.remarked = True
        return [self._note("commentary", markdown.shortened(message.text))] if message.text.strip() else []

    def _grown(self, text: str, now: float, *, replaces: bool) -> list[A2AEvent]:
        if replaces:
            self._answer.start_over()
        self._answer.add(text, now)
        self._text_at = now
        due = self._answer.due(self._interval_s())
        return self.flush(now) if due is not None and now >= due else []

    def _tool_started(self, use: ToolUse) -> list[A2AEvent]:
        self._open_tools[use.id] = use
        out, note = self._remark_if_complete(), start_note(use)
        if note is not None:
            out.append(self._note(*note))
            self._started = use.id
        return out

    def _tool_finished(self, use: ToolUse, result: ToolResult) -> list[A2AEvent]:
        note = end_note(use, result, follows_start=self._started == use.id)
        return [] if note is None else [self._note(*note)]

    def _note(self, kind: str, text: str, about: JsonObject | None = None) -> TaskStatusUpdateEvent:
        """Return a step of the turn as Markdown, with metadata for programs."""
        return self._status(TaskState.TASK_STATE_WORKING, text, {"kind": kind, **(about or {})})

    def _status(self, state: TaskState, text: str = "", metadata: JsonObject | None = None) -> TaskStatusUpdateEvent:
        self._started = None
        status = TaskStatus(state=state)
        status.timestamp.GetCurrentTime()
        if text:
            status.message.role = Role.ROLE_AGENT
            status.message.message_id = str(uuid.uuid4())
            status.message.task_id, status.message.context_id = self._task_id, self._context_id
            status.message.parts.append(_text_part(text))
        if metadata:
            status.message.metadata.CopyFrom(_struct(metadata))
        return TaskStatusUpdateEvent(task_id=self._task_id, context_id=self._context_id, status=status)

    def _artifact(
        self, name: str, parts: list[Part], *, append: bool = False, last: bool = False, description: str = ""
    ) -> TaskArtifactUpdateEvent:
        self._started = None
        artifact = Artifact(artifact_id=name, name=name, description=safe_text(description), parts=parts)
        if name != ANSWER:
            self._artifacts[name] = artifact
        return TaskArtifactUpdateEvent(
            task_id=self._task_id, context_id=self._context_id, artifact=artifact, append=append, last_chunk=last
        )


@dataclass(slots=True)
class _Answer:
    """One message of the agent: its text, and how much of it was sent."""

    item: str | None = None
    phase: str | None = None
    last_update: float | None = None
    is_complete: bool = False
    remarked: bool = False
    pieces: list[str] = field(default_factory=list)
    _began: float = 0.0
    _chars: int = 0
    _sent_pieces: int = 0
    _sent_chars: int = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, text: str, now: float) -> None:
        if not self.pieces:
            self._began = now
        self.pieces.append(text)
        self._chars += len(text)

    def due(self, interval_s: float) -> float | None:
        if self._sent_pieces == len(self.pieces) or self.remarked or self.phase == "commentary":
            return None
        due = 0.0
        if self.last_update is not None:
            due = self.last_update + max(interval_s, self._sent_chars / COPIED_CHARS_PER_S)
        if self.phase is not None or self._sent_pieces or self._chars > MAX_REMARK_CHARS:
            return due
        # It may be a remark; if it is complete, the next event tells.
        return None if self.is_complete else max(due, self._began + MAX_REMARK_S)

    def start_over(self) -> None:
        """Drop the text; the next piece replaces what was sent."""
        self.pieces.clear()
        self._chars = self._sent_pieces = self._sent_chars = 0

    def take(self, now: float) -> tuple[str, int | None]:
        """Return the waiting text and its offset (None for the first piece), and count it as sent."""
        if self.due(0.0) is None:
            return "", None
        waiting, offset = "".join(self.pieces[self._sent_pieces :]), self._sent_chars if self._sent_pieces else None
        self._sent_pieces = len(self.pieces)
        self._sent_chars += len(waiting)
        self.last_update = now
        return waiting, offset


def closing_events(ended: Task) -> list[A2AEvent]:
    """Return the last events for readers of the stream: the whole answer and the terminal status."""
    return [event for event in replay_events(ended) if not _is_side_artifact(event)]


def replay_events(ended: Task) -> list[A2AEvent]:
    """Return the events that bring a task to its stored end, whichever of them its readers know."""
    artifacts = [
        TaskArtifactUpdateEvent(task_id=ended.id, context_id=ended.context_id, artifact=artifact, last_chunk=True)
        for artifact in ended.artifacts
    ]
    status = TaskStatusUpdateEvent(task_id=ended.id, context_id=ended.context_id, status=ended.status)
    status.metadata.CopyFrom(ended.metadata)
    return [*artifacts, status]


def _is_side_artifact(event: A2AEvent) -> bool:
    return isinstance(event, TaskArtifactUpdateEvent) and event.artifact.artifact_id != ANSWER


def answer_text(ended: Task) -> str:
    """Return the answer of a finished task."""
    return "".join(part.text for each in ended.artifacts if each.artifact_id == ANSWER for part in each.parts)


def _struct(content: JsonObject) -> Struct:
    return ParseDict(_safe(content), Struct())


def _safe(content: JsonObject) -> JsonObject:
    """Return `content` without lone surrogates, which protobuf rejects."""
    safe: JsonObject = json.loads(safe_text(json.dumps(content, ensure_ascii=False)))
    return safe


def _text_part(text: str) -> Part:
    return Part(text=safe_text(text))


def turn_outcome(ended: TurnCompleted | None, redactor: Redactor) -> Outcome:
    """Return the outcome of a turn that ended."""
    match ended:
        case TurnCompleted(status="completed"):
            return Outcome(TaskState.TASK_STATE_COMPLETED)
        case TurnCompleted(status="interrupted"):
            return failed_outcome("The turn was interrupted from outside.", "interrupted")
        case TurnCompleted(failure=TurnError() as failure):
            logger.warning("turn failed (%s): %s", failure.kind, redactor(failure.message)[:MAX_LOGGED_CHARS])
            metadata: JsonObject = {FAILURE: error_metadata(failure)}
            return Outcome(TaskState.TASK_STATE_FAILED, redactor(describe_failure(failure)), metadata)
        case _:
            return failed_outcome("Codex reported a failed turn without a reason.", "unknown")


def failed_outcome(sentence: str, reason: str) -> Outcome:
    """Return the outcome of a failed task; `reason` is the code for programs."""
    return Outcome(TaskState.TASK_STATE_FAILED, sentence, code(reason))


def canceled_outcome() -> Outcome:
    """Return the outcome of a canceled task."""
    return Outcome(TaskState.TASK_STATE_CANCELED, "Canceled.")


def code(reason: str) -> JsonObject:
    """Return the metadata that tells programs why a task did not complete."""
    return {FAILURE: {"code": reason}}


def usage_metadata(turn: TokenUsage | None, thread: TokenUsage | None) -> JsonObject:
    """Return the token counts for the terminal status's metadata, as far as codex reported them."""
    counts: JsonObject = _counts(turn) if turn is not None else {}
    if thread is not None:
        counts["thread"] = _counts(thread)
    return {USAGE: counts} if counts else {}


def _counts(count: TokenUsage) -> JsonObject:
    return {
        "totalTokens": count.total,
        "inputTokens": count.input,
        "cachedInputTokens": count.cached_input,
        "outputTokens": count.output,
        "reasoningOutputTokens": count.reasoning_output,
    }
