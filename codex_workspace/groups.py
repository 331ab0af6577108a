"""A task group whose only error arrives plain, so that callers can name it in `except`, and work that nothing stops."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def plain_task_group() -> AsyncIterator[TaskGroup]:
    """Like `anyio.create_task_group`, but a lone error is raised itself, not in an ExceptionGroup."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from group.exceptions[0].__cause__


async def done_in_thread(work: Callable[[], object]) -> None:
    """Do `work` in a thread, whatever is cancelled; it may be called twice, and the second time from here.

    Raises:
        whatever `work` does.
    """
    with anyio.CancelScope(shield=True):
        try:
            await anyio.to_thread.run_sync(work)
        except anyio.get_cancelled_exc_class():
            # A shield does not hold what asyncio itself cancels, and the thread may not have begun.
            work()
            raise
