"""A context's thread and its turns, with a codex in memory and in virtual time.

Covers `codex.thread` and `codex.turn`.
"""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import pytest

from codex_workspace.app_server import Connection
from codex_workspace.codex.history import LAST_TURNS
from codex_workspace.codex.thread import MAX_ATTEMPTS, OTHER_WRITER_GRACE_S, CodexThread, ThreadOptions
from codex_workspace.codex.turn import IDLE_GRACE_S, INTERRUPT_RETRY_S, STOP_GRACE_S, Turn, TurnLimits
from codex_workspace.common.errors import CodexGone, CodexRefused, ProtocolError
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.prompts import Instructions
from codex_workspace.protocol.codex_events import (
    MessageCompleted,
    TokenUsage,
    TurnCompleted,
)
from codex_workspace.protocol.server_requests import PatchQuestion
from codex_workspace.runtimes.backend import (
    MAX_THREADS,
    StartedTurn,
    ThreadRegistry,
    TurnOptions,
    TurnRecord,
    text_input,
)
from codex_workspace.runtimes.convert import NO_RESULT
from codex_workspace.runtimes.events import (
    AgentEvent,
    Done,
    Error,
    RunWarning,
    Text,
    ToolOutput,
    ToolResult,
    ToolUse,
    Usage,
)
from tests.support.memory_codex import MemoryCodex, in_virtual_time, memory_codex, params_of, turn_of

OPTIONS = ThreadOptions(Path("/w"), "gpt", "gateway", "workspace-write", "never")
LIMITS = TurnLimits(inactivity_s=300.0, total_s=3600.0, request_s=30.0)
ECHO: JsonObject = {"sandbox": {"type": "workspaceWrite", "networkAccess": False}}


@dataclass(slots=True)
class Memory:
    """A context's thread ID and instructions, in memory."""

    thread_id: str | None = None
    saved: list[str] = field(default_factory=list)
    digest: str | None = None

    async def load(self) -> str | None:
        return self.thread_id

    async def instructions(self) -> str | None:
        return self.digest

    async def save(self, thread_id: str, instructions: str | None = None) -> None:
        self.thread_id = thread_id
        self.digest = instructions
        self.saved.append(thread_id)


class CodexSide:
    """Codex's side of the connection: the thread `thread-1`, with turns that the test names."""

    def __init__(self, codex: MemoryCodex, memory: Memory) -> None:
        self.codex = codex
        self.memory = memory

    async def start_thread(self, thread_id: str = "thread-1") -> JsonObject:
        return await self.codex.answer("thread/start", {"thread": {"id": thread_id}, **ECHO})

    async def start_turn(self, turn_id: str = "turn-1") -> JsonObject:
        params = await self.codex.answer("turn/start", {"turn": {"id": turn_id, "status": "inProgress"}})
        await self.notify("turn/started", turn={"id": turn_id})
        return params

    async def run_first_turn(self) -> None:
        """Start the thread; start and complete its first turn."""
        await self.start_thread()
        await self.run_turn()

    async def start(self) -> None:
        """Start the thread and its first turn."""
        await self.start_thread()
        await self.start_turn()

    async def notify(self, method: str, thread_id: str = "thread-1", **params: JsonValue) -> None:
        await self.codex.tell(method, threadId=thread_id, **params)

    async def delta(self, text: str, turn_id: str = "turn-1") -> None:
        await self.notify("item/agentMessage/delta", turnId=turn_id, itemId="m", delta=text)

    async def command(self, turn_id: str = "turn-1") -> None:
        item: JsonObject = {"type": "commandExecution", "id": "c", "command": "sleep 9", "cwd": "/w"}
        await self.notify("item/started", turnId=turn_id, item=item)

    async def idle(self, kind: str = "idle") -> None:
        await self.notify("thread/status/changed", status={"type": kind})

    async def error(self, message: str, *, will_retry: bool, turn_id: str = "turn-1") -> None:
        await self.notify("error", turnId=turn_id, error={"message": message}, willRetry=will_retry)

    async def complete(self, turn_id: str = "turn-1", status: str = "completed", **turn: JsonValue) -> None:
        await self.notify("turn/completed", turn={"id": turn_id, "status": status, "items": [], **turn})

    async def run_turn(self, turn_id: str = "turn-1") -> None:
        """Start and complete a turn."""
        await self.start_turn(turn_id)
        await self.complete(turn_id)

    async def accept_interrupt(self) -> None:
        """Answer an interrupt, but do not end the turn."""
        await self.codex.answer("turn/interrupt", {})
        await self.codex.answer("thread/backgroundTerminals/clean", {})

    async def handle_interrupt(self, turn_id: str = "turn-1") -> None:
        """Handle an interrupt like codex."""
        await self.accept_interrupt()
        await self.complete(turn_id, "interrupted")


@dataclass(slots=True)
class ThreadSetup:
    """A thread and its codexes; the next one is used when one has exited."""

    thread: CodexThread
    memory: Memory
    sides: list[CodexSide]

    @property
    def side(self) -> CodexSide:
        return self.sides[0]


@asynccontextmanager
async def open_thread(
    *, codex_count: int = 1, stored: str | None = None, options: ThreadOptions = OPTIONS, limits: TurnLimits = LIMITS
) -> AsyncIterator[ThreadSetup]:
    """Set up a thread; it connects to the first codex that is still running."""
    memory = Memory(stored)
    async with AsyncExitStack() as stack:
        codexes = [await stack.enter_async_context(memory_codex()) for _ in range(codex_count)]
        yield _thread_setup(codexes, memory, options, limits)


def _thread_setup(
    codexes: list[MemoryCodex], memory: Memory, options: ThreadOptions, limits: TurnLimits
) -> ThreadSetup:
    @asynccontextmanager
    async def connect() -> AsyncIterator[Connection]:
        await anyio.lowlevel.checkpoint()
        living = [codex.connection for codex in codexes if codex.connection.error is None]
        yield living[0] if living else codexes[-1].connection

    thread = CodexThread(connect, memory, options, limits)
    return ThreadSetup(thread, memory, [CodexSide(codex, memory) for codex in codexes])


@asynccontextmanager
async def started_turn(
    play: Callable[[CodexSide], Awaitable[None]] | None = None, *, start: bool = True
) -> AsyncIterator[tuple[ThreadSetup, StartedTurn[Turn]]]:
    """Start a thread and its first turn, unless `play` does so; then run `play` on codex's side."""
    async with open_thread() as setup, anyio.create_task_group() as tasks:

        async def codex() -> None:
            if start:
                await setup.side.start()
            if play is not None:
                await play(setup.side)

        tasks.start_soon(codex)
        async with turn_of(setup.thread, text_input("hello")) as started:
            yield setup, started


async def receive_all(started: StartedTurn[Turn]) -> list[AgentEvent]:
    """Return the remaining events of a turn."""
    events: list[AgentEvent] = []
    while started.turn.ended is None:
        events += await started.turn.receive()
    return events


@dataclass(slots=True)
class Caller:
    """A caller of one turn, and what it received."""

    text: str = "hello"
    events: list[AgentEvent] = field(default_factory=list)
    started: StartedTurn[Turn] | None = None
    duration_s: float = 0.0

    async def __call__(self, thread: CodexThread) -> None:
        start = anyio.current_time()
        async with turn_of(thread, text_input(self.text)) as started:
            self.started = started
            self.events = await receive_all(started)
        self.duration_s = anyio.current_time() - start

    @property
    def ended(self) -> TurnCompleted:
        assert [event for event in self.events if isinstance(event, Done)] == [self.events[-1]]
        assert self.started is not None
        assert self.started.turn.ended is not None
        return self.started.turn.ended

    @property
    def failure(self) -> str:
        assert self.ended.status == "failed"
        assert self.ended.failure is not None
        return self.ended.failure.message

    @property
    def note(self) -> str | None:
        assert self.started is not None
        return self.started.note


async def run_turn(setup: ThreadSetup, play: Callable[[CodexSide], Awaitable[None]], *, text: str = "hello") -> Caller:
    """Run one turn while `play` runs on the side of the first codex."""
    caller = Caller(text)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(caller, setup.thread)
        await play(setup.side)
    return caller


async def run_single_turn(
    play: Callable[[CodexSide], Awaitable[None]],
    *,
    stored: str | None = None,
    options: ThreadOptions = OPTIONS,
    limits: TurnLimits = LIMITS,
) -> Caller:
    """Run the only turn of a thread, with the stored thread ID `stored`; `play` must read all requests."""
    async with open_thread(stored=stored, options=options, limits=limits) as setup:
        caller = await run_turn(setup, play)
        assert not setup.side.codex.unread
        return caller


async def run_noisy_turn(noise: Callable[[CodexSide], Awaitable[None]], *, every_s: float) -> Caller:
    """Run a turn during which codex repeats `noise` until it is interrupted."""

    async def repeat(side: CodexSide) -> None:
        while True:
            await noise(side)
            await anyio.sleep(every_s)

    async def play(side: CodexSide) -> None:
        await side.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(repeat, side)
            await side.handle_interrupt()
            tasks.cancel_scope.cancel()

    return await run_single_turn(play)


def usage(total: int, last: int) -> JsonObject:
    return {"total": {"totalTokens": total, "inputTokens": total}, "last": {"totalTokens": last, "inputTokens": last}}


# --- The course of a turn ---


@in_virtual_time
async def test_a_context_is_a_thread_and_a_message_a_turn() -> None:
    async def play(side: CodexSide) -> None:
        assert await side.start_thread() == {
            "cwd": "/w",
            "model": "gpt",
            "modelProvider": "gateway",
            "sandbox": "workspace-write",
            "approvalPolicy": "never",
            "developerInstructions": None,
        }
        request = await side.codex.read("turn/start")
        assert side.memory.saved == ["thread-1"], "the thread ID must be stored before the first turn"
        caller: JsonObject = {"threadId": "thread-1", "input": [{"type": "text", "text": "hello"}]}
        assert params_of(request) == caller | {"clientUserMessageId": None}
        await side.codex.reply(request, {"turn": {"id": "turn-1"}})
        await side.notify("turn/started", turn={"id": "turn-1"})
        await side.delta("Hi")
        await side.complete()

    async with open_thread() as setup:
        caller = await run_turn(setup, play)
        assert caller.events[:-1] == [Text("m", "Hi")]
        assert caller.ended == TurnCompleted("completed", None, None)
        assert caller.note is None
        assert (await run_turn(setup, lambda side: side.run_turn("turn-2"))).ended.status == "completed"


@in_virtual_time
async def test_events_before_the_start_response_are_received() -> None:
    async def play(side: CodexSide) -> None:
        await side.start_thread()
        request = await side.codex.read("turn/start")
        await side.notify("turn/started", turn={"id": "turn-1"})
        await side.delta("first")
        await side.codex.reply(request, {"turn": {"id": "turn-1"}})
        await side.complete()

    assert (await run_single_turn(play)).events[0] == Text("m", "first")


@in_virtual_time
async def test_events_of_other_turns_are_ignored() -> None:
    async def play(side: CodexSide) -> None:
        await side.start()
        await side.delta("late", "turn-0")
        await side.complete("turn-0")
        await side.delta("mine")
        await side.complete()

    caller = await run_single_turn(play)
    assert caller.events[:-1] == [Text("m", "mine")]
    assert caller.ended == TurnCompleted("completed", None, None)


@in_virtual_time
async def test_receive_returns_nothing_at_its_time_out() -> None:
    async with started_turn() as (setup, started):
        by = anyio.current_time() + 7
        assert await started.turn.receive(by=by) == []
        assert anyio.current_time() == pytest.approx(by)
        assert await started.turn.receive(by=by - 1) == []
        await setup.side.complete()
        assert [type(event) for event in await started.turn.receive(by=math.inf)] == [Done]
        assert await started.turn.receive() == []


@in_virtual_time
async def test_deltas_wait_for_the_given_time_and_are_joined() -> None:
    async with started_turn() as (setup, started):
        start = anyio.current_time()
        await setup.side.delta("a")
        assert await started.turn.receive(text_by=start + 5) == [Text("m", "a")]
        assert anyio.current_time() == start
        for text in "bcd":
            await setup.side.delta(text)
        assert await started.turn.receive(text_by=start + 5) == [Text("m", "bcd")]
        assert anyio.current_time() == start + 5


@in_virtual_time
async def test_the_end_of_a_turn_does_not_wait() -> None:
    async with started_turn() as (setup, started):
        start = anyio.current_time()
        await setup.side.delta("a")
        await started.turn.receive(text_by=math.inf)
        for text in "bcd":
            await setup.side.delta(text)
        await setup.side.complete()
        events = await started.turn.receive(text_by=math.inf)
        assert [type(event) for event in events] == [Text, Done]
        assert anyio.current_time() == start


@in_virtual_time
async def test_unread_deltas_are_activity() -> None:
    async with started_turn() as (setup, started):
        await setup.side.delta("a")
        await started.turn.receive(text_by=math.inf)
        await anyio.sleep(LIMITS.inactivity_s - 1)
        await setup.side.delta("b")
        assert await started.turn.receive(text_by=math.inf) == [Text("m", "b")]
        assert started.turn.ended is None
        await setup.side.complete()
        assert [type(event) for event in await started.turn.receive()] == [Done]


# --- One turn at a time ---


@in_virtual_time
async def test_a_second_message_is_queued() -> None:
    async with open_thread() as setup, anyio.create_task_group() as tasks:
        first, second = Caller("one"), Caller("two")
        tasks.start_soon(first, setup.thread)
        await setup.side.start()
        tasks.start_soon(second, setup.thread)
        await setup.side.codex.assert_silent(100)
        await setup.side.complete("turn-1")
        params = await setup.side.start_turn("turn-2")
        assert params["input"] == [{"type": "text", "text": "two"}]
        assert first.ended.status == "completed"
        await setup.side.complete("turn-2")


@in_virtual_time
async def test_a_cancelled_waiter_releases_no_slot() -> None:
    async with open_thread() as setup, anyio.create_task_group() as tasks:
        first, third = Caller("one"), Caller("three")
        tasks.start_soon(first, setup.thread)
        await setup.side.start()
        with anyio.move_on_after(1):
            await Caller("two")(setup.thread)
        assert setup.thread.busy
        tasks.start_soon(third, setup.thread)
        await setup.side.codex.assert_silent(1)
        await setup.side.complete("turn-1")
        params = await setup.side.start_turn("turn-3")
        assert params["input"] == [{"type": "text", "text": "three"}]
        await setup.side.complete("turn-3")


# --- Interrupting ---


@in_virtual_time
async def test_an_interrupt_stops_the_turn_and_closes_open_items() -> None:
    async def play(side: CodexSide) -> None:
        await side.command()
        ids: JsonObject = {"threadId": "thread-1", "turnId": "turn-1"}
        assert await side.codex.answer("turn/interrupt", {}) == ids
        assert await side.codex.answer("thread/backgroundTerminals/clean", {}) == {"threadId": "thread-1"}
        await side.complete(status="interrupted")

    async with started_turn(play) as (setup, started):
        events: list[AgentEvent] = []
        while not any(isinstance(event, ToolUse) for event in events):
            events += await started.turn.receive()
        started.turn.interrupt()
        started.turn.interrupt()
        events += await receive_all(started)
        assert events[-2] == ToolResult("c", NO_RESULT, is_error=True, status="failed")
        assert started.turn.ended == TurnCompleted("interrupted", None, None)
        assert not setup.side.codex.unread


@in_virtual_time
async def test_an_interrupt_waits_for_the_turns_start() -> None:
    async def play(side: CodexSide) -> None:
        await side.start_thread()
        await side.codex.answer("turn/start", {"turn": {"id": "turn-1"}})
        await side.codex.assert_silent(STOP_GRACE_S / 2)
        await side.notify("turn/started", turn={"id": "turn-1"})
        await side.handle_interrupt()

    async with started_turn(play, start=False) as (_, started):
        started.turn.interrupt()
        await receive_all(started)
        assert started.turn.ended == TurnCompleted("interrupted", None, None)


@in_virtual_time
async def test_an_interrupt_sent_too_early_is_repeated() -> None:
    async def play(side: CodexSide) -> None:
        retried_at = []
        for _ in range(3):
            await side.codex.refuse(await side.codex.read("turn/interrupt"), -32600, "no active turn")
            retried_at.append(anyio.current_time())
        await side.handle_interrupt()
        assert [retried_at[1] - retried_at[0], retried_at[2] - retried_at[1]] == pytest.approx(
            [INTERRUPT_RETRY_S] * 2, abs=0.01
        )

    async with started_turn(play) as (_, started):
        started.turn.interrupt()
        await receive_all(started)
        assert started.turn.ended == TurnCompleted("interrupted", None, None)


@in_virtual_time
async def test_a_turn_may_complete_during_its_interrupt() -> None:
    async def play(side: CodexSide) -> None:
        request = await side.codex.read("turn/interrupt")
        await side.complete()
        await side.codex.refuse(request, -32600, "no active turn to interrupt")

    async with started_turn(play) as (_, started):
        started.turn.interrupt()
        await receive_all(started)
        assert started.turn.ended == TurnCompleted("completed", None, None)


@in_virtual_time
async def test_a_codex_that_ignores_the_interrupt_is_killed() -> None:
    async with started_turn(CodexSide.accept_interrupt) as (setup, started):
        start = anyio.current_time()
        started.turn.interrupt()
        with pytest.raises(CodexGone, match="did not stop its turn"):
            await receive_all(started)
        assert anyio.current_time() - start == pytest.approx(STOP_GRACE_S, abs=0.1)
        await anyio.sleep(1)
        assert setup.side.codex.connection.error is not None


@in_virtual_time
async def test_leaving_the_block_early_stops_the_turn() -> None:
    async with open_thread() as setup, anyio.create_task_group() as tasks:

        async def play() -> None:
            await setup.side.start()
            await setup.side.handle_interrupt()
            await setup.side.run_turn("turn-2")

        tasks.start_soon(play)
        with pytest.raises(KeyError):
            async with turn_of(setup.thread, text_input("hello")):
                raise KeyError
        await Caller()(setup.thread)


@in_virtual_time
async def test_leaving_the_block_early_kills_an_unresponsive_codex() -> None:
    async with open_thread() as setup, anyio.create_task_group() as tasks:
        tasks.start_soon(setup.side.start)
        async with turn_of(setup.thread, text_input("hello")):
            pass
        await anyio.sleep(1)
        assert setup.side.codex.connection.error is not None
        assert not setup.thread.busy


@in_virtual_time
async def test_cancelling_the_caller_during_a_turn_stops_the_turn() -> None:
    async with open_thread() as setup, anyio.create_task_group() as tasks:
        asker = Caller()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as asking:
                asking.start_soon(asker, setup.thread)
                await setup.side.start()
                tasks.start_soon(setup.side.handle_interrupt)
                scope.cancel()
        assert not setup.thread.busy


@in_virtual_time
async def test_cancelling_the_caller_during_the_start_stops_the_turn() -> None:
    """The response must be awaited: an unknown turn would block the thread."""
    async with open_thread() as setup, anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as asking:
                asking.start_soon(Caller(), setup.thread)
                await setup.side.start_thread()
                request = await setup.side.codex.read("turn/start")

                async def play() -> None:
                    await anyio.sleep(1)
                    await setup.side.codex.reply(request, {"turn": {"id": "turn-1"}})
                    await setup.side.notify("turn/started", turn={"id": "turn-1"})
                    await setup.side.handle_interrupt()

                tasks.start_soon(play)
                scope.cancel()
        assert not setup.thread.busy
        assert not setup.side.codex.unread


# --- Silence ---


@in_virtual_time
async def test_an_idle_thread_without_an_end_takes_codexs_record() -> None:
    async def play(side: CodexSide) -> None:
        await side.start()
        await side.idle()
        params = await side.codex.answer(
            "thread/turns/list", recorded({"id": "turn-0"}, {"id": "turn-1", **COMPLETED_TURN})
        )
        assert params == {"threadId": "thread-1", "limit": LAST_TURNS, "itemsView": "full"}

    caller = await run_single_turn(play)
    assert caller.ended == TurnCompleted("completed", None, MessageCompleted("m-9", "the whole", None))
    assert caller.duration_s == pytest.approx(IDLE_GRACE_S, abs=0.1)


COMPLETED_TURN: JsonObject = {
    "status": "completed",
    "items": [{"type": "agentMessage", "id": "m-9", "text": "the whole"}, {"type": "reasoning", "id": "r"}],
}


def recorded(*turns: JsonObject) -> JsonObject:
    """Return codex's record of turns, the newest first."""
    return {"data": list(turns[::-1])}


@pytest.mark.parametrize(
    ("answer", "status", "sentence"),
    [
        (recorded({"id": "turn-1", "status": "interrupted"}), "interrupted", None),
        (recorded({"id": "turn-1", "status": "failed", "error": {"message": "boom"}}), "failed", "boom"),
        (recorded({"id": "turn-1", "status": "new"}), "failed", "without a reason"),
        (recorded(), "failed", "no record"),
        (recorded({"id": "turn-0", "status": "completed"}), "failed", "no record"),
        ({}, "failed", "no record"),
        (None, "failed", "no record"),
        ("refused", "failed", "thread not loaded"),
    ],
)
@in_virtual_time
async def test_an_idle_thread_completes_whatever_the_record_says(
    answer: JsonValue, status: str, sentence: str | None
) -> None:
    async def play(side: CodexSide) -> None:
        await side.start()
        await side.idle()
        request = await side.codex.read("thread/turns/list")
        if answer == "refused":
            await side.codex.refuse(request, -32600, "thread not loaded")
        else:
            await side.codex.reply(request, answer)

    ended = (await run_single_turn(play)).ended
    assert ended.status == status
    assert (ended.failure is None) == (sentence is None)
    if ended.failure is not None and sentence is not None:
        assert sentence in ended.failure.message


@in_virtual_time
async def test_an_idle_thread_with_a_turn_in_progress_continues() -> None:
    async def play(side: CodexSide) -> None:
        await side.start()
        await side.idle()
        await side.codex.answer("thread/turns/list", recorded({"id": "turn-1", "status": "inProgress"}))
        await anyio.sleep(100)
        await side.delta("still here")
        await side.complete()

    assert [type(event) for event in (await run_single_turn(play)).events] == [Text, Done]


@in_virtual_time
async def test_idle_before_the_turns_start_is_ignored() -> None:
    async def play(side: CodexSide) -> None:
        await side.start_thread()
        await side.codex.answer("turn/start", {"turn": {"id": "turn-1"}})
        await side.idle()
        await anyio.sleep(100)
        await side.notify("turn/started", turn={"id": "turn-1"})
        await side.complete()

    assert (await run_single_turn(play)).ended.status == "completed"


@in_virtual_time
async def test_idle_right_before_the_end_sends_no_request() -> None:
    async def play(side: CodexSide) -> None:
        await side.start()
        await side.idle()
        await anyio.sleep(IDLE_GRACE_S / 2)
        await side.complete()

    assert (await run_single_turn(play)).ended.status == "completed"


@in_virtual_time
async def test_an_error_without_an_end_ends_the_turn() -> None:
    async def play(side: CodexSide) -> None:
        await side.start_thread()
        await side.codex.answer("turn/start", {"turn": {"id": "turn-1"}})
        await side.error("model not found", will_retry=False)
        await side.idle("systemError")

    caller = await run_single_turn(play)
    assert caller.failure == "model not found"
    assert caller.duration_s < 2 * IDLE_GRACE_S


@in_virtual_time
async def test_events_after_the_end_of_a_turn_are_ignored() -> None:
    async def play(side: CodexSide) -> None:
        await side.start()
        await side.command()
        item: JsonObject = {
            "type": "commandExecution",
            "id": "c",
            "command": "sleep 9",
            "cwd": "/w",
            "status": "failed",
        }
        turn: JsonObject = {"id": "turn-1", "status": "interrupted", "items": []}
        await side.codex.write(
            {"method": "turn/completed", "params": {"threadId": "thread-1", "turn": turn}},
            {"method": "item/completed", "params": {"threadId": "thread-1", "turnId": "turn-1", "item": item}},
        )

    caller = await run_single_turn(play)
    assert [type(event) for event in caller.events[-2:]] == [ToolResult, Done]
    assert [event for event in caller.events if isinstance(event, ToolResult)] == [caller.events[-2]]


@in_virtual_time
async def test_a_silent_turn_is_stopped_and_fails() -> None:
    async def play(side: CodexSide) -> None:
        await side.start()
        await side.command()
        await side.handle_interrupt()

    async with open_thread() as setup:
        caller = await run_turn(setup, play)
        assert "silent for 300 s" in caller.failure
        assert caller.duration_s == pytest.approx(LIMITS.inactivity_s, abs=1)
        assert [type(event) for event in caller.events[-3:]] == [ToolResult, Error, Done], "open tool calls are closed"
        assert (await run_turn(setup, lambda side: side.run_turn("turn-2"))).ended.status == "completed"


@in_virtual_time
async def test_the_users_own_message_is_no_activity() -> None:
    async def play(side: CodexSide) -> None:
        await side.start()
        await anyio.sleep(1)
        await side.notify("item/completed", turnId="turn-1", item={"type": "userMessage", "id": "u", "content": []})
        await side.handle_interrupt()

    caller = await run_single_turn(play)
    assert "silent for 300 s" in caller.failure
    assert caller.duration_s == pytest.approx(LIMITS.inactivity_s, abs=1)


@in_virtual_time
async def test_a_silent_turn_that_ignores_the_interrupt_kills_codex() -> None:
    async def play(side: CodexSide) -> None:
        await side.start()
        await side.accept_interrupt()

    async with open_thread() as setup:
        caller = await run_turn(setup, play)
        assert "silent" in caller.failure
        assert caller.duration_s == pytest.approx(LIMITS.inactivity_s + STOP_GRACE_S, abs=1)
        await anyio.sleep(1)
        assert setup.side.codex.connection.error is not None


@in_virtual_time
async def test_a_printing_command_is_not_silence() -> None:
    async def play(side: CodexSide) -> None:
        await side.start()
        await side.command()
        for _ in range(10):
            await anyio.sleep(LIMITS.inactivity_s - 1)
            await side.notify("item/commandExecution/outputDelta", turnId="turn-1", itemId="c", delta=".")
        await side.complete()

    caller = await run_single_turn(play)
    assert caller.ended.status == "completed"
    assert sum(isinstance(event, ToolOutput) for event in caller.events) == 10


@in_virtual_time
async def test_endless_reconnecting_counts_as_silence() -> None:
    async def reconnect(side: CodexSide) -> None:
        await side.error("Reconnecting... waiting for network", will_retry=True)

    caller = await run_noisy_turn(reconnect, every_s=20)
    assert "silent" in caller.failure
    assert caller.duration_s == pytest.approx(LIMITS.inactivity_s, abs=1)
    assert RunWarning("Reconnecting... waiting for network", will_retry=True) in caller.events


@in_virtual_time
async def test_other_threads_and_turns_do_not_keep_a_turn_alive() -> None:
    async def chatter(side: CodexSide) -> None:
        await side.delta("old", "turn-0")
        await side.notify("item/agentMessage/delta", "thread-2", turnId="turn-1", itemId="m", delta="x")

    assert (await run_noisy_turn(chatter, every_s=20)).ended.status == "failed"


@in_virtual_time
async def test_a_busy_turn_is_stopped_at_its_time_budget() -> None:
    caller = await run_noisy_turn(lambda side: side.delta("."), every_s=10)
    assert "longer than 3600 s" in caller.failure
    assert caller.duration_s == pytest.approx(LIMITS.total_s, abs=1)


# --- Resumed and lost threads ---


@in_virtual_time
async def test_a_known_thread_is_resumed_with_all_its_options() -> None:
    async def play(side: CodexSide) -> None:
        params = await side.codex.answer("thread/resume", ECHO)
        assert params == {"threadId": "thread-1", "excludeTurns": True, **OPTIONS.params()}
        await side.run_turn()

    async with open_thread(stored="thread-1") as setup:
        assert (await run_turn(setup, play)).ended.status == "completed"
        assert setup.memory.saved == []


@in_virtual_time
async def test_a_thread_is_resumed_in_a_new_codex() -> None:
    async with open_thread(codex_count=2) as setup:
        first, second = setup.sides

        await run_turn(setup, CodexSide.run_first_turn)
        await first.codex.exit()
        while first.codex.connection.error is None:
            await anyio.sleep(0.01)

        async def two(_side: CodexSide) -> None:
            await second.codex.answer("thread/resume", ECHO)
            await second.run_turn("turn-2")

        caller = await run_turn(setup, two)
        assert caller.ended.status == "completed"
        assert caller.note is None


@pytest.mark.parametrize("reason", ["no rollout found for thread id thread-0", "rollout is empty", "invalid thread id"])
@in_virtual_time
async def test_a_lost_thread_is_replaced_with_a_notice(reason: str) -> None:
    async def play(side: CodexSide) -> None:
        await side.codex.refuse(await side.codex.read("thread/resume"), -32600, reason)
        await side.start()
        await side.complete()

    async with open_thread(stored="thread-0") as setup:
        caller = await run_turn(setup, play)
        assert caller.note is not None
        assert reason in caller.note
        assert setup.memory.saved == ["thread-1"]


@in_virtual_time
async def test_a_thread_with_another_writer_is_awaited() -> None:
    async def play(side: CodexSide) -> None:
        for _ in range(3):
            request = await side.codex.read("thread/resume")
            await side.codex.refuse(request, -32600, "thread thread-1 already has an active writer")
        await side.codex.answer("thread/resume", ECHO)
        await side.run_turn()

    assert (await run_single_turn(play, stored="thread-1")).ended.status == "completed"


@in_virtual_time
async def test_a_thread_with_a_permanent_writer_is_replaced() -> None:
    async def play(side: CodexSide) -> None:
        start = anyio.current_time()
        while (request := await side.codex.read())["method"] == "thread/resume":
            await side.codex.refuse(request, -32600, "already has an active writer")
        assert anyio.current_time() - start == pytest.approx(OTHER_WRITER_GRACE_S, abs=0.5)
        await side.codex.reply(request, {"thread": {"id": "thread-1"}, **ECHO})
        await side.run_turn()

    caller = await run_single_turn(play, stored="thread-0")
    assert caller.note is not None
    assert "active writer" in caller.note


@in_virtual_time
async def test_an_archived_thread_is_resumed() -> None:
    async with open_thread() as setup:

        async def two(side: CodexSide) -> None:
            await side.codex.refuse(await side.codex.read("turn/start"), -32600, "thread not found: thread-1")
            await side.codex.answer("thread/resume", ECHO)
            await side.run_turn("turn-2")

        await run_turn(setup, CodexSide.run_first_turn)
        assert (await run_turn(setup, two)).ended.status == "completed"


@pytest.mark.parametrize("echoed", ["dangerFullAccess", "readOnly", None])
@in_virtual_time
async def test_a_sandbox_other_than_the_configured_one_is_an_error(echoed: str | None) -> None:
    async def play(side: CodexSide) -> None:
        answer: JsonObject = {"thread": {"id": "thread-1"}, "sandbox": {"type": echoed}}
        await side.codex.answer("thread/start", answer if echoed else {"thread": {"id": "thread-1"}})

    async with open_thread() as setup:
        with pytest.raises(ExceptionGroup) as raised:
            await run_turn(setup, play)
        assert raised.group_contains(ProtocolError, match="instead of workspaceWrite")
        assert setup.memory.saved == []


@in_virtual_time
async def test_a_rejected_configuration_does_not_lose_the_thread() -> None:
    async def play(side: CodexSide) -> None:
        refusal = "failed to load configuration: Model provider `mine` not found"
        await side.codex.refuse(await side.codex.read("thread/resume"), -32600, refusal)

    async with open_thread(stored="thread-0") as setup:
        with pytest.raises(ExceptionGroup) as raised:
            await run_turn(setup, play)
        assert raised.group_contains(CodexRefused, match="Model provider … not found")
        assert setup.memory.saved == []


@in_virtual_time
async def test_other_errors_reach_the_caller() -> None:
    async def play(side: CodexSide) -> None:
        await side.start_thread()
        await side.codex.refuse(await side.codex.read("turn/start"), -32602, "input_too_large")

    async with open_thread() as setup:
        with pytest.raises(ExceptionGroup) as raised:
            await run_turn(setup, play)
        assert raised.group_contains(CodexRefused, match="input_too_large")
        assert not setup.thread.busy


@in_virtual_time
async def test_a_thread_id_that_cannot_be_stored_starts_no_turn() -> None:
    class FailingMemory(Memory):
        async def save(self, thread_id: str, instructions: str | None = None) -> None:
            raise OSError("disk full")

    async def play(side: CodexSide) -> None:
        await side.start_thread()

    async with memory_codex() as codex:
        setup = _thread_setup([codex], FailingMemory(), OPTIONS, LIMITS)
        for _ in range(2):
            with pytest.raises(ExceptionGroup) as raised:
                await run_turn(setup, play)
            assert raised.group_contains(OSError, match="disk full")


# --- Instructions ---

OLD_INSTRUCTIONS = Instructions("Be polite.")
BRIEF_OPTIONS = replace(OPTIONS, instructions=Instructions("Be brief."))


@in_virtual_time
async def test_a_new_thread_starts_with_the_instructions() -> None:
    async def play(side: CodexSide) -> None:
        assert (await side.start_thread())["developerInstructions"] == "Be brief."
        await side.run_turn()

    async with open_thread(options=BRIEF_OPTIONS) as setup:
        await run_turn(setup, play)
        assert setup.memory.digest == BRIEF_OPTIONS.instructions.digest


@in_virtual_time
async def test_unchanged_instructions_are_not_sent_again() -> None:
    async def play(side: CodexSide) -> None:
        assert (await side.codex.answer("thread/resume", ECHO))["developerInstructions"] == "Be brief."
        await side.run_turn()

    async with open_thread(stored="thread-1", options=BRIEF_OPTIONS) as setup:
        setup.memory.digest = BRIEF_OPTIONS.instructions.digest
        await run_turn(setup, play)
        assert setup.memory.saved == []


@pytest.mark.parametrize(
    ("earlier", "options", "expected"),
    [
        (OLD_INSTRUCTIONS, BRIEF_OPTIONS, "Be brief."),
        (Instructions(), BRIEF_OPTIONS, "Be brief."),
        (OLD_INSTRUCTIONS, OPTIONS, "no longer apply"),
    ],
)
@in_virtual_time
async def test_changed_instructions_are_sent_once(earlier: Instructions, options: ThreadOptions, expected: str) -> None:
    async def play(side: CodexSide) -> None:
        await side.codex.answer("thread/resume", ECHO)
        request = await side.codex.read("thread/inject_items")
        assert side.memory.saved == [], "instructions must not be stored before codex accepted them"
        await side.codex.reply(request, {})
        match params_of(request):
            case {"threadId": "thread-1", "items": [{"role": "developer", "content": [{"text": str(text)}]}]}:
                assert expected in text
            case other:
                pytest.fail(f"unexpected request {other}")
        await side.run_turn()

    async with open_thread(stored="thread-1", options=options) as setup:
        setup.memory.digest = earlier.digest
        await run_turn(setup, play)
        assert setup.memory.digest == options.instructions.digest
        await run_turn(setup, lambda side: side.run_turn("turn-2"))


@in_virtual_time
async def test_instructions_are_sent_again_after_a_crash() -> None:
    async with open_thread(codex_count=2, stored="thread-1", options=BRIEF_OPTIONS) as setup:
        first, second = setup.sides

        async def play(_side: CodexSide) -> None:
            await first.codex.answer("thread/resume", ECHO)
            await first.codex.read("thread/inject_items")
            await first.codex.exit()
            await second.codex.answer("thread/resume", ECHO)
            await second.codex.answer("thread/inject_items", {})
            await second.run_turn()

        assert (await run_turn(setup, play)).ended.status == "completed"
        assert setup.memory.digest == BRIEF_OPTIONS.instructions.digest


# --- Crashes of codex ---


@in_virtual_time
async def test_a_codex_that_died_unnoticed_is_replaced_once() -> None:
    async with open_thread(codex_count=2) as setup:
        first, second = setup.sides

        await run_turn(setup, CodexSide.run_first_turn)

        async def two(_side: CodexSide) -> None:
            await first.codex.read("turn/start")
            await first.codex.exit()
            await second.codex.answer("thread/resume", ECHO)
            params = await second.start_turn("turn-2")
            assert params["input"] == [{"type": "text", "text": "again"}]
            await second.complete("turn-2")

        assert (await run_turn(setup, two, text="again")).ended.status == "completed"


@in_virtual_time
async def test_a_thread_that_crashes_every_codex_is_given_up() -> None:
    async with open_thread(codex_count=MAX_ATTEMPTS + 1) as setup:

        async def play(_side: CodexSide) -> None:
            for side in setup.sides[:MAX_ATTEMPTS]:
                await side.codex.read("thread/start")
                await side.codex.exit()

        with pytest.raises(ExceptionGroup) as raised:
            await run_turn(setup, play)
        assert raised.group_contains(CodexGone)
        await setup.sides[MAX_ATTEMPTS].codex.assert_silent(1)


@pytest.mark.parametrize("deaths", [0, MAX_ATTEMPTS - 1, MAX_ATTEMPTS])
@in_virtual_time
async def test_the_record_is_read_again_after_a_crash(deaths: int) -> None:
    async with (
        open_thread(codex_count=MAX_ATTEMPTS, stored="thread-1") as setup,
        anyio.create_task_group() as tasks,
    ):

        async def play() -> None:
            for side in setup.sides[:deaths]:
                await side.codex.answer("thread/resume", ECHO)
                await side.codex.read("thread/turns/list")
                await side.codex.exit()
            for side in setup.sides[deaths:][:1]:
                await side.codex.answer("thread/resume", ECHO)
                await side.codex.answer("thread/turns/list", recorded())

        tasks.start_soon(play)
        async with setup.thread.lease() as lease:
            if deaths < MAX_ATTEMPTS:
                assert await lease.recorded_end("task/", text_input("hello")) is TurnRecord.MISSING
            else:
                with pytest.raises(CodexGone):
                    await lease.recorded_end("task/", text_input("hello"))


@in_virtual_time
async def test_a_turn_that_may_have_started_is_not_started_again() -> None:
    async with open_thread(codex_count=2) as setup:
        first, second = setup.sides

        async def play(_side: CodexSide) -> None:
            await first.start_thread()
            await first.codex.read("turn/start")
            await first.notify("turn/started", turn={"id": "turn-1"})
            await first.codex.exit()

        with pytest.raises(ExceptionGroup) as raised:
            await run_turn(setup, play)
        assert raised.group_contains(CodexGone)
        await second.codex.assert_silent(1)


@in_virtual_time
async def test_a_crash_during_a_turn_ends_it_after_its_last_event() -> None:
    async with open_thread() as setup, anyio.create_task_group() as tasks:

        async def play() -> None:
            await setup.side.start()
            await setup.side.delta("half")
            await setup.side.codex.exit()

        tasks.start_soon(play)
        start = anyio.current_time()
        async with turn_of(setup.thread, text_input("hello")) as started:
            events: list[AgentEvent] = []

            async def listen() -> None:
                while True:
                    events.extend(await started.turn.receive())

            with pytest.raises(CodexGone, match="exit code 0"):
                await listen()
        assert events == [Text("m", "half")]
        assert anyio.current_time() - start < 1


@in_virtual_time
async def test_an_unresponsive_codex_is_replaced_and_gets_the_turn() -> None:
    """A thread with an abandoned turn would accept no other turn."""
    async with open_thread(codex_count=2) as setup:
        first, second = setup.sides

        async def play(_side: CodexSide) -> None:
            await first.start_thread()
            await first.codex.read("turn/start")
            await second.codex.answer("thread/resume", ECHO)
            await second.run_turn("turn-2")

        assert (await run_turn(setup, play)).ended.status == "completed"
        assert first.codex.connection.error is not None


# --- Usage ---


@in_virtual_time
async def test_usage_is_counted_by_turn_and_by_thread() -> None:
    async with open_thread() as setup:
        for turn, before in (("turn-1", 0), ("turn-2", 150)):

            async def play(side: CodexSide, turn: str = turn, before: int = before) -> None:
                if turn == "turn-1":
                    await side.start_thread()
                await side.start_turn(turn)
                # The first call is reported twice, as by codex 0.130.
                for total, last in ((100, 100), (100, 100), (150, 50)):
                    await side.notify("thread/tokenUsage/updated", turnId=turn, tokenUsage=usage(before + total, last))
                await side.complete(turn)

            caller = await run_turn(setup, play)
            assert caller.started is not None
            assert caller.started.turn.usage == TokenUsage(150, 150)
            assert caller.started.turn.thread_usage == TokenUsage(before + 150, before + 150)
            assert isinstance(caller.events[0], Usage)


@in_virtual_time
async def test_usage_of_a_resumed_thread_starts_with_this_turn() -> None:
    async def play(side: CodexSide) -> None:
        await side.codex.answer("thread/resume", ECHO)
        await side.start_turn()
        for total, last in ((1100, 100), (1150, 50)):
            await side.notify("thread/tokenUsage/updated", turnId="turn-1", tokenUsage=usage(total, last))
        await side.complete()

    caller = await run_single_turn(play, stored="thread-1")
    assert caller.started is not None
    assert caller.started.turn.usage == TokenUsage(150, 150)
    assert caller.started.turn.thread_usage == TokenUsage(1150, 1150)


# --- ThreadRegistry ---


def thread_registry() -> ThreadRegistry[CodexThread]:
    def connect() -> AbstractAsyncContextManager[Connection]:
        raise AssertionError

    return ThreadRegistry(lambda _owner, _context: CodexThread(connect, Memory(), OPTIONS, LIMITS))


def test_an_owners_context_is_one_conversation() -> None:
    stored = thread_registry()
    assert stored.get("me", "c") is stored.get("me", "c")
    assert stored.get("me", "c") is not stored.get("me", "d")
    assert stored.get("me", "c") is not stored.get("you", "c")


def test_idle_conversations_over_the_limit_are_closed() -> None:
    stored = thread_registry()
    oldest, second = stored.get("me", "oldest"), stored.get("me", "second")
    for number in range(MAX_THREADS - 2):
        stored.get("me", str(number))
    assert stored.get("me", "oldest") is oldest, "recently used threads must stay open"
    stored.get("me", "one more")
    assert stored.get("me", "oldest") is oldest
    assert stored.get("me", "second") is not second


@in_virtual_time
async def test_a_busy_conversation_is_not_closed() -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:

        @asynccontextmanager
        async def connect() -> AsyncIterator[Connection]:
            yield codex.connection

        stored = ThreadRegistry(lambda _owner, _context: CodexThread(connect, Memory(), OPTIONS, LIMITS))
        busy = stored.get("me", "busy")
        tasks.start_soon(Caller(), busy)
        side = CodexSide(codex, Memory())
        await side.start_thread()
        for number in range(MAX_THREADS + 5):
            stored.get("me", str(number))
        assert stored.get("me", "busy") is busy
        await side.run_turn()


# --- Questions ---


def approval(number: int, turn_id: str = "turn-1") -> JsonObject:
    params: JsonObject = {"threadId": "thread-1", "turnId": turn_id, "itemId": "c", "command": "make", "cwd": "/w"}
    return {"id": number, "method": "item/commandExecution/requestApproval", "params": params}


@in_virtual_time
async def test_a_turns_deadlines_pause_during_a_question() -> None:
    async with open_thread() as setup, anyio.create_task_group() as tasks:

        async def play() -> None:
            await setup.side.start()
            await setup.side.codex.write(approval(0))
            answer = await setup.side.codex.read()
            assert answer == {"id": 0, "result": {"decision": "accept"}}
            await anyio.sleep(LIMITS.inactivity_s - 1)
            await setup.side.complete()

        tasks.start_soon(play)
        async with turn_of(setup.thread, text_input("hello")) as started:
            while started.turn.pending is None:
                await started.turn.receive()
            pending = started.turn.pending
            assert await started.turn.receive(by=anyio.current_time() + 10 * LIMITS.total_s) == []
            started.turn.answer(pending, {"decision": "accept"})
            events = await receive_all(started)
        assert isinstance(events[-1], Done)
        assert events[-1].stop_reason == "completed"


@in_virtual_time
async def test_a_patch_question_shows_its_changes_even_if_both_arrive_at_once() -> None:
    item: JsonObject = {
        "type": "fileChange",
        "id": "p",
        "changes": [{"path": "a.txt", "kind": {"type": "add"}, "diff": "a"}],
    }
    of_turn: JsonObject = {"threadId": "thread-1", "turnId": "turn-1"}

    async def play(side: CodexSide) -> None:
        await side.codex.write(
            {"method": "item/started", "params": {**of_turn, "item": item}},
            {"id": 0, "method": "item/fileChange/requestApproval", "params": {**of_turn, "itemId": "p"}},
        )
        await side.codex.read()
        await side.complete()

    async with started_turn(play) as (_, started):
        while started.turn.pending is None:
            await started.turn.receive()
        pending = started.turn.pending
        assert isinstance(pending.subject, PatchQuestion)
        assert [change.path for change in pending.subject.changes] == ["a.txt"]
        started.turn.answer(pending, {"decision": "accept"})
        await receive_all(started)


@in_virtual_time
async def test_a_question_resolved_by_codex_is_withdrawn() -> None:
    async def play(side: CodexSide) -> None:
        await side.codex.write(approval(0), approval(1))
        await side.notify("serverRequest/resolved", requestId=0)
        assert await side.codex.read() == {"id": 0, "result": {"decision": "decline"}}
        await side.complete()
        assert await side.codex.read() == {"id": 1, "result": {"decision": "decline"}}

    async with started_turn(play) as (_, started):
        await receive_all(started)
        assert started.turn.pending is None


@in_virtual_time
async def test_a_question_of_another_turn_or_type_is_declined_at_once() -> None:
    async def play(side: CodexSide) -> None:
        await side.start()
        await side.codex.write(approval(7, "turn-0"))
        assert await side.codex.read() == {"id": 7, "result": {"decision": "decline"}}
        unknown: JsonObject = {"threadId": "thread-1", "turnId": "turn-1"}
        await side.codex.write({"id": 8, "method": "item/telepathy/request", "params": unknown})
        assert (await side.codex.read())["error"]
        await side.complete()

    assert (await run_single_turn(play)).ended.status == "completed"


@in_virtual_time
async def test_steering_input_joins_a_running_turn_or_is_too_late() -> None:
    async def play(side: CodexSide) -> None:
        steered = await side.codex.answer("turn/steer", {"turnId": "turn-1"})
        assert steered == {
            "threadId": "thread-1",
            "expectedTurnId": "turn-1",
            "input": [{"type": "text", "text": "look here"}],
            "clientUserMessageId": "mark",
        }
        await side.codex.refuse(await side.codex.read("turn/steer"), -32600, "no active turn to steer")
        await side.complete()

    async with started_turn(play) as (_, started):
        assert await started.turn.steer(text_input("look here"), "mark")
        assert not await started.turn.steer(text_input("and here"))
        await receive_all(started)


@in_virtual_time
async def test_overridden_options_are_restored_for_the_next_turn() -> None:
    async with open_thread() as setup:

        async def run(options: TurnOptions | None = None) -> JsonObject:
            requests: list[JsonObject] = []

            async def play() -> None:
                message = await setup.side.codex.read()
                if message["method"] == "thread/start":
                    await setup.side.codex.reply(message, {"thread": {"id": "thread-1"}, **ECHO})
                    message = await setup.side.codex.read()
                requests.append(params_of(message))
                await setup.side.codex.reply(message, {"turn": {"id": "turn-1"}})
                if options is not None and options.effort is not None:
                    models: JsonValue = [{"model": OPTIONS.model, "defaultReasoningEffort": "medium"}]
                    await setup.side.codex.answer("model/list", {"data": models})
                await setup.side.notify("turn/started", turn={"id": "turn-1"})
                await setup.side.complete()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(play)
                async with setup.thread.lease() as lease, lease.turn(text_input("x"), None, options) as started:
                    await receive_all(started)
            own = ("model", "effort", "cwd", "outputSchema")
            return {name: value for name, value in requests[0].items() if name in own}

        assert await run() == {}
        overrides = TurnOptions("big", "high", Path("/w/sub"), {"type": "object"})
        own: JsonObject = {"model": "big", "effort": "high", "cwd": "/w/sub", "outputSchema": {"type": "object"}}
        assert await run(overrides) == own
        restored: JsonObject = {"model": OPTIONS.model, "effort": "medium", "cwd": "/w"}
        assert await run() == restored
        assert await run(TurnOptions(model="other")) == {**restored, "model": "other"}
