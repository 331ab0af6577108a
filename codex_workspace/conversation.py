"""One context's codex thread: start or resume it, and run one turn at a time on it.

Here are codex's method names and the rules of a turn's life. What the notifications mean is left to `events`, the pipe
to the connection that is handed in.
"""

import logging
import math
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Final, Protocol

import anyio

from codex_workspace.errors import (
    CodexError,
    CodexGone,
    CodexRefused,
    CodexTimeout,
    InputRefused,
    ProtocolError,
)
from codex_workspace.events import (
    Erred,
    ThreadIdle,
    TokenCount,
    TurnEnded,
    TurnEvent,
    TurnFailure,
    TurnReader,
    TurnStarted,
    Usage,
    Warned,
)
from codex_workspace.history import Trace, ended_in, recorded
from codex_workspace.items import OpenItems
from codex_workspace.mailbox import Mailbox
from codex_workspace.wire import MAX_INPUT_CHARS, JsonObject, JsonValue, Notification

logger = logging.getLogger(__name__)

QUIET_GRACE_S: Final = 1.5
"""Codex says a thread is idle less than 1 ms before it says how the turn ended; after this long it will not say it."""

STOP_GRACE_S: Final = 5.0
"""An interrupted turn ends within 15 ms; a codex that takes this long does not answer any more and is killed."""

INTERRUPT_AGAIN_S: Final = 0.05
"""Codex refuses an interrupt for up to 52 ms after it has accepted the turn."""

OTHER_WRITER_GRACE_S: Final = 6.0
"""A codex whose input has ended may take 5 s to leave, and holds its threads' locks until then."""

PAUSED_S: Final = 1.0
"""A deadline that is met this late was slept through: the process was suspended, or its machine was."""

MAX_TRIES: Final = 3
"""A codex that dies, or loses the thread, before it has heard of a turn has done nothing for it: it is tried again. A
thread that ends every codex that loads it is not: others need codex too."""

MAX_REMEMBERED: Final = 1000
"""Conversations kept in memory, a few hundred bytes each."""

LOST_THREAD: Final = re.compile(
    r"rollout|session file|active writer|invalid (thread|session) id|not found", re.IGNORECASE
)
"""How codex says that a thread is not to be had: no rollout or a broken one, another process's, no id of a thread's.
Any other refusal leaves the thread where it is, for the next message to find."""

SANDBOX_TYPES: Final = {
    "read-only": "readOnly",
    "workspace-write": "workspaceWrite",
    "danger-full-access": "dangerFullAccess",
}
"""The sandbox as codex is told it, and as it says it back."""


class Codex(Protocol):
    """What a conversation needs of the connection to codex."""

    proved: bool
    """Set once a turn has come to its end on it."""

    @property
    def gone(self) -> CodexGone | None:
        """Why the connection is of no more use; None while it is."""

    async def call(self, method: str, params: JsonObject, *, timeout_s: float = ...) -> JsonValue:
        """Send a request and return its result."""

    def listen(self, thread_id: str) -> AbstractContextManager[Mailbox]:
        """Collect a thread's notifications from now on."""

    def kill(self) -> None:
        """End codex at once."""


class ThreadMemory(Protocol):
    """Where the thread id of one context is kept."""

    async def load(self) -> str | None:
        """Return the context's thread id, None where it has none yet."""

    async def save(self, thread_id: str) -> None:
        """Keep the context's thread id; it is durable on return."""


@dataclass(frozen=True, slots=True)
class ThreadOptions:
    """What a thread runs with. Told to codex at start and at every resume: no version remembers all of it."""

    cwd: Path
    model: str
    model_provider: str
    sandbox: str
    approval_policy: str
    developer_instructions: str | None = None

    def params(self) -> JsonObject:
        """Return the fields of `thread/start` and `thread/resume`."""
        return {
            "cwd": str(self.cwd),
            "model": self.model,
            "modelProvider": self.model_provider,
            "sandbox": self.sandbox,
            "approvalPolicy": self.approval_policy,
            "developerInstructions": self.developer_instructions,
        }


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """How long things may take, in seconds, and how many characters a turn's text may have."""

    inactivity_s: float = 300.0
    total_s: float = 3600.0
    request_s: float = 30.0
    max_text_chars: int = MAX_INPUT_CHARS


async def ask(codex: Codex, method: str, params: JsonObject, timeout_s: float) -> JsonValue:
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


class _Wish(Enum):
    """How far an interrupt has come."""

    NONE = auto()
    WANTED = auto()
    SENT = auto()


class Turn:
    """A running turn: its events as they come, and the way to stop it."""

    def __init__(
        self, codex: Codex, mailbox: Mailbox, reader: TurnReader, limits: TurnLimits, used_before: TokenCount | None
    ) -> None:
        self.thread_id: Final = reader.thread_id
        self.turn_id: Final = reader.turn_id
        self.ended: TurnEnded | None = None
        self.usage: TokenCount | None = None
        self.thread_usage: TokenCount | None = used_before
        self._codex = codex
        self._mailbox = mailbox
        self._reader = reader
        self._limits = limits
        self._used_before = used_before
        self._open_items = OpenItems()
        self._started = False
        self._wish = _Wish.NONE
        self._erred: TurnFailure | None = None
        self._broken = False
        now = anyio.current_time()
        self._budget_ends = now + limits.total_s
        self._silence_ends = now + limits.inactivity_s
        self._quiet_ends: float | None = None
        self._stop_ends: float | None = None
        self._ask_again: float | None = None

    def interrupt(self) -> None:
        """Have the turn stopped; `receive` goes on until it has ended."""
        if self._wish is _Wish.NONE and self.ended is None:
            self._wish = _Wish.WANTED
            self._stop_ends = anyio.current_time() + STOP_GRACE_S
            self._mailbox.wake()

    async def receive(self, by: float = math.inf) -> list[TurnEvent]:
        """Wait for something and return the events since; nothing once `ended` is set, or at the time `by`.

        Items still open at the end of the turn are closed before it.

        Raises:
            CodexGone: codex died; the turn will not end.
        """
        while self.ended is None:
            try:
                events = [event for read in await self._next(by) for event in self._follow(read)]
                if self._wish is _Wish.WANTED and self.ended is None and self._may_interrupt():
                    await self._send_interrupt()
            except CodexGone:
                self._broken = True
                raise
            if events or anyio.current_time() >= by:
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
        notifications: list[Notification] | None = None
        due = min(by, *self._deadlines())
        with anyio.CancelScope(deadline=due):
            notifications = await self._mailbox.take()
        if notifications is None:
            return await self._on_time(due)
        return [event for notification in notifications for event in self._reader.read(notification)]

    def _deadlines(self) -> list[float]:
        """Return when the turn's own clocks have something to do; a turn that is being stopped only has to end."""
        watchdogs = (self._budget_ends, self._silence_ends) if self._stop_ends is None else (self._stop_ends,)
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
        if now >= self._budget_ends:
            return await self._time_out(f"The turn took longer than {self._limits.total_s:g} s and was stopped.")
        if now >= self._silence_ends:
            return await self._time_out(f"The turn was silent for {self._limits.inactivity_s:g} s and was stopped.")
        return []

    def _follow(self, event: TurnEvent) -> list[TurnEvent]:
        """Take note of what an event says of the turn's life; return what the reader gets."""
        match event:
            case TurnEnded():
                closed = self._open_items.close()
                self.ended = event
                self._codex.proved = True
                return [*closed, event]
            case ThreadIdle():
                if self._started or self._erred is not None:
                    self._quiet_ends = anyio.current_time() + QUIET_GRACE_S
                return []
            case Warned(will_retry=True):
                return [event]
            case Erred(failure=failure):
                self._erred = failure
                self._quiet_ends = anyio.current_time() + QUIET_GRACE_S
            case TurnStarted():
                self._started = True
            case Usage(thread=total, last=last):
                # A thread that was resumed: all that was used before this turn's first call.
                before = self._used_before = self._used_before or total.minus(last)
                self.thread_usage, self.usage = total, total.minus(before)
            case _:
                self._open_items.see(event)
        self._silence_ends = anyio.current_time() + self._limits.inactivity_s
        return [event]

    def _may_interrupt(self) -> bool:
        return self._started and (self._ask_again is None or anyio.current_time() >= self._ask_again)

    async def _send_interrupt(self) -> None:
        params: JsonObject = {"threadId": self.thread_id, "turnId": self.turn_id}
        try:
            await ask(self._codex, "turn/interrupt", params, STOP_GRACE_S)
        except CodexRefused:
            # Not yet, or no more: the turn's end tells which.
            self._ask_again = anyio.current_time() + INTERRUPT_AGAIN_S
            return
        self._wish, self._ask_again = _Wish.SENT, None
        await self._stop_commands()

    async def _stop_commands(self) -> None:
        """End the commands of the thread: an interrupt leaves them running."""
        try:
            clean: JsonObject = {"threadId": self.thread_id}
            await ask(self._codex, "thread/backgroundTerminals/clean", clean, STOP_GRACE_S)
        except CodexRefused as refusal:
            logger.warning("the commands of an interrupted turn may still run: %s", refusal)

    async def _time_out(self, sentence: str) -> list[TurnEvent]:
        """Stop the turn, and end it as failed with `sentence`."""
        self.interrupt()
        events: list[TurnEvent] = []
        try:
            while self.ended is None:
                events += await self.receive()
        except CodexGone as gone:
            logger.warning("the turn %s ended with its codex: %s", self.turn_id, gone)
        failed = TurnEnded("failed", TurnFailure(sentence, "watchdogTimeout", None, None), None)
        self.ended = failed
        return [*(event for event in events if not isinstance(event, TurnEnded)), failed]

    def _give_up_stopping(self) -> list[TurnEvent]:
        self._codex.kill()
        raise CodexGone("codex did not stop its turn and was ended")

    async def _settle(self) -> list[TurnEvent]:
        """Find out how the turn ended where codex has fallen silent without saying so."""
        self._quiet_ends = None
        if self._erred is not None:
            return [TurnEnded("failed", self._erred, None)]
        params: JsonObject = {"threadId": self.thread_id, "includeTurns": True}
        try:
            read = await ask(self._codex, "thread/read", params, self._limits.request_s)
        except CodexRefused as refusal:
            sentence = f"Codex went idle and did not say how the turn ended ({refusal.message})."
            return [TurnEnded("failed", TurnFailure(sentence, "unsettled", None, None), None)]
        ended = ended_in(read, self.turn_id)
        return [ended] if ended is not None else []


class Conversation:
    """One context: its thread, and the queue before it.

    Args:
        connect: holds the codex of the moment for as long as its block is open, started anew where the last one died.
        memory: keeps this context's thread id.
        options: what the thread runs with.
        limits: how long things may take.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Codex]],
        memory: ThreadMemory,
        options: ThreadOptions,
        limits: TurnLimits,
    ) -> None:
        self._connect = connect
        self._memory = memory
        self._options = options
        self._limits = limits
        self._one_at_a_time = anyio.Lock()
        self._loaded: _Loaded | None = None
        self._never_used: str | None = None

    @property
    def busy(self) -> bool:
        """Whether a turn runs or waits."""
        return self._one_at_a_time.locked()

    @asynccontextmanager
    async def turn(self, text: str) -> AsyncIterator["Begun"]:
        """Wait for this context's turn, start one with `text`, and stop it if it still runs when the block is left.

        Raises:
            InputRefused: `text` is empty, or longer than codex takes.
            CodexCannotStart, CodexGone, CodexRefused: codex could not begin the turn.
        """
        self.check(text)
        async with self.floor() as floor, floor.turn(text) as begun:
            yield begun

    def check(self, text: str) -> None:
        """Refuse a text that codex would refuse, before it waits in line.

        Raises:
            InputRefused: `text` is empty, or longer than codex takes.
        """
        if not text.strip():
            raise InputRefused("The message has no text.")
        if len(text) > self._limits.max_text_chars:
            raise InputRefused(
                f"The message has {len(text)} characters; at most {self._limits.max_text_chars} are taken."
            )

    @asynccontextmanager
    async def floor(self) -> AsyncIterator["Floor"]:
        """Wait until nobody else speaks in this context; while the block is open, nobody else does."""
        async with self._one_at_a_time:
            yield Floor(self)

    @asynccontextmanager
    async def _turn(self, text: str, mark: str | None = None) -> AsyncIterator["Begun"]:
        async with AsyncExitStack() as held:
            begun = await self._begin(text, mark, held)
            try:
                yield begun
            finally:
                with anyio.CancelScope(shield=True):
                    await begun.turn.abandon()
                if self._loaded is not None:
                    self._loaded.used = begun.turn.thread_usage

    async def _recorded(self, mark: str) -> TurnEnded | Trace:
        for _ in range(MAX_TRIES - 1):
            with suppress(CodexGone):
                return await self._read_record(mark)
        return await self._read_record(mark)

    async def _read_record(self, mark: str) -> TurnEnded | Trace:
        async with self._connect() as codex:
            loaded, _ = await self._load_thread(codex)
            params: JsonObject = {"threadId": loaded.thread_id, "includeTurns": True}
            try:
                return recorded(await ask(codex, "thread/read", params, self._limits.request_s), mark)
            except CodexRefused as refusal:
                # A thread without a turn cannot be read with its turns.
                logger.info("no record of %s: %s", mark, refusal.message)
                return Trace.NONE

    async def _begin(self, text: str, mark: str | None, held: AsyncExitStack) -> "Begun":
        """Begin a turn, with as many tries as are due while codex has not heard of it."""
        for _ in range(MAX_TRIES - 1):
            attempt = _Attempt()
            try:
                return await self._try_to_begin(text, mark, held, attempt)
            except (CodexGone, CodexRefused) as error:
                if attempt.heard() or not _is_lost(error):
                    raise
                self._loaded = None
                await held.aclose()
        return await self._try_to_begin(text, mark, held, _Attempt())

    async def _try_to_begin(self, text: str, mark: str | None, held: AsyncExitStack, attempt: "_Attempt") -> "Begun":
        codex = await held.enter_async_context(self._connect())
        # A cancelled start would leave a turn behind that nobody knows.
        with anyio.CancelScope(shield=True):
            loaded, note = await self._load_thread(codex)
            # Listen before asking: the turn's first notification can come ahead of the answer.
            mailbox = attempt.mailbox = held.enter_context(codex.listen(loaded.thread_id))
            params: JsonObject = {
                "threadId": loaded.thread_id,
                "input": [{"type": "text", "text": text}],
                "clientUserMessageId": mark,
            }
            started = await ask(codex, "turn/start", params, self._limits.request_s)
            reader = TurnReader(loaded.thread_id, _id_of(started, "turn"))
            turn = Turn(codex, mailbox, reader, self._limits, loaded.used)
            self._never_used = None
        return Begun(turn, note)

    async def _load_thread(self, codex: Codex) -> tuple["_Loaded", str | None]:
        """Return the context's thread, loaded in this codex, and what has to be said of it."""
        if self._loaded is not None and self._loaded.codex is codex:
            return self._loaded, None
        known = await self._memory.load()
        note = None
        if known is not None:
            try:
                await self._resume(codex, known)
            except CodexRefused as refusal:
                if not LOST_THREAD.search(refusal.message):
                    raise
                logger.warning("thread %s cannot be resumed: %s", known, refusal.message)
                # A thread that was started here and has had no turn takes nothing with it.
                if known != self._never_used:
                    note = f"The earlier conversation cannot be resumed ({refusal.message}); a new one begins."
            else:
                self._loaded = _Loaded(codex, known, None)
                return self._loaded, None
        thread_id = await self._start(codex)
        await self._memory.save(thread_id)
        self._never_used = thread_id
        self._loaded = _Loaded(codex, thread_id, TokenCount())
        return self._loaded, note

    async def _start(self, codex: Codex) -> str:
        started = await ask(codex, "thread/start", self._options.params(), self._limits.request_s)
        self._check_echo(started)
        return _id_of(started, "thread")

    async def _resume(self, codex: Codex, thread_id: str) -> None:
        params: JsonObject = {"threadId": thread_id, "excludeTurns": True, **self._options.params()}
        give_up = anyio.current_time() + OTHER_WRITER_GRACE_S
        while True:
            try:
                self._check_echo(await ask(codex, "thread/resume", params, self._limits.request_s))
            except CodexRefused as refusal:
                if "active writer" not in refusal.message or anyio.current_time() >= give_up:
                    raise
                await anyio.sleep(0.2)
            else:
                return

    def _check_echo(self, answer: JsonValue) -> None:
        """Compare what codex says it runs with to what it was told: a looser sandbox would go unnoticed."""
        sandbox = answer.get("sandbox") if isinstance(answer, dict) else None
        echoed = sandbox.get("type") if isinstance(sandbox, dict) else None
        wanted = SANDBOX_TYPES[self._options.sandbox]
        if echoed != wanted:
            raise ProtocolError(f"codex runs the thread with sandbox {echoed}, not {wanted} as it was told")


class Floor:
    """The word in one context: whoever holds it may speak as often as is needed."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    def turn(self, text: str, mark: str | None = None) -> AbstractAsyncContextManager["Begun"]:
        """Start a turn, and stop it if it still runs when the block is left; raises as `Conversation.turn` does.

        Args:
            text: what is said.
            mark: the message's id in codex's record (0.163 and later keep it), for `recorded`.
        """
        return self._conversation._turn(text, mark)

    async def recorded(self, mark: str) -> TurnEnded | Trace:
        """Return how the last turn with an id that begins with `mark` ended by codex's own record, or its trace."""
        return await self._conversation._recorded(mark)


class Conversations:
    """The conversations of this process, one for each context of each owner.

    Args:
        make: makes the conversation of an owner's context.
    """

    def __init__(self, make: Callable[[str, str], Conversation]) -> None:
        self._make = make
        self._known: OrderedDict[tuple[str, str], Conversation] = OrderedDict()

    def of(self, owner: str, context_id: str) -> Conversation:
        """Return the conversation; the longest unused ones are forgotten, their threads are resumed when needed."""
        key = owner, context_id
        conversation = self._known.get(key) or self._make(owner, context_id)
        self._known[key] = conversation
        self._known.move_to_end(key)
        idle = [known for known, each in self._known.items() if not each.busy and known != key]
        for forgotten in idle[: max(0, len(self._known) - MAX_REMEMBERED)]:
            del self._known[forgotten]
        return conversation


@dataclass(slots=True)
class _Loaded:
    """A thread that a codex holds in memory, and the tokens it has used so far where that is known."""

    codex: Codex
    thread_id: str
    used: TokenCount | None


@dataclass(slots=True)
class _Attempt:
    """What is known of an attempt to begin a turn."""

    mailbox: Mailbox | None = None

    def heard(self) -> bool:
        """Tell whether codex has said anything of the thread since: then the turn may have begun."""
        return self.mailbox is not None and self.mailbox.heard_something


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn that has begun, and what its reader has to be told first (the thread's memory is lost)."""

    turn: Turn
    note: str | None


def _is_lost(error: CodexGone | CodexRefused) -> bool:
    """Tell whether `error` says that codex, or the thread in it, is not there: starting again will help."""
    return isinstance(error, CodexGone) or "thread not found" in error.message


def _id_of(answer: JsonValue, name: str) -> str:
    """Return `answer[name]["id"]`: the shape of every answer that makes a thread or a turn."""
    match answer:
        case dict() if isinstance(made := answer.get(name), dict) and isinstance(made_id := made.get("id"), str):
            return made_id
        case _:
            raise ProtocolError(f"codex answered without the id of the {name}")
