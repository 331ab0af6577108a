"""How much there is of everything at this moment, gathered for a scrape.

What those who run the agent look at over HTTP, beside A2A, and who may: the operator, and readers of one view.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from codex_workspace.codex.transcript import LINES
from codex_workspace.common.a2a_terms import OPERATOR
from codex_workspace.common.metrics import CONTENT_TYPE, CodexGauges, Gauges
from codex_workspace.common.values import JsonObject
from codex_workspace.runtimes.backend import BackendStats
from codex_workspace.server.middleware import Authenticator
from codex_workspace.storage.deliveries import Deliveries
from codex_workspace.tasks.scheduling import AdmissionControl

COUNTED_S: Final = 5.0
"""The database is asked at most this often, however many scrape."""


@dataclass(slots=True)
class GaugeCollector:
    """Reads the levels of one agent.

    Args:
        deliveries: counts the messages that are kept.
        streams: counts the open streams.
        admission: counts what waits and runs; None where nobody counts it.
        codex: tells of codex; None where there is none.
        push_waiting: counts the notifications for webhooks; None where there are none.
    """

    deliveries: Deliveries
    streams: Callable[[], int]
    admission: AdmissionControl | None = None
    codex: Callable[[], BackendStats] | None = None
    push_waiting: Callable[[], int] | None = None
    _one_counts: anyio.Lock = field(default_factory=anyio.Lock)
    _counted: Mapping[str, int] | None = None
    _counted_at: float = -COUNTED_S

    async def read(self) -> Gauges:
        """Return the levels; messages are at most `COUNTED_S` old."""
        counted = await self._count()
        admission, codex = self.admission, self.codex
        return Gauges(
            waiting=0 if admission is None else admission.waiting,
            running=0 if admission is None else admission.running,
            asking=0 if admission is None else admission.asking,
            streams=self.streams(),
            codex=None if codex is None else _levels_of(codex()),
            deliveries=counted,
            push_waiting=None if self.push_waiting is None else self.push_waiting(),
        )

    async def _count(self) -> Mapping[str, int] | None:
        async with self._one_counts:
            now = anyio.current_time()
            if now - self._counted_at >= COUNTED_S:
                self._counted, self._counted_at = await self.deliveries.count_by_state(), now
            return self._counted


def _levels_of(figures: BackendStats) -> CodexGauges:
    return CodexGauges(
        is_up=figures.is_up,
        threads=figures.threads,
        resident_bytes=figures.resident_bytes,
        starts=figures.starts,
        deaths=figures.deaths,
    )


METRICS_READER: Final = "(metrics)"
PLATFORM_READER: Final = "(platform)"
"""Who has the token of a view; no principal of config.yaml can be called so."""


@dataclass(frozen=True, slots=True)
class View:
    """Something to look at.

    handler: makes the answer of a request. readers: the tokens that open this view and nothing else, by their owners.
    needs_token: nobody sees it without a token, also where the agent asks nobody for one.
    """

    path: str
    handler: Callable[[Request], Awaitable[Response]]
    extra_tokens: Mapping[str, str] = field(default_factory=dict)
    needs_token: bool = False


def metrics_view(scrape: Callable[[], Awaitable[bytes]], token: str | None) -> View:
    """Return the view of the agent's numbers, which `token` opens too."""

    async def show(_request: Request) -> Response:
        return Response(await scrape(), media_type=CONTENT_TYPE)

    return View("/metrics", show, {} if token is None else {METRICS_READER: token})


def transcript_view(lines: Callable[[int, int, str | None], Awaitable[JsonObject]], token: str | None) -> View:
    """Return the view of what codex does, which the platform's `token` opens too.

    `lines` is asked for those after `since`, at most `limit`, of a `context` or of everybody's newest work.
    """

    async def show(request: Request) -> Response:
        since, limit = number_of(request, "since", 0, 0), number_of(request, "limit", LINES, 1)
        told = await lines(since, limit, request.query_params.get("context"))
        return JSONResponse(told, headers={"Cache-Control": "no-store"})

    return View("/transcript", show, {} if token is None else {PLATFORM_READER: token}, needs_token=True)


def authenticators(views: Sequence[View], tokens: Mapping[str, str]) -> dict[str, Authenticator]:
    """Return who is let in to look at each view, by its path: all principals are known there, and its readers."""
    return {view.path: Authenticator({**tokens, **view.extra_tokens}) for view in views}


def routes(views: Sequence[View], tokens: Mapping[str, str]) -> list[Route]:
    """Return the views' routes, which refuse principals that are not the operator."""
    return [Route(view.path, _guarded(view, tokens)) for view in views]


def _guarded(view: View, tokens: Mapping[str, str]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if view.needs_token and not (tokens or view.extra_tokens):
            raise HTTPException(403, "this needs a token, and the agent has none; set A2A_TOKEN")
        if request.user.display_name not in (OPERATOR, *view.extra_tokens):
            raise HTTPException(403, "only the operator's token opens this")
        return await view.handler(request)

    return endpoint


def number_of(request: Request, name: str, default: int, lowest: int) -> int:
    """Return a whole number of the query.

    Raises:
        HTTPException: 400, it is none, or less than `lowest`.
    """
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) <= 12 and int(given) >= lowest):
        raise HTTPException(400, f"{name} must be a whole number of at least {lowest}")
    return int(given)
