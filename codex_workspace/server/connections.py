"""HTTP connections: closes those of slow clients, and rejects those for which too few file handles are left."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Final

from h11 import IDLE, SEND_BODY
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

SLOW_READER_S: Final = 15.0
"""How long a slow client may take to catch up: a megabyte over a poor mobile connection."""

WARN_EVERY_S: Final = 60.0

LATE: Final = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@dataclass(slots=True)
class ConnectionGuard:
    """The limits of a server's connections, and when it warned last, by the sentence.

    max_handle: a connection whose file handle is higher is rejected; the kernel always assigns the lowest free one.
    head_s: how long a client may take for its first head; at most twice as long for a later one, or for the rest of a
        body that is not read.
    slow_reader_s: how long it may take to read what exceeds asyncio's high-water mark (64 KiB).
    """

    max_handle: int
    head_s: float
    slow_reader_s: float
    warned: dict[str, float] = field(default_factory=dict)


class GuardedConnection(H11Protocol):
    """Uvicorn's HTTP/1.1 protocol within the limits of a guard; `guarded_by` returns a class that has one.

    The connection of a client that does not read is closed: the kernels buffer several megabytes, and the pending
    events of a slow client stay in memory, each with a copy of its task. A disconnected client can resubscribe or get
    the task.
    """

    guard: ConnectionGuard
    _reader_timer: asyncio.TimerHandle | None = None
    _request_timer: asyncio.TimerHandle | None = None
    _awaited: tuple[object, object] | None = (IDLE, None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if transport.get_extra_info("socket").fileno() > self.guard.max_handle:
            self._end(FULL, "rejecting connections because too many are open for the limit of open files (ulimit -n)")
        else:
            self._request_timer = self.loop.call_later(self.guard.head_s, self._check_request)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timer = self.loop.call_later(self.guard.slow_reader_s, self._close)

    def resume_writing(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in filter(None, (self._reader_timer, self._request_timer)):
            timer.cancel()
        super().connection_lost(exc)

    def _check_request(self) -> None:
        """Close the connection if the same request is incomplete as at the last check."""
        awaited = self._incomplete_request()
        if awaited is not None and awaited == self._awaited:
            self._end(LATE, "closing connections whose requests do not arrive in time")
        self._awaited = awaited
        self._request_timer = self.loop.call_later(self.guard.head_s, self._check_request)

    def _incomplete_request(self) -> tuple[object, object] | None:
        """Return what identifies a request with a partial head, or with a partial body that is not read any more.

        Uvicorn limits the time between requests, and `RequestChecks` that of a body.
        """
        state = self.conn.their_state
        is_partial = self.cycle.response_complete if state is SEND_BODY else self.timeout_keep_alive_task is None
        return (state, self.cycle) if state in (IDLE, SEND_BODY) and is_partial else None

    def _end(self, response: bytes, why: str) -> None:
        """Close the connection, with a response unless the request has one."""
        self._warn(why)
        if self.conn.their_state is SEND_BODY or self.transport.is_closing():
            self.transport.abort()
        else:
            self.transport.write(response)
            self.transport.close()

    def _warn(self, why: str) -> None:
        now, warned = self.loop.time(), self.guard.warned
        if now - warned.get(why, -WARN_EVERY_S) >= WARN_EVERY_S:
            logger.warning("%s, such as one of %s", why, self.client)
            warned[why] = now

    def _close(self) -> None:
        patience_s = self.guard.slow_reader_s
        logger.warning("closing the connection of client %s, which has not read for %g s", self.client, patience_s)
        # `close` would wait for the buffer to drain.
        self.transport.abort()


def guarded_by(guard: ConnectionGuard) -> type[H11Protocol]:
    """Return the protocol class of a server's connections."""
    return type("Connection", (GuardedConnection,), {"guard": guard})
