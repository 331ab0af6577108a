"""Clients that do not send their request, and more clients than file handles, over real sockets."""

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import anyio
import httpx
import pytest
from anyio.abc import SocketStream
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from codex_workspace.server import app as app_module
from codex_workspace.server.app import serving
from codex_workspace.server.sockets import bind
from tests.support.waiting import eventually

HEAD_S = 0.5


async def answer(request: Request) -> Response:
    """Answer at once, or after the body."""
    unread = "unread" in request.headers
    return PlainTextResponse("hello" if unread else f"{len(await request.body())} bytes")


@asynccontextmanager
async def server(head_s: float = HEAD_S) -> AsyncIterator[int]:
    """Serve on a port."""
    app = Starlette(routes=[Route("/", answer, methods=["GET", "POST"])])
    with bind("127.0.0.1", 0) as listener:
        async with serving(app, listener, head_s=head_s):
            yield int(listener.getsockname()[1])


async def everything(stream: SocketStream) -> bytes:
    """Return what the server sends until it closes the connection."""
    received = b""
    try:
        async for data in stream:
            received += data
    except anyio.BrokenResourceError:
        pass
    return received


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nA: b"])
async def test_a_half_head_is_answered_by_408_and_closed(sent: bytes) -> None:
    async with server() as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        if sent:
            await stream.send(sent)
        assert (await everything(stream)).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


async def test_the_head_of_a_second_request_has_the_same_deadline() -> None:
    async with server() as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await stream.receive()).startswith(b"HTTP/1.1 200 OK\r\n")
        await stream.send(b"GET / HTTP/1.1\r\nHost: x\r\n")
        assert b"HTTP/1.1 408 Request Timeout\r\n" in await everything(stream)


async def test_a_half_body_is_not_awaited_after_its_response(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with server() as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(b"POST / HTTP/1.1\r\nHost: x\r\nUnread: 1\r\nContent-Length: 100\r\n\r\nhalf")
        received = await everything(stream)
        assert (received[:15], received[-5:]) == (b"HTTP/1.1 200 OK", b"hello")
        await eventually(lambda: "closing connections whose requests do not arrive in time" in caplog.text)


async def test_neither_an_idle_connection_nor_a_slow_body_counts_as_late() -> None:
    async with server() as port, await anyio.connect_tcp("127.0.0.1", port) as idle:
        await idle.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await idle.receive()
        async with await anyio.connect_tcp("127.0.0.1", port) as slow:
            await slow.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nha")
            async with await anyio.connect_tcp("127.0.0.1", port) as late:
                # The two others have waited longer when this one is closed.
                assert b" 408 " in await everything(late)
            await slow.send(b"lf")
            assert (await slow.receive()).startswith(b"HTTP/1.1 200 OK\r\n")
        await idle.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await idle.receive()).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_connections_beyond_the_file_handles_are_rejected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with ExitStack() as stack:
        # The client's sockets use the handles of the same process.
        in_use = max(stack.enter_context(socket.socket()).fileno() for _ in range(3))
        monkeypatch.setattr(app_module, "handles_for", lambda _share: in_use + 40)
        async with server(head_s=60) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert (await http.get("/")).text == "0 bytes"
            clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(50)]
            clients[-1].setblocking(False)
            await anyio.wait_readable(clients[-1])
            rejection = clients[-1].recv(100)
            assert rejection.startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\n")
            assert (await http.get("/")).text == "0 bytes"
            await eventually(lambda: "because too many are open" in caplog.text)
            for each in clients:
                each.close()

            async def accepted() -> bool:
                try:
                    async with httpx.AsyncClient() as new:
                        return (await new.get(f"http://127.0.0.1:{port}")).is_success
                except httpx.TransportError:
                    return False

            await eventually(accepted)
    assert len([record for record in caplog.records if record.name.startswith("codex_workspace")]) == 1
