"""A task group whose only error arrives plain, so that callers can name it in `except`."""

from collections.abc import AsyncIterator
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
