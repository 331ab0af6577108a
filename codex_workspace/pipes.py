"""Byte streams over raw pipe ends.

Not asyncio's subprocess streams: a pending `Process.wait()` there does not return while any descendant of the process
holds a pipe, and a closed process leaves transports behind. Here the pipes are ours, and an exit is seen on a pidfd.
"""

import os
from typing import Final

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

READ_BYTES: Final = 256 * 1024
"""One read takes at most this much: a few thousand deltas, or a quarter of codex's usual longest line."""


class PipeReader(ByteReceiveStream):
    """The reading end of a pipe, which it owns."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd

    async def receive(self, max_bytes: int = READ_BYTES) -> bytes:
        """Return what is there, after waiting for something.

        Raises:
            EndOfStream: every writer closed its end.
            ClosedResourceError: this end was closed.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        while True:
            if self._fd < 0:
                raise anyio.ClosedResourceError
            try:
                data = os.read(self._fd, max_bytes)
            except BlockingIOError:
                await anyio.wait_readable(self._fd)
            else:
                if not data:
                    raise anyio.EndOfStream
                await anyio.lowlevel.cancel_shielded_checkpoint()
                return data

    async def aclose(self) -> None:
        """Close this end; a waiting `receive` ends with ClosedResourceError."""
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
        """Write all of `item`. A cancelled `send` may have written a part of it.

        Raises:
            BrokenResourceError: nobody reads the pipe any more.
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
