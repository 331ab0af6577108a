"""A server that refreshes a subscription's login: each refresh token works once and is replaced."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from codex_workspace.server.app import serving
from codex_workspace.server.sockets import bind

ACCOUNT = "account-1"


def token(account: str, token_id: str, valid_for: timedelta = timedelta(days=1)) -> str:
    """Return an unsigned token in codex's format that is valid for `valid_for`."""

    def part(content: dict[str, object]) -> str:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")

    expires_at = (datetime.now(UTC) + valid_for).timestamp()
    claims = {"chatgpt_account_id": account, "chatgpt_plan_type": "pro", "chatgpt_user_id": "user-1"}
    payload = {"exp": int(expires_at), "email": "a@example.com", "jti": token_id, "https://api.openai.com/auth": claims}
    return f"{part({'alg': 'none', 'typ': 'JWT'})}.{part(payload)}.c2lnbmVk"


@dataclass(slots=True)
class LoginServer:
    """The server. refresh_token: the valid one. requests: the refresh tokens it received.

    takes_s: duration of a successful response; errors are returned at once.
    """

    url: str
    takes_s: float
    refresh_token: str = "refresh-0-0123456789"
    requests: list[str] = field(default_factory=list)
    _changed: anyio.Event = field(default_factory=anyio.Event)

    async def wait_for_requests(self, times: int = 1) -> None:
        """Wait until it has received `times` requests."""
        while len(self.requests) < times:
            await self._changed.wait()

    async def refresh(self, request: Request) -> JSONResponse:
        """Answer `POST /oauth/token`."""
        given = (await request.json())["refresh_token"]
        self.requests.append(given)
        self._changed.set()
        self._changed = anyio.Event()
        if given != self.refresh_token:
            return JSONResponse({"error": {"code": "refresh_token_reused", "message": "already used"}}, 401)
        number = len(self.requests)
        self.refresh_token = f"refresh-{number}-0123456789"
        await anyio.sleep(self.takes_s)
        return JSONResponse(
            {
                "id_token": token(ACCOUNT, f"id-{number}"),
                "access_token": token(ACCOUNT, f"access-{number}"),
                "refresh_token": self.refresh_token,
            }
        )


@asynccontextmanager
async def running_login_server(takes_s: float) -> AsyncIterator[LoginServer]:
    """Run the server on a free port."""
    with bind("127.0.0.1", 0) as listener:
        server = LoginServer(f"http://127.0.0.1:{listener.getsockname()[1]}/oauth/token", takes_s)
        app = Starlette(routes=[Route("/oauth/token", server.refresh, methods=["POST"])])
        async with serving(app, listener):
            yield server
