"""Cuts off clients that do not take what they are sent.

What waits for a slow reader stays in memory: in the connection's buffer, and above it in the task's queue of events,
each of which the SDK keeps with a copy of the task as it was then. Neither knows time. A reader that was cut off can
subscribe again, or get the task, and has everything.
"""

import asyncio
import logging

from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)


def impatient(patience_s: float) -> type[H11Protocol]:
    """Return uvicorn's HTTP/1.1 protocol, with connections that are cut off where a reader does not catch up.

    A connection's buffer has `patience_s` seconds to drain once it holds more than asyncio's high-water mark (64 KiB);
    what the kernels hold on both sides comes on top, and is several megabytes.
    """

    class Impatient(H11Protocol):
        _giving_up: asyncio.TimerHandle | None = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._giving_up = self.loop.call_later(patience_s, self._give_up)

        def resume_writing(self) -> None:
            self._wait_on()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._wait_on()
            super().connection_lost(exc)

        def _wait_on(self) -> None:
            if self._giving_up is not None:
                self._giving_up.cancel()
                self._giving_up = None

        def _give_up(self) -> None:
            logger.warning("client %s has not taken what it was sent for %g s and is cut off", self.client, patience_s)
            # Not `close`: that waits for the buffer to drain.
            self.transport.abort()

    return Impatient
