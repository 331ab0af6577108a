"""What stands before the endpoints of the platform's stand-in: what is asked is counted, kept, and meets its faults."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from codex_workspace.devkit.platform.faults import Fault, Faults
from codex_workspace.devkit.platform.store import PlatformStore

MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request that a workspace has sent; `at`: a monotonic clock's seconds."""

    workspace_id: str
    method: str
    path: str
    status: int
    at: float


def token_of(request: Request) -> str | None:
    """Return the token that a request shows."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token if kind.lower() == "bearer" and token else None


@dataclass(slots=True)
class _Rate:
    """How many requests each workspace has sent in the minute that runs."""

    per_minute: int
    began: float = field(default_factory=time.monotonic)
    counted: Counter[str] = field(default_factory=Counter)

    def wait_s(self, workspace_id: str) -> int:
        """Count a request; return in how many seconds there is room again, 0 where there is now."""
        now = time.monotonic()
        if now - self.began >= MINUTE_S:
            self.began = now
            self.counted.clear()
        self.counted[workspace_id] += 1
        return 0 if self.counted[workspace_id] <= self.per_minute else int(self.began + MINUTE_S - now) + 1


class RequestLog:
    """Stands before the endpoints: counts requests, keeps which there were, and does wrong what is to go wrong.

    Requests of the user, who shows no token and names no workspace, go through as they are.

    rotate: makes a workspace's token void, and another one. note: is told of every answer to a workspace.
    """

    def __init__(
        self,
        app: ASGIApp,
        store: PlatformStore,
        faults: Faults,
        rate_per_minute: int,
        rotate: Callable[[str], object],
        note: Callable[[LoggedRequest], None],
    ) -> None:
        self._app = app
        self._store = store
        self._faults = faults
        self._rate = _Rate(rate_per_minute)
        self._rotate = rotate
        self._note = note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        token = token_of(request)
        workspace_id = request.headers.get("x-workspace-id") or (token and self._store.owner_of(token))
        if workspace_id is None and token is None:
            await self._app(scope, receive, send)
            return
        caller = _Caller(self._note, workspace_id or "", request, send)
        refused = await self._refusal(caller)
        if refused is not None:
            await refused(scope, receive, caller.sent)
        elif self._faults.happens(Fault.LOST, caller.path):
            await self._app(scope, receive, caller.swallowed)
            await caller.lose()
        else:
            await self._app(scope, receive, caller.sent)

    async def _refusal(self, caller: "_Caller") -> Response | None:
        faults = self._faults
        if faults.happens(Fault.LATE, caller.path):
            await anyio.sleep(faults.random.uniform(0.1, 1) * faults.late_s)
        wait_s = self._rate.wait_s(caller.workspace_id)
        if faults.happens(Fault.TOO_MANY, caller.path):
            wait_s = faults.retry_after_s
        if wait_s:
            headers = {
                "Retry-After": str(wait_s),
                "X-RateLimit-Limit": str(self._rate.per_minute),
                "X-RateLimit-Remaining": "0",
                "X-RateLimit-Reset": str(wait_s),
            }
            return JSONResponse({"error": "rate limit exceeded", "retry_after": wait_s}, 429, headers)
        if faults.happens(Fault.FAILING, caller.path):
            return _failing(faults.random.choice((500, 502, 503)))
        if faults.happens(Fault.UNAUTHORIZED, caller.path):
            return JSONResponse({"error": "invalid workspace auth token"}, 401)
        known = self._store.workspace(caller.workspace_id)
        has_file = known is not None and known.token_file is not None and known.status != "removed"
        if has_file and faults.happens(Fault.ROTATED, caller.path):
            self._rotate(caller.workspace_id)
        return None


def _failing(status: int) -> Response:
    match status:
        case 503:
            return JSONResponse({"error": "platform unavailable", "code": "platform_unavailable"}, 503)
        case 502:
            return Response("<html>502 Bad Gateway</html>", 502, media_type="text/html")
        case _:
            return JSONResponse({"error": "internal error"}, status)


@dataclass(slots=True)
class _Caller:
    """A request of a workspace; takes note of its answer."""

    note: Callable[[LoggedRequest], None]
    workspace_id: str
    request: Request
    send: Send

    @property
    def path(self) -> str:
        return self.request.url.path

    async def sent(self, message: Message) -> None:
        self._note(message)
        await self.send(message)

    async def swallowed(self, message: Message) -> None:
        self._note(message)

    async def lose(self) -> None:
        """End the connection: uvicorn closes one whose answer is announced and does not come."""
        head = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]}
        await self.send(head)

    def _note(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            asked = LoggedRequest(
                self.workspace_id, self.request.method, self.path, message["status"], time.monotonic()
            )
            self.note(asked)
