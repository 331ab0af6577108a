"""Translates codex's events and questions into the public events of one run, and redacts them.

The result is balanced for any input: each `ToolUse` has one `ToolResult`, and the last event is the only `Done`.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias, assert_never

from codex_workspace.common.redact import RedactedStream, Redactor, redact_value
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol import codex_events as events
from codex_workspace.protocol.codex_events import (
    NO_SESSION,
    FilePatch,
    ItemStatus,
    TokenUsage,
    TurnCompleted,
    TurnError,
    TurnEvent,
    error_metadata,
)
from codex_workspace.protocol.server_requests import (
    CommandQuestion,
    Form,
    FormQuestion,
    PatchQuestion,
    PermissionQuestion,
    Question,
    QuestionField,
    ToolApproval,
    UrlRequest,
    UserQuestion,
    can_last,
)
from codex_workspace.runtimes.events import (
    BASH,
    COMMAND,
    FILES,
    SEARCH,
    WEB_SEARCH,
    AgentEvent,
    AgentMessage,
    Done,
    Error,
    FileChange,
    FileDiff,
    Plan,
    PlanStep,
    Reasoning,
    ReasoningSummary,
    RunDiff,
    RunWarning,
    Text,
    TokenCounts,
    ToolOutput,
    ToolResult,
    ToolUse,
    UnmappedEvent,
    Usage,
    name_of_change,
)
from codex_workspace.runtimes.markdown import unified_diff

ToolCallBegin = events.CommandStarted | events.PatchStarted | events.ToolCallStarted
ToolCallEnd = events.CommandCompleted | events.PatchCompleted | events.ToolCallCompleted | events.WebSearchCompleted

NO_RESULT: Final = "The run ended before codex reported the result."
"""The output of a tool call whose end codex did not report."""

NO_END: Final = TurnError("codex did not report the end of the turn", "noEnd")
NONE_USED: Final = TokenUsage()
"""The tokens of a new session."""

_CAPITAL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def error_code(failure: TurnError) -> str:
    """Return the public code of a failure, for example WATCHDOG_TIMEOUT for watchdogTimeout."""
    return _CAPITAL.sub("_", str(error_metadata(failure)["code"])).upper()


class EventConverter:
    """Converts the events of one run. No method raises.

    Args:
        used_before: the tokens of the session before this run; None if they are unknown.
        clock: seconds; the run's duration is measured from now.
    """

    def __init__(self, used_before: TokenUsage | None = NONE_USED, clock: Callable[[], float] = time.monotonic) -> None:
        self.session_id: str | None = None
        self.session_usage = used_before
        """The tokens of the whole session; before codex reports them, those before this run."""
        self.ended: TurnCompleted | None = None
        """How the turn ended according to codex; None until codex reports it."""
        self.failure: TurnError | None = None
        """Codex's last error, or after `finish` why the run failed."""
        self._used_before = used_before
        self._clock = clock
        self._started = clock()
        self._messages: dict[str, _GrowingText] = {}
        self._reasoning: dict[str, _GrowingText] = {}
        self._open_tools: dict[str, tuple[FilePatch, ...]] = {}
        self._seen_tools: set[str] = set()
        self._is_done = False

    @property
    def run_usage(self) -> TokenUsage | None:
        """The tokens of this run so far; None if they are unknown."""
        before, now = self._used_before, self.session_usage
        return None if before is None or now is None or now is before else _difference(now, before)

    @property
    def answer(self) -> str:
        """The final answer so far: the last message with that phase, else the last one; "" before any text."""
        messages = [each for each in self._messages.values() if each.pieces]
        final = [each for each in messages if each.phase == "final_answer"]
        return (final or messages)[-1].text if messages else ""

    def open_changes(self, item_id: str) -> tuple[FilePatch, ...]:
        """Return the changes of a patch that has started and not ended; nothing for any other item."""
        return self._open_tools.get(item_id, ())

    def convert(self, event: TurnEvent) -> list[AgentEvent]:
        """Return the public events of an event."""
        return [] if self._is_done else self._convert(event)

    def finish(self, failure: TurnError | None = None, *, stopped: bool = False) -> list[AgentEvent]:
        """Return the run's last events; none if the run was finished before.

        A turn that codex reported as completed stays completed.

        Args:
            failure: why the run failed, if codex does not know it.
            stopped: whether the caller stopped the run.
        """
        if self._is_done:
            return []
        self._is_done = True
        if failure is not None and failure.kind == NO_SESSION:
            # Codex may have started a new session instead.
            self.session_id = None
        out: list[AgentEvent] = [ToolResult(id_, NO_RESULT, is_error=True, status="failed") for id_ in self._open_tools]
        status, why = self._outcome(failure, stopped=stopped)
        error = None
        if why is not None:
            message = why.message if why is not failure or why.details is None else f"{why.message}: {why.details}"
            out += self._failed(replace(why, message=message))
            error = Error(message, error_code(why), fatal=True)
        duration_ms = round((self._clock() - self._started) * 1000)
        usage = _tokens(self.run_usage) if self.run_usage is not None else None
        self.ended = TurnCompleted(status, why, None)
        return [*out, Done(self.answer, self.session_id, duration_ms, usage, status, error)]

    def _outcome(self, failure: TurnError | None, *, stopped: bool) -> tuple[events.TurnStatus, TurnError | None]:
        ended = self.ended
        if ended is not None and ended.status == "completed":
            return "completed", None
        if stopped or (failure is None and ended is not None and ended.status == "interrupted"):
            return "interrupted", None
        reported = ended.failure if ended is not None else None
        return "failed", failure or reported or self.failure or NO_END

    def _convert(self, event: TurnEvent) -> list[AgentEvent]:
        match event:
            case events.MessageStarted(item, phase):
                self._messages.setdefault(item, _GrowingText(phase))
                return []
            case events.MessageDelta(item, text):
                message = self._messages.setdefault(item, _GrowingText())
                more = message.add(text)
                return [Text(item, more, phase=message.phase)] if more else []
            case events.MessageCompleted():
                return self._message(event)
            case events.ReasoningDelta(item, section, text):
                more = self._reasoning.setdefault(item, _GrowingText()).add(text, section)
                return [Reasoning(item, more)] if more else []
            case events.ReasoningCompleted(item, sections):
                return self._reasoning_summary(item, sections)
            case events.CommandStarted() | events.PatchStarted() | events.ToolCallStarted():
                return self._tool_started(event)
            case events.CommandOutput(item, text):
                return [ToolOutput(item, text)] if text else []
            case (
                events.CommandCompleted()
                | events.PatchCompleted()
                | events.ToolCallCompleted()
                | events.WebSearchCompleted()
            ):
                return self._tool_completed(event)
            case events.DiffUpdated(diff):
                return [RunDiff(diff)]
            case events.PlanUpdated(steps, explanation):
                return [Plan(tuple(map(_plan_step, steps)), explanation)]
            case events.TokensUpdated():
                return [self._usage(event)]
            case events.WarningReported(message=warning, will_retry=will_retry):
                if will_retry:
                    # Codex repeats the model call; its text starts again under another id.
                    self._messages = {id_: each for id_, each in self._messages.items() if each.is_complete}
                return [RunWarning(warning, will_retry)]
            case events.ErrorReported(failure):
                return self._failed(failure)
            case events.TurnCompleted(last_message=last):
                self.ended = event
                return self._message(last) if last is not None else []
            case events.TurnStarted():
                self.ended = None
                return []
            case events.UnknownEvent(name, payload):
                return [UnmappedEvent(name, payload)]
            case events.ThreadIdle() | events.Activity():
                return []
            case _:
                assert_never(event)

    def _failed(self, why: TurnError) -> list[AgentEvent]:
        """Return the error, unless it repeats the previous one; only the first is fatal."""
        before, self.failure = self.failure, why
        return [] if why == before else [Error(why.message, error_code(why), fatal=before is None)]

    def _message(self, event: events.MessageCompleted) -> list[AgentEvent]:
        item, text = event.item_id, event.text
        message = self._messages.setdefault(item, _GrowingText())
        if message.is_complete and message.text == text:
            return []
        message.phase = event.phase or message.phase
        more, replaces = message.complete(text)
        out: list[AgentEvent] = []
        if replaces or more:
            out.append(Text(item, more, replaces, message.phase))
        return [*out, AgentMessage(item, text, message.phase)]

    def _reasoning_summary(self, item: str, sections: tuple[str, ...]) -> list[AgentEvent]:
        # If both summary and raw text came, the text that was shown is not repeated in other words.
        more, replaces = self._reasoning.setdefault(item, _GrowingText()).complete("\n\n".join(sections))
        out: list[AgentEvent] = [Reasoning(item, more)] if more and not replaces else []
        return [*out, ReasoningSummary(item, sections)]

    def _tool_started(self, event: ToolCallBegin | ToolCallEnd) -> list[AgentEvent]:
        """Return the start of a tool call, unless it was seen before."""
        if event.item_id in self._seen_tools:
            return []
        self._seen_tools.add(event.item_id)
        self._open_tools[event.item_id] = event.changes if isinstance(event, events.PatchStarted) else ()
        return [_tool_use(event)]

    def _tool_completed(self, event: ToolCallEnd) -> list[AgentEvent]:
        out = self._tool_started(event)
        if self._open_tools.pop(event.item_id, None) is None:
            # An interrupted command may end twice: as a tool call, and as a process that is cleaned up.
            return []
        return [*out, *_results(event)]

    def _usage(self, event: events.TokensUpdated) -> Usage:
        if self._used_before is None and event.last.total:
            # Of a resumed thread: all tokens before the first model call of this turn.
            self._used_before = _difference(event.thread, event.last)
        self.session_usage = event.thread
        run = self.run_usage
        return Usage(_tokens(run) if run is not None else None, _tokens(event.thread))


@dataclass(slots=True)
class _GrowingText:
    """A message or a reasoning: its purpose, and the pieces that were sent."""

    phase: events.Phase = None
    pieces: list[str] = field(default_factory=list)
    section: int = 0
    is_complete: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, text: str, section: int = 0) -> str:
        """Return what to send for a further piece; nothing if the text is complete."""
        if self.is_complete or not text:
            return ""
        more = f"\n\n{text}" if self.pieces and section != self.section else text
        self.section = section
        self.pieces.append(more)
        return more

    def complete(self, text: str) -> tuple[str, bool]:
        """Return what to send for the complete text, and whether it replaces what was sent before."""
        sent = self.text
        self.pieces, self.is_complete = [text] if text else [], True
        return (text[len(sent) :], False) if text.startswith(sent) else (text, True)


def _tool_use(event: ToolCallBegin | ToolCallEnd) -> ToolUse:
    match event:
        case events.CommandStarted(item, command, cwd) | events.CommandCompleted(item, command, cwd):
            given: JsonObject = {"command": command, **({"cwd": cwd} if cwd else {})}
            return ToolUse(item, BASH, COMMAND, given)
        case events.PatchStarted(item, changes) | events.PatchCompleted(item, changes):
            listed: list[JsonValue] = [{"path": each.path, "kind": each.kind} for each in changes]
            name = name_of_change(each.kind for each in changes)
            return ToolUse(item, name, FILES, {"changes": listed})
        case events.ToolCallStarted(item, server, tool, arguments) | events.ToolCallCompleted(
            item, server, tool, arguments
        ):
            return ToolUse(item, tool, tool, _input(arguments), server)
        case events.WebSearchCompleted(item, query):
            return ToolUse(item, WEB_SEARCH, SEARCH, {"query": query})
        case _:
            assert_never(event)


def _plan_step(step: events.PlanItem) -> PlanStep:
    return PlanStep(step.text, "in_progress" if step.status == "inProgress" else step.status)


def _input(arguments: JsonValue) -> JsonObject:
    """Return a tool's arguments as an object; models also give texts, lists and nothing."""
    if isinstance(arguments, dict):
        return arguments
    return {} if arguments is None else {"arguments": arguments}


def _results(event: ToolCallEnd) -> list[AgentEvent]:
    match event:
        case events.CommandCompleted(item, _, _, output, exit_code, status, duration_ms):
            is_error = exit_code not in (0, None) or status is not ItemStatus.COMPLETED
            return [ToolResult(item, output, is_error, exit_code, duration_ms, status)]
        case events.PatchCompleted(item, changes, ItemStatus.COMPLETED):
            listed = tuple(FileDiff(each.path, each.kind, each.diff) for each in changes)
            return [FileChange(item, listed), ToolResult(item, "", is_error=False)]
        case events.PatchCompleted(item, _, status):
            why = f"No file was changed ({status})."
            return [ToolResult(item, why, is_error=True, status=status)]
        case events.ToolCallCompleted(item, _, _, _, result, is_error, status, duration_ms):
            return [ToolResult(item, result, is_error, None, duration_ms, status)]
        case events.WebSearchCompleted(item):
            return [ToolResult(item, "", is_error=False)]
        case _:
            assert_never(event)


def _difference(now: TokenUsage, before: TokenUsage) -> TokenUsage:
    return TokenUsage(
        now.total - before.total,
        now.input - before.input,
        now.cached_input - before.cached_input,
        now.output - before.output,
        now.reasoning_output - before.reasoning_output,
    )


def _tokens(count: TokenUsage) -> TokenCounts:
    return TokenCounts(count.input, count.cached_input, count.output, count.reasoning_output)


MAX_DIFF_CHARS: Final = 100_000
"""The diffs of one question are limited to this many characters; further ones are null."""


def approval_data(question: Question) -> JsonObject:
    """Return the question as JSON: `kind`, the question's fields (null if unknown), and its `choices`.

    A question of kind `question` has options instead of choices; a form with fields has a schema.
    """
    match question:
        case CommandQuestion(command, cwd, reason, to_terminal, permissions, host):
            data: JsonObject = {"kind": "command", "command": command, "cwd": cwd, "reason": reason}
            data |= {"toTerminal": to_terminal, "permissions": permissions, "host": host}
        case PatchQuestion(changes, reason, grant_root):
            listed = list[JsonValue](_changes_data(changes))
            data = {"kind": "patch", "changes": listed, "reason": reason, "grantRoot": grant_root}
        case PermissionQuestion(permissions, cwd, reason):
            data = {"kind": "permission", "permissions": permissions, "cwd": cwd, "reason": reason}
        case UserQuestion(several):
            return {"kind": "question", "questions": [_field_data(each) for each in several]}
        case FormQuestion(server, message, subject):
            data = {**_subject_data(subject), "server": server, "message": message}
            if isinstance(subject, Form) and subject.fields:
                return data
        case _:
            assert_never(question)
    return data | {"choices": ["approve", *(["approveForSession"] if can_last(question) else []), "decline"]}


def _subject_data(subject: Form | ToolApproval | UrlRequest) -> JsonObject:
    match subject:
        case Form(_, schema):
            return {"kind": "form", "schema": schema}
        case ToolApproval(tool, description, arguments):
            return {"kind": "toolCall", "tool": tool, "description": description, "arguments": arguments}
        case UrlRequest(url):
            return {"kind": "url", "url": url}
        case _:
            assert_never(subject)


def _changes_data(changes: Iterable[FilePatch]) -> Iterator[JsonObject]:
    """Yield each change as JSON; `diff` is null if the diffs before it and it exceed `MAX_DIFF_CHARS`."""
    left = MAX_DIFF_CHARS
    for change in changes:
        diff = unified_diff((change,))
        fits = len(diff) <= left
        left -= len(diff) if fits else 0
        yield {"path": change.path, "kind": change.kind, "diff": diff if fits else None}


def _field_data(field: QuestionField) -> JsonObject:
    options: list[JsonValue] = [{"label": each.label, "description": each.description} for each in field.options]
    return {
        "id": field.id,
        "header": field.header,
        "question": field.text,
        "options": options,
        "isOther": field.is_other,
        "isSecret": field.is_secret,
    }


_Stream: TypeAlias = Text | Reasoning | ToolOutput


class EventRedactor:
    """Removes secrets from the events of one turn, in their order.

    The pieces of a text pass through one stream, because a secret may be split between two of them.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor: Final = redactor
        self._streams: dict[tuple[type[_Stream], str], RedactedStream] = {}

    def redact(self, event: AgentEvent) -> list[AgentEvent]:
        """Return the redacted event, preceded by text that was held back; nothing if the event itself is held back."""
        if not self._redactor:
            return [event]
        out: list[AgentEvent] = []
        match event:
            case Text(item_id=item, replaces=True):
                self._streams.pop((Text, item), None)
            case Text(item_id=item) | Reasoning(item_id=item) | ToolOutput(id=item):
                return self._piece(event, item)
            case AgentMessage(item_id=item, phase=phase):
                out = self._held_back(item, phase)
            case RunWarning(will_retry=True):
                # The model call is repeated, with its text.
                self._streams.clear()
            case Done():
                out = [text for kind, item in list(self._streams) if kind is Text for text in self._held_back(item)]
            case _:
                pass
        return [*out, redact_value(event, self._redactor)]

    def _piece(self, event: _Stream, item: str) -> list[AgentEvent]:
        stream = self._streams.setdefault((type(event), item), self._redactor.stream())
        shown = stream.feed(event.text)
        if shown == event.text:
            return [event]
        return [replace(event, text=shown)] if shown else []

    def _held_back(self, item: str, phase: events.Phase = None) -> list[AgentEvent]:
        stream = self._streams.pop((Text, item), None)
        rest = stream.finish() if stream is not None else ""
        return [Text(item, rest, phase=phase)] if rest else []
