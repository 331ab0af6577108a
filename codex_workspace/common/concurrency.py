"""Task groups with plain errors, uncancellable threads, a background resource, and backoff."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_DOUBLINGS: Final = 30
"""More doublings exceed every limit, and more than a thousand overflow a float."""


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """Open `anyio.create_task_group`, and raise a single error itself instead of an ExceptionGroup."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from group.exceptions[0].__cause__


async def run_in_thread(work: Callable[[], object]) -> None:
    """Run idempotent `work` in a thread, and complete it even if the caller is cancelled.

    Raises:
        whatever `work` raises.
    """
    with anyio.CancelScope(shield=True):
        try:
            await anyio.to_thread.run_sync(work)
        except anyio.get_cancelled_exc_class():
            # A shield does not hold back asyncio's own cancellation, and the thread may not have started.
            work()
            raise


def backoff(first_s: float, longest_s: float, tries: int) -> float:
    """Return the seconds before the next try: `first_s` doubled `tries` times, at most `longest_s`."""
    return min(longest_s, first_s * 2.0 ** min(tries, _MAX_DOUBLINGS))


class BackgroundResource(Generic[T]):
    """A context manager that a background task holds open, for callers that cannot use `async with`.

    The task that entered a cancel scope must also leave it, and requests come and go in tasks of their own. The
    resource is opened when it is first requested, opened again if it is no longer usable, and closed once. This is the
    project's only `create_task`.

    Args:
        open_it: creates the context manager.
        usable: tells whether its value can still be used.
    """

    def __init__(self, open_it: Callable[[], AbstractAsyncContextManager[T]], usable: Callable[[T], bool]) -> None:
        self._open_it = open_it
        self._usable = usable
        self._lock = asyncio.Lock()
        self._holder: _Holder[T] | None = None
        self._closed = False

    @property
    def current(self) -> T | None:
        """The open and usable value; None if there is none."""
        value = self._holder.value if self._holder is not None and not self._holder.closing else None
        return value if value is not None and self._usable(value) else None

    async def get(self) -> T:
        """Return the value, after opening the resource if needed. An error of the opening is raised here.

        If a caller is cancelled while the resource opens, the next caller gets it.
        """
        async with self._lock:
            if self._closed:
                raise RuntimeError("the resource is closed")
            if self._holder is None or not (self._holder.opening or self.current is not None):
                await self._release()
                self._holder = _Holder(self._open_it)
            return await asyncio.shield(self._holder.opened)

    def retire(self) -> None:
        """Start to close the resource if it is open; the next `get` waits for the end and opens it again."""
        if self._holder is not None and not self._holder.opening:
            self._holder.close()

    async def close(self) -> None:
        """Close the resource; afterwards `get` raises RuntimeError."""
        async with self._lock:
            self._closed = True
            await self._release()

    async def _release(self) -> None:
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.close()
            try:
                await asyncio.shield(holder.task)
            except Exception:
                # The next caller does not need the old resource.
                logger.exception("closing the old resource failed")


class _Holder(Generic[T]):
    """Holds one context manager open in a background task."""

    def __init__(self, open_it: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self.opened: Final[asyncio.Future[T]] = asyncio.get_running_loop().create_future()
        self.task: Final = asyncio.create_task(self._hold(open_it), name="background resource")
        self._close_requested = asyncio.Event()

    @property
    def opening(self) -> bool:
        return not self.opened.done()

    @property
    def value(self) -> T | None:
        """The context manager's value; None while it opens and if that failed."""
        if self.opening or self.opened.cancelled() or self.opened.exception() is not None:
            return None
        return self.opened.result()

    @property
    def closing(self) -> bool:
        return self._close_requested.is_set()

    def close(self) -> None:
        """Leave the context manager; cancel it if it is still opening."""
        self._close_requested.set()
        if self.opening:
            self.task.cancel()

    async def _hold(self, open_it: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        try:
            async with open_it() as value:
                self.opened.set_result(value)
                await self._close_requested.wait()
        except asyncio.CancelledError:
            self.opened.cancel()
            if not self._close_requested.is_set():
                raise
        except Exception as error:
            if not self.opening:
                raise
            self.opened.set_exception(error)
