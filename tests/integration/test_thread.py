"""A context's thread and its turns, over a codex in memory and on a clock that jumps."""

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
    """The context's thread id, in memory, and what the thread was told."""

    thread_id: str | None = None
    saved: list[str] = field(default_factory=list)
    told: str | None = None

    async def load(self) -> str | None:
        return self.thread_id

    async def instructions(self) -> str | None:
        return self.told

    async def save(self, thread_id: str, instructions: str | None = None) -> None:
        self.thread_id = thread_id
        self.told = instructions
        self.saved.append(thread_id)


class FarEnd:
    """What codex does for a conversation: a thread `thread-1`, and turns that are named by the test."""

    def __init__(self, codex: MemoryCodex, memory: Memory) -> None:
        self.codex = codex
        self.memory = memory

    async def start_thread(self, thread_id: str = "thread-1") -> JsonObject:
        return await self.codex.answer("thread/start", {"thread": {"id": thread_id}, **ECHO})

    async def start_turn(self, turn_id: str = "turn-1") -> JsonObject:
        params = await self.codex.answer("turn/start", {"turn": {"id": turn_id, "status": "inProgress"}})
        await self.say("turn/started", turn={"id": turn_id})
        return params

    async def start(self) -> None:
        """Start the thread and its first turn."""
        await self.start_thread()
        await self.start_turn()

    async def say(self, method: str, thread_id: str = "thread-1", **params: JsonValue) -> None:
        await self.codex.tell(method, threadId=thread_id, **params)

    async def delta(self, text: str, turn_id: str = "turn-1") -> None:
        await self.say("item/agentMessage/delta", turnId=turn_id, itemId="m", delta=text)

    async def command(self, turn_id: str = "turn-1") -> None:
        item: JsonObject = {"type": "commandExecution", "id": "c", "command": "sleep 9", "cwd": "/w"}
        await self.say("item/started", turnId=turn_id, item=item)

    async def idle(self, kind: str = "idle") -> None:
        await self.say("thread/status/changed", status={"type": kind})

    async def error(self, message: str, *, will_retry: bool, turn_id: str = "turn-1") -> None:
        await self.say("error", turnId=turn_id, error={"message": message}, willRetry=will_retry)

    async def complete(self, turn_id: str = "turn-1", status: str = "completed", **turn: JsonValue) -> None:
        await self.say("turn/completed", turn={"id": turn_id, "status": status, "items": [], **turn})

    async def obey(self, turn_id: str = "turn-1") -> None:
        """Take an interrupt as codex does."""
        await self.codex.answer("turn/interrupt", {})
        await self.codex.answer("thread/backgroundTerminals/clean", {})
        await self.complete(turn_id, "interrupted")


@dataclass(slots=True)
class Scene:
    """A conversation, and the codex behind it: one after the other where several are named."""

    conversation: CodexThread
    memory: Memory
    ends: list[FarEnd]

    @property
    def end(self) -> FarEnd:
        return self.ends[0]


@asynccontextmanager
async def scene(
    *, codexes: int = 1, known: str | None = None, options: ThreadOptions = OPTIONS, limits: TurnLimits = LIMITS
) -> AsyncIterator[Scene]:
    """Set up a conversation; it connects to the first codex that still lives."""
    memory = Memory(known)
    async with AsyncExitStack() as held:
        made = [await held.enter_async_context(memory_codex()) for _ in range(codexes)]
        yield _scene(made, memory, options, limits)


def _scene(codexes: list[MemoryCodex], memory: Memory, options: ThreadOptions, limits: TurnLimits) -> Scene:
    @asynccontextmanager
    async def connect() -> AsyncIterator[Connection]:
        await anyio.lowlevel.checkpoint()
        living = [codex.connection for codex in codexes if codex.connection.error is None]
        yield living[0] if living else codexes[-1].connection

    conversation = CodexThread(connect, memory, options, limits)
    return Scene(conversation, memory, [FarEnd(codex, memory) for codex in codexes])


@asynccontextmanager
async def started_turn(
    far: Callable[[FarEnd], Awaitable[None]] | None = None,
    *,
    options: ThreadOptions = OPTIONS,
    limits: TurnLimits = LIMITS,
) -> AsyncIterator[tuple[Scene, StartedTurn[Turn]]]:
    """Start a thread and its first turn; codex then does what `far` says."""
    async with scene(options=options, limits=limits) as now, anyio.create_task_group() as tasks:

        async def codex() -> None:
            await now.end.start()
            if far is not None:
                await far(now.end)

        tasks.start_soon(codex)
        async with turn_of(now.conversation, text_input("hello")) as begun:
            yield now, begun


async def follow(begun: StartedTurn[Turn]) -> list[AgentEvent]:
    """Return all events of a turn."""
    events: list[AgentEvent] = []
    while begun.turn.ended is None:
        events += await begun.turn.receive()
    return events


@dataclass(slots=True)
class Talk:
    """What a caller of a turn got."""

    text: str = "hello"
    events: list[AgentEvent] = field(default_factory=list)
    begun: StartedTurn[Turn] | None = None

    async def __call__(self, conversation: CodexThread) -> None:
        async with turn_of(conversation, text_input(self.text)) as begun:
            self.begun = begun
            self.events = await follow(begun)

    @property
    def ended(self) -> TurnCompleted:
        assert [event for event in self.events if isinstance(event, Done)] == [self.events[-1]]
        assert self.begun is not None
        assert self.begun.turn.ended is not None
        return self.begun.turn.ended


async def talk(now: Scene, far: Callable[[FarEnd], Awaitable[None]], *, text: str = "hello") -> Talk:
    """Run one turn against what codex does on the far end of the first codex."""
    said = Talk(text)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(said, now.conversation)
        await far(now.end)
    return said


async def talk_once(
    far: Callable[[FarEnd], Awaitable[None]],
    *,
    known: str | None = None,
    options: ThreadOptions = OPTIONS,
    limits: TurnLimits = LIMITS,
) -> Talk:
    """Run the only turn of a context, with the stored thread id `known`."""
    async with scene(known=known, options=options, limits=limits) as now:
        return await talk(now, far)


def usage(total: int, last: int) -> JsonObject:
    return {"total": {"totalTokens": total, "inputTokens": total}, "last": {"totalTokens": last, "inputTokens": last}}


# --- A turn's way ---


@in_virtual_time
async def test_a_context_is_a_thread_and_a_message_a_turn() -> None:
    async def far(end: FarEnd) -> None:
        assert await end.start_thread() == {
            "cwd": "/w",
            "model": "gpt",
            "modelProvider": "gateway",
            "sandbox": "workspace-write",
            "approvalPolicy": "never",
            "developerInstructions": None,
        }
        request = await end.codex.read("turn/start")
        assert end.memory.saved == ["thread-1"], "the thread's id is kept before its first turn"
        said: JsonObject = {"threadId": "thread-1", "input": [{"type": "text", "text": "hello"}]}
        assert params_of(request) == said | {"clientUserMessageId": None}
        await end.codex.reply(request, {"turn": {"id": "turn-1"}})
        await end.say("turn/started", turn={"id": "turn-1"})
        await end.delta("Hi")
        await end.complete()

    async with scene() as now:
        said = await talk(now, far)
        assert said.events[:-1] == [Text("m", "Hi")]
        assert said.ended == TurnCompleted("completed", None, None)
        assert said.begun is not None
        assert said.begun.note is None

        async def second(end: FarEnd) -> None:
            await end.start_turn("turn-2")
            await end.complete("turn-2")

        assert (await talk(now, second)).ended.status == "completed"


@in_virtual_time
async def test_events_before_the_start_response_are_received() -> None:
    async def far(end: FarEnd) -> None:
        await end.start_thread()
        request = await end.codex.read("turn/start")
        await end.say("turn/started", turn={"id": "turn-1"})
        await end.delta("first")
        await end.codex.reply(request, {"turn": {"id": "turn-1"}})
        await end.complete()

    assert (await talk_once(far)).events[0] == Text("m", "first")


@in_virtual_time
async def test_events_of_other_turns_are_ignored() -> None:
    async def far(end: FarEnd) -> None:
        await end.start()
        await end.delta("late", "turn-0")
        await end.complete("turn-0")
        await end.delta("mine")
        await end.complete()

    said = await talk_once(far)
    assert said.events[:-1] == [Text("m", "mine")]
    assert said.ended == TurnCompleted("completed", None, None)


@in_virtual_time
async def test_receive_returns_nothing_at_its_time_out() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:

        async def far() -> None:
            await now.end.start()

        tasks.start_soon(far)
        async with turn_of(now.conversation, text_input("hello")) as begun:
            by = anyio.current_time() + 7
            assert await begun.turn.receive(by=by) == []
            assert anyio.current_time() == pytest.approx(by)
            assert await begun.turn.receive(by=by - 1) == []
            tasks.start_soon(now.end.complete)
            assert [type(event) for event in await begun.turn.receive(by=math.inf)] == [Done]
            assert await begun.turn.receive() == []


# --- One turn at a time ---


@in_virtual_time
async def test_a_second_message_is_queued() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:
        first, second = Talk("one"), Talk("two")
        tasks.start_soon(first, now.conversation)
        await now.end.start_thread()
        await now.end.start_turn("turn-1")
        tasks.start_soon(second, now.conversation)
        with anyio.move_on_after(100) as waiting:
            await now.end.codex.read()
        assert waiting.cancelled_caught, "nothing was sent for the second message"
        await now.end.complete("turn-1")
        params = await now.end.start_turn("turn-2")
        assert params["input"] == [{"type": "text", "text": "two"}]
        assert first.ended.status == "completed"
        await now.end.complete("turn-2")


@in_virtual_time
async def test_a_cancelled_waiter_releases_no_slot() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:
        first, third = Talk("one"), Talk("three")
        tasks.start_soon(first, now.conversation)
        await now.end.start_thread()
        await now.end.start_turn("turn-1")
        with anyio.move_on_after(1):
            await Talk("two")(now.conversation)
        assert now.conversation.busy
        tasks.start_soon(third, now.conversation)
        with anyio.move_on_after(1) as waiting:
            await now.end.codex.read()
        assert waiting.cancelled_caught
        await now.end.complete("turn-1")
        params = await now.end.start_turn("turn-3")
        assert params["input"] == [{"type": "text", "text": "three"}]
        await now.end.complete("turn-3")


# --- Interrupting ---


@in_virtual_time
async def test_an_interrupt_stops_the_turn_and_closes_open_items() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:

        async def far() -> None:
            await now.end.start()
            await now.end.command()
            ids: JsonObject = {"threadId": "thread-1", "turnId": "turn-1"}
            assert await now.end.codex.answer("turn/interrupt", {}) == ids
            cleaned = await now.end.codex.answer("thread/backgroundTerminals/clean", {})
            assert cleaned == {"threadId": "thread-1"}
            await now.end.complete(status="interrupted")

        tasks.start_soon(far)
        async with turn_of(now.conversation, text_input("hello")) as begun:
            events: list[AgentEvent] = []
            while not any(isinstance(event, ToolUse) for event in events):
                events += await begun.turn.receive()
            begun.turn.interrupt()
            begun.turn.interrupt()
            events += await follow(begun)
        assert events[-2] == ToolResult("c", NO_RESULT, is_error=True, status="failed")
        assert begun.turn.ended == TurnCompleted("interrupted", None, None)
        assert not now.end.codex.unread


@in_virtual_time
async def test_an_interrupt_waits_for_the_turns_start() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:

        async def far() -> None:
            await now.end.start_thread()
            await now.end.codex.answer("turn/start", {"turn": {"id": "turn-1"}})
            with anyio.move_on_after(STOP_GRACE_S / 2) as waiting:
                await now.end.codex.read()
            assert waiting.cancelled_caught, "nothing is asked before the turn has started"
            await now.end.say("turn/started", turn={"id": "turn-1"})
            await now.end.obey()

        tasks.start_soon(far)
        async with turn_of(now.conversation, text_input("hello")) as begun:
            begun.turn.interrupt()
            await follow(begun)
            assert begun.turn.ended == TurnCompleted("interrupted", None, None)


@in_virtual_time
async def test_an_interrupt_sent_too_early_is_repeated() -> None:
    async def far(end: FarEnd) -> None:
        asked = []
        for _ in range(3):
            await end.codex.refuse(await end.codex.read("turn/interrupt"), -32600, "no active turn")
            asked.append(anyio.current_time())
        await end.obey()
        assert [asked[1] - asked[0], asked[2] - asked[1]] == pytest.approx([INTERRUPT_RETRY_S] * 2, abs=0.01)

    async with started_turn(far) as (_, begun):
        begun.turn.interrupt()
        await follow(begun)
        assert begun.turn.ended == TurnCompleted("interrupted", None, None)


@in_virtual_time
async def test_a_turn_may_complete_during_its_interrupt() -> None:
    async def far(end: FarEnd) -> None:
        request = await end.codex.read("turn/interrupt")
        await end.complete()
        await end.codex.refuse(request, -32600, "no active turn to interrupt")

    async with started_turn(far) as (_, begun):
        begun.turn.interrupt()
        await follow(begun)
        assert begun.turn.ended == TurnCompleted("completed", None, None)


@in_virtual_time
async def test_a_codex_that_ignores_the_interrupt_is_killed() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:

        async def far() -> None:
            await now.end.start()
            await now.end.codex.answer("turn/interrupt", {})
            await now.end.codex.answer("thread/backgroundTerminals/clean", {})

        tasks.start_soon(far)
        async with turn_of(now.conversation, text_input("hello")) as begun:
            began = anyio.current_time()
            begun.turn.interrupt()
            with pytest.raises(CodexGone, match="did not stop its turn"):
                await follow(begun)
            assert anyio.current_time() - began == pytest.approx(STOP_GRACE_S, abs=0.1)
        await anyio.sleep(1)
        assert now.end.codex.connection.error is not None


@in_virtual_time
async def test_leaving_the_block_early_stops_the_turn() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:

        async def far() -> None:
            await now.end.start_thread()
            await now.end.start_turn("turn-1")
            await now.end.obey("turn-1")
            await now.end.start_turn("turn-2")
            await now.end.complete("turn-2")

        tasks.start_soon(far)
        with pytest.raises(KeyError):
            async with turn_of(now.conversation, text_input("hello")):
                raise KeyError
        await Talk()(now.conversation)


@in_virtual_time
async def test_leaving_the_block_early_kills_an_unresponsive_codex() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:

        async def far() -> None:
            await now.end.start_thread()
            await now.end.start_turn("turn-1")

        tasks.start_soon(far)
        async with turn_of(now.conversation, text_input("hello")):
            pass
        await anyio.sleep(1)
        assert now.end.codex.connection.error is not None
        assert not now.conversation.busy


@in_virtual_time
async def test_cancelling_the_caller_during_a_turn_stops_the_turn() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:
        asker = Talk()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as asking:
                asking.start_soon(asker, now.conversation)
                await now.end.start_thread()
                await now.end.start_turn("turn-1")
                tasks.start_soon(now.end.obey)
                scope.cancel()
        assert not now.conversation.busy


@in_virtual_time
async def test_cancelling_the_caller_during_the_start_stops_the_turn() -> None:
    """Whatever codex has been asked is waited for: a turn that nobody knows would block the thread."""
    async with scene() as now, anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as asking:
                asking.start_soon(Talk(), now.conversation)
                await now.end.start_thread()
                request = await now.end.codex.read("turn/start")

                async def far() -> None:
                    await anyio.sleep(1)
                    await now.end.codex.reply(request, {"turn": {"id": "turn-1"}})
                    await now.end.say("turn/started", turn={"id": "turn-1"})
                    await now.end.obey()

                tasks.start_soon(far)
                scope.cancel()
        assert not now.conversation.busy
        assert not now.end.codex.unread


# --- Silence ---


@in_virtual_time
async def test_an_idle_thread_without_an_end_takes_codexs_record() -> None:
    async def far(end: FarEnd) -> None:
        await end.start()
        await end.idle()
        params = await end.codex.answer("thread/turns/list", recorded({"id": "turn-0"}, {"id": "turn-1", **DONE}))
        assert params == {"threadId": "thread-1", "limit": LAST_TURNS, "itemsView": "full"}

    async with scene() as now:
        began = anyio.current_time()
        said = await talk(now, far)
        assert said.ended == TurnCompleted("completed", None, MessageCompleted("m-9", "the whole", None))
        assert anyio.current_time() - began == pytest.approx(IDLE_GRACE_S, abs=0.1)


DONE: JsonObject = {
    "status": "completed",
    "items": [{"type": "agentMessage", "id": "m-9", "text": "the whole"}, {"type": "reasoning", "id": "r"}],
}


def recorded(*turns: JsonObject) -> JsonObject:
    """Return codex's record of turns; it says the newest first."""
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
def test_an_idle_thread_completes_whatever_the_record_says(
    answer: JsonValue, status: str, sentence: str | None
) -> None:
    async def far(end: FarEnd) -> None:
        await end.start()
        await end.idle()
        request = await end.codex.read("thread/turns/list")
        if answer == "refused":
            await end.codex.refuse(request, -32600, "thread not loaded")
        else:
            await end.codex.reply(request, answer)

    @in_virtual_time
    async def test() -> None:
        async with scene() as now:
            ended = (await talk(now, far)).ended
            assert ended.status == status
            assert (ended.failure is None) == (sentence is None)
            if ended.failure is not None and sentence is not None:
                assert sentence in ended.failure.message

    test()


@in_virtual_time
async def test_an_idle_thread_with_a_turn_in_progress_continues() -> None:
    async def far(end: FarEnd) -> None:
        await end.start()
        await end.idle()
        await end.codex.answer("thread/turns/list", recorded({"id": "turn-1", "status": "inProgress"}))
        await anyio.sleep(100)
        await end.delta("still here")
        await end.complete()

    async with scene() as now:
        assert [type(event) for event in (await talk(now, far)).events] == [Text, Done]


@in_virtual_time
async def test_idle_before_the_turns_start_is_ignored() -> None:
    async def far(end: FarEnd) -> None:
        await end.start_thread()
        await end.codex.answer("turn/start", {"turn": {"id": "turn-1"}})
        await end.idle()
        await anyio.sleep(100)
        await end.say("turn/started", turn={"id": "turn-1"})
        await end.complete()

    async with scene() as now:
        assert (await talk(now, far)).ended.status == "completed"
        assert not now.end.codex.unread


@in_virtual_time
async def test_idle_right_before_the_end_sends_no_request() -> None:
    async def far(end: FarEnd) -> None:
        await end.start()
        await end.idle()
        await anyio.sleep(IDLE_GRACE_S / 2)
        await end.complete()

    async with scene() as now:
        assert (await talk(now, far)).ended.status == "completed"
        assert not now.end.codex.unread


@in_virtual_time
async def test_an_error_without_an_end_ends_the_turn() -> None:
    async def far(end: FarEnd) -> None:
        await end.start_thread()
        await end.codex.answer("turn/start", {"turn": {"id": "turn-1"}})
        await end.error("model not found", will_retry=False)
        await end.idle("systemError")

    async with scene() as now:
        began = anyio.current_time()
        ended = (await talk(now, far)).ended
        assert ended.status == "failed"
        assert ended.failure is not None
        assert ended.failure.message == "model not found"
        assert anyio.current_time() - began < 2 * IDLE_GRACE_S
        assert not now.end.codex.unread


@in_virtual_time
async def test_events_after_the_end_of_a_turn_are_ignored() -> None:
    async def far(end: FarEnd) -> None:
        await end.start()
        await end.command()
        item: JsonObject = {
            "type": "commandExecution",
            "id": "c",
            "command": "sleep 9",
            "cwd": "/w",
            "status": "failed",
        }
        turn: JsonObject = {"id": "turn-1", "status": "interrupted", "items": []}
        await end.codex.write(
            {"method": "turn/completed", "params": {"threadId": "thread-1", "turn": turn}},
            {"method": "item/completed", "params": {"threadId": "thread-1", "turnId": "turn-1", "item": item}},
        )

    said = await talk_once(far)
    assert [type(event) for event in said.events[-2:]] == [ToolResult, Done]
    assert [event for event in said.events if isinstance(event, ToolResult)] == [said.events[-2]]


@in_virtual_time
async def test_a_silent_turn_is_stopped_and_fails() -> None:
    async def far(end: FarEnd) -> None:
        await end.start()
        await end.command()
        await end.obey()

    async with scene() as now:
        began = anyio.current_time()
        said = await talk(now, far)
        assert said.ended.status == "failed"
        assert said.ended.failure is not None
        assert "silent for 300 s" in said.ended.failure.message
        assert anyio.current_time() - began == pytest.approx(LIMITS.inactivity_s, abs=1)
        assert [type(event) for event in said.events[-3:]] == [ToolResult, Error, Done], "open tool calls are closed"

        async def next_one(end: FarEnd) -> None:
            await end.start_turn("turn-2")
            await end.complete("turn-2")

        assert (await talk(now, next_one)).ended.status == "completed"


@in_virtual_time
async def test_a_silent_turn_that_ignores_the_interrupt_kills_codex() -> None:
    async def far(end: FarEnd) -> None:
        await end.start()
        await end.codex.answer("turn/interrupt", {})
        await end.codex.answer("thread/backgroundTerminals/clean", {})

    async with scene() as now:
        began = anyio.current_time()
        ended = (await talk(now, far)).ended
        assert ended.failure is not None
        assert "silent" in ended.failure.message
        assert anyio.current_time() - began == pytest.approx(LIMITS.inactivity_s + STOP_GRACE_S, abs=1)
        await anyio.sleep(1)
        assert now.end.codex.connection.error is not None


@in_virtual_time
async def test_a_printing_command_is_not_silence() -> None:
    async def far(end: FarEnd) -> None:
        await end.start()
        await end.command()
        for _ in range(10):
            await anyio.sleep(LIMITS.inactivity_s - 1)
            await end.say("item/commandExecution/outputDelta", turnId="turn-1", itemId="c", delta=".")
        await end.complete()

    said = await talk_once(far)
    assert said.ended.status == "completed"
    assert sum(isinstance(event, ToolOutput) for event in said.events) == 10


@in_virtual_time
async def test_endless_reconnecting_counts_as_silence() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:

        async def far(end: FarEnd) -> None:
            await end.start()
            tasks.start_soon(reconnect, end)
            await end.obey()
            tasks.cancel_scope.cancel()

        async def reconnect(end: FarEnd) -> None:
            while True:
                await end.error("Reconnecting... waiting for network", will_retry=True)
                await anyio.sleep(20)

        began = anyio.current_time()
        said = await talk(now, far)
        assert said.ended.failure is not None
        assert "silent" in said.ended.failure.message
        assert anyio.current_time() - began == pytest.approx(LIMITS.inactivity_s, abs=1)
        assert RunWarning("Reconnecting... waiting for network", will_retry=True) in said.events


@in_virtual_time
async def test_other_threads_and_turns_do_not_keep_a_turn_alive() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:

        async def far(end: FarEnd) -> None:
            await end.start()
            tasks.start_soon(chatter, end)
            await end.obey()
            tasks.cancel_scope.cancel()

        async def chatter(end: FarEnd) -> None:
            while True:
                await end.delta("old", "turn-0")
                await end.say("item/agentMessage/delta", "thread-2", turnId="turn-1", itemId="m", delta="x")
                await anyio.sleep(20)

        assert (await talk(now, far)).ended.status == "failed"


@in_virtual_time
async def test_a_busy_turn_is_stopped_at_its_time_budget() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:

        async def far(end: FarEnd) -> None:
            await end.start()
            tasks.start_soon(work, end)
            await end.obey()
            tasks.cancel_scope.cancel()

        async def work(end: FarEnd) -> None:
            while True:
                await end.delta(".")
                await anyio.sleep(10)

        began = anyio.current_time()
        said = await talk(now, far)
        assert said.ended.failure is not None
        assert "longer than 3600 s" in said.ended.failure.message
        assert anyio.current_time() - began == pytest.approx(LIMITS.total_s, abs=1)


# --- Threads that come back, and threads that do not ---


@in_virtual_time
async def test_a_known_thread_is_resumed_with_all_its_options() -> None:
    async def far(end: FarEnd) -> None:
        params = await end.codex.answer("thread/resume", ECHO)
        assert params == {"threadId": "thread-1", "excludeTurns": True, **OPTIONS.params()}
        await end.start_turn()
        await end.complete()

    async with scene(known="thread-1") as now:
        assert (await talk(now, far)).ended.status == "completed"
        assert now.memory.saved == []


@in_virtual_time
async def test_a_thread_is_resumed_in_a_new_codex() -> None:
    async with scene(codexes=2) as now:
        first, second = now.ends

        async def one(end: FarEnd) -> None:
            await end.start()
            await end.complete()

        await talk(now, one)
        await first.codex.exit()
        while first.codex.connection.error is None:
            await anyio.sleep(0.01)

        async def two(_end: FarEnd) -> None:
            await second.codex.answer("thread/resume", ECHO)
            await second.start_turn("turn-2")
            await second.complete("turn-2")

        said = await talk(now, two)
        assert said.ended.status == "completed"
        assert said.begun is not None
        assert said.begun.note is None


@pytest.mark.parametrize("reason", ["no rollout found for thread id thread-0", "rollout is empty", "invalid thread id"])
def test_a_lost_thread_is_replaced_with_a_notice(reason: str) -> None:
    async def far(end: FarEnd) -> None:
        await end.codex.refuse(await end.codex.read("thread/resume"), -32600, reason)
        await end.start()
        await end.complete()

    @in_virtual_time
    async def test() -> None:
        async with scene(known="thread-0") as now:
            said = await talk(now, far)
            assert said.begun is not None
            assert said.begun.note is not None
            assert reason in said.begun.note
            assert now.memory.saved == ["thread-1"]

    test()


@in_virtual_time
async def test_a_thread_with_another_writer_is_awaited() -> None:
    async def far(end: FarEnd) -> None:
        for _ in range(3):
            request = await end.codex.read("thread/resume")
            await end.codex.refuse(request, -32600, "thread thread-1 already has an active writer")
        await end.codex.answer("thread/resume", ECHO)
        await end.start_turn()
        await end.complete()

    assert (await talk_once(far, known="thread-1")).ended.status == "completed"


@in_virtual_time
async def test_a_thread_with_a_permanent_writer_is_replaced() -> None:
    async def far(end: FarEnd) -> None:
        began = anyio.current_time()
        while (request := await end.codex.read())["method"] == "thread/resume":
            await end.codex.refuse(request, -32600, "already has an active writer")
        assert anyio.current_time() - began == pytest.approx(OTHER_WRITER_GRACE_S, abs=0.5)
        await end.codex.reply(request, {"thread": {"id": "thread-1"}, **ECHO})
        await end.start_turn()
        await end.complete()

    said = await talk_once(far, known="thread-0")
    assert said.begun is not None
    assert said.begun.note is not None
    assert "active writer" in said.begun.note


@in_virtual_time
async def test_an_archived_thread_is_resumed() -> None:
    async with scene() as now:

        async def one(end: FarEnd) -> None:
            await end.start()
            await end.complete()

        async def two(end: FarEnd) -> None:
            await end.codex.refuse(await end.codex.read("turn/start"), -32600, "thread not found: thread-1")
            await end.codex.answer("thread/resume", ECHO)
            await end.start_turn("turn-2")
            await end.complete("turn-2")

        await talk(now, one)
        assert (await talk(now, two)).ended.status == "completed"


@pytest.mark.parametrize("echoed", ["dangerFullAccess", "readOnly", None])
def test_a_sandbox_other_than_the_configured_one_is_an_error(echoed: str | None) -> None:
    async def far(end: FarEnd) -> None:
        answer: JsonObject = {"thread": {"id": "thread-1"}, "sandbox": {"type": echoed}}
        await end.codex.answer("thread/start", answer if echoed else {"thread": {"id": "thread-1"}})

    @in_virtual_time
    async def test() -> None:
        async with scene() as now:
            with pytest.raises(ExceptionGroup) as raised:
                await talk(now, far)
            assert raised.group_contains(ProtocolError, match="instead of workspaceWrite")
            assert now.memory.saved == []

    test()


@in_virtual_time
async def test_a_rejected_configuration_does_not_lose_the_thread() -> None:
    async def far(end: FarEnd) -> None:
        refusal = "failed to load configuration: Model provider `mine` not found"
        await end.codex.refuse(await end.codex.read("thread/resume"), -32600, refusal)

    async with scene(known="thread-0") as now:
        with pytest.raises(ExceptionGroup) as raised:
            await talk(now, far)
        assert raised.group_contains(CodexRefused, match="Model provider … not found")
        assert now.memory.saved == []


@in_virtual_time
async def test_other_errors_reach_the_caller() -> None:
    async def far(end: FarEnd) -> None:
        await end.start_thread()
        await end.codex.refuse(await end.codex.read("turn/start"), -32602, "input_too_large")

    async with scene() as now:
        with pytest.raises(ExceptionGroup) as raised:
            await talk(now, far)
        assert raised.group_contains(CodexRefused, match="input_too_large")
        assert not now.conversation.busy


@in_virtual_time
async def test_a_thread_id_that_cannot_be_stored_starts_no_turn() -> None:
    class Broken(Memory):
        async def save(self, thread_id: str, instructions: str | None = None) -> None:
            raise OSError("disk full")

    async def far(end: FarEnd) -> None:
        await end.start_thread()

    async with memory_codex() as codex:
        now = _scene([codex], Broken(), OPTIONS, LIMITS)
        for _ in range(2):
            with pytest.raises(ExceptionGroup) as raised:
                await talk(now, far)
            assert raised.group_contains(OSError, match="disk full")


# --- Instructions ---

OLD = Instructions("Be polite.")
BRIEF = replace(OPTIONS, instructions=Instructions("Be brief."))


@in_virtual_time
async def test_a_new_thread_starts_with_the_instructions() -> None:
    async def far(end: FarEnd) -> None:
        assert (await end.start_thread())["developerInstructions"] == "Be brief."
        await end.start_turn()
        await end.complete()

    async with scene(options=BRIEF) as now:
        await talk(now, far)
        assert now.memory.told == BRIEF.instructions.digest


@in_virtual_time
async def test_unchanged_instructions_are_not_sent_again() -> None:
    async def far(end: FarEnd) -> None:
        assert (await end.codex.answer("thread/resume", ECHO))["developerInstructions"] == "Be brief."
        await end.start_turn()
        await end.complete()

    async with scene(known="thread-1", options=BRIEF) as now:
        now.memory.told = BRIEF.instructions.digest
        await talk(now, far)
        assert now.memory.saved == []


@pytest.mark.parametrize(
    ("told", "options", "expected"),
    [(OLD, BRIEF, "Be brief."), (Instructions(), BRIEF, "Be brief."), (OLD, OPTIONS, "no longer in force")],
)
def test_changed_instructions_are_sent_once(told: Instructions, options: ThreadOptions, expected: str) -> None:
    async def far(end: FarEnd) -> None:
        await end.codex.answer("thread/resume", ECHO)
        request = await end.codex.read("thread/inject_items")
        assert end.memory.saved == [], "what codex has not taken was not told"
        await end.codex.reply(request, {})
        match params_of(request):
            case {"threadId": "thread-1", "items": [{"role": "developer", "content": [{"text": str(text)}]}]}:
                assert expected in text
            case other:
                pytest.fail(f"told {other}")
        await end.start_turn()
        await end.complete()

    async def again(end: FarEnd) -> None:
        await end.start_turn("turn-2")
        await end.complete("turn-2")

    @in_virtual_time
    async def test() -> None:
        async with scene(known="thread-1", options=options) as now:
            now.memory.told = told.digest
            await talk(now, far)
            assert now.memory.told == options.instructions.digest
            await talk(now, again)

    test()


@in_virtual_time
async def test_instructions_are_sent_again_after_a_crash() -> None:
    async with scene(codexes=2, known="thread-1", options=BRIEF) as now:
        first, second = now.ends

        async def far(_end: FarEnd) -> None:
            await first.codex.answer("thread/resume", ECHO)
            await first.codex.read("thread/inject_items")
            await first.codex.exit()
            await second.codex.answer("thread/resume", ECHO)
            await second.codex.answer("thread/inject_items", {})
            await second.start_turn()
            await second.complete()

        assert (await talk(now, far)).ended.status == "completed"
        assert now.memory.told == BRIEF.instructions.digest


# --- Codex's death ---


@in_virtual_time
async def test_a_codex_that_died_unnoticed_is_replaced_once() -> None:
    async with scene(codexes=2) as now:
        first, second = now.ends

        async def one(end: FarEnd) -> None:
            await end.start()
            await end.complete()

        await talk(now, one)

        async def two(_end: FarEnd) -> None:
            await first.codex.read("turn/start")
            await first.codex.exit()
            await second.codex.answer("thread/resume", ECHO)
            params = await second.start_turn("turn-2")
            assert params["input"] == [{"type": "text", "text": "again"}]
            await second.complete("turn-2")

        assert (await talk(now, two, text="again")).ended.status == "completed"


@in_virtual_time
async def test_a_thread_that_crashes_every_codex_is_given_up() -> None:
    async with scene(codexes=MAX_ATTEMPTS + 1) as now:

        async def far(_end: FarEnd) -> None:
            for end in now.ends[:MAX_ATTEMPTS]:
                await end.codex.read("thread/start")
                await end.codex.exit()

        with pytest.raises(ExceptionGroup) as raised:
            await talk(now, far)
        assert raised.group_contains(CodexGone)
        with anyio.move_on_after(1) as waiting:
            await now.ends[MAX_ATTEMPTS].codex.read()
        assert waiting.cancelled_caught


@pytest.mark.parametrize("deaths", [0, MAX_ATTEMPTS - 1, MAX_ATTEMPTS])
def test_the_record_is_read_again_after_a_crash(deaths: int) -> None:
    @in_virtual_time
    async def test() -> None:
        async with scene(codexes=MAX_ATTEMPTS, known="thread-1") as now, anyio.create_task_group() as tasks:

            async def far() -> None:
                for end in now.ends[:deaths]:
                    await end.codex.answer("thread/resume", ECHO)
                    await end.codex.read("thread/turns/list")
                    await end.codex.exit()
                for end in now.ends[deaths:][:1]:
                    await end.codex.answer("thread/resume", ECHO)
                    await end.codex.answer("thread/turns/list", recorded())

            tasks.start_soon(far)
            async with now.conversation.lease() as lease:
                if deaths < MAX_ATTEMPTS:
                    assert await lease.recorded_end("task/", text_input("hello")) is TurnRecord.MISSING
                else:
                    with pytest.raises(CodexGone):
                        await lease.recorded_end("task/", text_input("hello"))

    test()


@in_virtual_time
async def test_a_turn_that_may_have_started_is_not_started_again() -> None:
    async with scene(codexes=2) as now:
        first, second = now.ends

        async def far(_end: FarEnd) -> None:
            await first.start_thread()
            await first.codex.read("turn/start")
            await first.say("turn/started", turn={"id": "turn-1"})
            await first.codex.exit()

        with pytest.raises(ExceptionGroup) as raised:
            await talk(now, far)
        assert raised.group_contains(CodexGone)
        with anyio.move_on_after(1) as waiting:
            await second.codex.read()
        assert waiting.cancelled_caught


@in_virtual_time
async def test_a_crash_during_a_turn_ends_it_after_its_last_event() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:

        async def far() -> None:
            await now.end.start()
            await now.end.delta("half")
            await now.end.codex.exit()

        tasks.start_soon(far)
        began = anyio.current_time()
        async with turn_of(now.conversation, text_input("hello")) as begun:
            events: list[AgentEvent] = []

            async def listen() -> None:
                while True:
                    events.extend(await begun.turn.receive())

            with pytest.raises(CodexGone, match="exit code 0"):
                await listen()
        assert events == [Text("m", "half")]
        assert anyio.current_time() - began < 1


@in_virtual_time
async def test_an_unresponsive_codex_is_replaced_and_gets_the_turn() -> None:
    """A thread with a turn that nobody follows would take no other."""
    async with scene(codexes=2) as now:
        first, second = now.ends

        async def far(_end: FarEnd) -> None:
            await first.start_thread()
            await first.codex.read("turn/start")
            await second.codex.answer("thread/resume", ECHO)
            await second.start_turn("turn-2")
            await second.complete("turn-2")

        assert (await talk(now, far)).ended.status == "completed"
        assert first.codex.connection.error is not None


# --- Usage ---


@in_virtual_time
async def test_usage_is_counted_by_turn_and_by_thread() -> None:
    async with scene() as now:
        for turn, before in (("turn-1", 0), ("turn-2", 150)):

            async def far(end: FarEnd, turn: str = turn, before: int = before) -> None:
                if turn == "turn-1":
                    await end.start_thread()
                await end.start_turn(turn)
                # The first call is told twice, as codex 0.130 does.
                for total, last in ((100, 100), (100, 100), (150, 50)):
                    await end.say("thread/tokenUsage/updated", turnId=turn, tokenUsage=usage(before + total, last))
                await end.complete(turn)

            said = await talk(now, far)
            assert said.begun is not None
            assert said.begun.turn.usage == TokenUsage(150, 150)
            assert said.begun.turn.thread_usage == TokenUsage(before + 150, before + 150)
            assert isinstance(said.events[0], Usage)


@in_virtual_time
async def test_usage_of_a_resumed_thread_starts_with_this_turn() -> None:
    async def far(end: FarEnd) -> None:
        await end.codex.answer("thread/resume", ECHO)
        await end.start_turn()
        for total, last in ((1100, 100), (1150, 50)):
            await end.say("thread/tokenUsage/updated", turnId="turn-1", tokenUsage=usage(total, last))
        await end.complete()

    said = await talk_once(far, known="thread-1")
    assert said.begun is not None
    assert said.begun.turn.usage == TokenUsage(150, 150)
    assert said.begun.turn.thread_usage == TokenUsage(1150, 1150)


# --- ThreadRegistry ---


def conversations() -> ThreadRegistry[CodexThread]:
    def connect() -> AbstractAsyncContextManager[Connection]:
        raise AssertionError

    return ThreadRegistry(lambda _owner, _context: CodexThread(connect, Memory(), OPTIONS, LIMITS))


def test_an_owners_context_is_one_conversation() -> None:
    known = conversations()
    assert known.get("me", "c") is known.get("me", "c")
    assert known.get("me", "c") is not known.get("me", "d")
    assert known.get("me", "c") is not known.get("you", "c")


def test_idle_conversations_over_the_limit_are_closed() -> None:
    known = conversations()
    oldest, second = known.get("me", "oldest"), known.get("me", "second")
    for number in range(MAX_THREADS - 2):
        known.get("me", str(number))
    assert known.get("me", "oldest") is oldest, "used again, so not the oldest any more"
    known.get("me", "one more")
    assert known.get("me", "oldest") is oldest
    assert known.get("me", "second") is not second


@in_virtual_time
async def test_a_busy_conversation_is_not_closed() -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:

        @asynccontextmanager
        async def connect() -> AsyncIterator[Connection]:
            yield codex.connection

        known = ThreadRegistry(lambda _owner, _context: CodexThread(connect, Memory(), OPTIONS, LIMITS))
        busy = known.get("me", "busy")
        tasks.start_soon(Talk(), busy)
        end = FarEnd(codex, Memory())
        await end.start_thread()
        for number in range(MAX_THREADS + 5):
            known.get("me", str(number))
        assert known.get("me", "busy") is busy
        await end.start_turn()
        await end.complete()


# --- What codex asks ---


def approval(number: int, turn_id: str = "turn-1") -> JsonObject:
    params: JsonObject = {"threadId": "thread-1", "turnId": turn_id, "itemId": "c", "command": "make", "cwd": "/w"}
    return {"id": number, "method": "item/commandExecution/requestApproval", "params": params}


@in_virtual_time
async def test_a_turns_deadlines_pause_during_a_question() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:

        async def far() -> None:
            await now.end.start()
            await now.end.codex.write(approval(0))
            answer = await now.end.codex.read()
            assert answer == {"id": 0, "result": {"decision": "accept"}}
            await anyio.sleep(LIMITS.inactivity_s - 1)
            await now.end.complete()

        tasks.start_soon(far)
        async with turn_of(now.conversation, text_input("hello")) as begun:
            while begun.turn.pending is None:
                await begun.turn.receive()
            pending = begun.turn.pending
            assert await begun.turn.receive(by=anyio.current_time() + 10 * LIMITS.total_s) == []
            begun.turn.answer(pending, {"decision": "accept"})
            events = await follow(begun)
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

    async def far(end: FarEnd) -> None:
        await end.codex.write(
            {"method": "item/started", "params": {**of_turn, "item": item}},
            {"id": 0, "method": "item/fileChange/requestApproval", "params": {**of_turn, "itemId": "p"}},
        )
        await end.codex.read()
        await end.complete()

    async with started_turn(far) as (_, begun):
        while begun.turn.pending is None:
            await begun.turn.receive()
        pending = begun.turn.pending
        assert isinstance(pending.subject, PatchQuestion)
        assert [change.path for change in pending.subject.changes] == ["a.txt"]
        begun.turn.answer(pending, {"decision": "accept"})
        await follow(begun)


@in_virtual_time
async def test_a_question_resolved_by_codex_is_withdrawn() -> None:
    async def far(end: FarEnd) -> None:
        await end.codex.write(approval(0), approval(1))
        await end.say("serverRequest/resolved", requestId=0)
        assert await end.codex.read() == {"id": 0, "result": {"decision": "decline"}}
        await end.complete()
        assert await end.codex.read() == {"id": 1, "result": {"decision": "decline"}}

    async with started_turn(far) as (_, begun):
        await follow(begun)
        assert begun.turn.pending is None


@in_virtual_time
async def test_a_question_of_another_turn_or_type_is_declined_at_once() -> None:
    async def far(end: FarEnd) -> None:
        await end.start()
        await end.codex.write(approval(7, "turn-0"))
        assert await end.codex.read() == {"id": 7, "result": {"decision": "decline"}}
        unknown: JsonObject = {"threadId": "thread-1", "turnId": "turn-1"}
        await end.codex.write({"id": 8, "method": "item/telepathy/request", "params": unknown})
        assert (await end.codex.read())["error"]
        await end.complete()

    assert (await talk_once(far)).ended.status == "completed"


@in_virtual_time
async def test_steering_input_joins_a_running_turn_or_is_too_late() -> None:
    async def far(end: FarEnd) -> None:
        steered = await end.codex.answer("turn/steer", {"turnId": "turn-1"})
        assert steered == {
            "threadId": "thread-1",
            "expectedTurnId": "turn-1",
            "input": [{"type": "text", "text": "look here"}],
            "clientUserMessageId": "mark",
        }
        await end.codex.refuse(await end.codex.read("turn/steer"), -32600, "no active turn to steer")
        await end.complete()

    async with started_turn(far) as (_, begun):
        assert await begun.turn.steer(text_input("look here"), "mark")
        assert not await begun.turn.steer(text_input("and here"))
        await follow(begun)


@in_virtual_time
async def test_overridden_options_are_restored_for_the_next_turn() -> None:
    async with scene() as now:

        async def run(options: TurnOptions | None = None) -> JsonObject:
            started: list[JsonObject] = []

            async def far() -> None:
                message = await now.end.codex.read()
                if message["method"] == "thread/start":
                    await now.end.codex.reply(message, {"thread": {"id": "thread-1"}, **ECHO})
                    message = await now.end.codex.read()
                started.append(params_of(message))
                await now.end.codex.reply(message, {"turn": {"id": "turn-1"}})
                if options is not None and options.effort is not None:
                    models: JsonValue = [{"model": OPTIONS.model, "defaultReasoningEffort": "medium"}]
                    await now.end.codex.answer("model/list", {"data": models})
                await now.end.say("turn/started", turn={"id": "turn-1"})
                await now.end.complete()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(far)
                async with now.conversation.lease() as lease, lease.turn(text_input("x"), None, options) as begun:
                    await follow(begun)
            own = ("model", "effort", "cwd", "outputSchema")
            return {name: value for name, value in started[0].items() if name in own}

        assert await run() == {}
        wish = TurnOptions("big", "high", Path("/w/sub"), {"type": "object"})
        own: JsonObject = {"model": "big", "effort": "high", "cwd": "/w/sub", "outputSchema": {"type": "object"}}
        assert await run(wish) == own
        usual: JsonObject = {"model": OPTIONS.model, "effort": "medium", "cwd": "/w"}
        assert await run() == usual
        assert await run(TurnOptions(model="other")) == {**usual, "model": "other"}
