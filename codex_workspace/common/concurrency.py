"""Task groups with plain errors, backoff, and byte streams over pipes.

asyncio's subprocess streams are not used: a pending `Process.wait()` does not return while a descendant of the process
holds a pipe, and a closed process leaves transports behind.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
    """The reading end of a pipe, which it owns."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd

    async def receive(self, max_bytes: int = READ_BYTES) -> bytes:
        """Wait for data and return it.

        Raises:
            EndOfStream: all writers closed their ends.
            ClosedResourceError: this end was closed.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        has_waited = False
        while True:
            if self._fd < 0:
                raise anyio.ClosedResourceError
            try:
                data = os.read(self._fd, max_bytes)
            except BlockingIOError:
                await anyio.wait_readable(self._fd)
                has_waited = True
            else:
                if not data:
                    raise anyio.EndOfStream
                if not has_waited:
                    await anyio.lowlevel.cancel_shielded_checkpoint()
                return data

    async def aclose(self) -> None:
        """Close this end; a waiting `receive` raises ClosedResourceError."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            anyio.notify_closing(fd)
            os.close(fd)


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
