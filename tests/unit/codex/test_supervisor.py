"""Codex given out: started again, waited for, replaced; over small programs in memory, on a clock that jumps."""

import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from subprocess import PIPE

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.app_server import Connection
from codex_workspace.codex.supervisor import (
    DRAIN_AGAIN_S,
    DRAIN_S,
    LONGEST_PAUSE_S,
    MAX_SILENCE_S,
    STEADY_S,
    CodexSupervisor,
    SupervisorLimits,
    pause_after,
    resident_bytes,
)
from codex_workspace.common.errors import CodexCannotStart, CodexGone
from codex_workspace.common.values import Version
from tests.support.memory_codex import in_virtual_time

BOUNDS = SupervisorLimits(threads=10)
DEAD = "codex ended with exit code 1"


@dataclass(eq=False)
class Child(Connection):
    """A connection without a process."""

    number: int
    threads: int = 0
    has_completed_turn: bool = False
    error: CodexGone | None = None
    pid: int | None = None
    version: Version = (0, 169, 0)
    stands_still: bool = False

    def die(self) -> None:
        self.error = CodexGone(DEAD, "its last lines")

    async def responds(self, within_s: float) -> bool:
        if self.stands_still:
            await anyio.sleep(within_s)
        return not self.stands_still

    def kill(self) -> None:
        self.die()


@dataclass
class Factory:
    """Makes codexes; the next ones fail as often as `failing` says, after `start_s` seconds each."""

    failing: int = 0
    start_s: float = 0.0
    made: list[Child] = field(default_factory=list)
    closed: list[Child] = field(default_factory=list)
    tries: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Child]:
        self.tries.append(anyio.current_time())
        await anyio.sleep(self.start_s)
        if self.failing:
            self.failing -= 1
            raise CodexCannotStart("codex cannot start: it ended with exit code 7", "why it did")
        child = Child(len(self.made))
        self.made.append(child)
        try:
            yield child
        finally:
            self.closed.append(child)

    def pauses(self) -> list[float]:
        """The seconds between the tries."""
        return [after - before for before, after in pairwise(self.tries)]


@dataclass
class Scene:
    supply: CodexSupervisor
    factory: Factory

    async def get(self) -> Child:
        """Return the running codex."""
        async with self.use() as codex:
            pass
        return codex

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Child]:
        async with self.supply.use() as codex:
            assert isinstance(codex, Child)
            yield codex

    async def turn(self, duration_s: float = 0.0, threads: int = 0) -> Child:
        """Run a turn that ends well, after which codex holds `threads` more."""
        async with self.use() as codex:
            await anyio.sleep(duration_s)
            codex.threads += threads
            codex.has_completed_turn = True
        return codex


@asynccontextmanager
async def scene(
    bounds: SupervisorLimits = BOUNDS, *, failing: int = 0, start_s: float = 0.0, jitter: float = 1.0
) -> AsyncIterator[Scene]:
    factory = Factory(failing, start_s)
    async with anyio.create_task_group() as tasks:
        supply = CodexSupervisor(tasks, factory.open, bounds, lambda: jitter)
        yield Scene(supply, factory)
        await supply.close()


# --- Starting again ---


@in_virtual_time
async def test_everybody_gets_the_one_codex() -> None:
    async with scene() as now:
        first = await now.get()
        assert await now.turn() is first
        assert await now.get() is first
        assert now.factory.made == [first]


@in_virtual_time
async def test_the_first_failure_costs_no_pause() -> None:
    async with scene(failing=1) as now:
        before = anyio.current_time()
        await now.get()
        assert anyio.current_time() == before


@in_virtual_time
async def test_the_backoff_grows_and_waiters_get_codex_in_the_end() -> None:
    async with scene(failing=7) as now:
        await now.get()
        assert now.factory.pauses() == [0, 0.5, 1, 2, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


@in_virtual_time
async def test_many_that_wait_try_no_more_often_than_one() -> None:
    async with scene(failing=4) as now, anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(now.turn)
        await anyio.wait_all_tasks_blocked()
        await now.turn()
        assert now.factory.pauses() == [0, 0.5, 1, 2]
        assert len(now.factory.made) == 1


@in_virtual_time
async def test_jitter_shortens_a_pause() -> None:
    async with scene(failing=2, jitter=0.8) as now:
        await now.get()
        assert now.factory.pauses() == [0, pytest.approx(0.4)]


@in_virtual_time
async def test_waiting_is_bounded_and_reports_cause_and_attempts() -> None:
    async with scene(SupervisorLimits(restart_wait_s=10), failing=99) as now:
        before = anyio.current_time()
        with pytest.raises(CodexCannotStart) as raised:
            await now.turn()
        assert anyio.current_time() - before == 10
        assert raised.value.public == "codex cannot start: it ended with exit code 7; gave up after 5 failures in a row"
        assert raised.value.tail == "why it did"


@in_virtual_time
async def test_a_waiter_that_gives_up_leaves_the_next_attempt_to_others() -> None:
    async with scene(SupervisorLimits(restart_wait_s=10), failing=5) as now:
        with pytest.raises(CodexCannotStart):
            await now.turn()
        await anyio.sleep(15)
        await now.turn()
        assert now.factory.pauses()[-1] == LONGEST_PAUSE_S


@in_virtual_time
async def test_a_hanging_start_is_awaited_no_longer_than_a_failing_one() -> None:
    async with scene(SupervisorLimits(restart_wait_s=10), start_s=15) as now:
        with pytest.raises(CodexCannotStart, match="codex did not start within 10 s"):
            await now.turn()
        assert (await now.turn()).number == 0
        assert len(now.factory.tries) == 1


@in_virtual_time
async def test_a_failure_without_waiters_counts_too() -> None:
    async with scene(failing=2, start_s=15) as now:
        assert await now.supply.not_ready_reason(3) == "codex did not start within 3 s"
        await anyio.sleep(20)
        assert await now.supply.not_ready_reason(3) == (
            "codex cannot start: it ended with exit code 7; 1 failure in a row, it is restarting"
        )


@in_virtual_time
async def test_waiting_for_a_pause_can_be_cancelled() -> None:
    async with scene(failing=99) as now:
        with anyio.move_on_after(7) as waiting:
            await now.turn()
        assert waiting.cancelled_caught


@in_virtual_time
async def test_start_is_one_try() -> None:
    async with scene(failing=1) as now:
        with pytest.raises(CodexCannotStart, match=r"exit code 7\n"):
            await now.supply.start()
        assert await now.supply.start() == (0, 169, 0)
        assert len(now.factory.made) == 1


@in_virtual_time
async def test_an_early_start_is_the_try_of_start() -> None:
    async with scene(failing=1, start_s=3) as now:
        now.supply.start_soon()
        await anyio.sleep(10)
        with pytest.raises(CodexCannotStart, match=r"exit code 7\n"):
            await now.supply.start()
        assert len(now.factory.tries) == 1
        assert await now.supply.start() == (0, 169, 0)


@in_virtual_time
async def test_start_waits_for_an_early_start_and_close_ends_it() -> None:
    async with scene(start_s=3) as now:
        now.supply.start_soon()
        assert await now.supply.start() == (0, 169, 0)
        assert len(now.factory.tries) == 1
    async with scene(start_s=3) as now:
        now.supply.start_soon()
        await now.supply.close()
        assert now.factory.made == []


@given(st.integers(1, 3000), st.integers(1, 1000))
def test_a_pause_has_its_bounds(failures: int, max_restarts: int) -> None:
    pause = pause_after(failures, max_restarts)
    assert 0 <= pause <= LONGEST_PAUSE_S
    assert (pause == 0) == (failures == 1)
    assert pause_after(failures + 1, max_restarts) >= pause
    assert failures < max_restarts or failures == 1 or pause == LONGEST_PAUSE_S


# --- What counts as a failure ---


@in_virtual_time
async def test_a_codex_that_worked_is_replaced_at_once() -> None:
    async with scene() as now:
        for number in range(20):
            codex = await now.turn(STEADY_S)
            assert codex.number == number
            codex.die()
        assert now.factory.pauses() == [STEADY_S] * 19


@in_virtual_time
async def test_a_crash_after_a_completed_turn_causes_no_backoff() -> None:
    async with scene() as now:
        for _ in range(20):
            (await now.turn()).die()
        assert set(now.factory.pauses()) == {0}


@in_virtual_time
async def test_a_codex_that_dies_in_every_turn_is_paused_for() -> None:
    async with scene() as now:
        for _ in range(6):
            async with now.use() as codex:
                await anyio.sleep(STEADY_S + 1)
                codex.die()
        assert [pause - STEADY_S - 1 for pause in now.factory.pauses()] == [0, 0.5, 1, 2, LONGEST_PAUSE_S]


@in_virtual_time
async def test_a_turn_that_ends_well_makes_up_for_all_failures() -> None:
    async with scene(failing=4) as now:
        (await now.turn()).die()
        now.factory.failing = 1
        before = anyio.current_time()
        await now.turn()
        assert now.factory.tries[-3:] == [before, before, before + 0.5]


# --- Readiness ---


@in_virtual_time
async def test_readiness_starts_codex() -> None:
    async with scene() as now:
        assert await now.supply.not_ready_reason(3) is None
        (await now.get()).die()
        assert await now.supply.not_ready_reason(3) is None
        assert len(now.factory.made) == 2


@in_virtual_time
async def test_a_frozen_codex_is_not_ready_and_is_killed() -> None:
    async with scene() as now:
        codex = await now.turn(STEADY_S)
        codex.stands_still = True
        assert await now.supply.not_ready_reason(3) == "codex has not responded for 3 s"
        codex.stands_still = False
        assert await now.supply.not_ready_reason(3) is None
        codex.stands_still = True
        began = anyio.current_time()
        while (why := await now.supply.not_ready_reason(3)) is not None:
            assert why.startswith("codex has not responded for")
            await anyio.sleep(7)
        assert MAX_SILENCE_S <= anyio.current_time() - began <= MAX_SILENCE_S + 20
        assert (codex.error is not None, len(now.factory.made)) == (True, 2)


def test_a_broken_codex_fails_at_once_until_one_start_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    @in_virtual_time
    async def story() -> None:
        async with scene(failing=6) as now, anyio.create_task_group() as tasks:
            tasks.start_soon(now.turn)
            await anyio.sleep(5)
            assert now.factory.failing == 1
            before = anyio.current_time()
            assert await now.supply.not_ready_reason(3) == (
                "codex cannot start: it ended with exit code 7; 5 failures in a row, next attempt in 29 s"
            )
            assert anyio.current_time() == before
            await anyio.sleep(100)
            assert await now.supply.not_ready_reason(3) is None

    story()
    assert caplog.text.count("is broken after 5 failures in a row") == 1
    assert "why it did" in caplog.text
    assert caplog.text.count("works again after 6 failures in a row") == 1


@in_virtual_time
async def test_a_probe_alone_heals_it_too_once_codex_has_lived_for_a_while() -> None:
    async with scene(failing=5) as now:
        why = [await now.supply.not_ready_reason(3) for _ in range(8)]
        assert why[0] is not None
        while now.factory.failing or not now.factory.made:
            await anyio.sleep(1)
            why.append(await now.supply.not_ready_reason(3))
        assert why[-1] == "codex cannot start: it ended with exit code 7; 5 failures in a row, it has just started"
        await anyio.sleep(STEADY_S)
        assert await now.supply.not_ready_reason(3) is None
        assert now.factory.pauses()[-1] >= LONGEST_PAUSE_S


# --- Replacing ---


@in_virtual_time
async def test_a_codex_with_too_many_threads_is_replaced_between_turns() -> None:
    async with scene() as now:
        first = await now.turn(threads=9)
        assert await now.turn(threads=0) is first
        assert await now.turn(threads=1) is first
        await anyio.wait_all_tasks_blocked()
        assert now.factory.closed == [first], "its memory is free before anybody needs the next one"
        assert (await now.turn()).number == 1
        assert set(now.factory.pauses()) == {0}


@in_virtual_time
async def test_a_codex_with_too_much_memory_is_replaced() -> None:
    async with scene(SupervisorLimits(memory_mb=1)) as now:
        async with now.use() as first:
            # This process stands in for codex: it has more than a megabyte.
            first.pid = os.getpid()
        async with now.use() as second:
            assert second is not first
            second.pid = 2**22 + 1
        assert await now.turn() is second, "no process, no memory"


@in_virtual_time
async def test_running_turns_end_and_new_ones_wait_for_the_next_codex() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:
        used: list[int] = []

        async def turn(duration_s: float, threads: int) -> None:
            used.append((await now.turn(duration_s, threads)).number)

        tasks.start_soon(turn, 30, 1)
        tasks.start_soon(turn, 40, 1)
        await anyio.wait_all_tasks_blocked()
        await now.turn(threads=10)
        before = anyio.current_time()
        assert (await now.turn()).number == 1
        assert anyio.current_time() - before == 40
        assert sorted(used) == [0, 0]


@in_virtual_time
async def test_a_long_turn_does_not_delay_a_replacement_for_ever() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:
        tasks.start_soon(now.turn, 1000.0)
        await anyio.wait_all_tasks_blocked()
        await now.turn(threads=10)
        before = anyio.current_time()
        assert (await now.turn()).number == 0
        assert anyio.current_time() - before == DRAIN_S
        for _ in range(3):
            assert (await now.turn()).number == 0
        assert anyio.current_time() - before == DRAIN_S, "they are let in for a while"
        await anyio.sleep(DRAIN_AGAIN_S)
        await now.turn()
        before = anyio.current_time()
        assert (await now.turn()).number == 0
        assert anyio.current_time() - before == DRAIN_S, "it was tried again"
        await anyio.sleep(1000)
        assert (await now.turn()).number == 1


@in_virtual_time
async def test_a_death_ends_the_waiting_for_a_replacement() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:

        async def dying() -> None:
            async with now.use() as codex:
                await anyio.sleep(20)
                codex.die()

        tasks.start_soon(dying)
        await anyio.wait_all_tasks_blocked()
        await now.turn(threads=10)
        before = anyio.current_time()
        assert (await now.turn()).number == 1
        assert anyio.current_time() - before == 20


@in_virtual_time
async def test_no_use_ever_outlives_its_codex() -> None:
    """Many at a time, and codex replaced again and again: whoever holds one holds a living one."""
    async with scene(SupervisorLimits(threads=7), start_s=0.2) as now:

        async def client(number: int) -> None:
            for step in range(20):
                async with now.use() as codex:
                    codex.threads += 1
                    await anyio.sleep((number * 7 + step * 3) % 5)
                    assert codex not in now.factory.closed
                    codex.has_completed_turn = True

        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(client, number)
        assert len(now.factory.made) >= 10
        assert now.factory.made[:-1] == [codex for codex in now.factory.closed if codex is not now.factory.made[-1]]


def test_resident_bytes_are_those_of_the_kernel_and_zero_after_the_end() -> None:
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 1 << 20 < resident_bytes(process.pid) < 1 << 30
    assert resident_bytes(process.pid) == 0
