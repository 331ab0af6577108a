"""What stands before every request: who is it, is it too big, and the word to refuse it with. Pure ASGI, no A2A.

What HTTP requests meet between the door and the SDK: how often, of what type and version, which extensions are on.

Pure ASGI. The JSON-RPC endpoint and the HTTP+JSON routes are told apart by their path, as each has errors of its own
form.
"""

import hashlib
import hmac
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from starlette.authentication import AuthCredentials, AuthenticationBackend, AuthenticationError, BaseUser
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from codex_workspace.common.a2a_terms import OPERATOR
from codex_workspace.server.overload import RateLimiter, rest_body, rpc_body

if TYPE_CHECKING:
    from codex_workspace.common.values import JsonObject


API_KEY_HEADER: Final = "X-API-Key"
"""Where a token may be shown as well, by clients that know no bearer tokens."""


class Principal(BaseUser):
    """Whoever has shown the token, or anybody where none is needed."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def is_authenticated(self) -> bool:
        """Always: who is not let in does not become a principal."""
        return True

    @property
    def display_name(self) -> str:
        """The owner of what this principal makes."""
        return self._name


class Authenticator:
    """Knows the principals by their tokens.

    `tokens`: each principal's token, by the principal's name. Without any, everybody is `OPERATOR`.
    """

    def __init__(self, tokens: Mapping[str, str]) -> None:
        self._digests = {name: _digest(token) for name, token in tokens.items()}
        self._further: dict[str, bytes] = {}

    def add(self, name: str, token: str) -> None:
        """Let in one more, by a token that came later; whoever needed none before needs none now."""
        self._further[name] = _digest(token)

    def authenticate(self, authorization: str, api_key: str = "") -> Principal:
        """Return whose token an Authorization or, where that is empty, an X-API-Key header shows.

        Raises:
            AuthenticationError: nobody's; with the sentence for the client.
        """
        shown = api_key
        if not self._digests:
            return Principal(self._further_owner(authorization) or OPERATOR)
        if authorization or not api_key:
            scheme, _, shown = authorization.partition(" ")
            if scheme.lower() != "bearer":
                raise AuthenticationError("this agent wants `Authorization: Bearer <token>`")
        # Of digests, and of all of them, so that neither content nor length nor owner shows in the time it takes.
        digest = _digest(shown.strip())
        known_ones = self._digests | self._further
        owners = [name for name, known in known_ones.items() if hmac.compare_digest(known, digest)]
        if not owners:
            raise AuthenticationError("the token is not one that this agent knows")
        return Principal(owners[0])

    def _further_owner(self, authorization: str) -> str | None:
        digest = _digest(authorization.partition(" ")[2].strip())
        return next((name for name, known in self._further.items() if hmac.compare_digest(known, digest)), None)


class TokenBackend(AuthenticationBackend):
    """Lets requests of principals pass, and all requests for public paths; `doors` has paths with their own keeper."""

    def __init__(
        self, doorkeeper: Authenticator, public_paths: frozenset[str], doors: Mapping[str, Authenticator] | None = None
    ) -> None:
        self._doorkeeper = doorkeeper
        self._public_paths = public_paths
        self._doors = doors or {}

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser] | None:
        """Return who it is; None for a public path.

        Raises:
            AuthenticationError: with the sentence for the client.
        """
        path = conn.url.path
        if path in self._public_paths:
            return None
        headers, doorkeeper = conn.headers, self._doors.get(path, self._doorkeeper)
        principal = doorkeeper.authenticate(headers.get("authorization", ""), headers.get(API_KEY_HEADER, ""))
        return AuthCredentials(["authenticated"]), principal


def unauthorized(_connection: HTTPConnection, error: Exception) -> Response:
    """Answer a request that was not let in."""
    return _refusal(401, "UNAUTHENTICATED", str(error), {"WWW-Authenticate": "Bearer"})


def _refusal(status: int, name: str, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    # The form of HTTP+JSON's errors, also for JSON-RPC: its clients look for the sentence in an object as well.
    return JSONResponse({"error": {"code": status, "status": name, "message": sentence}}, status, headers)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class BodyLimit:
    """Refuses bodies of more than `max_bytes` bytes, by what their header says and by what really comes; drops those
    whose client leaves before their end."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._sentence = f"the body is over the limit of {max_bytes} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, counting."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = dict(scope["headers"]).get(b"content-length", b"0")
        if not told.isdigit() or int(told) > self._max_bytes:
            await _refusal(413, "INVALID_ARGUMENT", self._sentence)(scope, receive, send)
            return
        # Nobody hears an answer any more where the client has left within its body.
        with suppress(ClientDisconnect):
            await self._app(scope, self._counting(receive), send)

    def _counting(self, receive: Receive) -> Receive:
        left = self._max_bytes

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, self._sentence)
            return message

        return counted


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

    def __init__(self, app: ASGIApp, rates: RateLimiter) -> None:
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


class RequireJson:
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


class VersionQueryParameter:
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


class ExtensionHeaders:
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
        active = {name: active_extensions(headers.getlist(name), self._known) for name in EXTENSION_HEADERS}

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for name, uris in active.items():
                    if uris:
                        answer[name] = ", ".join(uris)
            await send(message)

        await self._app(scope, receive, telling if any(active.values()) else send)


def active_extensions(asked: list[str], known: frozenset[str]) -> list[str]:
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
