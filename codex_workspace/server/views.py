"""The operator endpoints `/metrics` and `/transcript`, their access control, and the collection of gauges."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from codex_workspace.codex.transcript import LINES
from codex_workspace.common.telemetry import CONTENT_TYPE
from codex_workspace.common.values import JsonObject
from codex_workspace.config.settings import OPERATOR
from codex_workspace.runtimes.backend import BackendStats
from codex_workspace.server.middleware import Authenticator
from codex_workspace.storage.deliveries import Deliveries
from codex_workspace.tasks.scheduling import AdmissionControl

COUNTED_S: Final = 5.0
"""Messages are counted in the database at most this often."""


@dataclass(slots=True)
class GaugeCollector:
    """Collects the gauges of one agent; the sources of values that do not exist are None."""

    deliveries: Deliveries
    streams: Callable[[], int]
    admission: AdmissionControl | None = None
    codex: Callable[[], BackendStats] | None = None
    push_waiting: Callable[[], int] | None = None
    _count_lock: anyio.Lock = field(default_factory=anyio.Lock)
    _counted: Mapping[str, int] | None = None
    _counted_at: float = -COUNTED_S

    async def read(self) -> tuple[dict[str, float], Mapping[str, int] | None]:
        """Return the gauges by name, and the stored messages by state, which are at most `COUNTED_S` old."""
        deliveries, admission = await self._count(), self.admission
        values: dict[str, float] = {
            "messages_waiting": 0 if admission is None else admission.waiting,
            "turns_running": 0 if admission is None else admission.running,
            "questions_open": 0 if admission is None else admission.asking,
            "streams_open": self.streams(),
        }
        if self.push_waiting is not None:
            values["push_notifications_waiting"] = self.push_waiting()
        if self.codex is not None:
            values |= _codex_values(self.codex())
        return values, deliveries

    async def _count(self) -> Mapping[str, int] | None:
        async with self._count_lock:
            if anyio.current_time() - self._counted_at >= COUNTED_S:
                self._counted, self._counted_at = await self.deliveries.count_by_state(), anyio.current_time()
            return self._counted


def _codex_values(codex: BackendStats) -> dict[str, float]:
    return {
        "codex_up": codex.is_up,
        "codex_threads": codex.threads,
        "codex_resident_memory_bytes": codex.resident_bytes,
        "codex_restarts": max(0, codex.starts - 1),
        "codex_deaths": codex.deaths,
    }


METRICS_READER: Final = "(metrics)"
PLATFORM_READER: Final = "(platform)"
"""The principals of an endpoint's extra token; config.yaml rejects such names."""


@dataclass(frozen=True, slots=True)
class View:
    """An operator endpoint.

    extra_tokens: the tokens, by owner, that are valid for this endpoint only.
    needs_token: a token is required even if the agent requires none otherwise.
    """

    path: str
    handler: Callable[[Request], Awaitable[Response]]
    extra_tokens: Mapping[str, str] = field(default_factory=dict)
    needs_token: bool = False


def metrics_view(scrape: Callable[[], Awaitable[bytes]], token: str | None) -> View:
    """Return the `/metrics` endpoint; `token` is an extra token for it."""

    async def show(_request: Request) -> Response:
        return Response(await scrape(), media_type=CONTENT_TYPE)

    return View("/metrics", show, {} if token is None else {METRICS_READER: token})


def transcript_view(lines: Callable[[int, int, str | None], Awaitable[JsonObject]], token: str | None) -> View:
    """Return the `/transcript` endpoint; the platform's `token` is an extra token for it.

    `lines` returns at most `limit` lines after `since`, of a context or of the newest work.
    """

    async def show(request: Request) -> Response:
        since, limit = number_of(request, "since", 0, 0), number_of(request, "limit", LINES, 1)
        content = await lines(since, limit, request.query_params.get("context"))
        return JSONResponse(content, headers={"Cache-Control": "no-store"})

    return View("/transcript", show, {} if token is None else {PLATFORM_READER: token}, needs_token=True)


def authenticators(views: Sequence[View], tokens: Mapping[str, str | bytes]) -> dict[str, Authenticator]:
    """Return each endpoint's authenticator by path; it accepts the principals' tokens and the extra tokens."""
    return {view.path: Authenticator({**tokens, **view.extra_tokens}) for view in views}


def routes(views: Sequence[View], tokens: Mapping[str, str | bytes]) -> list[Route]:
    """Return the endpoints' routes, which reject principals other than the operator."""
    return [Route(view.path, _operator_only(view, tokens)) for view in views]


def _operator_only(view: View, tokens: Mapping[str, str | bytes]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if view.needs_token and not (tokens or view.extra_tokens):
            raise HTTPException(403, "this endpoint needs a token, and the agent has none; set A2A_TOKEN")
        if request.user.display_name not in (OPERATOR, *view.extra_tokens):
            raise HTTPException(403, "this endpoint needs the operator's token")
        return await view.handler(request)

    return endpoint


def number_of(request: Request, name: str, default: int, lowest: int) -> int:
    """Return an integer query parameter.

    Raises:
        HTTPException: 400, it is not an integer, or less than `lowest`.
    """
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) <= 12 and int(given) >= lowest):
        raise HTTPException(400, f"{name} must be a whole number of at least {lowest}")
    return int(given)
