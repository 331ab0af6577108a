"""Converts the events of a task's turns into A2A events, from the task object to the terminal status.

Pure: the time is an argument, and the caller sends the returned events. A client receives, in terms of A2A 1.0:

* artifact `answer`: the agent's message as it grows, then one update that replaces it with the whole text;
* artifacts `patch-1`, `patch-2`, …: a unified diff for each change of files; artifact `plan`: the latest plan;
* `TASK_STATE_WORKING` with a message for every other step; `kind` in the message's metadata is one of commentary,
  reasoning, command, tool, search, notice;
* one terminal status, with the token usage and the failure code in its metadata.
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.codex_events import (
    CommandCompleted,
    CommandStarted,
    ItemStatus,
    MessageCompleted,
    MessageDelta,
    MessageStarted,
    PatchCompleted,
    PatchStarted,
    PlanUpdated,
    ReasoningCompleted,
    ToolCallCompleted,
    ToolCallStarted,
    TurnEvent,
    WarningReported,
    WebSearchCompleted,
)
from codex_workspace.protocol.jsonrpc import safe_text
from codex_workspace.runtimes import markdown
from codex_workspace.runtimes.convert import plan_event, tool_use
from codex_workspace.runtimes.events import FILES
from codex_workspace.tasks.live_output import LiveOutput
from codex_workspace.tasks.outcomes import Outcome

UPDATE_INTERVAL_S: Final = 0.1
"""At most ten updates of the answer per second; each one costs every client and the store some work."""

COPIED_CHARS_PER_S: Final = 1_000_000
"""The SDK copies the task with every update and keeps the copies for slow readers. This bounds that memory: answers of
more than 100,000 characters are updated less often."""

A2AEvent = Task | TaskStatusUpdateEvent | TaskArtifactUpdateEvent


class Reply:
    """The A2A events of one task.

    Args:
        task_id: the task.
        context_id: its context.
        live: the live output, if the client requested that extension.
        before: the artifacts that an earlier process created.
    """

    def __init__(
        self, task_id: str, context_id: str, live: LiveOutput | None = None, before: Sequence[Artifact] = ()
    ) -> None:
        self._live = live
        self._task_id = task_id
        self._context_id = context_id
        self._answer = _Answer()
        self._artifacts: dict[str, Artifact] = {}
        self._files: list[Artifact] = []
        self._answer_shown = False
        self._patches = 0
        # The item whose start is the last thing that was shown.
        self._started: str | None = None
        for artifact in before:
            self._keep(artifact)

    @property
    def due(self) -> float | None:
        """When `flush` has something to send, on the clock of `now`; None while nothing waits."""
        dues = [self._answer.due, self._live.due if self._live is not None else None]
        return min((due for due in dues if due is not None), default=None)

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

    def _keep(self, artifact: Artifact) -> None:
        """Continue the numbering of an earlier process."""
        kind = artifact.artifact_id.partition("-")[0]
        if artifact.artifact_id != ANSWER:
            self._artifacts[artifact.artifact_id] = artifact
        self._patches += kind == "patch"
        if kind == "file":
            self._files.append(artifact)

    @property
    def files(self) -> list[Artifact]:
        """The files that were handed over so far."""
        return list(self._files)

    def handed_over(self, artifact: Artifact) -> TaskArtifactUpdateEvent:
        """Return the event that hands over a file; the artifact stays in the task."""
        self._started = None
        self._files.append(artifact)
        self._artifacts[artifact.artifact_id] = artifact
        return TaskArtifactUpdateEvent(
            task_id=self._task_id, context_id=self._context_id, artifact=artifact, last_chunk=True
        )

    def apply(self, event: TurnEvent, now: float) -> list[A2AEvent]:
        """Return what to send for an event. Text waits for `flush` if the last update is too recent."""
        out = self._apply(event, now)
        return out if self._live is None else [*out, *self._live.see(event)]

    def _apply(self, event: TurnEvent, now: float) -> list[A2AEvent]:
        match event:
            case MessageDelta(item, text):
                return [*self._switch_to(item, None), *self._grown(text, now)]
            case MessageStarted(item, phase):
                return self._switch_to(item, phase)
            case MessageCompleted(item, text, phase):
                out = self._switch_to(item, phase)
                missing = self._answer.complete(text)
                return out + (self._remark(self._answer) if phase == "commentary" else self._grown(missing, now))
            case ReasoningCompleted(sections=sections):
                return [self._note("reasoning", markdown.shortened(each)) for each in sections if each.strip()]
            case PatchStarted():
                return self._remark_if_complete()
            case CommandStarted() | ToolCallStarted():
                return [*self._remark_if_complete(), self._tool_started(event)]
            case PatchCompleted(changes=changes, status=ItemStatus.COMPLETED):
                self._patches += 1
                part = Part(text=safe_text(markdown.unified_diff(changes)), media_type="text/x-diff")
                shown = markdown.markdown(tool_use(event))
                return [self._artifact(f"patch-{self._patches}", [part], last=True, description=shown)]
            case CommandCompleted() | PatchCompleted() | ToolCallCompleted():
                return [self._tool_finished(event)]
            case WebSearchCompleted(item_id=item, query=query):
                shown = markdown.markdown(tool_use(event))
                return [self._note("search", shown, {"itemId": item, "query": markdown.shortened(query)})]
            case PlanUpdated(steps=steps, explanation=explanation):
                listed: list[JsonValue] = [{"step": step.text, "status": step.status} for step in steps]
                part = Part(data=ParseDict(_safe({"explanation": explanation, "steps": listed}), Value()))
                shown = markdown.markdown(plan_event(event))
                return [self._artifact("plan", [part], last=True, description=shown)]
            case WarningReported(message=message, will_retry=will_retry):
                if will_retry:
                    self._answer.start_over()
                return [self.notice(message)]
            case _:
                return []

    def interrupted(self) -> list[A2AEvent]:
        """Return what to send before the answer starts again: the text so far becomes a remark."""
        before, self._answer = self._answer, _Answer(last_update=self._answer.last_update)
        return [] if before.remarked else self._remark(before)

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
            final: the answer, if it is known better than from the stream.
        """
        text = self._answer.text if final is None else final
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

    def close(self, outcome: Outcome, final: str | None = None) -> list[A2AEvent]:
        """Return the answer's closing update and the terminal status."""
        return closing_events(self.ended(outcome, final))

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
        return self._remark(self._answer) if self._answer.is_whole and not self._answer.remarked else []

    def _remark(self, message: "_Answer") -> list[A2AEvent]:
        message.remarked = True
        message.hold_back()
        return [self._note("commentary", markdown.shortened(message.text))] if message.text.strip() else []

    def _grown(self, text: str, now: float) -> list[A2AEvent]:
        self._answer.grow(text)
        due = self._answer.due
        return self.flush(now) if due is not None and now >= due else []

    def _tool_started(self, event: CommandStarted | ToolCallStarted) -> TaskStatusUpdateEvent:
        about: JsonObject = {**_tool(event), "status": "inProgress"}
        if isinstance(event, ToolCallStarted):
            about["input"] = _bounded(event.arguments)
        note = self._note(_kind(event), markdown.markdown(tool_use(event)), about)
        self._started = event.item_id
        return note

    def _tool_finished(self, event: CommandCompleted | ToolCallCompleted | PatchCompleted) -> TaskStatusUpdateEvent:
        about: JsonObject = {**_tool(event), "status": str(event.status), "durationMs": None}
        use = tool_use(event)
        match event:
            case CommandCompleted(exit_code=code, duration_ms=duration):
                output, is_error = event.output or "", code != 0
                about |= {"exitCode": code, "durationMs": duration}
                word = markdown.STOPPED if code is None else markdown.FAILED
                result = markdown.result(output, is_error=is_error, exit_code=code, failed=word)
            case ToolCallCompleted(result=output, is_error=is_error, duration_ms=duration):
                about |= {"isError": is_error, "durationMs": duration}
                result, use = markdown.result(output, is_error=is_error), replace(use, input={})
            case PatchCompleted(status=status):
                output = f"No file was changed ({status})."
                about["isError"] = True
                result = markdown.result(output, is_error=True)
        # The note names its tool unless the note of the tool's start is right above it.
        head = "" if self._started == use.id else f"{markdown.markdown(use)}\n\n"
        return self._note(_kind(event), f"{head}{result}", {**about, "output": markdown.shortened(output)})

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
    was_sent: bool = False
    remarked: bool = False
    _whole: str | None = None
    _sent: list[str] = field(default_factory=list)
    _sent_chars: int = 0
    _waiting: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self._whole is not None

    @property
    def text(self) -> str:
        return self._whole if self._whole is not None else "".join([*self._sent, *self._waiting])

    @property
    def due(self) -> float | None:
        if not self._waiting or self.phase == "commentary":
            return None
        if self.last_update is None:
            return 0.0
        return self.last_update + max(UPDATE_INTERVAL_S, self._sent_chars / COPIED_CHARS_PER_S)

    def start_over(self) -> None:
        """Drop an incomplete text: codex repeats the model request."""
        if self._whole is None:
            self._sent.clear()
            self._waiting.clear()
            self._sent_chars = 0
            self.was_sent = False

    def hold_back(self) -> None:
        """Send nothing more: the whole text is shown as a remark."""
        self._sent += self._waiting
        self._waiting.clear()

    def grow(self, text: str) -> None:
        if text:
            self._waiting.append(text)

    def complete(self, text: str) -> str:
        """Set the whole text; return the part that was never streamed."""
        streamed = "".join([*self._sent, *self._waiting])
        self._whole = text
        return text[len(streamed) :] if text.startswith(streamed) else ""

    def take(self, now: float) -> tuple[str, int | None]:
        """Return the waiting text and its offset (None for the first piece), and count it as sent."""
        if self.due is None:
            return "", None
        waiting, offset = "".join(self._waiting), self._sent_chars if self.was_sent else None
        self._sent.append(waiting)
        self._sent_chars += len(waiting)
        self._waiting.clear()
        self.was_sent, self.last_update = True, now
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


def _kind(event: CommandStarted | CommandCompleted | ToolCallStarted | ToolCallCompleted | PatchCompleted) -> str:
    return "command" if isinstance(event, CommandStarted | CommandCompleted) else "tool"


def _tool(
    event: CommandStarted | CommandCompleted | ToolCallStarted | ToolCallCompleted | PatchCompleted,
) -> JsonObject:
    match event:
        case CommandStarted(item, command, cwd) | CommandCompleted(item, command, cwd):
            return {"itemId": item, "command": command, "cwd": cwd}
        case ToolCallStarted(item, server, tool) | ToolCallCompleted(item, server, tool):
            return {"itemId": item, "tool": tool, "server": server}
        case PatchCompleted(item):
            return {"itemId": item, "tool": FILES, "server": None}


def _struct(content: JsonObject) -> Struct:
    return ParseDict(_safe(content), Struct())


def _safe(content: JsonObject) -> JsonObject:
    """Return `content` without lone surrogates, which protobuf rejects."""
    safe: JsonObject = json.loads(safe_text(json.dumps(content, ensure_ascii=False)))
    return safe


def _bounded(value: JsonValue) -> JsonValue:
    """Return `value`, or its shortened JSON text if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return value if len(text) <= markdown.MAX_SHOWN_CHARS else markdown.shortened(text)


def _text_part(text: str) -> Part:
    return Part(text=safe_text(text))
