"""A task group whose only error arrives plain, so that callers can name it in `except`, and work that nothing stops.

Hold an `async with` open in a task of its own, for callers that have no place to hold one.

A cancel scope must be left by the task that entered it, and the requests that need codex come and go in tasks of
their own. This is the project's only `create_task`.

How long to wait before something that has failed is tried again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Generic, TypeVar

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """Like `anyio.create_task_group`, but a lone error is raised itself, not in an ExceptionGroup."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from group.exceptions[0].__cause__


async def run_in_thread(work: Callable[[], object]) -> None:
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


logger = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundResource(Generic[T]):
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
        value = self._held.value if self._held is not None and not self._held.leaving else None
        return value if value is not None and self._usable(value) else None

    async def get(self) -> T:
        """Return the open thing, after opening it where needed; what opening raises arrives here, plain.

        An asker that leaves while it opens spoils nothing: the next one gets it.
        """
        async with self._lock:
            if self._closed:
                raise RuntimeError("the owner is closed")
            if self._held is None or not (self._held.opening or self.current is not None):
                await self._let_go()
                self._held = _Held(self._open_it)
            return await asyncio.shield(self._held.opened)

    def retire(self) -> None:
        """Have the block left if it is open; the next `get` waits until it is, and opens another."""
        if self._held is not None and not self._held.opening:
            self._held.leave()

    async def close(self) -> None:
        """Leave the block; afterwards `get` raises RuntimeError."""
        async with self._lock:
            self._closed = True
            await self._let_go()

    async def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.leave()
            try:
                await asyncio.shield(held.task)
            except Exception:
                # It is of no concern to whoever asks for the next one.
                logger.exception("leaving the old block failed")


class _Held(Generic[T]):
    """A block that is opened and held by a task of its own until it is told to leave it."""

    def __init__(self, open_it: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self.opened: Final[asyncio.Future[T]] = asyncio.get_running_loop().create_future()
        self.task: Final = asyncio.create_task(self._hold(open_it), name="owner")
        self._enough = asyncio.Event()

    @property
    def opening(self) -> bool:
        return not self.opened.done()

    @property
    def value(self) -> T | None:
        """What the block gave; None while it opens, and where it could not."""
        if self.opening or self.opened.cancelled() or self.opened.exception() is not None:
            return None
        return self.opened.result()

    @property
    def leaving(self) -> bool:
        return self._enough.is_set()

    def leave(self) -> None:
        """Have the block left, at once also where it is still opening."""
        self._enough.set()
        if self.opening:
            self.task.cancel()

    async def _hold(self, open_it: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        try:
            async with open_it() as value:
                self.opened.set_result(value)
                await self._enough.wait()
        except asyncio.CancelledError:
            self.opened.cancel()
            if not self._enough.is_set():
                raise
        except Exception as error:
            if not self.opening:
                raise
            self.opened.set_exception(error)


_MOST_DOUBLINGS: Final = 30
"""What is doubled so often is too long, and what is doubled more than a thousand times is no float."""


def backoff(first_s: float, longest_s: float, tries: int) -> float:
    """Return the seconds before the next try: `first_s` doubled `tries` times, `longest_s` at the most."""
    return min(longest_s, first_s * 2.0 ** min(tries, _MOST_DOUBLINGS))
