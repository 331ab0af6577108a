"""Listening sockets, which are bound before anything is started."""

import errno
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio

from codex_workspace.common.errors import ConfigError

if TYPE_CHECKING:
    import grpc.aio

BACKLOG: Final = 1024
"""How many connections may wait to be accepted, so that the kernel does not reject a burst of clients."""

WANTED_HANDLES: Final = 8192
"""Twice what the default limits need. Commands inherit it, and some programs close every possible handle at start."""

HEAD_S: Final = 15.0
"""How long a client may take for the head of its first HTTP request, or for gRPC's handshake."""

MAX_GRPC_CALLS: Final = 2000
"""The open calls of one connection, with and without a message; further ones wait in the client."""


def raise_handle_limit() -> None:
    """Raise this process's limit of open files to `WANTED_HANDLES`, or as far as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_HANDLES if hard == resource.RLIM_INFINITY else min(WANTED_HANDLES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def handles_for(share: float) -> int:
    """Return a share of the file handles that this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return int(share * (1 << 20 if soft == resource.RLIM_INFINITY else soft))


def reachable(host: str) -> str:
    """Return a listening address as clients on this machine write it in a URL."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{shown}]" if ":" in shown else shown


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 selects a free one.

    Raises:
        ConfigError: the address is in use or is not an address of this machine.
    """
    # asyncio disables Nagle's algorithm only if the protocol is set; it costs 40 ms per blocking response.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        remedy = "stop the other program or choose another port"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            remedy = "set A2A_HOST to an address of this machine, such as 127.0.0.1 or 0.0.0.0"
        raise ConfigError(
            f"A2A_HOST/A2A_PORT: cannot listen on {host} port {port}: {error.strerror}; {remedy}"
        ) from error
    return listener


@dataclass(frozen=True, slots=True)
class GrpcListener:
    """A gRPC server that is bound to its port and does not serve yet."""

    server: "grpc.aio.Server"
    port: int


@asynccontextmanager
async def bind_grpc(host: str, port: int, max_message_bytes: int, dead_after_s: float) -> AsyncIterator[GrpcListener]:
    """Bind a port for gRPC, 0 for any free one; leaving the block releases it.

    Idle clients are pinged after `dead_after_s` seconds, and disconnected after the same time without a response.

    Raises:
        ConfigError: the address is in use or is not an address of this machine.
    """
    # Imported only if gRPC is on: it takes 35 ms and 9 MB.
    import grpc.aio

    patience_ms = int(dead_after_s * 1000)
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.keepalive_time_ms", patience_ms),
            ("grpc.http2.ping_timeout_ms", patience_ms),
            ("grpc.server_handshake_timeout_ms", int(HEAD_S * 1000)),
            ("grpc.max_allowed_incoming_connections", handles_for(1 / 6)),
            ("grpc.max_concurrent_streams", MAX_GRPC_CALLS),
        ]
    )
    try:
        taken = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(
            f"A2A_HOST/A2A_GRPC_PORT: cannot listen on {host} port {port}; "
            "stop the other program or choose another port"
        ) from error
    try:
        yield GrpcListener(server, taken)
    finally:
        with anyio.CancelScope(shield=True):
            await server.stop(None)
