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
from codex_workspace.protocol.codex_events import TokenUsage, TurnCompleted
from codex_workspace.protocol.failures import PROCESS_EXITED, duration_error
from codex_workspace.protocol.jsonrpc import Request
from codex_workspace.runtimes.backend import DynamicToolCall, PendingRequest, TurnInput
from codex_workspace.runtimes.convert import ExecConverter
from codex_workspace.runtimes.events import AgentEvent, Done

logger = logging.getLogger(__name__)


class TurnProcess(Protocol):
    """The part of `CliRun` that a turn needs."""

    @property
    def lines(self) -> ExecConverter:
        """The reader of its lines."""

    @property
    def diagnostics(self) -> str:
        """The last lines of stderr."""

    async def take(self) -> list[AgentEvent]:
        """Wait for an event and return all events that have arrived; return none after the last one."""

    def abort(self) -> None:
        """Stop the run."""

    def kill(self) -> None:
        """Kill the process."""


class ExecTurn:
    """A running turn; see `RunningTurn`.

    Args:
        run: its process.
        thread_id: the session's id.
        turn_id: the turn's id.
        total_s: how long the turn may take.
    """

    def __init__(self, run: TurnProcess, thread_id: str, turn_id: str, total_s: float) -> None:
        self.thread_id: Final = thread_id
        self.turn_id: Final = turn_id
        self.ended: TurnCompleted | None = None
        self._run = run
        self._total_s = total_s
        self._budget_ends = anyio.current_time() + total_s
        self._calls: list[PendingRequest] = []
        self._is_left = False
        self._waiting: anyio.CancelScope | None = None
        self._has_news = False
        self._stopped = False
        self._too_long = False

    @property
    def usage(self) -> TokenUsage | None:
        """The turn's tokens; None until codex reports them, and if those before the turn are unknown."""
        return self._run.lines.run_usage

    @property
    def thread_usage(self) -> TokenUsage | None:
        """The tokens of the whole session."""
        return self._run.lines.session_usage

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
        pending = PendingRequest(id_, call, Request(id_, call.tool, {}))
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

    async def receive(self, by: float = math.inf) -> list[AgentEvent]:
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

    async def _next(self, by: float) -> list[AgentEvent]:
        deadline = by if self._too_long else min(by, self._budget_ends)
        events: list[AgentEvent] = []
        with anyio.CancelScope(deadline=deadline) as self._waiting:
            events = await self._run.take()
        self._waiting = None
        if events and isinstance(events[-1], Done):
            self.ended = self._outcome()
        elif not self._too_long and anyio.current_time() >= self._budget_ends:
            self._too_long = True
            self._run.abort()
        return events

    def _outcome(self) -> TurnCompleted:
        ended = self._run.lines.ended
        assert ended is not None
        failure = ended.failure
        if failure is not None and failure.kind == PROCESS_EXITED and not (self._stopped or self._too_long):
            raise CodexGone(failure.message, self._run.diagnostics)
        if self._too_long and ended.status != "completed":
            return TurnCompleted("failed", duration_error(self._total_s), None)
        return ended
