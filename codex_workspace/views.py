"""What those who run the agent look at over HTTP, beside A2A, and who may: the operator, and readers of one view."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from codex_workspace.guards import PRINCIPAL, Doorkeeper
from codex_workspace.metrics import CONTENT_TYPE
from codex_workspace.transcript import LINES
from codex_workspace.wire import JsonObject

METRICS_READER: Final = "(metrics)"
PLATFORM_READER: Final = "(platform)"
"""Who has the token of a view; no principal of config.yaml can be called so."""


@dataclass(frozen=True, slots=True)
class View:
    """Something to look at.

    show: makes the answer of a request. readers: the tokens that open this view and nothing else, by their owners.
    needs_token: nobody sees it without a token, also where the agent asks nobody for one.
    """

    path: str
    show: Callable[[Request], Awaitable[Response]]
    readers: Mapping[str, str] = field(default_factory=dict)
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


def doors(views: Sequence[View], tokens: Mapping[str, str]) -> dict[str, Doorkeeper]:
    """Return who is let in to look at each view, by its path: all principals are known there, and its readers."""
    return {view.path: Doorkeeper({**tokens, **view.readers}) for view in views}


def routes(views: Sequence[View], tokens: Mapping[str, str]) -> list[Route]:
    """Return the views' routes, which refuse principals that are not the operator."""
    return [Route(view.path, _guarded(view, tokens)) for view in views]


def _guarded(view: View, tokens: Mapping[str, str]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if view.needs_token and not (tokens or view.readers):
            raise HTTPException(403, "this needs a token, and the agent has none; set A2A_TOKEN")
        if request.user.display_name not in (PRINCIPAL, *view.readers):
            raise HTTPException(403, "only the operator's token opens this")
        return await view.show(request)

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
