"""Waits for conditions, with a time limit that only a hang reaches."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

HANG_S: Final = 120.0
"""The time limit of a hanging test. It is far above any real duration, so that a busy machine does not fail a test."""

POLL_S: Final = 0.02


async def eventually(condition: Callable[[], object | Awaitable[object]], poll_s: float = POLL_S) -> None:
    """Return as soon as `condition()`, awaited if necessary, is true.

    For the state of other processes, which have no event to wait for.

    Raises:
        TimeoutError: the condition was still false after `HANG_S` seconds.
    """
    with anyio.fail_after(HANG_S):
        while not (await value if inspect.isawaitable(value := condition()) else value):
            await anyio.sleep(poll_s)
