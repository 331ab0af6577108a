"""A reading end of a pipe for any event loop, for tests in virtual time."""

import os

import anyio
from anyio.abc import ByteReceiveStream

from codex_workspace.common.concurrency import READ_BYTES


class AnyPipeReader(ByteReceiveStream):
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
        """Close this end; a waiting `receive` raises ClosedResourceError."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            anyio.notify_closing(fd)
            os.close(fd)
