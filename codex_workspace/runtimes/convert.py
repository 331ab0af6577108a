"""Translates codex's events into the public events of one run.

The result is balanced for any input: each `ToolUse` has one `ToolResult`, and the last event is the only `Done`.
"""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, assert_never

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol import codex_events as events
from codex_workspace.protocol.codex_events import ItemStatus, TokenUsage, TurnCompleted, TurnError, TurnEvent, TurnText
from codex_workspace.protocol.exec_reader import ExecReader
from codex_workspace.protocol.failures import NO_SESSION, error_metadata, process_exit_error
from codex_workspace.protocol.server_requests import Question
from codex_workspace.runtimes.approvals import approval_data
from codex_workspace.runtimes.events import (
    BASH,
    COMMAND,
    FILES,
    SEARCH,
    WEB_SEARCH,
    AgentEvent,
    AgentMessage,
    Approval,
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

ToolCallBegin = events.CommandStarted | events.PatchStarted | events.ToolCallStarted
ToolCallEnd = events.CommandCompleted | events.PatchCompleted | events.ToolCallCompleted | events.WebSearchCompleted

NO_RESULT: Final = "The run ended before codex reported the result."
"""The output of a tool call whose end codex did not report."""

NO_END: Final = TurnError("codex reported no end of the turn", "noEnd", None, None)
NONE_USED: Final = TokenUsage()
"""The tokens of a new session."""

_CAPITAL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def tool_use(event: ToolCallBegin | ToolCallEnd) -> ToolUse:
    """Return the start of a tool call."""
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


def plan_event(event: events.PlanUpdated) -> Plan:
    """Return the agent's plan."""
    steps = ((each.text, "in_progress" if each.status == "inProgress" else each.status) for each in event.steps)
    return Plan(tuple(PlanStep(text, status) for text, status in steps), event.explanation)


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
        self.session_usage: TokenUsage | None = None
        self.ended: TurnCompleted | None = None
        """How the turn ended according to codex; None until codex reports it."""
        self.failure: TurnError | None = None
        """Codex's last error, or after `finish` why the run failed."""
        self._used_before = used_before
        self._clock = clock
        self._started = clock()
        self._messages = TurnText()
        self._phases: dict[str, events.Phase] = {}
        self._text = _Pieces("")
        self._reasoning = _Pieces("\n\n")
        self._open_tools: dict[str, None] = {}
        self._seen_tools: set[str] = set()
        self._is_done = False

    @property
    def run_usage(self) -> TokenUsage | None:
        """The tokens of this run so far; None if they are unknown."""
        if self.session_usage is None or self._used_before is None:
            return None
        return self.session_usage.minus(self._used_before)

    def convert(self, event: TurnEvent) -> list[AgentEvent]:
        """Return the public events of an event."""
        if self._is_done:
            return []
        self._messages.apply(event)
        return self._convert(event)

    def approval(self, id_: str, question: Question) -> list[AgentEvent]:
        """Return the public events of a question to a person."""
        return [] if self._is_done else [Approval(id_, approval_data(question))]

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
        out: list[AgentEvent] = [ToolResult(id_, NO_RESULT, is_error=True, status="failed") for id_ in self._open_tools]
        status, why = self._outcome(failure, stopped=stopped)
        error = None
        if why is not None:
            out += self._failed(why)
            error = Error(why.message, error_code(why), fatal=True)
        duration_ms = round((self._clock() - self._started) * 1000)
        usage = _tokens(self.run_usage) if self.run_usage is not None else None
        self.ended = TurnCompleted(status, why, None)
        return [
            *out,
            Done(self._messages.answer, self.session_id, duration_ms, usage, status, error),
        ]

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
                self._phases[item] = phase
                return []
            case events.MessageDelta(item, text):
                more = self._text.add(item, 0, text)
                return [Text(item, more, phase=self._phases.get(item))] if more else []
            case events.MessageCompleted():
                return self._message(event)
            case events.ReasoningDelta(item, section, text):
                more = self._reasoning.add(item, section, text)
                return [Reasoning(item, more)] if more else []
            case events.ReasoningCompleted(item, sections):
                return self._reasoning_summary(item, sections)
            case events.CommandStarted() | events.PatchStarted() | events.ToolCallStarted():
                return [tool_use(event)] if self._open_tool(event.item_id) else []
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
            case events.PlanUpdated():
                return [plan_event(event)]
            case events.TokensUpdated():
                return [self._usage(event)]
            case events.WarningReported(message, will_retry):
                return [RunWarning(message, will_retry)]
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
            case events.ThreadIdle() | events.ThreadActive() | events.Activity():
                return []
            case _:
                assert_never(event)

    def _failed(self, why: TurnError) -> list[AgentEvent]:
        """Return the error, unless it repeats the previous one; only the first is fatal."""
        before, self.failure = self.failure, why
        return [] if why == before else [Error(why.message, error_code(why), fatal=before is None)]

    def _message(self, message: events.MessageCompleted) -> list[AgentEvent]:
        item, text = message.item_id, message.text
        phase = message.phase or self._phases.get(item)
        if self._text.whole(item) == text:
            return []
        more, replaces = self._text.complete(item, text)
        out: list[AgentEvent] = []
        if replaces or more:
            out.append(Text(item, text if replaces else more, replaces, phase))
        return [*out, AgentMessage(item, text, phase)]

    def _reasoning_summary(self, item: str, sections: tuple[str, ...]) -> list[AgentEvent]:
        # If both summary and raw text came, the text that was shown is not repeated in other words.
        more, _ = self._reasoning.complete(item, "\n\n".join(sections))
        out: list[AgentEvent] = [Reasoning(item, more)] if more else []
        return [*out, ReasoningSummary(item, sections)]

    def _open_tool(self, id_: str) -> bool:
        """Record the start of a tool call; return False if it was seen before."""
        if id_ in self._seen_tools:
            return False
        self._seen_tools.add(id_)
        self._open_tools[id_] = None
        return True

    def _tool_completed(self, event: ToolCallEnd) -> list[AgentEvent]:
        out: list[AgentEvent] = [tool_use(event)] if self._open_tool(event.item_id) else []
        if event.item_id not in self._open_tools:
            return []
        del self._open_tools[event.item_id]
        return [*out, *_results(event)]

    def _usage(self, event: events.TokensUpdated) -> Usage:
        if self._used_before is None and event.last.total:
            self._used_before = event.thread.minus(event.last)
        self.session_usage = event.thread
        run = self.run_usage
        return Usage(_tokens(run) if run is not None else None, _tokens(event.thread))


class _Pieces:
    """What was sent of several growing texts, whose sections are separated by `separator`."""

    def __init__(self, separator: str) -> None:
        self._separator = separator
        self._pieces: dict[str, list[str]] = {}
        self._sections: dict[str, int] = {}
        self._whole: dict[str, str] = {}

    def whole(self, item: str) -> str | None:
        """Return the complete text; None while it is incomplete."""
        return self._whole.get(item)

    def add(self, item: str, section: int, text: str) -> str:
        """Return what to send for a further piece; nothing if the text is complete."""
        if item in self._whole or not text:
            return ""
        more = text
        if self._pieces.get(item) and self._sections.get(item) != section:
            more = f"{self._separator}{text}"
        self._sections[item] = section
        self._pieces.setdefault(item, []).append(more)
        return more

    def complete(self, item: str, text: str) -> tuple[str, bool]:
        """Return what to send for the complete text, and whether it replaces what was sent before."""
        sent = self._whole.get(item, "".join(self._pieces.pop(item, ())))
        self._whole[item] = text
        return (text[len(sent) :], False) if text.startswith(sent) else ("", True)


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


def _tokens(count: TokenUsage) -> TokenCounts:
    return TokenCounts(count.input, count.cached_input, count.output, count.reasoning_output)


class ExecConverter:
    """Converts the lines of one run of `codex exec --json`. No method raises.

    Args:
        used_before: the tokens of the session before this run; None if they are unknown. Codex reports the tokens of
            the whole session.
        clock: seconds; the run's duration is measured from now.
    """

    def __init__(self, used_before: TokenUsage | None = NONE_USED, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader: Final = ExecReader()
        self._events: Final = EventConverter(used_before, clock)

    @property
    def session_id(self) -> str | None:
        """The session's id, by which it is resumed; None until codex reports it."""
        return self._reader.thread_id

    @property
    def session_usage(self) -> TokenUsage | None:
        """The tokens of the whole session, this run included; None until codex reports them."""
        return self._events.session_usage

    @property
    def run_usage(self) -> TokenUsage | None:
        """The tokens of this run; None if they are unknown."""
        return self._events.run_usage

    @property
    def ended(self) -> TurnCompleted | None:
        """How the turn ended; None before. The process may need seconds more to exit."""
        return self._events.ended

    @property
    def failed(self) -> bool:
        """Whether codex reported an error that ends the turn."""
        return self._events.failure is not None

    def feed(self, line: bytes | str) -> list[AgentEvent]:
        """Return the events of a line without its newline; none if it is no event."""
        parsed = self._reader.read(line)
        self._events.session_id = self._reader.thread_id
        return [event for each in parsed for event in self._events.convert(each)]

    def skipped(self, size: int) -> list[AgentEvent]:
        """Return the warning about a line of `size` bytes that was too long to be read."""
        return self._events.convert(self._reader.skipped(size))

    def finish(
        self, exit_code: int | None = None, failure: TurnError | None = None, *, stopped: bool = False
    ) -> list[AgentEvent]:
        """Return the run's last events; none if the run was finished before.

        Args:
            exit_code: the process's, None if it is unknown.
            failure: why the run was given up.
            stopped: whether the caller stopped the run.
        """
        if failure is not None and failure.kind == NO_SESSION:
            # Codex may have started a new session instead.
            self._events.session_id = None
        if failure is not None and failure.details is not None:
            failure = replace(failure, message=f"{failure.message}: {failure.details}")
        if failure is None and not (stopped or self.ended or self.failed):
            failure = process_exit_error(exit_code)
        return self._events.finish(failure, stopped=stopped)
