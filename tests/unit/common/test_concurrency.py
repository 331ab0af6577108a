"""One block, held open for many."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from codex_workspace.common.concurrency import BackgroundResource


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
    assert caplog.text.count("leaving the old block failed") == 2


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
