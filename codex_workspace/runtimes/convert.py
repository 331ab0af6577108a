"""Which tool an event of a turn is about: its `ToolUse`, or `Plan`, the same for the public stream and for A2A.

The public stream of one run, made of the events of its turn: what every backend says to the outside.

A stream is balanced whatever comes in: each `ToolUse` has one `ToolResult`, and the last event is the one `Done`.

The public stream of one run of `codex exec --json`, made of its lines.
"""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, assert_never

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol import codex_events as events
from codex_workspace.protocol.codex_events import (
    CommandCompleted,
    CommandStarted,
    ItemStatus,
    PatchCompleted,
    PatchStarted,
    PlanUpdated,
    TokenUsage,
    ToolCallCompleted,
    ToolCallStarted,
    TurnCompleted,
    TurnError,
    TurnEvent,
    TurnText,
    WebSearchCompleted,
)
from codex_workspace.protocol.exec_reader import ExecReader, ParsedLine
from codex_workspace.protocol.failures import error_metadata, process_exit_error
from codex_workspace.protocol.server_requests import Question
from codex_workspace.runtimes.approvals import approval_data
from codex_workspace.runtimes.events import (
    BASH,
    COMMAND,
    FILES,
    SEARCH,
    WEB_SEARCH,
    AgentEvent,
    Approval,
    Done,
    Error,
    FileChange,
    FileDiff,
    Plan,
    PlanStep,
    Reasoning,
    StopReason,
    Text,
    TokenCounts,
    ToolResult,
    ToolUse,
    UnmappedEvent,
    Usage,
    name_of_change,
)

ToolCallBegin = CommandStarted | PatchStarted | ToolCallStarted
ToolCallEnd = CommandCompleted | PatchCompleted | ToolCallCompleted | WebSearchCompleted


def tool_use(event: ToolCallBegin | ToolCallEnd, extra: JsonObject | None = None) -> ToolUse:
    """Return what the agent uses; `extra` are the fields of codex's that the event has no place for."""
    extra = extra or {}
    match event:
        case CommandStarted(item, command, cwd) | CommandCompleted(item, command, cwd):
            given: JsonObject = {"command": command, **({"cwd": cwd} if cwd else {})}
            return ToolUse(item, BASH, COMMAND, given, extra=extra)
        case PatchStarted(item, changes) | PatchCompleted(item, changes):
            listed: list[JsonValue] = [{"path": each.path, "kind": each.kind} for each in changes]
            name = name_of_change(each.kind for each in changes)
            return ToolUse(item, name, FILES, {"changes": listed}, extra=extra)
        case ToolCallStarted(item, server, tool, arguments) | ToolCallCompleted(item, server, tool, arguments):
            return ToolUse(item, tool, tool, _input(arguments), server, extra=extra)
        case WebSearchCompleted(item, query):
            return ToolUse(item, WEB_SEARCH, SEARCH, {"query": query}, extra=extra)
        case _:
            assert_never(event)


def plan_event(event: PlanUpdated, extra: JsonObject | None = None) -> Plan:
    """Return the agent's plan; `extra` as for `tool_use`."""
    steps = tuple(PlanStep(each.text, _step_status(each.status)) for each in event.steps)
    return Plan(steps, event.explanation, extra=extra or {})


def _step_status(status: str) -> str:
    return "in_progress" if status == "inProgress" else status


def _input(arguments: JsonValue) -> JsonObject:
    """Return a tool's arguments as an object; models also give texts and lists, and nothing."""
    if isinstance(arguments, dict):
        return arguments
    return {} if arguments is None else {"arguments": arguments}


NO_RESULT: Final = "The run ended before codex said what became of this."
"""Output of a tool that codex never said the end of; a command may run on for as long as codex does."""

NO_END: Final = TurnError("The run ended before codex said how its turn did.", "noEnd", None, None)

NONE_USED: Final = TokenUsage()
"""What a new session has used before its first run."""

RETRYING: Final = "RETRYING"
"""Code of an error after which codex asks the model again."""

WARNING: Final = "WARNING"
"""Code of an error that codex only tells of."""

_WORD: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def code_of(failure: TurnError) -> str:
    """Return codex's word for a failure as the stream says it: WATCHDOG_TIMEOUT for watchdogTimeout."""
    return _WORD.sub("_", str(error_metadata(failure)["code"])).upper()


class EventConverter:
    """Makes the public events of one run. No method raises.

    Args:
        used_before: the tokens of the session before this run; None where that is not known.
        clock: seconds, for the run's duration, which begins now.
    """

    def __init__(self, used_before: TokenUsage | None = NONE_USED, clock: Callable[[], float] = time.monotonic) -> None:
        self.session_id: str | None = None
        self.session_usage: TokenUsage | None = None
        self._used_before = used_before
        self._clock = clock
        self._began = clock()
        self._messages = TurnText()
        self._said = _Pieces("")
        self._thought = _Pieces("\n\n")
        self._tools = _Tools()
        self._ended: TurnCompleted | None = None
        self._erred: TurnError | None = None
        self._is_done = False

    @property
    def ended(self) -> TurnCompleted | None:
        """How codex said that the turn has ended; None while it has not."""
        return self._ended

    @property
    def erred(self) -> bool:
        """Whether codex has said that it gave up."""
        return self._erred is not None

    def see(self, event: TurnEvent, extra: JsonObject | None = None) -> list[AgentEvent]:
        """Return what is said of an event; `extra` are the fields of codex's that the event has no place for."""
        if self._is_done:
            return []
        self._messages.apply(event)
        return self._see(event, extra or {})

    def asked(self, id_: str, question: Question) -> list[AgentEvent]:
        """Return what is said when codex asks a person."""
        return [] if self._is_done else [Approval(id_, approval_data(question))]

    def end(
        self, failure: TurnError | None = None, *, stopped: bool = False, extra: JsonObject | None = None
    ) -> list[AgentEvent]:
        """Return the run's last events; nothing where it has ended before.

        A turn that codex has completed is completed, whatever comes after it.

        Args:
            failure: why the run ended, where codex does not know.
            stopped: whether it was stopped by its caller.
            extra: fields of codex's that no event before had a place for.
        """
        if self._is_done:
            return []
        self._is_done = True
        reason, why = self._outcome(failure, stopped)
        out: list[AgentEvent] = [ToolResult(id_, NO_RESULT, is_error=True) for id_ in self._tools.close()]
        error = None
        if why is not None:
            error = Error(why.message, code_of(why), fatal=True)
            out += self._given_up(why, {})
        duration_ms = round((self._clock() - self._began) * 1000)
        run = self._run_usage()
        usage = _tokens(run) if run is not None else None
        text = self._messages.answer
        return [*out, Done(text, self.session_id, duration_ms, usage, reason, error, extra=extra or {})]

    def _outcome(self, failure: TurnError | None, stopped: bool) -> tuple[StopReason, TurnError | None]:
        ended = self._ended
        if ended is not None and ended.status == "completed":
            return "completed", None
        if stopped or (failure is None and ended is not None and ended.status == "interrupted"):
            return "interrupted", None
        told = ended.failure if ended is not None else None
        return "failed", failure or told or self._erred or NO_END

    def _see(self, event: TurnEvent, extra: JsonObject) -> list[AgentEvent]:
        match event:
            case events.MessageDelta(item, text):
                more = self._said.grown(item, 0, text)
                return [Text(item, more, extra=extra)] if more else []
            case events.MessageCompleted(item, text):
                return self._whole(item, text, extra)
            case events.ReasoningDelta(item, section, text):
                more = self._thought.grown(item, section, text)
                return [Reasoning(item, more, extra=extra)] if more else []
            case events.ReasoningCompleted(item, sections):
                # Where summary and raw text both came, what has been shown is not said again in other words.
                more, _ = self._thought.completed(item, "\n\n".join(sections))
                return [Reasoning(item, more, extra=extra)] if more else []
            case events.CommandStarted() | events.PatchStarted() | events.ToolCallStarted() if not self._tools.begins(
                event.item_id
            ):
                return []
            case events.CommandStarted() | events.PatchStarted() | events.ToolCallStarted():
                return [tool_use(event, extra)]
            case (
                events.CommandCompleted()
                | events.PatchCompleted()
                | events.ToolCallCompleted()
                | events.WebSearchCompleted()
            ):
                return self._finished(event, extra)
            case events.PlanUpdated():
                return [plan_event(event, extra)]
            case events.TokensUpdated():
                return [self._used(event, extra)]
            case events.WarningReported(message, will_retry):
                return [Error(message, RETRYING if will_retry else WARNING, fatal=False, extra=extra)]
            case events.ErrorReported(failure):
                return self._given_up(failure, extra)
            case events.TurnCompleted(last_message=last):
                self._ended = event
                return self._whole(last.item_id, last.text, {}) if last is not None else []
            case events.TurnStarted():
                self._ended = None
                return []
            case events.UnknownEvent(name, payload):
                return [UnmappedEvent(name, payload, extra=extra)]
            case (
                events.MessageStarted()
                | events.CommandOutput()
                | events.DiffUpdated()
                | events.ThreadIdle()
                | events.ThreadActive()
                | events.Activity()
            ):
                return []
            case _:
                assert_never(event)

    def _given_up(self, why: TurnError, extra: JsonObject) -> list[AgentEvent]:
        """Say why codex gave up: the first reason is the fatal one, another one is said beside it, none twice."""
        before, self._erred = self._erred, why
        return [] if why == before else [Error(why.message, code_of(why), fatal=before is None, extra=extra)]

    def _whole(self, item: str, text: str, extra: JsonObject) -> list[AgentEvent]:
        more, replaces = self._said.completed(item, text)
        if replaces:
            return [Text(item, text, replaces=True, extra=extra)]
        return [Text(item, more, extra=extra)] if more else []

    def _finished(self, event: ToolCallEnd, extra: JsonObject) -> list[AgentEvent]:
        out: list[AgentEvent] = [tool_use(event)] if self._tools.begins(event.item_id) else []
        return [*out, *_results(event, extra)] if self._tools.ends(event.item_id) else []

    def _used(self, event: events.TokensUpdated, extra: JsonObject) -> Usage:
        if self._used_before is None and event.last.total:
            self._used_before = event.thread.minus(event.last)
        self.session_usage = event.thread
        run = self._run_usage()
        return Usage(_tokens(run) if run is not None else None, _tokens(event.thread), extra=extra)

    def _run_usage(self) -> TokenUsage | None:
        if self.session_usage is None or self._used_before is None:
            return None
        return self.session_usage.minus(self._used_before)


class _Tools:
    """Which tools are in use, and which were."""

    def __init__(self) -> None:
        self._open: dict[str, None] = {}
        self._seen: set[str] = set()

    def begins(self, id_: str) -> bool:
        """Note a beginning; False where it came before."""
        if id_ in self._seen:
            return False
        self._seen.add(id_)
        self._open[id_] = None
        return True

    def ends(self, id_: str) -> bool:
        """Note an end; False where it came before."""
        if id_ not in self._open:
            return False
        del self._open[id_]
        return True

    def close(self) -> list[str]:
        """Return the ids that are open, in the order of their beginnings; they are not any more."""
        opened, self._open = list(self._open), {}
        return opened


class _Pieces:
    """What was said of each of several growing texts, whose sections are parted by `between`."""

    def __init__(self, between: str) -> None:
        self._between = between
        self._pieces: dict[str, list[str]] = {}
        self._sections: dict[str, int] = {}
        self._whole: set[str] = set()

    def grown(self, item: str, section: int, text: str) -> str:
        """Return what to say of a further piece; nothing once the whole is known."""
        if item in self._whole or not text:
            return ""
        more = text
        if self._pieces.get(item) and self._sections.get(item) != section:
            more = f"{self._between}{text}"
        self._sections[item] = section
        self._pieces.setdefault(item, []).append(more)
        return more

    def completed(self, item: str, text: str) -> tuple[str, bool]:
        """Return what the whole has beyond what was said, and whether it takes the place of that."""
        said = "".join(self._pieces.get(item, ()))
        self._whole.add(item)
        if not text.startswith(said):
            self._pieces[item] = [text]
            return "", True
        self._pieces[item] = [text]
        return text[len(said) :], False


def _results(event: ToolCallEnd, extra: JsonObject) -> list[AgentEvent]:
    match event:
        case events.CommandCompleted(item, _, _, output, exit_code, status, duration_ms):
            # A completed command without an exit code runs on in the background.
            is_error = exit_code not in (0, None) or status is not ItemStatus.COMPLETED
            return [ToolResult(item, output, is_error, exit_code, duration_ms, extra=extra)]
        case events.PatchCompleted(item, changes, ItemStatus.COMPLETED):
            listed = tuple(FileDiff(each.path, each.kind, each.diff) for each in changes)
            return [FileChange(item, listed), ToolResult(item, "", is_error=False, extra=extra)]
        case events.PatchCompleted(item, _, status):
            return [ToolResult(item, f"No file was changed ({status}).", is_error=True, extra=extra)]
        case events.ToolCallCompleted(item, _, _, _, result, is_error, _, duration_ms):
            return [ToolResult(item, result, is_error, None, duration_ms, extra=extra)]
        case events.WebSearchCompleted(item):
            return [ToolResult(item, "", is_error=False, extra=extra)]
        case _:
            assert_never(event)


def _tokens(count: TokenUsage) -> TokenCounts:
    return TokenCounts(count.input, count.cached_input, count.output, count.reasoning_output)


NO_SESSION: Final = "sessionNotFound"
"""The kind of failure of a run whose session there is not."""


class ExecConverter:
    """Takes the lines of one run and gives its events; a further run needs another one. No method raises.

    Args:
        used_before: the `session_usage` of the session's run before; None where that is not known: codex tells the
            tokens of the whole session.
        clock: seconds, for the run's duration, which begins now.
    """

    def __init__(self, used_before: TokenUsage | None = NONE_USED, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader: Final = ExecReader()
        self._stream: Final = EventConverter(used_before, clock)
        self._kept: dict[str | None, JsonObject] = {}

    @property
    def thread_id(self) -> str | None:
        """Codex's id of the session, by which it is resumed; None before codex says it."""
        return self._reader.thread_id

    @property
    def session_usage(self) -> TokenUsage | None:
        """The tokens of the whole session, this run included; None before codex tells them, at a turn's end."""
        return self._stream.session_usage

    @property
    def ended(self) -> bool:
        """Whether codex has said that the turn is over; its process may take seconds more to end."""
        return self._stream.ended is not None

    @property
    def erred(self) -> bool:
        """Whether codex has said that it gave up."""
        return self._stream.erred

    def feed(self, line: bytes | str) -> list[AgentEvent]:
        """Return the events of a line, without its newline; none where it is no event."""
        told = self._reader.read(line)
        self._stream.session_id = self._reader.thread_id
        return [event for each in told for event in self._say(each)]

    def skipped(self, size: int) -> list[AgentEvent]:
        """Return what is said of a line of `size` bytes that was too long to be read."""
        return self._stream.see(self._reader.skipped(size))

    def finish(
        self, exit_code: int | None = None, failure: TurnError | None = None, *, stopped: bool = False
    ) -> list[AgentEvent]:
        """Return the last events of the run, with its `Done`; nothing where it was finished before.

        Args:
            exit_code: codex's, None where it is not known.
            failure: why the run was given up, such as TurnFailure("…", "watchdogTimeout", None, None); its details are
                told, too.
            stopped: whether the caller wanted no more of it.
        """
        if failure is not None and failure.kind == NO_SESSION:
            # What codex has begun instead is nothing that anybody asked for.
            self._stream.session_id = None
        if failure is not None and failure.details is not None:
            failure = replace(failure, message=f"{failure.message}: {failure.details}")
        extra = {key: value for kept in self._kept.values() for key, value in kept.items()}
        if self.ended or failure is not None or stopped:
            return self._stream.end(failure, stopped=stopped, extra=extra)
        if self._stream.erred:
            return self._stream.end(extra=extra)
        return self._stream.end(process_exit_error(exit_code), extra=extra)

    def _say(self, told: ParsedLine) -> list[AgentEvent]:
        """Return what is said of it; fields of a line of which nothing is said wait for the next one of its item."""
        extra = {**self._kept.pop(told.item, {}), **told.extra}
        said = self._stream.see(told.event, extra)
        if extra and not said:
            self._kept[told.item] = extra
        return said
