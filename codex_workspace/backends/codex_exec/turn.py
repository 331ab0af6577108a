"""A running turn of `codex exec`, and the calls of the file tool in it.

A turn cannot be steered and asks no questions, because its process has read all its input. The app-server calls the
file tool over its pipe; `codex exec` calls our MCP server, which knows the caller but not the turn.
"""

import math
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio

from codex_workspace.common.errors import CodexGone, ToolRefused
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.codex_events import PROCESS_EXITED, TokenUsage, TurnCompleted, duration_error
from codex_workspace.protocol.jsonrpc import Request
from codex_workspace.runtimes.backend import HANDOVER_TOOL, DynamicToolCall, PendingRequest, ToolCaller, TurnInput
from codex_workspace.runtimes.cli_run import CliRun
from codex_workspace.runtimes.events import AgentEvent, Done

NO_TURN: Final = "The turn has ended; no more files can be sent."


class ToolCalls:
    """The tool calls of one turn, which wait for its reader. The first ones may come before the turn has started."""

    def __init__(self) -> None:
        self.on_call: Callable[[], None] = lambda: None
        self._waiting: list[PendingRequest] = []
        self._is_closed = False

    @property
    def pending(self) -> PendingRequest | None:
        """The oldest call without a result."""
        return next((each for each in self._waiting if not each.request.answered.is_set()), None)

    async def call(self, call: DynamicToolCall) -> JsonValue:
        """Wait for the call's result, and return it; None if the turn has ended."""
        if self._is_closed:
            return None
        id_ = uuid.uuid4().hex
        pending = PendingRequest(id_, call, Request(id_, call.tool, {}))
        self._waiting.append(pending)
        self.on_call()
        try:
            await pending.request.answered.wait()
        finally:
            self._waiting.remove(pending)
        return pending.request.result

    def close(self) -> None:
        """End all calls: the turn is not read any more."""
        self._is_closed = True
        for pending in self._waiting:
            pending.request.answer(None)


class FileRequests:
    """The calls of the running turns, by caller; each caller has one turn at a time."""

    def __init__(self) -> None:
        self._calls: dict[ToolCaller, ToolCalls] = {}

    @contextmanager
    def expecting(self, caller: ToolCaller) -> Iterator[ToolCalls]:
        """Yield the calls of `caller` for the turn that the block runs; reject them after the block."""
        calls = self._calls[caller] = ToolCalls()
        try:
            yield calls
        finally:
            del self._calls[caller]
            calls.close()

    async def hand_over(self, caller: ToolCaller, arguments: JsonObject) -> str:
        """Hand a file to the sender of the caller's message; return the answer for the model.

        Raises:
            ToolRefused: the file cannot be handed over, or the caller has no running turn.
        """
        calls = self._calls.get(caller)
        result = await calls.call(DynamicToolCall(HANDOVER_TOOL, arguments)) if calls is not None else None
        match result:
            case {"contentItems": [{"text": str(text)}], "success": True}:
                return text
            case {"contentItems": [{"text": str(text)}], "success": False}:
                raise ToolRefused(text)
            case _:
                raise ToolRefused(NO_TURN)


class ExecTurn:
    """A running turn; see `RunningTurn`.

    Args:
        run: its process.
        thread_id: the session's id.
        turn_id: the turn's id.
        total_s: how long the turn may take.
    """

    def __init__(self, run: CliRun, thread_id: str, turn_id: str, total_s: float) -> None:
        self.thread_id: Final = thread_id
        self.turn_id: Final = turn_id
        self.ended: TurnCompleted | None = None
        self._run = run
        self._total_s = total_s
        self._budget_ends = anyio.current_time() + total_s
        self._calls = ToolCalls()
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
        return self._calls.pending

    def answer(self, pending: PendingRequest, result: JsonObject) -> None:
        """Return a result to a call; a call that does not wait any more is ignored."""
        pending.request.answer(result)

    def accept(self, calls: ToolCalls) -> None:
        """Pass these tool calls to the turn's reader."""
        self._calls = calls
        calls.on_call = self.wake

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

    async def receive(self, by: float = math.inf, text_by: float = -math.inf) -> list[AgentEvent]:
        """Wait for events and return them; return none once `ended` is set, or at the time `by`.

        A text has one piece only, so `text_by` has no effect.

        `ended` is set after the process has exited, so that the session's file is complete.

        Raises:
            CodexGone: the process ended before its turn.
        """
        while self.ended is None:
            events: list[AgentEvent] = []
            with anyio.CancelScope(deadline=by if self._too_long else min(by, self._budget_ends)) as self._waiting:
                events = await self._run.take()
            self._waiting = None
            if events and isinstance(events[-1], Done):
                self.ended = self._outcome()
            elif not self._too_long and anyio.current_time() >= self._budget_ends:
                self._too_long = True
                self._run.abort()
            if events or self._has_news or anyio.current_time() >= by:
                self._has_news = False
                return events
        return []

    def _outcome(self) -> TurnCompleted:
        ended = self._run.lines.ended
        assert ended is not None
        failure = ended.failure
        if failure is not None and failure.kind == PROCESS_EXITED and not (self._stopped or self._too_long):
            raise CodexGone(failure.message, self._run.diagnostics)
        if self._too_long and ended.status != "completed":
            return TurnCompleted("failed", duration_error(self._total_s))
        return ended
