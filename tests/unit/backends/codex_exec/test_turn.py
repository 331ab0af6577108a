"""A turn of `codex exec`: its lines as events, its clocks, and how it ends."""

import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio
import pytest

from codex_workspace.backends.codex_exec.turn import ExecTurn
from codex_workspace.common.errors import CodexGone
from codex_workspace.protocol.codex_events import TokenUsage, TurnCompleted, TurnError
from codex_workspace.protocol.failures import PROCESS_EXITED
from codex_workspace.runtimes.backend import DynamicToolCall, text_input
from codex_workspace.runtimes.convert import ExecConverter
from codex_workspace.runtimes.events import AgentEvent, Done, ToolResult, ToolUse, Usage

BEGUN = {"type": "turn.started"}
DONE = {"type": "turn.completed", "usage": {"input_tokens": 30, "output_tokens": 5}}
GIVEN_UP = {"type": "error", "message": "the model is gone"}
COMMAND = {"type": "item.started", "item": {"id": "1", "type": "command_execution", "command": "ls"}}


def line(event: object) -> str:
    return json.dumps(event)


@dataclass
class FakeRun:
    """A run that says what it is given, and is over then unless it `stays`."""

    lines: ExecConverter
    said: deque[Sequence[object]] = field(default_factory=deque)
    failure: TurnError | None = None
    stays: bool = False
    is_over: bool = False
    diagnostics: str = "the last line"
    aborted: anyio.Event = field(default_factory=anyio.Event)
    killed: bool = False

    async def take(self) -> list[AgentEvent]:
        if self.said:
            return [event for each in self.said.popleft() for event in self.lines.feed(line(each))]
        if self.is_over:
            return []
        if self.stays:
            await self.aborted.wait()
        self.is_over = True
        return self.lines.finish(self.failure, stopped=self.aborted.is_set())

    def abort(self) -> None:
        self.aborted.set()

    def kill(self) -> None:
        self.killed = True


def made(
    *said: Sequence[object], before: TokenUsage | None = None, total_s: float = 60.0, stays: bool = False
) -> tuple[ExecTurn, FakeRun]:
    run = FakeRun(ExecConverter(before), deque(said), stays=stays)
    return ExecTurn(run, "thread", "0-turn", total_s), run


async def all_of(turn: ExecTurn) -> list[AgentEvent]:
    events: list[AgentEvent] = []
    while turn.ended is None:
        events += await turn.receive()
    return events


def run_in_time(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(5):
            await test()

    anyio.run(bounded)


def test_the_end_is_told_when_the_process_is_gone_and_open_items_are_closed_before_it() -> None:
    async def test() -> None:
        turn, run = made([BEGUN, COMMAND, DONE], before=TokenUsage(10, 10))
        first = await turn.receive()
        assert [type(event) for event in first] == [ToolUse, Usage]
        assert (turn.ended, run.is_over) == (None, False)
        closed, end = await all_of(turn)
        assert isinstance(closed, ToolResult)
        assert isinstance(end, Done)
        assert turn.ended == TurnCompleted("completed", None, None)
        assert run.is_over
        assert turn.thread_usage == TokenUsage(35, 30, 0, 5)
        assert turn.usage == TokenUsage(25, 20, 0, 5)
        assert await turn.receive() == []

    run_in_time(test)


def test_tokens_before_a_turn_that_are_not_known_are_not_guessed() -> None:
    async def test() -> None:
        turn, _ = made([BEGUN, DONE])
        await all_of(turn)
        assert (turn.usage, turn.thread_usage) == (None, TokenUsage(35, 30, 0, 5))

    run_in_time(test)


def test_a_process_that_is_gone_before_its_turn_cuts_it_off() -> None:
    async def test() -> None:
        turn, run = made([BEGUN])
        run.failure = TurnError("codex was ended by signal 9 (SIGKILL)", PROCESS_EXITED, None, None)
        with pytest.raises(CodexGone, match="SIGKILL") as gone:
            await all_of(turn)
        assert gone.value.tail == "the last line"

    run_in_time(test)


def test_a_failure_that_codex_has_told_of_is_the_turns() -> None:
    async def test() -> None:
        turn, _ = made([BEGUN, GIVEN_UP])
        await all_of(turn)
        assert turn.ended is not None
        assert turn.ended.failure is not None
        assert (turn.ended.status, turn.ended.failure.message) == ("failed", "the model is gone")

    run_in_time(test)


def test_an_interrupt_and_the_budget_stop_the_run() -> None:
    async def test() -> None:
        turn, run = made([BEGUN, COMMAND], stays=True)
        await turn.receive()
        turn.interrupt()
        await all_of(turn)
        assert turn.ended == TurnCompleted("interrupted", None, None)
        assert run.aborted.is_set()
        turn, run = made([BEGUN], total_s=0.05, stays=True)
        await all_of(turn)
        assert turn.ended is not None
        assert turn.ended.failure is not None
        assert turn.ended.failure.kind == "watchdogTimeout"
        assert "longer than 0.05 s" in turn.ended.failure.message

    run_in_time(test)


def test_nothing_is_said_into_it_and_whoever_waits_can_be_woken() -> None:
    async def test() -> None:
        turn, run = made([BEGUN, COMMAND], stays=True)
        assert not await turn.steer(text_input("hello"))
        assert turn.pending is None
        await turn.receive()
        assert await turn.receive(by=anyio.current_time() + 0.02) == []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(turn.receive, math.inf)
            await anyio.sleep(0.02)
            turn.wake()
        turn.kill()
        assert run.killed

    run_in_time(test)


HAND_OVER = DynamicToolCall("hand_over_file", {"path": "a"})


async def test_a_call_of_a_tool_waits_for_the_reader_and_has_one_result() -> None:
    turn, _ = made(stays=True)
    results: list[object] = []

    async def call() -> None:
        results.append(await turn.serve(HAND_OVER))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            assert await turn.receive() == []
            pending = turn.pending
            assert pending is not None
            assert pending.subject == HAND_OVER
            turn.answer(pending, {"success": True})
            assert turn.pending is None
            turn.answer(pending, {"success": False})
    assert results == [{"success": True}]


async def test_a_call_that_nobody_will_answer_ends() -> None:
    turn, _ = made(stays=True)

    async def call() -> None:
        assert await turn.serve(HAND_OVER) is None

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await turn.receive()
            turn.leave()
        assert turn.pending is None
        await call()
