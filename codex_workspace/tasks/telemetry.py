"""Log context, metrics and spans of messages and turns; a `Job` reports to it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import anyio

from codex_workspace.common.a2a_terms import HEADERS
from codex_workspace.common.telemetry import (
    NO_TRACER,
    REQUEST_SPAN,
    Attributes,
    IdName,
    Metrics,
    Span,
    SpanKind,
    TaskOutcome,
    TokenTotals,
    Tracer,
    TurnOutcome,
    log_context,
)
from codex_workspace.runtimes.backend import TurnInfo
from codex_workspace.runtimes.events import AgentEvent, AgentMessage, Text, ToolResult, ToolUse


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The metrics and the tracer of one agent."""

    metrics: Metrics = field(default_factory=Metrics)
    tracer: Tracer = NO_TRACER
    clock: Callable[[], float] = anyio.current_time

    @contextmanager
    def message(self, task_id: str, context_id: str, request: Mapping[str, object]) -> Iterator["MessageTelemetry"]:
        """Record a message while the block is open; `request` is the state of its call context."""
        about: Attributes = {"a2a.task.id": task_id, "a2a.context.id": context_id}
        caller, headers = request.get(REQUEST_SPAN), request.get(HEADERS)
        if isinstance(caller, Span):
            span = caller.start_child("message", about)
        else:
            # A foreign host has no span for the request.
            span = self.tracer.start_span(
                "message", SpanKind.INTERNAL, about, headers if isinstance(headers, dict) else None
            )
        ids: dict[IdName, str] = {"task": task_id, "context": context_id}
        if span.trace_id is not None:
            ids["trace"] = span.trace_id
        with log_context(ids), span:
            yield MessageTelemetry(self, span)


class MessageTelemetry:
    """Records one message."""

    def __init__(self, telemetry: Telemetry, span: Span) -> None:
        self._telemetry = telemetry
        self._span = span

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Record the wait for the turn while the block is open."""
        since = self._telemetry.clock()
        with self._span.start_child("wait", {}):
            yield
        self._telemetry.metrics.wait.observe(self._telemetry.clock() - since)

    @contextmanager
    def turn(self) -> Iterator["TurnTelemetry"]:
        """Record a turn while the block is open."""
        about: Attributes = {"gen_ai.operation.name": "invoke_agent"}
        with self._span.start_child("turn", about) as span, ExitStack() as ids:
            watch = TurnTelemetry(self._telemetry, span, ids)
            try:
                yield watch
            finally:
                watch.close()

    def ended(self, outcome: TaskOutcome) -> None:
        """Count the task's end, after it was stored."""
        self._telemetry.metrics.count_task(outcome)
        self._span.set({"a2a.task.state": outcome})


class TurnTelemetry:
    """Records one turn, from before its start; `ids` holds its log context."""

    def __init__(self, telemetry: Telemetry, span: Span, ids: ExitStack) -> None:
        self._telemetry = telemetry
        self._span = span
        self._ids = ids
        self._since = telemetry.clock()
        self._turn: TurnInfo | None = None
        self._has_text = False
        self._items: dict[str, Span] = {}

    def began(self, turn: TurnInfo) -> None:
        """Record that codex has started the turn."""
        self._turn = turn
        self._span.set({"gen_ai.conversation.id": turn.thread_id, "codex.turn.id": turn.turn_id})
        self._ids.enter_context(log_context({"thread": turn.thread_id, "turn": turn.turn_id}))

    def see(self, event: AgentEvent) -> None:
        """Record an event; called for every delta, so the most frequent case comes first."""
        match event:
            case Text() | AgentMessage():
                if not self._has_text:
                    self._has_text = True
                    self._telemetry.metrics.first_text.observe(self._telemetry.clock() - self._since)
            case ToolUse():
                name, about = _tool_span(event)
                self._items[event.id] = self._span.start_child(name, {"codex.item.id": event.id, **about})
            case ToolResult(id=id_, is_error=is_error, exit_code=exit_code) if id_ in self._items:
                span = self._items.pop(id_)
                span.set({} if exit_code is None else {"process.exit.code": exit_code})
                span.end(None if not is_error else "declined" if event.status == "declined" else "failed")
            case _:
                pass

    def close(self) -> None:
        """Count the turn and end its spans."""
        for span in self._items.values():
            span.end("the turn ended first")
        outcome, used = _outcome(self._turn), _tokens(self._turn)
        self._telemetry.metrics.count_turn(outcome, self._telemetry.clock() - self._since, used)
        self._span.set(
            {
                "codex.turn.outcome": outcome,
                "gen_ai.usage.input_tokens": used.input + used.cached_input,
                "gen_ai.usage.output_tokens": used.output + used.reasoning_output,
            }
        )
        self._span.end(None if outcome in (TurnOutcome.COMPLETED, TurnOutcome.INTERRUPTED) else outcome)


def _tool_span(use: ToolUse) -> tuple[str, Attributes]:
    match use.kind, use.input:
        case "command", given:
            return "command", {"codex.command": str(given.get("command")), "codex.cwd": str(given.get("cwd", ""))}
        case "patch", {"changes": list(changes)}:
            return "file change", {"codex.files": len(changes)}
        case "search", _:
            return "web search", {}
        case _:
            server: Attributes = {} if use.server is None else {"codex.mcp.server": use.server}
            return "tool", {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": use.tool, **server}


def _outcome(turn: TurnInfo | None) -> TurnOutcome:
    if turn is None:
        return TurnOutcome.NOT_BEGUN
    return TurnOutcome.CUT_OFF if turn.ended is None else TurnOutcome(turn.ended.status)


def _tokens(turn: TurnInfo | None) -> TokenTotals:
    used = turn.usage if turn is not None else None
    if used is None:
        return TokenTotals()
    return TokenTotals(
        input=used.input - used.cached_input,
        cached_input=used.cached_input,
        output=used.output - used.reasoning_output,
        reasoning_output=used.reasoning_output,
    )
