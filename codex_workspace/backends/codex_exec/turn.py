"""A running turn of `codex exec`: the events of its lines, its deadline, and its end.

It cannot be steered and asks no questions, because its process has read all its input. Calls of our own tools arrive
through our MCP server (`ExecTurn.serve`).
"""

import logging
import math
import uuid
from typing import Final, Protocol

import anyio

from codex_workspace.common.errors import CodexGone
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.codex_events import (
    ErrorReported,
    OpenItems,
    TokensUpdated,
    TokenUsage,
    TurnCompleted,
    TurnError,
    TurnEvent,
)
from codex_workspace.protocol.exec_reader import ExecReader
from codex_workspace.protocol.failures import PROCESS_EXITED, duration_error, process_exit_error
from codex_workspace.protocol.jsonrpc import Request, ServerRequest
from codex_workspace.runtimes.backend import DynamicToolCall, PendingRequest, TurnInput

logger = logging.getLogger(__name__)


class TurnProcess(Protocol):
    """The part of `CliRun` that a turn needs."""

    @property
    def is_over(self) -> bool:
        """Whether the process has ended."""

    @property
    def diagnostics(self) -> str:
        """The last lines of stderr."""

    async def take(self) -> list[TurnEvent]:
        """Wait for an event and return all events that have arrived; return none after the last one."""

    def abort(self) -> None:
        """Stop the run."""

    def kill(self) -> None:
        """Kill the process."""


class TurnLines:
    """Converts the lines of one run to the events of its turn; the last one is a `TurnCompleted`. No method raises.

    Args:
        used_before: the session's tokens before the turn; None if they are unknown.
    """

    def __init__(self, used_before: TokenUsage | None) -> None:
        self.used_before: Final = used_before
        self.session_usage: TokenUsage | None = used_before
        self._reader: Final = ExecReader()
        self._ended: TurnCompleted | None = None
        self._failure: TurnError | None = None

    @property
    def session_id(self) -> str | None:
        """The session's id; None until codex reports it."""
        return self._reader.thread_id

    @property
    def ended(self) -> TurnCompleted | None:
        """How the turn ended; None until codex reports it."""
        return self._ended

    @property
    def failed(self) -> bool:
        """Whether codex reported an error that ends the turn."""
        return self._failure is not None

    def feed(self, line: bytes | str) -> list[TurnEvent]:
        """Return the events of a line without its newline; none if it is no event."""
        events = [] if self.ended else list(self._reader.read(line))
        for event in events:
            self._see(event)
        return events

    def skipped(self, size: int) -> list[TurnEvent]:
        """Return the warning about a line of `size` bytes that was too long to be read."""
        return [] if self.ended else [self._reader.skipped(size)]

    def finish(
        self, exit_code: int | None = None, failure: TurnError | None = None, *, stopped: bool = False
    ) -> list[TurnEvent]:
        """Return the turn's end, unless codex has reported it."""
        if self._ended is not None:
            return []
        if stopped:
            self._ended = TurnCompleted("interrupted", None, None)
        else:
            self._ended = TurnCompleted("failed", failure or self._failure or process_exit_error(exit_code), None)
        return [self._ended]

    def _see(self, event: TurnEvent) -> None:
        match event:
            case TurnCompleted():
                self._ended = event
            case ErrorReported(failure):
                self._failure = failure
            case TokensUpdated():
                self.session_usage = event.thread
            case _:
                pass


class ExecTurn:
    """A running turn; see `RunningTurn`.

    Args:
        run: its process.
        lines: the reader of the process's lines.
        thread_id: the session's id.
        turn_id: the turn's id.
        total_s: how long the turn may take.
        begun: the events that have arrived already.
    """

    def __init__(
        self, run: TurnProcess, lines: TurnLines, thread_id: str, turn_id: str, total_s: float, begun: list[TurnEvent]
    ) -> None:
        self.thread_id: Final = thread_id
        self.turn_id: Final = turn_id
        self.ended: TurnCompleted | None = None
        self._run = run
        self._lines = lines
        self._total_s = total_s
        self._budget_ends = anyio.current_time() + total_s
        self._unread = begun
        self._open_items = OpenItems()
        self._end: TurnCompleted | None = None
        self._calls: list[PendingRequest] = []
        self._is_left = False
        self._waiting: anyio.CancelScope | None = None
        self._has_news = False
        self._stopped = False
        self._too_long = False

    @property
    def usage(self) -> TokenUsage | None:
        """The turn's tokens; None until codex reports them, and if those before the turn are unknown."""
        before, now = self._lines.used_before, self._lines.session_usage
        return None if before is None or now is None or now == before else now.minus(before)

    @property
    def thread_usage(self) -> TokenUsage | None:
        """The tokens of the whole session."""
        return self._lines.session_usage

    @property
    def pending(self) -> PendingRequest | None:
        """The oldest call of our tools that waits for its result; there are no other requests."""
        return self._calls[0] if self._calls else None

    def answer(self, pending: PendingRequest, result: JsonObject) -> None:
        """Return a result to a call; a call that does not wait any more is ignored."""
        pending.request.answer(result)
        self._forget(pending)

    async def serve(self, call: DynamicToolCall) -> JsonValue:
        """Pass a tool call to the reader of the turn, and return its result; None if the turn has ended or was left."""
        if self._is_left or self.ended is not None:
            return None
        id_ = uuid.uuid4().hex
        pending = PendingRequest(id_, call, ServerRequest(Request(id_, call.tool, {})))
        self._calls.append(pending)
        self.wake()
        try:
            await pending.request.answered.wait()
        finally:
            self._forget(pending)
        return pending.request.result

    def _forget(self, pending: PendingRequest) -> None:
        self._calls = [each for each in self._calls if each is not pending]

    def leave(self) -> None:
        """End the waiting tool calls: the turn is not read any more."""
        self._is_left = True
        for pending in self._calls:
            pending.request.answer(None)

    def wake(self) -> None:
        """Make `receive` return, with no events if there are none."""
        self._has_news = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def steer(self, turn_input: TurnInput, client_message_id: str | None = None) -> bool:
        """Return False: the process accepts no further input."""
        return False

    def interrupt(self) -> None:
        """Stop the turn: its process and all descendants are ended."""
        self._stopped = True
        self._run.abort()

    def kill(self) -> None:
        """Kill the process."""
        self._run.kill()

    async def receive(self, by: float = math.inf) -> list[TurnEvent]:
        """Wait for events and return them; return none once `ended` is set, or at the time `by`.

        `ended` is set after the process has exited, so that the session's file is complete.

        Raises:
            CodexGone: the process ended before its turn.
        """
        while self.ended is None:
            events = await self._next(by)
            if events or self._has_news or anyio.current_time() >= by:
                self._has_news = False
                return events
        return []

    async def _next(self, by: float) -> list[TurnEvent]:
        deadline = by if self._too_long else min(by, self._budget_ends)
        if not self._unread:
            with anyio.CancelScope(deadline=deadline) as self._waiting:
                self._unread = await self._run.take()
            self._waiting = None
        came, self._unread = self._unread, []
        events = [followed for event in came for followed in self._follow(event)]
        if self._end is not None and self._run.is_over:
            return [*events, *self._close(self._end)]
        if not self._too_long and anyio.current_time() >= self._budget_ends:
            self._too_long = True
            self._run.abort()
        return events

    def _follow(self, event: TurnEvent) -> list[TurnEvent]:
        if isinstance(event, TurnCompleted):
            self._end = event
            return []
        return [event] if self._open_items.apply(event) else []

    def _close(self, end: TurnCompleted) -> list[TurnEvent]:
        failure = end.failure
        if failure is not None and failure.kind == PROCESS_EXITED and not (self._stopped or self._too_long):
            raise CodexGone(failure.message, self._run.diagnostics)
        if self._too_long and end.status != "completed":
            end = TurnCompleted("failed", duration_error(self._total_s), None)
        self.ended = end
        return [*self._open_items.close(), end]
