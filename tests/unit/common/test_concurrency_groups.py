"""A task group whose only error is itself, and a thread's work that is done whatever is cancelled."""

import asyncio
import threading

import anyio
import pytest

from codex_workspace.common.concurrency import run_in_thread, task_group


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
