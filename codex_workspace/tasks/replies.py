"""Make A2A events of a turn's agent events: one task's answer, from its first word to its terminal status.

Pure: time comes in as an argument, events go out as values. Nothing is sent here.

What a client sees (A2A 1.0 names):

* artifact `answer`: the agent's message as it grows, then closed by one update that replaces it by the whole text;
* artifacts `patch-1`, `patch-2`, …: a unified diff for each change of files; artifact `plan`: the latest plan; their
  descriptions say for people what is in them;
* `TASK_STATE_WORKING` with a message for what else a person wants to see; the message's metadata say what it is, for
  programs: `kind` is one of commentary, reasoning, command, tool, search, notice;
* one terminal status. Its metadata hold the token usage, and on failure a code.
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
    Activity,
    CommandCompleted,
    CommandOutput,
    CommandStarted,
    DiffUpdated,
    ErrorReported,
    ItemStatus,
    MessageCompleted,
    MessageDelta,
    MessageStarted,
    PatchCompleted,
    PatchStarted,
    PlanUpdated,
    ReasoningCompleted,
    ReasoningDelta,
    ThreadActive,
    ThreadIdle,
    TokensUpdated,
    TokenUsage,
    ToolCallCompleted,
    ToolCallStarted,
    TurnCompleted,
    TurnEvent,
    TurnStarted,
    UnknownEvent,
    WarningReported,
    WebSearchCompleted,
)
from codex_workspace.protocol.jsonrpc import safe_text
from codex_workspace.runtimes import markdown as presentation
from codex_workspace.runtimes.convert import plan_event, tool_use
from codex_workspace.runtimes.events import FILES, ToolUse
from codex_workspace.runtimes.markdown import unified_diff
from codex_workspace.tasks.live_output import LiveOutput

USAGE: Final = "urn:codex-workspace:usage"
"""Metadata key of the terminal status: the turn's tokens, and the thread's."""

FAILURE: Final = "urn:codex-workspace:failure"
"""Metadata key of a failed task's terminal status: `code`, and `httpStatus` where a model endpoint gave one."""

UPDATE_INTERVAL_S: Final = 0.1
"""At most ten updates of the answer a second: every one of them costs each client, and the store, some work."""

COPIED_CHARS_PER_S: Final = 1_000_000
"""With every update the SDK copies the task for its readers, and keeps the copies of those that are behind: an answer
of more than 100,000 characters is updated less often, so that it costs at most this much memory a second."""

A2AEvent = Task | TaskStatusUpdateEvent | TaskArtifactUpdateEvent


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a task ends: its state, the sentence for people, and metadata for programs."""

    state: TaskState
    sentence: str = ""
    metadata: JsonObject = field(default_factory=dict)


class Reply:
    """The A2A side of one task's turns.

    `live` is the view of them for clients that have asked for that, `before` what an earlier process has made of it.
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
        # The tool whose beginning is what was shown last.
        self._begun: str | None = None
        for artifact in before:
            self._keep(artifact)

    @property
    def due(self) -> float | None:
        """When `flush` has something to send, on the clock of `now`; None while nothing waits."""
        dues = [self._answer.due, self._live.due if self._live is not None else None]
        return min((due for due in dues if due is not None), default=None)

    def opened(self, message: Message | None) -> Task:
        """Return the one Task object, which comes first."""
        history = [message] if message is not None else []
        status = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
        status.timestamp.GetCurrentTime()
        return Task(id=self._task_id, context_id=self._context_id, status=status, history=history)

    def working(self) -> TaskStatusUpdateEvent:
        """Return the status that says that the turn has begun."""
        return self._status(TaskState.TASK_STATE_WORKING)

    def notice(self, text: str) -> TaskStatusUpdateEvent:
        """Return a status that tells people something about the agent itself."""
        return self._note("notice", text)

    def waits(self, text: str) -> TaskStatusUpdateEvent:
        """Return a status that tells people why nothing has begun yet."""
        status = self._status(TaskState.TASK_STATE_SUBMITTED, text)
        status.status.message.metadata.CopyFrom(_struct({"kind": "notice"}))
        return status

    def asking(self, prompt: str, about: JsonObject) -> TaskStatusUpdateEvent:
        """Return the status that asks a person: `prompt` to be read, `about` for programs."""
        status = self._status(TaskState.TASK_STATE_INPUT_REQUIRED, prompt)
        status.status.message.parts.append(Part(data=ParseDict(_safe(about), Value())))
        status.status.message.metadata.CopyFrom(_struct({"kind": "question"}))
        return status

    def _keep(self, artifact: Artifact) -> None:
        """Go on counting where an earlier process has stopped."""
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
        """Return the event that hands over a file; the artifact stays with the answer."""
        self._begun = None
        self._files.append(artifact)
        self._artifacts[artifact.artifact_id] = artifact
        return TaskArtifactUpdateEvent(
            task_id=self._task_id, context_id=self._context_id, artifact=artifact, last_chunk=True
        )

    def apply(self, event: TurnEvent, now: float) -> list[A2AEvent]:
        """Return what has to go out for an event. Text waits for `flush` while the last update is too fresh."""
        out = self._apply(event, now)
        return out if self._live is None else [*out, *self._live.see(event)]

    def _apply(self, event: TurnEvent, now: float) -> list[A2AEvent]:
        match event:
            case MessageDelta(item_id=item, text=text):
                return [*self._turn_to(item, None), *self._grown(text, now)]
            case MessageStarted(item_id=item, phase=phase):
                return self._turn_to(item, phase)
            case MessageCompleted(item_id=item, text=text, phase=phase):
                out = self._turn_to(item, phase)
                missing = self._answer.complete(text)
                return out + (self._remark(self._answer) if phase == "commentary" else self._grown(missing, now))
            case ReasoningCompleted(sections=sections):
                return [self._note("reasoning", section) for section in sections if section.strip()]
            case PatchStarted():
                return self._remark_on_the_way()
            case CommandStarted(item_id=item, command=command, cwd=cwd):
                about: JsonObject = {"itemId": item, "command": command, "cwd": cwd, "status": "inProgress"}
                return [*self._remark_on_the_way(), self._use_note("command", tool_use(event), about)]
            case CommandCompleted():
                return [self._command_finished(event)]
            case PatchCompleted(changes=changes, status=ItemStatus.COMPLETED):
                self._patches += 1
                part = Part(text=safe_text(unified_diff(changes)), media_type="text/x-diff")
                told = presentation.markdown(tool_use(event))
                return [self._artifact(f"patch-{self._patches}", [part], last=True, description=told)]
            case PatchCompleted():
                return [self._files_not_changed(event)]
            case ToolCallStarted(item_id=item, tool=tool, server=server, arguments=arguments):
                about = {"itemId": item, "tool": tool, "server": server, "status": "inProgress"}
                about["input"] = _bounded(arguments)
                return [*self._remark_on_the_way(), self._use_note("tool", tool_use(event), about)]
            case ToolCallCompleted():
                return [self._tool_finished(event)]
            case WebSearchCompleted(item_id=item, query=query):
                told = presentation.markdown(tool_use(event))
                return [self._markdown_note("search", told, {"itemId": item, "query": presentation.shortened(query)})]
            case PlanUpdated(steps=steps, explanation=explanation):
                plan: JsonObject = {
                    "explanation": explanation,
                    "steps": [{"step": step.text, "status": step.status} for step in steps],
                }
                told = presentation.markdown(plan_event(event))
                part = Part(data=ParseDict(_safe(plan), Value()))
                return [self._artifact("plan", [part], last=True, description=told)]
            case WarningReported(message=message, will_retry=will_retry):
                if will_retry:
                    self._answer.start_over()
                return [self.notice(message)]
            case (
                TurnStarted()
                | ReasoningDelta()
                | CommandOutput()
                | DiffUpdated()
                | TokensUpdated()
                | ErrorReported()
                | ThreadIdle()
                | ThreadActive()
                | TurnCompleted()
                | Activity()
                | UnknownEvent()
            ):
                return []

    def cut_off(self) -> list[A2AEvent]:
        """Return what has to go out before the answer begins anew: what was said so far becomes a remark."""
        before, self._answer = self._answer, _Answer(last_update=self._answer.last_update)
        return [] if before.remarked else self._remark(before)

    def flush(self, now: float) -> list[A2AEvent]:
        """Return what waits, whether or not its time has come."""
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
        """Return the whole of what the task has come to, to be kept and handed out again.

        Args:
            outcome: how the task ends.
            final: the answer where it is known better than by what was streamed.
        """
        text = self._answer.text if final is None else final
        # An answer that was begun and taken back is emptied.
        shown = bool(text) or self._answer_shown
        answer = [Artifact(artifact_id=ANSWER, name=ANSWER, parts=[_text_part(text)])]
        status = self._status(outcome.state, outcome.sentence).status
        task = Task(id=self._task_id, context_id=self._context_id, status=status)
        task.artifacts.extend([*self._artifacts.values(), *(answer if shown else [])])
        task.metadata.CopyFrom(_struct(outcome.metadata))
        return task

    def ended_as(self, other: Task) -> Task:
        """Return an end that is another task's too: the one whose turn this one has joined."""
        task = Task()
        task.CopyFrom(other)
        task.id, task.context_id = self._task_id, self._context_id
        if task.status.HasField("message"):
            task.status.message.task_id = self._task_id
        return task

    def close(self, outcome: Outcome, final: str | None = None) -> list[A2AEvent]:
        """Return the answer's closing update and the terminal status."""
        return closing_events(self.ended(outcome, final))

    def _turn_to(self, item: str, phase: str | None) -> list[A2AEvent]:
        """Begin with another message: the one before it was not the answer, and becomes a remark on the way."""
        before = self._answer
        if before.item == item:
            before.phase = phase or before.phase
            return []
        self._answer = _Answer(item, phase, last_update=before.last_update)
        return [] if before.remarked else self._remark(before)

    def _remark_on_the_way(self) -> list[A2AEvent]:
        """A message that the agent acts after is not its answer, as a rule."""
        return self._remark(self._answer) if self._answer.is_whole and not self._answer.remarked else []

    def _remark(self, message: "_Answer") -> list[A2AEvent]:
        message.remarked = True
        message.hold_back()
        return [self._note("commentary", message.text)] if message.text.strip() else []

    def _grown(self, text: str, now: float) -> list[A2AEvent]:
        self._answer.grow(text)
        due = self._answer.due
        return self.flush(now) if due is not None and now >= due else []

    def _command_finished(self, event: CommandCompleted) -> TaskStatusUpdateEvent:
        about: JsonObject = {
            "itemId": event.item_id,
            "command": event.command,
            "cwd": event.cwd,
            "status": str(event.status),
            "exitCode": event.exit_code,
            "durationMs": event.duration_ms,
            "output": presentation.shortened(event.output or ""),
        }
        code = event.exit_code
        failed = presentation.STOPPED if code is None else presentation.FAILED
        result = presentation.result(event.output or "", is_error=code != 0, exit_code=code, failed=failed)
        return self._result_note("command", tool_use(event), result, about)

    def _tool_finished(self, event: ToolCallCompleted) -> TaskStatusUpdateEvent:
        about: JsonObject = {
            "itemId": event.item_id,
            "tool": event.tool,
            "server": event.server,
            "status": str(event.status),
            "isError": event.is_error,
            "durationMs": event.duration_ms,
            "output": presentation.shortened(event.result),
        }
        result = presentation.result(event.result, is_error=event.is_error)
        return self._result_note("tool", replace(tool_use(event), input={}), result, about)

    def _files_not_changed(self, event: PatchCompleted) -> TaskStatusUpdateEvent:
        why = f"No file was changed ({event.status})."
        about: JsonObject = {
            "itemId": event.item_id,
            "tool": FILES,
            "server": None,
            "status": str(event.status),
            "isError": True,
            "durationMs": None,
            "output": why,
        }
        return self._result_note("tool", tool_use(event), presentation.result(why, is_error=True), about)

    def _use_note(self, kind: str, use: ToolUse, about: JsonObject) -> TaskStatusUpdateEvent:
        note = self._markdown_note(kind, presentation.markdown(use), about)
        self._begun = use.id
        return note

    def _result_note(self, kind: str, use: ToolUse, result: str, about: JsonObject) -> TaskStatusUpdateEvent:
        """Return a note of what came of a tool, which says of which where it does not stand right below."""
        head = "" if self._begun == use.id else f"{presentation.markdown(use)}\n\n"
        return self._markdown_note(kind, f"{head}{result}", about)

    def _note(self, kind: str, text: str) -> TaskStatusUpdateEvent:
        return self._markdown_note(kind, presentation.shortened(text), {})

    def _markdown_note(self, kind: str, text: str, about: JsonObject) -> TaskStatusUpdateEvent:
        """Return a note whose text is Markdown, and no longer than it should be."""
        status = self._status(TaskState.TASK_STATE_WORKING, text)
        status.status.message.metadata.CopyFrom(_struct({"kind": kind, **about}))
        return status

    def _status(self, state: TaskState, text: str = "") -> TaskStatusUpdateEvent:
        self._begun = None
        status = TaskStatus(state=state)
        status.timestamp.GetCurrentTime()
        if text:
            said = Message(
                role=Role.ROLE_AGENT,
                message_id=str(uuid.uuid4()),
                task_id=self._task_id,
                context_id=self._context_id,
                parts=[_text_part(text)],
            )
            status.message.CopyFrom(said)
        return TaskStatusUpdateEvent(task_id=self._task_id, context_id=self._context_id, status=status)

    def _artifact(
        self, name: str, parts: list[Part], *, append: bool = False, last: bool = False, description: str = ""
    ) -> TaskArtifactUpdateEvent:
        self._begun = None
        artifact = Artifact(artifact_id=name, name=name, description=safe_text(description), parts=parts)
        if name != ANSWER:
            self._artifacts[name] = artifact
        return TaskArtifactUpdateEvent(
            task_id=self._task_id, context_id=self._context_id, artifact=artifact, append=append, last_chunk=last
        )


@dataclass(slots=True)
class _Answer:
    """One message of the agent: what it holds, and how much of it went out."""

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
        """Forget an incomplete text: codex asks the model again, whose words begin anew."""
        if self._whole is None:
            self._sent.clear()
            self._waiting.clear()
            self._sent_chars = 0
            self.was_sent = False

    def hold_back(self) -> None:
        """Let what waits not go out: the text is shown as a remark, in full."""
        self._sent += self._waiting
        self._waiting.clear()

    def grow(self, text: str) -> None:
        if text:
            self._waiting.append(text)

    def complete(self, text: str) -> str:
        """Take the whole text; return what of it was never streamed."""
        streamed = "".join([*self._sent, *self._waiting])
        self._whole = text
        return text[len(streamed) :] if text.startswith(streamed) else ""

    def take(self, now: float) -> tuple[str, int | None]:
        """Return the waiting text, and after how many characters it goes on, None: it begins; it is sent now."""
        if self.due is None:
            return "", None
        waiting, offset = "".join(self._waiting), self._sent_chars if self.was_sent else None
        self._sent.append(waiting)
        self._sent_chars += len(waiting)
        self._waiting.clear()
        self.was_sent, self.last_update = True, now
        return waiting, offset


def closing_events(ended: Task) -> list[A2AEvent]:
    """Return the last events of a task whose readers have seen the rest: the whole answer, and the terminal status."""
    return [event for event in replay_events(ended) if not _is_side_artifact(event)]


def replay_events(ended: Task) -> list[A2AEvent]:
    """Return the events that bring a task to its kept end, whatever of them its readers have seen already."""
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
    """Return what the agent has said in a task that ended."""
    return "".join(part.text for each in ended.artifacts if each.artifact_id == ANSWER for part in each.parts)


def usage_metadata(turn: TokenUsage | None, thread: TokenUsage | None) -> JsonObject:
    """Return the terminal status's metadata for token counts: whole numbers, absent where codex told none."""
    counts: JsonObject = {}
    if turn is not None:
        counts |= _counts(turn)
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


def _struct(content: JsonObject) -> Struct:
    return ParseDict(_safe(content), Struct())


def _safe(content: JsonObject) -> JsonObject:
    """Return `content` without lone surrogates, which cannot be sent."""
    safe: JsonObject = json.loads(safe_text(json.dumps(content, ensure_ascii=False)))
    return safe


def _bounded(value: JsonValue) -> JsonValue:
    """Return `value`, or its shortened JSON text where it is long: metadata stay small."""
    text = json.dumps(value, ensure_ascii=False)
    return value if len(text) <= presentation.MAX_SHOWN_CHARS else presentation.shortened(text)


def _text_part(text: str) -> Part:
    # A lone surrogate cannot be sent.
    return Part(text=safe_text(text))
