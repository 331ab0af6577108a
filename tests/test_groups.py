"""A task group whose only error is itself."""

import anyio
import pytest

from codex_workspace.groups import plain_task_group

pytestmark = pytest.mark.usefixtures("no_hang")


async def fail(error: Exception) -> None:
    raise error


async def run(*errors: Exception) -> None:
    async with plain_task_group() as tasks:
        for error in errors:
            tasks.start_soon(fail, error)
        await anyio.sleep_forever()


async def test_a_lone_error_arrives_plain_from_the_block_and_from_a_task() -> None:
    with pytest.raises(KeyError):
        async with plain_task_group():
            raise KeyError
    with pytest.raises(KeyError) as raised:
        await run(KeyError())
    assert raised.value.__cause__ is None


async def test_a_cause_is_kept() -> None:
    with pytest.raises(KeyError) as raised:
        async with plain_task_group():
            raise KeyError from OSError("why")
    assert isinstance(raised.value.__cause__, OSError)


async def test_several_errors_stay_together() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await run(KeyError(), OSError())
    assert raised.group_contains(KeyError)
    assert raised.group_contains(OSError)


async def test_a_cancelled_group_is_left_quietly() -> None:
    with anyio.move_on_after(0.01) as scope:
        async with plain_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
    assert scope.cancelled_caught
