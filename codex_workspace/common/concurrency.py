"""Task groups with plain errors, backoff, and byte streams over pipes.

asyncio's subprocess streams are not used: a pending `Process.wait()` does not return while a descendant of the process
holds a pipe, and a closed process leaves transports behind.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, TaskGroup

READ_BYTES: Final = 256 * 1024
"""The size of one read: a few thousand deltas, or a quarter of codex's longest usual line."""


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


def backoff(first_s: float, longest_s: float, tries: int) -> float:
    """Return the seconds before the next try: `first_s` doubled `tries` times, at most `longest_s`."""
    return min(longest_s, first_s * 2.0 ** min(tries, 30))


class PipeReader(ByteReceiveStream):
    """The reading end of a pipe, which it owns; for one task on asyncio's event loop.

    The event loop watches the pipe until data arrives that no `receive` waits for; adding it costs more than a read.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._max_bytes = 0
        self._unread: bytes | None = None

    async def receive(self, max_bytes: int = READ_BYTES) -> bytes:
        """Wait for data and return it.

        Raises:
            EndOfStream: all writers closed their ends.
            ClosedResourceError: this end was closed.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self._unread is None and self._fd >= 0:
            await self._wait(max_bytes)
        if self._fd < 0:
            raise anyio.ClosedResourceError
        if not self._unread:
            raise anyio.EndOfStream
        data, self._unread = self._unread[:max_bytes], self._unread[max_bytes:] or None
        return data

    async def _wait(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._read)
        self._waiting = self._loop.create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _read(self) -> None:
        if self._waiting is None:
            self._unwatch()
        elif not self._waiting.done():
            with suppress(BlockingIOError):
                self._unread = os.read(self._fd, self._max_bytes)
                self._waiting.set_result(None)

    def _unwatch(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None

    async def aclose(self) -> None:
        """Close this end; a waiting `receive` raises ClosedResourceError."""
        if self._fd >= 0:
            self._unwatch()
            fd, self._fd = self._fd, -1
            os.close(fd)
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)


class PipeWriter(ByteSendStream):
    """The writing end of a pipe, which it owns."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd

    async def send(self, item: bytes) -> None:
        """Write all of `item`; a cancelled `send` may have written a part of it.

        Raises:
            BrokenResourceError: the reader closed its end.
            ClosedResourceError: this end was closed.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        rest = memoryview(item)
        while rest:
            if self._fd < 0:
                raise anyio.ClosedResourceError
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self._fd)
            except BrokenPipeError as error:
                raise anyio.BrokenResourceError from error
        await anyio.lowlevel.cancel_shielded_checkpoint()

    async def aclose(self) -> None:
        """Close this end; the reader sees the end of the stream."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            anyio.notify_closing(fd)
            os.close(fd)
