"""A running turn of a codex thread: its events, its requests, and the ways to steer and to stop it."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

import anyio

from codex_workspace.app_server import Connection
from codex_workspace.codex.history import read_last_turns, turn_end
from codex_workspace.common.errors import CodexError, CodexGone, CodexRefused
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.app_server_reader import TurnReader, is_quiet, join_deltas
from codex_workspace.protocol.codex_events import (
    UNKNOWN_END,
    ErrorReported,
    ThreadIdle,
    TokenUsage,
    ToolCallCompleted,
    TurnCompleted,
    TurnError,
    TurnEvent,
    TurnStarted,
    WarningReported,
    duration_error,
    inactivity_error,
)
from codex_workspace.protocol.jsonrpc import Mailbox, Notification, Request
from codex_workspace.protocol.server_requests import read_question
from codex_workspace.runtimes.backend import DynamicToolCall, PendingRequest, TurnInput
from codex_workspace.runtimes.convert import EventConverter
from codex_workspace.runtimes.events import AgentEvent

logger = logging.getLogger(__name__)

RESOLVED: Final = "serverRequest/resolved"
"""The notification that a request was answered, or needs no answer any more."""


IDLE_GRACE_S: Final = 1.5
"""Codex reports an idle thread less than 1 ms before the turn's end; after this long it will not report the end."""

STOP_GRACE_S: Final = 5.0
"""An interrupted turn ends within 15 ms; a codex that takes this long does not respond any more and is killed."""

INTERRUPT_RETRY_S: Final = 0.05
"""Codex rejects an interrupt for up to 52 ms after it has accepted the turn."""

SUSPENDED_S: Final = 1.0
"""If a deadline is noticed this late, this process or its machine was suspended."""


RELOAD: Final = "config/mcpServer/reload"
"""The request that starts the MCP servers that are down."""

TRANSPORT_CLOSED: Final = "Transport closed"
"""Part of the error of a tool call whose server's process has exited. Codex reconnects to HTTP servers itself."""

MAX_RESTARTS: Final = 5
"""How often one turn restarts servers that have exited; one that exits on every call is not restarted forever."""


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Time limits in seconds, and the maximum number of characters of a turn's text."""

    inactivity_s: float = 300.0
    total_s: float = 3600.0
    request_s: float = 30.0


class _Interrupt(Enum):
    NONE = auto()
    REQUESTED = auto()
    SENT = auto()


class Turn:
    """A running turn; implements `RunningTurn`."""

    def __init__(
        self,
        codex: Connection,
        mailbox: Mailbox,
        reader: TurnReader,
        limits: TurnLimits,
        used_before: TokenUsage | None,
    ) -> None:
        self.thread_id: Final = reader.thread_id
        self.turn_id: Final = reader.turn_id
        self.ended: TurnCompleted | None = None
        self.converter: Final = EventConverter(used_before)
        self._codex = codex
        self._mailbox = mailbox
        self._reader = reader
        self._limits = limits
        self._deadlines = _Deadlines(limits)
        self._pending: list[PendingRequest] = []
        self._woken = False
        self._started = False
        self._interrupt = _Interrupt.NONE
        self._timed_out: TurnError | None = None
        self._codex_gone = False
        self._server_restarts = 0
        self._server_exited = False

    @property
    def usage(self) -> TokenUsage | None:
        """The turn's tokens so far; None while they are unknown."""
        return self.converter.run_usage

    @property
    def thread_usage(self) -> TokenUsage | None:
        """The tokens of the whole thread."""
        return self.converter.session_usage

    @property
    def pending(self) -> PendingRequest | None:
        """The oldest request that waits for an answer; while there is one, the time limits are paused."""
        return self._pending[0] if self._pending else None

    def answer(self, pending: PendingRequest, result: JsonObject | None) -> None:
        """Answer a request, by default with a decline; one that needs no answer any more is ignored."""
        pending.request.answer(result)
        if pending in self._pending:
            self._pending.remove(pending)
            self.wake()
            if not self._pending:
                self._deadlines.resume()

    def wake(self) -> None:
        """Make `receive` return, with no events if there are none."""
        self._woken = True
        self._mailbox.wake()

    async def steer(self, turn_input: TurnInput, client_message_id: str | None = None) -> bool:
        """Add input to the running turn; return False if the turn does not accept it.

        Raises:
            CodexGone: codex died.
        """
        params: JsonObject = {
            "threadId": self.thread_id,
            "expectedTurnId": self.turn_id,
            "input": list(turn_input),
            "clientUserMessageId": client_message_id,
        }
        try:
            await self._codex.request("turn/steer", params, self._limits.request_s)
        except CodexRefused as refusal:
            logger.info("cannot steer turn %s: %s", self.turn_id, refusal.message)
            return False
        return True

    def interrupt(self) -> None:
        """Request that the turn stops; `receive` continues until it has ended."""
        if self._interrupt is _Interrupt.NONE and self.ended is None:
            self._interrupt = _Interrupt.REQUESTED
            self._deadlines.set(_Deadline.STOP, STOP_GRACE_S)
            self._mailbox.wake()

    async def receive(self, by: float = math.inf, text_by: float = -math.inf) -> list[AgentEvent]:
        """Wait for events and return them; return none once `ended` is set, at the time `by`, or if `pending` changed.

        Further pieces of a text end the wait at the time `text_by`.

        Raises:
            CodexGone: codex died; the turn will not end.
        """
        while self.ended is None:
            try:
                events = await self._next(by, text_by)
                if self._interrupt is _Interrupt.REQUESTED and self.ended is None and self._started:
                    await self._send_interrupt()
                if self._server_exited:
                    await self._restart_servers()
            except CodexGone:
                self._codex_gone = True
                raise
            if events or self._woken or anyio.current_time() >= by:
                self._woken = False
                return events
        return []

    def kill(self) -> None:
        """Kill codex, and the turn with it."""
        self._codex.kill()

    async def stop(self) -> None:
        """Interrupt the turn if it still runs; kill codex if it cannot be stopped."""
        if self.ended is not None:
            return
        if not self._codex_gone:
            self.interrupt()
            try:
                with anyio.move_on_after(STOP_GRACE_S + 1):
                    while self.ended is None:
                        await self.receive()
            except CodexError:
                logger.warning("cannot stop turn %s; killing codex", self.turn_id, exc_info=True)
        if self.ended is None:
            self._codex.kill()

    async def _next(self, by: float, text_by: float) -> list[AgentEvent]:
        due = self._deadlines.next(by)
        messages = await self._mailbox.receive(due, text_by)
        if not messages and anyio.current_time() >= due:
            return await self._on_deadline(due)
        # In order: a request may refer to an item that the message before it has started.
        return [event for message in join_deltas(messages) for event in self._read(message)]

    def _read(self, message: Notification | Request) -> list[AgentEvent]:
        if isinstance(message, Request):
            self._add(message)
        elif message.method == RESOLVED:
            self._resolve(message.params.get("requestId"))
        elif self.ended is None:
            event = self._reader.read(message)
            return [] if event is None else self._apply(event, is_activity=not is_quiet(message))
        return []

    def _add(self, request: Request) -> None:
        changes = self.converter.open_changes(str(request.params.get("itemId")))
        subject = _tool_call(request) or read_question(request, changes)
        if subject is None or request.params.get("turnId") not in (self.turn_id, None):
            request.answer(None)
            return
        self._pending.append(PendingRequest(f"{self.turn_id}/{request.id}", subject, request))
        self._deadlines.pause()
        self._woken = True

    def _resolve(self, request_id: JsonValue) -> None:
        for pending in [each for each in self._pending if each.request.id == request_id]:
            self.answer(pending, None)

    async def _on_deadline(self, due: float) -> list[AgentEvent]:
        match self._deadlines.expired(due):
            case _Deadline.IDLE:
                end = await self._find_end()
                return [] if end is None else self._apply(end)
            case _Deadline.STOP:
                self._codex.kill()
                raise CodexGone("codex did not stop its turn and was killed")
            case _Deadline.TOTAL:
                return await self._time_out(duration_error(self._limits.total_s))
            case _Deadline.INACTIVITY:
                return await self._time_out(inactivity_error(self._limits.inactivity_s))
            case _:
                return []

    def _apply(self, event: TurnEvent, *, is_activity: bool = True) -> list[AgentEvent]:
        """Update the state of the turn by an event; return the events for the caller."""
        if isinstance(event, ToolCallCompleted) and event.is_error and TRANSPORT_CLOSED in event.result:
            self._server_exited = True
        match event:
            case TurnCompleted():
                self._codex.has_completed_turn = True
                return self._end(event)
            case ThreadIdle():
                if self._started or self.converter.failure is not None:
                    self._deadlines.set(_Deadline.IDLE, IDLE_GRACE_S)
                return []
            case WarningReported(will_retry=True):
                return self.converter.convert(event)
            case ErrorReported():
                self._deadlines.set(_Deadline.IDLE, IDLE_GRACE_S)
            case TurnStarted():
                self._started = True
            case _:
                pass
        # A quiet message may be read long after it came.
        if is_activity:
            self._deadlines.set(_Deadline.INACTIVITY, self._limits.inactivity_s)
        return self.converter.convert(event)

    def _end(self, ended: TurnCompleted) -> list[AgentEvent]:
        timed_out = self._timed_out
        if timed_out is not None:
            ended = replace(ended, status="failed", failure=timed_out)
        self.ended = ended
        for pending in list(self._pending):
            self.answer(pending, None)
        stopped = self._interrupt is not _Interrupt.NONE and timed_out is None
        return [*self.converter.convert(ended), *self.converter.finish(ended.failure, stopped=stopped)]

    async def _send_interrupt(self) -> None:
        if self._deadlines.is_pending(_Deadline.INTERRUPT):
            return
        thread: JsonObject = {"threadId": self.thread_id}
        try:
            await self._codex.request("turn/interrupt", {**thread, "turnId": self.turn_id}, STOP_GRACE_S)
        except CodexRefused:
            # The turn accepts no interrupt yet, or has ended.
            self._deadlines.set(_Deadline.INTERRUPT, INTERRUPT_RETRY_S)
            return
        self._interrupt = _Interrupt.SENT
        try:
            # An interrupt leaves the thread's commands running.
            await self._codex.request("thread/backgroundTerminals/clean", thread, STOP_GRACE_S)
        except CodexRefused as refusal:
            logger.warning("commands of the interrupted turn %s may still run: %s", self.turn_id, refusal)

    async def _restart_servers(self) -> None:
        self._server_exited = False
        if self._server_restarts >= MAX_RESTARTS:
            return
        self._server_restarts += 1
        try:
            await restart_mcp_servers(self._codex, self._limits.request_s)
        except CodexGone:
            if self.ended is None:
                raise

    async def _time_out(self, failure: TurnError) -> list[AgentEvent]:
        """Stop the turn, and end it as failed."""
        self._timed_out = failure
        self.interrupt()
        events: list[AgentEvent] = []
        try:
            while self.ended is None:
                events += await self.receive()
        except CodexGone as gone:
            logger.warning("codex died while turn %s was being stopped: %s", self.turn_id, gone)
            events += self._end(TurnCompleted("failed", failure, None))
        return events

    async def _find_end(self) -> TurnCompleted | None:
        """Return how the turn ended if codex is idle and has not reported it; None while it is in progress."""
        if self.converter.failure is not None:
            return TurnCompleted("failed", self.converter.failure)
        try:
            record = await read_last_turns(self._codex, self.thread_id, self._limits.request_s)
        except CodexRefused as refusal:
            sentence = f"Codex became idle without reporting how the turn ended ({refusal.message})."
            return TurnCompleted("failed", TurnError(sentence, UNKNOWN_END))
        return turn_end(record, self.turn_id)


def _tool_call(request: Request) -> DynamicToolCall | None:
    match request:
        case Request(method="item/tool/call", params={"tool": str(tool), **rest}):
            return DynamicToolCall(tool, rest.get("arguments"))
        case _:
            return None


async def restart_mcp_servers(codex: Connection, timeout_s: float) -> None:
    """Start the MCP servers that are down.

    Raises:
        CodexGone: codex died, or did not respond within `timeout_s` seconds.
    """
    try:
        await codex.request(RELOAD, {}, timeout_s)
    except CodexRefused as refusal:
        logger.warning("cannot restart MCP servers: %s", refusal)


class _Deadline(Enum):
    """A deadline of a turn; if several have passed, the first one counts."""

    INTERRUPT = auto()
    """When the interrupt may be sent again."""
    IDLE = auto()
    STOP = auto()
    TOTAL = auto()
    INACTIVITY = auto()


_LIMITS: Final = frozenset((_Deadline.TOTAL, _Deadline.INACTIVITY))
"""The deadlines that do not apply while codex waits for an answer, or when the turn is being stopped."""


class _Deadlines:
    """The deadlines of one turn, which starts now."""

    def __init__(self, limits: TurnLimits) -> None:
        self._times: dict[_Deadline, float] = {}
        self._paused_since: float | None = None
        self.set(_Deadline.TOTAL, limits.total_s)
        self.set(_Deadline.INACTIVITY, limits.inactivity_s)

    def set(self, deadline: _Deadline, seconds: float) -> None:
        """Set a deadline, in seconds from now."""
        self._times[deadline] = anyio.current_time() + seconds

    def is_pending(self, deadline: _Deadline) -> bool:
        """Return whether a deadline is set and has not passed."""
        return self._times.get(deadline, -math.inf) > anyio.current_time()

    def pause(self) -> None:
        """Stop the time limits while codex waits for an answer."""
        self._paused_since = self._paused_since or anyio.current_time()

    def resume(self) -> None:
        """Continue the time limits after `pause`."""
        if self._paused_since is not None:
            self._postpone(_LIMITS, anyio.current_time() - self._paused_since)
            self._paused_since = None

    def next(self, by: float) -> float:
        """Return the time of the next deadline, `by` at the latest."""
        return min((by, *self._applicable().values()))

    def expired(self, due: float) -> _Deadline | None:
        """Return which deadline has passed at the time `due`; after a suspension none, because events may be unread."""
        now = anyio.current_time()
        if (late := now - due) > SUSPENDED_S:
            self._postpone(_Deadline, late)
            return None
        times = self._applicable()
        passed = next((deadline for deadline in _Deadline if times.get(deadline, math.inf) <= now), None)
        if passed is not None and passed is not _Deadline.STOP:
            del self._times[passed]
        return passed

    def _applicable(self) -> dict[_Deadline, float]:
        is_limited = self._paused_since is None and _Deadline.STOP not in self._times
        return {name: time for name, time in self._times.items() if is_limited or name not in _LIMITS}

    def _postpone(self, deadlines: Iterable[_Deadline], seconds: float) -> None:
        self._times.update({name: self._times[name] + seconds for name in deadlines if name in self._times})
