"""One block, held open for many."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest

from codex_workspace.common.concurrency import BackgroundResource, backoff, run_in_thread, task_group


@dataclass(eq=False, slots=True)
class Thing:
    number: int
    usable: bool = True
    opened_by: asyncio.Task[object] | None = None
    closed_by: asyncio.Task[object] | None = None


@dataclass(slots=True)
class Shop:
    """Opens things; tells which, and whether they were closed."""

    made: list[Thing] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    failures: list[Exception] = field(default_factory=list)
    closing_fails: bool = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Thing]:
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        thing = Thing(len(self.made), opened_by=asyncio.current_task())
        self.made.append(thing)
        try:
            yield thing
        finally:
            await asyncio.sleep(0)
            thing.closed_by = asyncio.current_task()
            if self.closing_fails:
                raise OSError("it sticks")


def shop_of(*failures: Exception, is_open: bool = True) -> tuple[Shop, BackgroundResource[Thing]]:
    shop = Shop(failures=list(failures))
    if is_open:
        shop.gate.set()
    return shop, BackgroundResource(shop.open, usable=lambda thing: thing.usable)


async def test_many_askers_get_the_one_thing() -> None:
    shop, owner = shop_of()
    got = await asyncio.gather(*(owner.get() for _ in range(20)))
    assert got == [shop.made[0]] * 20
    assert owner.current is shop.made[0]
    await owner.close()


async def test_the_block_is_left_by_the_task_that_entered_it() -> None:
    shop, owner = shop_of()
    await owner.get()
    await owner.close()
    thing = shop.made[0]
    assert thing.closed_by is thing.opened_by is not asyncio.current_task()
    assert owner.current is None


async def test_what_is_not_usable_is_closed_and_opened_again() -> None:
    _, owner = shop_of()
    first = await owner.get()
    first.usable = False
    assert owner.current is None
    second = await owner.get()
    assert second is not first
    assert first.closed_by is not None
    assert second.closed_by is None
    await owner.close()


async def test_an_error_of_opening_arrives_plain_and_the_next_asker_tries_again() -> None:
    shop, owner = shop_of(KeyError("first"), ValueError("second"))
    with pytest.raises(KeyError, match="first"):
        await owner.get()
    with pytest.raises(ValueError, match="second"):
        await owner.get()
    assert await owner.get() is shop.made[0]
    await owner.close()


async def test_an_error_of_leaving_is_logged_and_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    shop, owner = shop_of()
    shop.closing_fails = True
    first = await owner.get()
    first.usable = False
    assert await owner.get() is shop.made[1]
    await owner.close()
    assert caplog.text.count("closing the old resource failed") == 2


async def leave_while_it_opens(owner: BackgroundResource[Thing]) -> None:
    asking = asyncio.create_task(owner.get())
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_what_a_cancelled_asker_began_to_open_is_the_next_ones() -> None:
    shop, owner = shop_of(is_open=False)
    await leave_while_it_opens(owner)
    assert owner.current is None
    shop.gate.set()
    assert await owner.get() is shop.made[0]
    await owner.close()
    assert len(shop.made) == 1
    assert shop.made[0].closed_by is not None


async def test_what_failed_to_open_after_its_asker_left_is_opened_again() -> None:
    shop, owner = shop_of(KeyError("nobody hears it"), is_open=False)
    await leave_while_it_opens(owner)
    shop.gate.set()
    await asyncio.sleep(0.01)
    assert await owner.get() is shop.made[0]
    await owner.close()


async def test_close_does_not_wait_for_what_is_still_opening() -> None:
    shop, owner = shop_of(is_open=False)
    await leave_while_it_opens(owner)
    await owner.close()
    shop.gate.set()
    await asyncio.sleep(0.01)
    assert shop.made == []


async def test_a_closed_owner_opens_nothing_more() -> None:
    shop, owner = shop_of()
    await owner.close()
    await owner.close()
    with pytest.raises(RuntimeError, match="closed"):
        await owner.get()
    assert shop.made == []


async def test_what_is_retired_is_closed_at_once_and_another_one_opened_when_asked_for() -> None:
    shop, owner = shop_of()
    owner.retire()
    first = await owner.get()
    owner.retire()
    assert owner.current is None
    await asyncio.sleep(0.01)
    assert first.closed_by is first.opened_by
    assert await owner.get() is shop.made[1]
    await owner.close()


async def test_what_is_still_opening_is_not_retired() -> None:
    shop, owner = shop_of(is_open=False)
    await leave_while_it_opens(owner)
    owner.retire()
    shop.gate.set()
    assert await owner.get() is shop.made[0]
    await owner.close()


# --- A task group whose only error is itself, and a thread's work that is done whatever is cancelled ---


async def fail(error: Exception) -> None:
    raise error


async def run(*errors: Exception) -> None:
    async with task_group() as tasks:
        for error in errors:
            tasks.start_soon(fail, error)
        await anyio.sleep_forever()


async def test_a_lone_error_arrives_plain_from_the_block_and_from_a_task() -> None:
    with pytest.raises(KeyError):
        async with task_group():
            raise KeyError
    with pytest.raises(KeyError) as raised:
        await run(KeyError())
    assert raised.value.__cause__ is None


async def test_a_cause_is_kept() -> None:
    with pytest.raises(KeyError) as raised:
        async with task_group():
            raise KeyError from OSError("why")
    assert isinstance(raised.value.__cause__, OSError)


async def test_several_errors_stay_together() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await run(KeyError(), OSError())
    assert raised.group_contains(KeyError)
    assert raised.group_contains(OSError)


async def test_a_cancelled_group_is_left_quietly() -> None:
    with anyio.move_on_after(0.01) as scope:
        async with task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
    assert scope.cancelled_caught


@pytest.mark.parametrize("steps", range(1, 6))
async def test_what_has_to_be_done_is_done_however_often_its_task_is_cancelled(steps: int) -> None:
    done = threading.Event()
    task = asyncio.create_task(run_in_thread(done.set))
    for _ in range(3):
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()


async def test_what_has_to_be_done_is_done_in_a_cancelled_scope_and_says_why_it_could_not_be() -> None:
    done = threading.Event()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await run_in_thread(done.set)
    assert done.is_set()

    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        await run_in_thread(fails)


# --- Pauses that grow ---


@pytest.mark.parametrize(("tries", "pause_s"), [(0, 0.5), (1, 1.0), (2, 2.0), (5, 16.0), (6, 30.0), (5000, 30.0)])
def test_a_pause_doubles_up_to_its_bound(tries: int, pause_s: float) -> None:
    assert backoff(0.5, 30.0, tries) == pause_s
