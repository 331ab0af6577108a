"""A turn of `codex exec` for a job: what its lines say as the events that the app-server's turns have, and its end.

Nothing can be said into it and it asks nobody: its process has read all its input, and says no to itself. What it wants
of our own tools comes by another way (`serve`).
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


class Run(Protocol):
    """What a turn needs of its run: `ExecRun`."""

    @property
    def is_over(self) -> bool:
        """Whether codex has ended."""

    @property
    def diagnostics(self) -> str:
        """The last lines that codex wrote on stderr."""

    async def take(self) -> list[TurnEvent]:
        """Return the events since, after waiting for one; nothing after the last."""

    def abort(self) -> None:
        """Stop the run."""

    def kill(self) -> None:
        """End codex at once."""


class TurnLines:
    """Takes the lines of one run and gives the events of its turn, a `TurnCompleted` last. No method raises.

    Args:
        used_before: the tokens of the session before it; None where they are not known.
    """

    def __init__(self, used_before: TokenUsage | None) -> None:
        self.used_before: Final = used_before
        self.session_usage: TokenUsage | None = used_before
        self._reader: Final = ExecReader()
        self._ended: TurnCompleted | None = None
        self._failure: TurnError | None = None

    @property
    def session_id(self) -> str | None:
        """Codex's id of the session; None before it is said."""
        return self._reader.thread_id

    @property
    def ended(self) -> TurnCompleted | None:
        """How codex said that the turn ended; None before."""
        return self._ended

    @property
    def failed(self) -> bool:
        """Whether codex has said that it gave up."""
        return self._failure is not None

    def feed(self, line: bytes | str) -> list[TurnEvent]:
        """Return the events of a line, without its newline; none where it is no event."""
        events = [] if self.ended else [told.event for told in self._reader.read(line)]
        for event in events:
            self._see(event)
        return events

    def skipped(self, size: int) -> list[TurnEvent]:
        """Return what is said of a line of `size` bytes that was too long to be read."""
        return [] if self.ended else [self._reader.skipped(size)]

    def finish(
        self, exit_code: int | None = None, failure: TurnError | None = None, *, stopped: bool = False
    ) -> list[TurnEvent]:
        """Return the turn's end, where codex has not said it."""
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
    """A running turn of a session, whose process runs it alone.

    Args:
        run: its process.
        lines: what reads what that writes.
        thread_id: the session's id.
        turn_id: its own.
        total_s: how long it may take.
        begun: the events that have come already.
    """

    def __init__(
        self, run: Run, lines: TurnLines, thread_id: str, turn_id: str, total_s: float, begun: list[TurnEvent]
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
        """Its own tokens; None while codex has told none, or those before it are not known."""
        before, now = self._lines.used_before, self._lines.session_usage
        return None if before is None or now is None or now == before else now.minus(before)

    @property
    def thread_usage(self) -> TokenUsage | None:
        """Those of the whole session."""
        return self._lines.session_usage

    @property
    def pending(self) -> PendingRequest | None:
        """The oldest call of a tool of ours that waits for its result; nothing else is ever asked."""
        return self._calls[0] if self._calls else None

    def answer(self, pending: PendingRequest, result: JsonObject) -> None:
        """Give a call its result. One that is not waited for any more is passed over."""
        pending.request.answer(result)
        self._forget(pending)

    async def serve(self, call: DynamicToolCall) -> JsonValue:
        """Have whoever reads the turn do what the model calls a tool of ours for, and return the result.

        None: the turn was over or left before.
        """
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
        """Take note that nobody reads the turn any more."""
        self._is_left = True
        for pending in self._calls:
            pending.request.answer(None)

    def wake(self) -> None:
        """Let `receive` return, if need be with nothing."""
        self._has_news = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def steer(self, turn_input: TurnInput, client_message_id: str | None = None) -> bool:
        """Return False: its process reads nothing any more."""
        return False

    def interrupt(self) -> None:
        """Have the turn stopped: its process and all that it has started are ended."""
        self._stopped = True
        self._run.abort()

    def kill(self) -> None:
        """End its process at once."""
        self._run.kill()

    async def receive(self, by: float = math.inf) -> list[TurnEvent]:
        """Wait for something and return the events since; nothing once `ended` is set, or at the time `by`.

        The end comes when the process is gone, so that the session is whole on disk.

        Raises:
            CodexGone: the process has ended before its turn.
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
