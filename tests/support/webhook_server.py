"""A webhook receiver on loopback with real sockets and scripted responses."""

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
import h11
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSListener

Answer = tuple[int, dict[str, str]]
"""A status and its headers."""


@dataclass(frozen=True, slots=True)
class Received:
    """One received request."""

    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def payload(self) -> dict[str, dict[str, object]]:
        """The body as JSON."""
        payload: dict[str, dict[str, object]] = json.loads(self.body)
        return payload


@dataclass(slots=True)
class WebhookServer:
    """The received requests; each of `answers` is sent once, then 200."""

    port: int
    answers: list[Answer]
    takes_s: float
    received: list[Received] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    _arrived: anyio.Event = field(default_factory=anyio.Event)

    @property
    def url(self) -> str:
        """The webhook's URL."""
        return f"http://127.0.0.1:{self.port}/hook"

    async def heard(self, number: int) -> list[Received]:
        """Wait for `number` requests and return all of them."""
        while len(self.received) < number:
            await self._arrived.wait()
        return self.received

    async def serve(self, stream: ByteStream) -> None:
        """Answer one connection's request."""
        # The client may have closed the connection.
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
            await self._answer(stream)

    async def _answer(self, stream: ByteStream) -> None:
        async with stream:
            connection = h11.Connection(h11.SERVER)
            request, body = await _read(connection, stream)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            headers = {name.decode(): value.decode() for name, value in request.headers}
            self.received.append(Received(request.target.decode(), headers, body))
            self._arrived.set()
            self._arrived = anyio.Event()
            await anyio.sleep(self.takes_s)
            self.at_once -= 1
            status, more = self.answers.pop(0) if self.answers else (200, dict[str, str]())
            head = h11.Response(status_code=status, headers=[("Content-Length", "0"), *more.items()])
            await stream.send((connection.send(head) or b"") + (connection.send(h11.EndOfMessage()) or b""))


async def _read(connection: h11.Connection, stream: ByteStream) -> tuple[h11.Request, bytes]:
    request: h11.Request | None = None
    body = b""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert request is not None
            return request, body
        else:
            assert event is h11.NEED_DATA
            connection.receive_data(await stream.receive())


@asynccontextmanager
async def webhook(
    *answers: Answer, takes_s: float = 0.0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[WebhookServer]:
    """Serve on a free port of loopback, over TLS if a context is given."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as plain, anyio.create_task_group() as tasks:
        server = WebhookServer(plain.extra(SocketAttribute.local_port), list(answers), takes_s)
        tasks.start_soon((plain if tls is None else TLSListener(plain, tls)).serve, server.serve)
        try:
            yield server
        finally:
            tasks.cancel_scope.cancel()
