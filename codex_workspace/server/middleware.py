"""Authentication and the HTTP middleware: body limit, rate limit, content type, A2A version and extension headers.

The middleware is pure ASGI. It distinguishes JSON-RPC and HTTP+JSON by the path, because their errors differ.
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

from codex_workspace.config.settings import OPERATOR
from codex_workspace.server.overload import RateLimiter, rest_body, rpc_body

if TYPE_CHECKING:
    from codex_workspace.common.values import JsonObject


API_KEY_HEADER: Final = "X-API-Key"
"""The header for the token of clients that do not support bearer tokens."""


class Principal(BaseUser):
    """The authenticated principal, as Starlette's user."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def is_authenticated(self) -> bool:
        """Always true: other requests are rejected."""
        return True

    @property
    def display_name(self) -> str:
        """The owner of what this principal creates."""
        return self._name


class Authenticator:
    """Identifies principals by their tokens.

    `tokens` are the tokens by principal. If there are none, every request belongs to `OPERATOR`.
    """

    def __init__(self, tokens: Mapping[str, str]) -> None:
        self._digests = {name: _digest(token) for name, token in tokens.items()}
        self._added: dict[str, bytes] = {}

    def add(self, name: str, token: str) -> None:
        """Add a principal's token; if no token was needed before, none is needed now."""
        self._added[name] = _digest(token)

    def authenticate(self, authorization: str, api_key: str = "") -> Principal:
        """Return the principal of the token in the Authorization header, or else in the X-API-Key header.

        Raises:
            AuthenticationError: the token is missing or unknown; the text is for the client.
        """
        shown = api_key
        if not self._digests:
            return Principal(self._added_principal(authorization) or OPERATOR)
        if authorization or not api_key:
            scheme, _, shown = authorization.partition(" ")
            if scheme.lower() != "bearer":
                raise AuthenticationError("this agent requires `Authorization: Bearer <token>`")
        # Compare all digests, so that the duration reveals neither content, length nor owner of a token.
        digest = _digest(shown.strip())
        known_ones = self._digests | self._added
        owners = [name for name, known in known_ones.items() if hmac.compare_digest(known, digest)]
        if not owners:
            raise AuthenticationError("the token is unknown")
        return Principal(owners[0])

    def _added_principal(self, authorization: str) -> str | None:
        digest = _digest(authorization.partition(" ")[2].strip())
        return next((name for name, known in self._added.items() if hmac.compare_digest(known, digest)), None)


class TokenBackend(AuthenticationBackend):
    """Authenticates requests, except those for public paths; `authenticators` are for paths with their own tokens."""

    def __init__(
        self,
        authenticator: Authenticator,
        public_paths: frozenset[str],
        authenticators: Mapping[str, Authenticator] | None = None,
    ) -> None:
        self._authenticator = authenticator
        self._public_paths = public_paths
        self._authenticators = authenticators or {}

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser] | None:
        """Return the principal; None for a public path.

        Raises:
            AuthenticationError: the token is missing or unknown.
        """
        path = conn.url.path
        if path in self._public_paths:
            return None
        headers, authenticator = conn.headers, self._authenticators.get(path, self._authenticator)
        principal = authenticator.authenticate(headers.get("authorization", ""), headers.get(API_KEY_HEADER, ""))
        return AuthCredentials(["authenticated"]), principal


def unauthorized(_connection: HTTPConnection, error: Exception) -> Response:
    """Return the response for a request that is not authenticated."""
    return _error_response(401, "UNAUTHENTICATED", str(error), {"WWW-Authenticate": "Bearer"})


def _error_response(status: int, name: str, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    # HTTP+JSON's error format, also for JSON-RPC, whose clients look for the message in an object as well.
    return JSONResponse({"error": {"code": status, "status": name, "message": sentence}}, status, headers)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class BodyLimit:
    """Rejects bodies of more than `max_bytes` bytes, by their header and by their actual size; ignores requests whose
    client disconnects before the end of the body."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._sentence = f"the body is over the limit of {max_bytes} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request, counting the bytes of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._max_bytes:
            await _error_response(413, "INVALID_ARGUMENT", self._sentence)(scope, receive, send)
            return
        # A client that disconnects within its body does not read a response.
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
"""The accepted content types. A web page can send every other type without a preflight request."""

CONTENT_TYPE_CODE: Final = -32005
"""A2A's ContentTypeNotSupportedError in JSON-RPC."""

VERSION_HEADER: Final = "A2A-Version"

EXTENSION_HEADERS: Final = ("A2A-Extensions", "X-A2A-Extensions")
"""The headers of requested and active extensions, in A2A 1.0 and 0.3."""

STATUS_NAMES: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
}
"""The canonical status names in HTTP+JSON errors."""


class RateLimit:
    """Rejects requests over a principal's rate limit with 429; public paths are not counted."""

    def __init__(self, app: ASGIApp, rates: RateLimiter) -> None:
        self._app = app
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request, or reject it."""
        if scope["type"] == "http" and scope["user"].is_authenticated:
            wait_s = self._rates.take(scope["user"].display_name)
            if wait_s:
                form = rpc_body if scope["path"] == RPC_PATH else rest_body
                body = form("the rate limit of this principal is exceeded", wait_s)
                await JSONResponse(body, 429, {"Retry-After": str(wait_s)})(scope, receive, send)
                return
        await self._app(scope, receive, send)


class RequireJson:
    """Rejects bodies without a JSON content type."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request, or reject it."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
            if _has_body(headers) and content_type not in JSON_TYPES:
                await _wrong_type(scope, content_type)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class VersionQueryParameter:
    """Sets the A2A version header from the query parameter, as the specification allows, if there is no header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request with the header."""
        if scope["type"] == "http" and VERSION_HEADER not in Headers(scope=scope):
            named = QueryParams(scope["query_string"]).get(VERSION_HEADER)
            if named is not None:
                # The value is logged, and a query parameter can contain line breaks.
                plain = named if named.isascii() and named.isprintable() else "unreadable"
                scope = {**scope, "headers": [*scope["headers"], (VERSION_HEADER.lower().encode(), plain.encode())]}
        await self._app(scope, receive, send)


class ExtensionHeaders:
    """Adds the active extensions of a request to the response's headers."""

    def __init__(self, app: ASGIApp, known: frozenset[str]) -> None:
        self._app = app
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request, and add the header to its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        active = {name: active_extensions(headers.getlist(name), self._known) for name in EXTENSION_HEADERS}

        async def send_with_extensions(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for name, uris in active.items():
                    if uris:
                        answer[name] = ", ".join(uris)
            await send(message)

        await self._app(scope, receive, send_with_extensions if any(active.values()) else send)


def active_extensions(asked: list[str], known: frozenset[str]) -> list[str]:
    """Return the known extensions in comma-separated header values, in their order."""
    uris = [uri.strip() for value in asked for uri in value.split(",")]
    return [uri for uri in dict.fromkeys(uris) if uri in known]


async def refuse_request(_request: Request, error: Exception) -> Response:
    """Return the response for a request without a route, in HTTP+JSON's error format."""
    assert isinstance(error, HTTPException)
    name = STATUS_NAMES.get(error.status_code, "UNKNOWN")
    body = {"error": {"code": error.status_code, "status": name, "message": error.detail}}
    return JSONResponse(body, error.status_code, error.headers)


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _wrong_type(scope: Scope, content_type: str) -> Response:
    sentence = f"the content type must be application/json, but is {content_type[:100] or 'missing'}"
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
