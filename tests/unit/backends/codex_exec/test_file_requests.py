"""Calls of our tools on their way to the turn that they are made in; that codex makes them is tested in e2e."""

from collections.abc import Sequence

import anyio
import pytest

from codex_workspace.backends.codex_exec.file_requests import NO_TURN, FileRequests
from codex_workspace.backends.codex_exec.turn import ExecTurn
from codex_workspace.common.errors import ToolRefused
from codex_workspace.common.values import JsonObject
from codex_workspace.runtimes.backend import ToolCaller
from tests.unit.backends.codex_exec.test_turn import made

ME, YOU = ToolCaller("me", "ctx"), ToolCaller("you", "ctx")
FILE: JsonObject = {"path": "a", "name": None}


def answered(said: str, *, success: bool) -> JsonObject:
    return {"contentItems": [{"type": "inputText", "text": said}], "success": success}


async def answer(turn: ExecTurn, results: Sequence[JsonObject]) -> None:
    for result in results:
        while turn.pending is None:
            await turn.receive()
        turn.answer(turn.pending, result)


async def test_a_call_reaches_the_turn_of_its_caller_though_it_comes_before_the_turn_is_known() -> None:
    errands = FileRequests()
    mine, _ = made(stays=True)
    yours, _ = made(stays=True)
    told: list[str] = []

    async def call() -> None:
        told.append(await errands.hand_over(ME, FILE))

    with errands.expecting(ME) as expected, errands.expecting(YOU) as other:
        other.begun(yours)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await anyio.wait_all_tasks_blocked()
            expected.begun(mine)
            await answer(mine, [answered("Handed over.", success=True)])
        assert yours.pending is None
    assert told == ["Handed over."]


async def test_a_refusal_is_one_and_so_is_the_end_of_the_turn() -> None:
    errands = FileRequests()
    turn, _ = made(stays=True)

    async def refused(expected: str) -> None:
        with pytest.raises(ToolRefused, match=expected):
            await errands.hand_over(ME, FILE)

    await refused(NO_TURN)
    async with anyio.create_task_group() as tasks:
        with errands.expecting(ME) as expected:
            expected.begun(turn)
            tasks.start_soon(refused, "no such file")
            await answer(turn, [answered("no such file", success=False)])
            tasks.start_soon(refused, NO_TURN)
            await turn.receive()
    async with anyio.create_task_group() as tasks:
        with errands.expecting(ME):
            tasks.start_soon(refused, NO_TURN)
            await anyio.wait_all_tasks_blocked()
    await refused(NO_TURN)
