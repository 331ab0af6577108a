"""A running turn of a codex thread: its events as they come, what it asks, the ways to join in and to stop it.

Here are the rules of a turn's life, and codex's method names in it. What the notifications mean is left to `events`,
what codex asks to `questions`, and how a turn is begun to `conversation`.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

import anyio

from codex_workspace.codex.history import turn_end
from codex_workspace.common.errors import CodexError, CodexGone, CodexRefused, CodexTimeout
from codex_workspace.common.values import MAX_INPUT_CHARS, JsonObject, JsonValue
from codex_workspace.protocol.app_server_reader import TurnReader
from codex_workspace.protocol.codex_events import (
    ErrorReported,
    FilePatch,
    ThreadIdle,
    TokensUpdated,
    TokenUsage,
    ToolCallCompleted,
    TurnCompleted,
    TurnError,
    TurnEvent,
    TurnStarted,
    WarningReported,
)
from codex_workspace.protocol.failures import duration_error, inactivity_error
from codex_workspace.protocol.jsonrpc import Notification, Request
from codex_workspace.protocol.mailbox import Mailbox, ServerRequest
from codex_workspace.protocol.mcp_status import CLOSED, MAX_REVIVALS, RELOAD, McpStatusTracker
from codex_workspace.protocol.open_items import OpenItems
from codex_workspace.protocol.server_requests import read_question
from codex_workspace.runtimes.backend import DynamicToolCall, PendingRequest, TurnInput

logger = logging.getLogger(__name__)

QUIET_GRACE_S: Final = 1.5
"""Codex says a thread is idle less than 1 ms before it says how the turn ended; after this long it will not say it."""

STOP_GRACE_S: Final = 5.0
"""An interrupted turn ends within 15 ms; a codex that takes this long does not answer any more and is killed."""

INTERRUPT_AGAIN_S: Final = 0.05
"""Codex refuses an interrupt for up to 52 ms after it has accepted the turn."""

PAUSED_S: Final = 1.0
"""A deadline that is met this late was slept through: the process was suspended, or its machine was."""

LAST_TURNS: Final = 3
"""So many turns are looked at for one that may have ended; turns of a thread come one after the other."""

RESOLVED: Final = "serverRequest/resolved"
"""Codex has its answer, or wants none any more."""


class CodexClient(Protocol):
    """What a conversation needs of the connection to codex."""

    has_completed_turn: bool
    """Set once a turn has come to its end on it."""

    @property
    def mcp_status(self) -> McpStatusTracker:
        """What it has said of MCP servers."""

    @property
    def error(self) -> CodexGone | None:
        """Why the connection is of no more use; None while it is."""

    async def call(self, method: str, params: JsonObject, *, timeout_s: float = ...) -> JsonValue:
        """Send a request and return its result."""

    def subscribe(self, thread_id: str) -> AbstractContextManager[Mailbox]:
        """Collect a thread's notifications from now on."""

    def kill(self) -> None:
        """End codex at once."""


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """How long things may take, in seconds, and how many characters a turn's text may have."""

    inactivity_s: float = 300.0
    total_s: float = 3600.0
    request_s: float = 30.0
    max_text_chars: int = MAX_INPUT_CHARS


async def request(codex: CodexClient, method: str, params: JsonObject, timeout_s: float) -> JsonValue:
    """Send a request to a codex that has to answer: one that does not is ended, for what it did is not known.

    Raises:
        CodexRefused: codex answered with an error.
        CodexGone: codex died, or did not answer within `timeout_s` seconds.
    """
    try:
        return await codex.call(method, params, timeout_s=timeout_s)
    except CodexTimeout as silence:
        codex.kill()
        raise CodexGone(f"codex did not answer {method} within {timeout_s:g} s and was ended") from silence


async def restart_mcp_servers(codex: CodexClient, timeout_s: float) -> None:
    """Have MCP servers started that are down.

    Raises:
        CodexGone: codex died, or did not answer within `timeout_s` seconds.
    """
    try:
        await request(codex, RELOAD, {}, timeout_s)
    except CodexRefused as refusal:
        logger.warning("an MCP server that has ended is not started again: %s", refusal)


async def read_last_turns(codex: CodexClient, thread_id: str, timeout_s: float) -> JsonValue:
    """Return codex's record of a thread's last turns, in the shape of `thread/read`.

    The whole of a long thread is more than one line may hold: every image, and every command's output, is in it.

    Raises:
        CodexRefused: there is no record; a thread without a turn has none.
        CodexGone: codex died, or did not answer.
    """
    newest_first: JsonObject = {"threadId": thread_id, "limit": LAST_TURNS, "itemsView": "full"}
    listed = await request(codex, "thread/turns/list", newest_first, timeout_s)
    turns = listed.get("data") if isinstance(listed, dict) else None
    return {"thread": {"turns": turns[::-1] if isinstance(turns, list) else []}}


class _Wish(Enum):
    """How far an interrupt has come."""

    NONE = auto()
    WANTED = auto()
    SENT = auto()


class Turn:
    """A running turn: its events as they come, what it asks, and the ways to join in and to stop it."""

    def __init__(
        self,
        codex: CodexClient,
        mailbox: Mailbox,
        reader: TurnReader,
        limits: TurnLimits,
        used_before: TokenUsage | None,
    ) -> None:
        self.thread_id: Final = reader.thread_id
        self.turn_id: Final = reader.turn_id
        self.ended: TurnCompleted | None = None
        self.usage: TokenUsage | None = None
        self.thread_usage: TokenUsage | None = used_before
        self._codex = codex
        self._mailbox = mailbox
        self._reader = reader
        self._limits = limits
        self._used_before = used_before
        self._open_items = OpenItems()
        self._asked: list[PendingRequest] = []
        self._asked_since: float | None = None
        self._has_news = False
        self._started = False
        self._wish = _Wish.NONE
        self._erred: TurnError | None = None
        self._broken = False
        self._revivals = 0
        self._server_ended = False
        now = anyio.current_time()
        self._budget_ends = now + limits.total_s
        self._silence_ends = now + limits.inactivity_s
        self._quiet_ends: float | None = None
        self._stop_ends: float | None = None
        self._ask_again: float | None = None

    @property
    def pending(self) -> PendingRequest | None:
        """What codex wants to know, the oldest question first; while there is one, the turn's clocks stand still."""
        return self._asked[0] if self._asked else None

    def answer(self, pending: PendingRequest, result: JsonObject) -> None:
        """Tell codex what it has asked for. One that it does not want to know any more is passed over."""
        pending.request.answer(result)
        self._forget(pending)

    def wake(self) -> None:
        """Let `receive` return, if need be with nothing."""
        self._has_news = True
        self._mailbox.wake()

    async def steer(self, turn_input: TurnInput, client_message_id: str | None = None) -> bool:
        """Say something into the running turn; False where it takes nothing any more, or not yet.

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
            await request(self._codex, "turn/steer", params, self._limits.request_s)
        except CodexRefused as refusal:
            logger.info("the turn %s cannot be joined: %s", self.turn_id, refusal.message)
            return False
        return True

    def interrupt(self) -> None:
        """Have the turn stopped; `receive` goes on until it has ended."""
        if self._wish is _Wish.NONE and self.ended is None:
            self._wish = _Wish.WANTED
            self._stop_ends = anyio.current_time() + STOP_GRACE_S
            self._mailbox.wake()

    async def receive(self, by: float = math.inf) -> list[TurnEvent]:
        """Wait for something and return the events since; nothing once `ended` is set, or at the time `by`.

        It returns as well when something is `pending`, or not any more.

        Items still open at the end of the turn are closed before it.

        Raises:
            CodexGone: codex died; the turn will not end.
        """
        while self.ended is None:
            try:
                events = await self._next(by)
                if self._wish is _Wish.WANTED and self.ended is None and self._may_interrupt():
                    await self._send_interrupt()
                if self._server_ended:
                    await self._revive_servers()
            except CodexGone:
                self._broken = True
                raise
            if events or self._has_news or anyio.current_time() >= by:
                self._has_news = False
                return events
        return []

    def kill(self) -> None:
        """End the turn with its whole codex."""
        self._codex.kill()

    async def abandon(self) -> None:
        """See to it that the turn has ended, whatever that takes: the thread is free for the next one."""
        if self.ended is not None:
            return
        if self._broken:
            # It may still live: then it is the turn that nobody can follow any more.
            self._codex.kill()
            return
        self.interrupt()
        try:
            with anyio.move_on_after(STOP_GRACE_S + 1):
                while self.ended is None:
                    await self.receive()
        except CodexError:
            logger.warning("the turn %s could not be stopped; ending codex", self.turn_id, exc_info=True)
        if self.ended is None:
            self._codex.kill()

    async def _next(self, by: float) -> list[TurnEvent]:
        heard: list[Notification | ServerRequest] | None = None
        due = min([by, *self._deadlines()])
        with anyio.CancelScope(deadline=due):
            heard = await self._mailbox.receive()
        if heard is None:
            return self._follow_all(await self._on_time(due))
        # One after the other: what is asked in one message may be about what the one before it has told.
        return [event for each in heard for event in self._hear(each)]

    def _hear(self, message: Notification | ServerRequest) -> list[TurnEvent]:
        if isinstance(message, ServerRequest):
            self._take_question(message)
            return []
        if message.method == RESOLVED:
            self._resolved(message.params.get("requestId"))
            return []
        return self._follow_all(self._reader.read(message))

    def _take_question(self, asking: ServerRequest) -> None:
        request = asking.request
        about = _tool_call(request) or read_question(request, self._changes_of(request))
        if about is None or request.params.get("turnId") not in (self.turn_id, None):
            asking.answer(None)
            return
        self._asked.append(PendingRequest(f"{self.turn_id}/{request.id}", about, asking))
        self._asked_since = self._asked_since or anyio.current_time()
        self._has_news = True

    def _changes_of(self, request: Request) -> tuple[FilePatch, ...]:
        return self._open_items.changes(str(request.params.get("itemId")))

    def _resolved(self, request_id: JsonValue) -> None:
        """Take note that codex does not wait for an answer any more."""
        for pending in [each for each in self._asked if each.request.request.id == request_id]:
            pending.request.answer(None)
            self._forget(pending)

    def _forget(self, pending: PendingRequest) -> None:
        if pending not in self._asked:
            return
        self._asked.remove(pending)
        self._has_news = True
        self._mailbox.wake()
        if not self._asked and self._asked_since is not None:
            waited = anyio.current_time() - self._asked_since
            self._budget_ends, self._silence_ends = self._budget_ends + waited, self._silence_ends + waited
            self._asked_since = None

    def _deadlines(self) -> list[float]:
        """Return when the turn's own clocks have something to do; a turn that is being stopped only has to end."""
        if self._stop_ends is not None:
            watchdogs: tuple[float, ...] = (self._stop_ends,)
        else:
            watchdogs = () if self._asked else (self._budget_ends, self._silence_ends)
        return [deadline for deadline in (*watchdogs, self._quiet_ends, self._ask_again) if deadline is not None]

    async def _on_time(self, due: float) -> list[TurnEvent]:
        """Act on the deadline that has passed."""
        now = anyio.current_time()
        if (late := now - due) > PAUSED_S:
            # This process stood still: what codex said meanwhile has not been read yet.
            self._budget_ends, self._silence_ends = self._budget_ends + late, self._silence_ends + late
            return []
        if self._quiet_ends is not None and now >= self._quiet_ends:
            return await self._settle()
        if self._stop_ends is not None:
            return self._give_up_stopping() if now >= self._stop_ends else []
        if self._asked:
            return []
        if now >= self._budget_ends:
            return await self._time_out(duration_error(self._limits.total_s))
        if now >= self._silence_ends:
            return await self._time_out(inactivity_error(self._limits.inactivity_s))
        return []

    def _follow_all(self, events: Sequence[TurnEvent]) -> list[TurnEvent]:
        return [followed for event in events for followed in self._follow(event)]

    def _follow(self, event: TurnEvent) -> list[TurnEvent]:
        """Take note of what an event says of the turn's life; return what the reader gets."""
        self._server_ended = self._server_ended or _tells_of_an_end(event)
        match event:
            case TurnCompleted():
                closed = self._open_items.close()
                self.ended = event
                self._codex.has_completed_turn = True
                for pending in list(self._asked):
                    pending.request.answer(None)
                    self._forget(pending)
                return [*closed, event]
            case ThreadIdle():
                if self._started or self._erred is not None:
                    self._quiet_ends = anyio.current_time() + QUIET_GRACE_S
                return []
            case WarningReported(will_retry=True):
                return [event]
            case ErrorReported(failure=failure):
                self._erred = failure
                self._quiet_ends = anyio.current_time() + QUIET_GRACE_S
            case TurnStarted():
                self._started = True
            case TokensUpdated(thread=total, last=last):
                # A thread that was resumed: all that was used before this turn's first call.
                before = self._used_before = self._used_before or total.minus(last)
                self.thread_usage, self.usage = total, total.minus(before)
            case _:
                if not self._open_items.apply(event):
                    return []
        self._silence_ends = anyio.current_time() + self._limits.inactivity_s
        return [event]

    def _may_interrupt(self) -> bool:
        return self._started and (self._ask_again is None or anyio.current_time() >= self._ask_again)

    async def _send_interrupt(self) -> None:
        params: JsonObject = {"threadId": self.thread_id, "turnId": self.turn_id}
        try:
            await request(self._codex, "turn/interrupt", params, STOP_GRACE_S)
        except CodexRefused:
            # Not yet, or no more: the turn's end tells which.
            self._ask_again = anyio.current_time() + INTERRUPT_AGAIN_S
            return
        self._wish, self._ask_again = _Wish.SENT, None
        await self._stop_commands()

    async def _revive_servers(self) -> None:
        """Have MCP servers started whose process has ended: codex does not do so by itself."""
        self._server_ended = False
        if self._revivals >= MAX_REVIVALS:
            return
        self._revivals += 1
        try:
            await restart_mcp_servers(self._codex, self._limits.request_s)
        except CodexGone:
            if self.ended is None:
                raise

    async def _stop_commands(self) -> None:
        """End the commands of the thread: an interrupt leaves them running."""
        try:
            clean: JsonObject = {"threadId": self.thread_id}
            await request(self._codex, "thread/backgroundTerminals/clean", clean, STOP_GRACE_S)
        except CodexRefused as refusal:
            logger.warning("the commands of an interrupted turn may still run: %s", refusal)

    async def _time_out(self, failure: TurnError) -> list[TurnEvent]:
        """Stop the turn, and end it as failed."""
        self.interrupt()
        events: list[TurnEvent] = []
        try:
            while self.ended is None:
                events += await self.receive()
        except CodexGone as gone:
            logger.warning("the turn %s ended with its codex: %s", self.turn_id, gone)
        failed = TurnCompleted("failed", failure, None)
        self.ended = failed
        return [*(event for event in events if not isinstance(event, TurnCompleted)), failed]

    def _give_up_stopping(self) -> list[TurnEvent]:
        self._codex.kill()
        raise CodexGone("codex did not stop its turn and was ended")

    async def _settle(self) -> list[TurnEvent]:
        """Find out how the turn ended where codex has fallen silent without saying so."""
        self._quiet_ends = None
        if self._erred is not None:
            return [TurnCompleted("failed", self._erred, None)]
        try:
            read = await read_last_turns(self._codex, self.thread_id, self._limits.request_s)
        except CodexRefused as refusal:
            sentence = f"Codex went idle and did not say how the turn ended ({refusal.message})."
            return [TurnCompleted("failed", TurnError(sentence, "unsettled", None, None), None)]
        ended = turn_end(read, self.turn_id)
        return [ended] if ended is not None else []


def _tells_of_an_end(event: TurnEvent) -> bool:
    """Tell whether a call failed because its MCP server's process has ended."""
    return isinstance(event, ToolCallCompleted) and event.is_error and CLOSED in event.result


def _tool_call(request: Request) -> DynamicToolCall | None:
    match request:
        case Request(method="item/tool/call", params={"tool": str(tool), **rest}):
            return DynamicToolCall(tool, rest.get("arguments"))
        case _:
            return None
