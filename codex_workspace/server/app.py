"""The A2A server: builds an application around any `AgentExecutor`, and serves it.

JSON-RPC at `/`, HTTP+JSON, and gRPC on its own port, for A2A 1.0 and 0.3; the agent card, `/healthz`, `/readyz` and the
operator endpoints.
"""

import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import uvicorn
from a2a.server.agent_execution import AgentExecutor
from a2a.server.routes import create_rest_routes
from a2a.types import AgentCard, AgentExtension
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from codex_workspace.common.concurrency import task_group
from codex_workspace.common.telemetry import NO_TRACER, Tracer
from codex_workspace.config.a2a_server import AnswerUpdates, host_of, origin_of
from codex_workspace.config.prompts import Skill
from codex_workspace.server.card import CARD_PATHS, Signer, Version, agent_card, card_routes, extended_card
from codex_workspace.server.connections import SLOW_READER_S, ConnectionGuard, guarded_by
from codex_workspace.server.errors import refuse_request, unauthorized
from codex_workspace.server.handler import IdempotentHandler
from codex_workspace.server.limits import LimitedHandler, RateLimiter, StreamLimits, limit_heads
from codex_workspace.server.middleware import (
    EXTENSION_HEADERS,
    RPC_PATH,
    Authenticator,
    CheckedContextBuilder,
    CheckedDispatcher,
    PageCheck,
    RequestChecks,
    TokenBackend,
)
from codex_workspace.server.push import PushService
from codex_workspace.server.sdk_fixes import CorrectedAdapter, EagerAdapter, ListingDispatcher
from codex_workspace.server.sockets import BACKLOG, HEAD_S, GrpcListener, handles_for
from codex_workspace.server.views import View, authenticators
from codex_workspace.server.views import routes as view_routes
from codex_workspace.storage.store import Store
from codex_workspace.tasks.scheduling import AdmissionControl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from codex_workspace.server.grpc_server import GrpcContextBuilder

logger = logging.getLogger(__name__)

PROBES: Final = frozenset({"/healthz", "/readyz"})
PUBLIC_PATHS: Final = PROBES | {*CARD_PATHS.values()}
"""Paths that need no token: the probes, and the cards, which say that a token is needed."""

LOOPBACK_HOSTS: Final = (r"(?:[a-z0-9-]+\.)*localhost", r"127(?:\.[0-9]{1,3}){3}", r"\[::1\]")
ADDRESSES: Final = (r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}", r"\[[0-9a-f:.]+\]")
"""Patterns of the Host header: names of this machine, and all IP addresses."""

WILDCARDS: Final = frozenset({"0.0.0.0", "::"})
"""The bound address of an agent that listens on all addresses of its machine."""

CLOSE_GRACE_S: Final = 2
"""How long open connections may take to end after their tasks have ended."""

ACCEPTED_AT_ONCE: Final = 8
"""asyncio accepts this many connections before the first of them can be rejected."""

Readiness = Callable[[], Awaitable[str | None]]
"""Returns why the agent cannot process messages; None if it can."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of the application and its card.

    url, grpc_url: the public addresses; `grpc_url` is host:port, None if gRPC is not on the card.
    tokens: the tokens, or their SHA-256, by principal; if empty, no token is needed.
    hosts: the names and addresses, besides loopback's and that of `url`, that are answered if no token is needed.
    origins: the web pages that may call the agent, as scheme://host:port.
    one_main_context: whether messages without a context share their sender's main context, instead of a new one each.
    versions: of A2A, the preferred one first.
    skills: the operator's skills.
    setup: the extended card's description of model, workspace and rules.
    sign: signs the card; only if `versions` is 1.0 alone, because the fields for 0.3 clients cannot be signed.
    """

    name: str
    description: str
    version: str
    url: str
    grpc_url: str | None = None
    tokens: Mapping[str, str | bytes] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 1024 * 1024
    max_parts: int = 100
    one_main_context: bool = True
    versions: tuple[Version, ...] = ("1.0", "0.3")
    streaming: bool = True
    answer_updates: AnswerUpdates = "by-client"
    push_notifications: bool = False
    input_modes: tuple[str, ...] = ("text/plain",)
    extensions: tuple[AgentExtension, ...] = ()
    skills: tuple[Skill, ...] = ()
    setup: Mapping[str, str] = field(default_factory=dict)
    sign: Signer | None = None
    requests_per_minute: int = 60_000
    streams: StreamLimits = field(default_factory=StreamLimits)

    @property
    def secured(self) -> bool:
        """Whether requests need a token."""
        return bool(self.tokens)

    @property
    def is_extended(self) -> bool:
        """Whether there is an extended card."""
        return self.secured and bool(self.setup)


@dataclass(frozen=True, slots=True)
class Application:
    """The application: `asgi` for HTTP, `grpc` for gRPC, and the handlers that all transports share."""

    asgi: Starlette
    handler: IdempotentHandler
    front: LimitedHandler
    card: AgentCard
    _authenticator: Authenticator
    _push: PushService | None
    _callers: "Callable[[Version], GrpcContextBuilder]"
    _versions: tuple[Version, ...]

    async def resume(self) -> int:
        """Resume the messages that an earlier process did not answer; return how many. Call it before serving.

        While the disk is full, this waits.
        """
        resumed = await self.handler.resume()
        if resumed:
            logger.warning("resuming %d unanswered messages of an earlier process", resumed)
        if self._push is not None:
            await self._push.resume()
        return resumed

    def add_principal(self, name: str, token: str) -> None:
        """Accept another principal's token."""
        self._authenticator.add(name, token)

    def grpc(self, listener: GrpcListener) -> AbstractAsyncContextManager[None]:
        """Serve gRPC on a listener until the block is left, then let open calls end."""
        # Imported only if gRPC is on: it takes 35 ms and 9 MB.
        from codex_workspace.server.grpc_server import serving_grpc

        old = self._callers("0.3") if "0.3" in self._versions else None
        return serving_grpc(listener, self.front, self._callers("1.0"), old)


@asynccontextmanager
async def build_app(
    options: ServerOptions,
    executor: AgentExecutor,
    store: Store,
    ready: Readiness,
    admission: AdmissionControl | None = None,
    push: PushService | None = None,
    *,
    views: Callable[[LimitedHandler], Sequence[View]] = lambda _front: (),
    tracer: Tracer = NO_TRACER,
    handler_class: type[IdempotentHandler] = IdempotentHandler,
) -> AsyncIterator[Application]:
    """Build the application around an executor; leaving the block ends the tasks that still run.

    Args:
        admission: limits the accepted messages, whose slots the executor must claim; None accepts all.
        push: sends push notifications; None turns them off.
        views: returns the operator endpoints; its argument counts the open streams.
        tracer: starts the requests' spans.
        handler_class: handles the requests.
    """
    options = replace(options, push_notifications=push is not None)
    card = agent_card(options)
    handler = handler_class(executor, store, admission, card, one_main_context=options.one_main_context, push=push)
    front = LimitedHandler(handler, options.streams, card, extended_card(options), tracer, options.answer_updates)
    authenticator, rates = Authenticator(options.tokens), RateLimiter(options.requests_per_minute)
    seen = views(front)
    extensions = frozenset(each.uri for each in options.extensions)
    pages = _page_check(options)
    backend = TokenBackend(authenticator, PUBLIC_PATHS, PROBES, authenticators(seen, options.tokens), pages)
    routes = [
        Route("/healthz", _healthz),
        Route("/readyz", _readyz(ready)),
        *view_routes(seen, options.tokens),
        *card_routes(options),
        *_a2a_routes(front, options.max_parts, has_old="0.3" in options.versions),
    ]
    middleware = [
        Middleware(limit_heads),
        Middleware(AuthenticationMiddleware, backend=backend, on_error=unauthorized),
        Middleware(RequestChecks, rates=rates, max_bytes=options.max_body_bytes, extensions=extensions),
    ]
    asgi = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: refuse_request})
    asgi.router.redirect_slashes = False
    if options.origins:
        _allow_pages(asgi, options.origins)

    def grpc_callers(version: Version) -> "GrpcContextBuilder":
        from codex_workspace.server.grpc_server import GrpcContextBuilder

        return GrpcContextBuilder(authenticator, pages, rates, extensions, version, options.max_parts)

    try:
        yield Application(asgi, handler, front, card, authenticator, push, grpc_callers, options.versions)
    finally:
        await handler.aclose()


def _page_check(options: ServerOptions) -> PageCheck:
    names = {urlsplit(options.url).hostname or "", *options.hosts} - {""}
    # Other programs than browsers send an address as it is written.
    patterns = map(_host_pattern, names | {host_of(name) for name in names})
    forms = "|".join((*LOOPBACK_HOSTS, *(ADDRESSES if WILDCARDS & {*options.hosts} else ()), *patterns))
    pattern = re.compile(rf"(?:{forms})\.?(?::[0-9]{{1,5}})?", re.ASCII | re.IGNORECASE)
    return PageCheck(pattern, frozenset({*options.origins, origin_of(options.url)}))


def _host_pattern(name: str) -> str:
    return re.escape(f"[{name}]" if ":" in name and not name.startswith("[") else name)


def _allow_pages(asgi: Starlette, origins: Sequence[str]) -> None:
    """Answer preflight requests of these pages, before authentication, and let them read responses."""
    asgi.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=(*EXTENSION_HEADERS, "ETag", "Retry-After", "WWW-Authenticate"),
    )


def _a2a_routes(front: LimitedHandler, max_parts: int, *, has_old: bool) -> list[BaseRoute]:
    contexts = CheckedContextBuilder(max_parts)
    dispatcher = CheckedDispatcher(front, contexts, CorrectedAdapter(front, contexts) if has_old else None)
    routes = [Route(RPC_PATH, dispatcher.handle_requests, methods=["POST"])]
    if has_old:
        old = EagerAdapter(front, contexts).routes().items()
        routes += [Route(path, endpoint, methods=[method]) for (path, method), endpoint in old]
    routes.append(Route("/tasks", ListingDispatcher(front, contexts).list_tasks))
    # The others are for tenants.
    return [*routes, *(each for each in create_rest_routes(front, contexts) if isinstance(each, Route))]


@asynccontextmanager
async def serving(
    app: Starlette, listener: socket.socket, slow_reader_s: float = SLOW_READER_S, head_s: float = HEAD_S
) -> AsyncIterator[None]:
    """Serve the application on a listening socket until the block is left, then let open connections end.

    The connection of a client that does not read for `slow_reader_s` seconds, or takes longer than `head_s` for the
    head of a request, is closed.
    """
    # gRPC may use a sixth of the file handles. The rest is for the database, codex's pipes and webhooks.
    guard = ConnectionGuard(handles_for(2 / 3), head_s, slow_reader_s)
    config = uvicorn.Config(
        app,
        http=guarded_by(guard),
        backlog=ACCEPTED_AT_ONCE,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_GRACE_S,
        timeout_keep_alive=75,
    )
    server = _Server(config)
    async with task_group() as tasks:
        tasks.start_soon(server.serve, [listener])
        try:
            yield
        finally:
            server.should_exit = True


class _Server(uvicorn.Server):
    """Uvicorn without signal handlers: the caller decides when to stop."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            # asyncio has set it to the number of connections that it accepts at once.
            listener.listen(BACKLOG)

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
