"""Waits for conditions, with a time limit that only a hang reaches."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, overload

import anyio

HANG_S: Final = 120.0
"""The time limit of a hanging test. It is far above any real duration, so that a busy machine does not fail a test."""

POLL_S: Final = 0.02


_T = TypeVar("_T")


@overload
async def eventually(condition: Callable[[], Awaitable[_T | None]], poll_s: float = POLL_S) -> _T: ...
@overload
async def eventually(condition: Callable[[], _T | None], poll_s: float = POLL_S) -> _T: ...
async def eventually(condition: Callable[[], Any], poll_s: float = POLL_S) -> Any:
    """Return the value of `condition()`, awaited if necessary, as soon as it is true.

    For the state of other processes, which have no event to wait for.

    Raises:
        TimeoutError: the condition was still false after `HANG_S` seconds.
    """
    with anyio.fail_after(HANG_S):
        while True:
            value = condition()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return value
            await anyio.sleep(poll_s)
