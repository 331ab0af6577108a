"""The A2A server: an application around any `AgentExecutor`, and the loop that serves it.

JSON-RPC at `/` for A2A 1.0 and 0.3, the agent card, `/healthz` and `/readyz`. Nothing here knows codex.
"""

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import uvicorn
from a2a.server.agent_execution import AgentExecutor
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    HTTPAuthSecurityScheme,
    SecurityRequirement,
    SecurityScheme,
    StringList,
)
from a2a.utils.constants import AGENT_CARD_WELL_KNOWN_PATH
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from codex_workspace.admission import Admission
from codex_workspace.errors import ConfigError
from codex_workspace.groups import plain_task_group
from codex_workspace.guards import BearerToken, BodyLimit, LastWord, unauthorized
from codex_workspace.handler import OnceHandler
from codex_workspace.readers import impatient
from codex_workspace.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

PUBLIC_PATHS: Final = frozenset({AGENT_CARD_WELL_KNOWN_PATH, "/healthz", "/readyz"})
"""What is answered without a token: probes, and the card that says that a token is needed."""

CLOSE_GRACE_S: Final = 2
"""How long open connections may take to end once their tasks have."""

SLOW_READER_S: Final = 15.0
"""What a client may take to catch up; a megabyte over a poor mobile connection."""

BACKLOG: Final = 1024
"""Connections that may wait to be accepted: a burst of clients is not turned away by the kernel."""

Readiness = Callable[[], Awaitable[str | None]]
"""Gives None when the agent can answer, else the reason why not."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the application has to know of the settings.

    `url` is where clients reach it; `token` None lets everybody in; `one_main_context` sends messages that name no
    context to their sender's main one, instead of a new one each.
    """

    name: str
    description: str
    version: str
    url: str
    token: str | None = None
    max_body_bytes: int = 8 * 1024 * 1024
    one_main_context: bool = True


@dataclass(frozen=True, slots=True)
class Application:
    """What is served: `asgi` over HTTP, and the handler that all transports share."""

    asgi: Starlette
    handler: OnceHandler

    async def take_up(self) -> int:
        """Set to work what an earlier process left unanswered, before new messages come; return how much.

        While the disk is full this waits for room.
        """
        taken_up = await self.handler.take_up()
        if taken_up:
            logger.warning("%d messages of an earlier process were not answered yet and are taken up", taken_up)
        return taken_up


@asynccontextmanager
async def build_app(
    options: ServerOptions,
    executor: AgentExecutor,
    store: Store,
    ready: Readiness,
    admission: Admission | None = None,
) -> AsyncIterator[Application]:
    """Make the application around an executor; leaving ends the tasks that still run in it.

    `admission` says which messages are taken; the executor must claim their places in it. None: all are.
    """
    card = agent_card(options)
    handler = OnceHandler(executor, store, admission, card, one_main_context=options.one_main_context)
    routes = [
        Route("/healthz", _healthz),
        Route("/readyz", _readyz(ready)),
        *create_agent_card_routes(card, cache_control="no-cache"),
        *create_jsonrpc_routes(handler, "/", enable_v0_3_compat=True),
    ]
    middleware = [
        Middleware(BodyLimit, max_bytes=options.max_body_bytes),
        Middleware(AuthenticationMiddleware, backend=BearerToken(options.token, PUBLIC_PATHS), on_error=unauthorized),
        Middleware(LastWord),
    ]
    try:
        yield Application(Starlette(routes=routes, middleware=middleware), handler)
    finally:
        await handler.aclose()


def agent_card(options: ServerOptions) -> AgentCard:
    """Return the public agent card; the 0.3 interface in it is what old clients look for."""
    card = AgentCard(
        name=options.name,
        description=options.description,
        version=options.version,
        capabilities=AgentCapabilities(streaming=True),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain", "application/json", "text/x-diff"],
        supported_interfaces=[
            AgentInterface(url=options.url, protocol_binding="JSONRPC", protocol_version=version)
            for version in ("1.0", "0.3")
        ],
        skills=[
            AgentSkill(
                id="code",
                name="Work on the code",
                description="Writes, changes, runs and explains code in the agent's workspace.",
                tags=["code", "shell", "files"],
                examples=["Add a test for the parser and run it.", "What does this repository do?"],
            )
        ],
    )
    if options.token is not None:
        bearer = HTTPAuthSecurityScheme(scheme="bearer", description="The operator's A2A_TOKEN")
        card.security_schemes["bearer"].CopyFrom(SecurityScheme(http_auth_security_scheme=bearer))
        card.security_requirements.append(SecurityRequirement(schemes={"bearer": StringList()}))
    return card


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes any free one.

    Raises:
        ConfigError: the address is taken, or is none of this machine's.
    """
    # The protocol is named because asyncio turns Nagle's delay off only where it is: 40 ms of every blocking answer.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"A2A_HOST/A2A_PORT: cannot listen on {host} port {port}: {error.strerror}; "
            "stop the other program or choose another port"
        ) from error
    return listener


@asynccontextmanager
async def serving(app: Starlette, listener: socket.socket, slow_reader_s: float = SLOW_READER_S) -> AsyncIterator[None]:
    """Serve the application on a listening socket until the block is left; open connections get a moment to end.

    A client that does not take what it is sent for `slow_reader_s` seconds is cut off.
    """
    config = uvicorn.Config(
        app,
        http=impatient(slow_reader_s),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=CLOSE_GRACE_S,
        timeout_keep_alive=75,
    )
    server = _Server(config)
    async with plain_task_group() as tasks:
        tasks.start_soon(server.serve, [listener])
        try:
            yield
        finally:
            server.should_exit = True


class _Server(uvicorn.Server):
    """Uvicorn without hands on the signals: whoever started us decides when to stop."""

    @contextmanager
    def capture_signals(self) -> "Iterator[None]":
        yield


async def _healthz(_request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _readyz(ready: Readiness) -> Callable[[Request], Awaitable[Response]]:
    async def readyz(_request: Request) -> Response:
        reason = await ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)

    return readyz
