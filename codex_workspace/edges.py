"""What HTTP requests meet between the door and the SDK: how often, of what type and version, which extensions are on.

Pure ASGI. The JSON-RPC endpoint and the HTTP+JSON routes are told apart by their path, as each has errors of its own
form.
"""

from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from codex_workspace.busy import rest_body, rpc_body
from codex_workspace.rates import Rates

if TYPE_CHECKING:
    from codex_workspace.wire import JsonObject

RPC_PATH: Final = "/"

JSON_TYPES: Final = frozenset({"application/json", "application/a2a+json"})
"""What a request's body may be. A page in a browser can post everything else without asking the agent first."""

CONTENT_TYPE_CODE: Final = -32005
"""A2A's ContentTypeNotSupportedError in JSON-RPC."""

VERSION_HEADER: Final = "A2A-Version"

EXTENSION_HEADERS: Final = ("A2A-Extensions", "X-A2A-Extensions")
"""Where extensions are asked for and answered: in 1.0, and in 0.3."""

STATUS_NAMES: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
}
"""The canonical name of an HTTP status in an error of HTTP+JSON."""


class RateLimit:
    """Answers principals that ask too often with 429; who is not known (probes, the card) is not counted."""

    def __init__(self, app: ASGIApp, rates: Rates) -> None:
        self._app = app
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and scope["user"].is_authenticated:
            wait_s = self._rates.take(scope["user"].display_name)
            if wait_s:
                form = rpc_body if scope["path"] == RPC_PATH else rest_body
                body = form("this principal asks too often", wait_s)
                await JSONResponse(body, 429, {"Retry-After": str(wait_s)})(scope, receive, send)
                return
        await self._app(scope, receive, send)


class JsonOnly:
    """Refuses bodies that do not say that they are JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            told = headers.get("content-type", "").partition(";")[0].strip().lower()
            if _has_body(headers) and told not in JSON_TYPES:
                await _wrong_type(scope, told)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class VersionParameter:
    """Takes the version of A2A from the address where no header names it, as the specification lets clients do."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with the header."""
        if scope["type"] == "http" and VERSION_HEADER not in Headers(scope=scope):
            named = QueryParams(scope["query_string"]).get(VERSION_HEADER)
            if named is not None:
                # It ends in a log line, which a header cannot break and an address can.
                plain = named if named.isascii() and named.isprintable() else "unreadable"
                scope = {**scope, "headers": [*scope["headers"], (VERSION_HEADER.lower().encode(), plain.encode())]}
        await self._app(scope, receive, send)


class ActiveExtensions:
    """Tells in the answer's head which of the extensions that a request asks for are on."""

    def __init__(self, app: ASGIApp, known: frozenset[str]) -> None:
        self._app = app
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its answer back with the header."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        active = {name: active_in(headers.getlist(name), self._known) for name in EXTENSION_HEADERS}

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for name, uris in active.items():
                    if uris:
                        answer[name] = ", ".join(uris)
            await send(message)

        await self._app(scope, receive, telling if any(active.values()) else send)


def active_in(asked: list[str], known: frozenset[str]) -> list[str]:
    """Return the known ones of the extensions that comma-separated header values ask for, in their order."""
    uris = [uri.strip() for value in asked for uri in value.split(",")]
    return [uri for uri in dict.fromkeys(uris) if uri in known]


async def refuse_request(_request: Request, error: Exception) -> Response:
    """Answer what no route takes, in the form of HTTP+JSON's errors."""
    assert isinstance(error, HTTPException)
    name = STATUS_NAMES.get(error.status_code, "UNKNOWN")
    body = {"error": {"code": error.status_code, "status": name, "message": error.detail}}
    return JSONResponse(body, error.status_code, error.headers)


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _wrong_type(scope: Scope, told: str) -> Response:
    sentence = f"a body must be application/json, but is {told[:100] or 'of no type'}"
    info: JsonObject = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": "CONTENT_TYPE_NOT_SUPPORTED",
        "domain": "a2a-protocol.org",
    }
    body: JsonObject = {"error": {"code": 415, "status": STATUS_NAMES[415], "message": sentence, "details": [info]}}
    if scope["path"] == RPC_PATH:
        error: JsonObject = {"code": CONTENT_TYPE_CODE, "message": sentence, "data": [info]}
        body = {"jsonrpc": "2.0", "id": None, "error": error}
    return JSONResponse(body, 415)
