"""Tests a turn of `codex exec`: its events, its time limits, its end, and its tool calls."""

import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import anyio
import pytest

from codex_workspace.backends.codex_exec.runtime import ExecConverter
from codex_workspace.backends.codex_exec.turn import NO_TURN, ExecTurn, FileRequests, ToolCalls
from codex_workspace.common.errors import CodexGone, ToolRefused
from codex_workspace.common.values import JsonObject
from codex_workspace.protocol.codex_events import PROCESS_EXITED, TokenUsage, TurnCompleted, TurnError
from codex_workspace.runtimes.backend import DynamicToolCall, ToolCaller, text_input
from codex_workspace.runtimes.events import AgentEvent, Done, ToolResult, ToolUse, Usage

if TYPE_CHECKING:
    from codex_workspace.runtimes.cli_run import CliRun

BEGUN = {"type": "turn.started"}
DONE = {"type": "turn.completed", "usage": {"input_tokens": 30, "output_tokens": 5}}
GIVEN_UP = {"type": "error", "message": "the model is gone"}
COMMAND = {"type": "item.started", "item": {"id": "1", "type": "command_execution", "command": "ls"}}


def line(event: object) -> str:
    return json.dumps(event)


@dataclass
class FakeRun:
    """A run that yields the given lines, and then ends unless it `stays`."""

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
    *said: Sequence[object],
    before: TokenUsage | None = None,
    total_s: float = 60.0,
    stays: bool = False,
    calls: ToolCalls | None = None,
) -> tuple[ExecTurn, FakeRun]:
    run = FakeRun(ExecConverter(before), deque(said), stays=stays)
    turn = ExecTurn(cast("CliRun", run), "thread", "0-turn", total_s)
    turn.accept(calls or ToolCalls())
    return turn, run


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


def test_a_turn_ends_with_its_process_after_open_items_are_closed() -> None:
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


def test_the_turns_tokens_are_unknown_if_those_before_it_are() -> None:
    async def test() -> None:
        turn, _ = made([BEGUN, DONE])
        await all_of(turn)
        assert (turn.usage, turn.thread_usage) == (None, TokenUsage(35, 30, 0, 5))

    run_in_time(test)


def test_a_process_that_dies_before_the_end_raises() -> None:
    async def test() -> None:
        turn, run = made([BEGUN])
        run.failure = TurnError("codex was ended by signal 9 (SIGKILL)", PROCESS_EXITED, None, None)
        with pytest.raises(CodexGone, match="SIGKILL") as gone:
            await all_of(turn)
        assert gone.value.tail == "the last line"

    run_in_time(test)


def test_a_failure_that_codex_reports_is_the_turns() -> None:
    async def test() -> None:
        turn, _ = made([BEGUN, GIVEN_UP])
        await all_of(turn)
        assert turn.ended is not None
        assert turn.ended.failure is not None
        assert (turn.ended.status, turn.ended.failure.message) == ("failed", "the model is gone")

    run_in_time(test)


def test_an_interrupt_and_the_time_limit_stop_the_run() -> None:
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


def test_a_turn_cannot_be_steered_and_its_reader_can_be_woken() -> None:
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
ME, YOU = ToolCaller("me", "ctx"), ToolCaller("you", "ctx")
FILE: JsonObject = {"path": "a", "name": None}


async def test_a_tool_call_wakes_the_reader_and_gets_one_result() -> None:
    calls = ToolCalls()
    turn, _ = made(stays=True, calls=calls)
    results: list[object] = []

    async def call() -> None:
        results.append(await calls.call(HAND_OVER))

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


def answered(text: str, *, success: bool) -> JsonObject:
    return {"contentItems": [{"type": "inputText", "text": text}], "success": success}


async def answer(turn: ExecTurn, result: JsonObject) -> None:
    while turn.pending is None:
        await turn.receive()
    turn.answer(turn.pending, result)


async def test_a_call_before_the_start_of_the_turn_reaches_the_turn_of_its_caller() -> None:
    requests = FileRequests()
    answers: list[str] = []

    async def call() -> None:
        answers.append(await requests.hand_over(ME, FILE))

    with requests.expecting(ME) as mine, requests.expecting(YOU) as other, anyio.fail_after(5):
        yours, _ = made(stays=True, calls=other)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await anyio.wait_all_tasks_blocked()
            turn, _ = made(stays=True, calls=mine)
            await answer(turn, answered("Handed over.", success=True))
        assert yours.pending is None
    assert answers == ["Handed over."]


async def test_a_call_is_rejected_by_the_reader_and_after_the_turn() -> None:
    requests = FileRequests()

    async def rejected(expected: str) -> None:
        with pytest.raises(ToolRefused, match=expected):
            await requests.hand_over(ME, FILE)

    await rejected(NO_TURN)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            with requests.expecting(ME) as calls:
                turn, _ = made(stays=True, calls=calls)
                tasks.start_soon(rejected, "no such file")
                await answer(turn, answered("no such file", success=False))
                tasks.start_soon(rejected, NO_TURN)
                await anyio.wait_all_tasks_blocked()
        await rejected(NO_TURN)
        assert await calls.call(HAND_OVER) is None
