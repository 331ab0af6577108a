"""Hold an `async with` open in a task of its own, for callers that have no place to hold one.

A cancel scope must be left by the task that entered it, and the requests that need codex come and go in tasks of
their own. This is the project's only `create_task`.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Owner(Generic[T]):
    """Opens the thing when it is first asked for, again when it is no longer usable, and closes it once.

    Args:
        open_it: makes the context manager that is held open.
        usable: tells whether what it gave can still be used.
    """

    def __init__(self, open_it: Callable[[], AbstractAsyncContextManager[T]], usable: Callable[[T], bool]) -> None:
        self._open_it = open_it
        self._usable = usable
        self._lock = asyncio.Lock()
        self._held: _Held[T] | None = None
        self._closed = False

    @property
    def current(self) -> T | None:
        """What is open and usable at this moment; None while nothing is."""
        held = self._held
        return held.value if held is not None and self._usable(held.value) else None

    async def get(self) -> T:
        """Return the open thing, after opening it where needed; what opening raises arrives here, plain."""
        async with self._lock:
            if self._closed:
                raise RuntimeError("the owner is closed")
            if self._held is not None and self._usable(self._held.value):
                return self._held.value
            await self._let_go()
            self._held = await _hold(self._open_it)
            return self._held.value

    async def close(self) -> None:
        """Leave the block; afterwards `get` raises RuntimeError."""
        async with self._lock:
            self._closed = True
            await self._let_go()

    async def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.enough.set()
            try:
                await asyncio.shield(held.task)
            except Exception:
                # It is of no concern to whoever asks for the next one.
                logger.exception("leaving the old block failed")


class _Held(Generic[T]):
    """An open block: its value, the task that holds it, and the word to leave it."""

    def __init__(self, value: T, task: "asyncio.Task[None]", enough: asyncio.Event) -> None:
        self.value = value
        self.task = task
        self.enough = enough


async def _hold(open_it: Callable[[], AbstractAsyncContextManager[T]]) -> _Held[T]:
    opened: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    enough = asyncio.Event()

    async def hold() -> None:
        try:
            async with open_it() as value:
                if not opened.done():
                    opened.set_result(value)
                await enough.wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)

    task = asyncio.create_task(hold(), name="owner")
    try:
        return _Held(await asyncio.shield(opened), task, enough)
    except asyncio.CancelledError:
        # The asker left while it was opening: nobody would ever close it.
        enough.set()
        opened.cancel()
        raise
