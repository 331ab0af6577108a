"""The HTTP checks before the SDK: token, host and origin, rate limit, content type, body, misread parameters.

The SDK blocks the event loop while it converts a request, however large. It repeats wrong values in its errors, drops
unknown enum names (a filter then matches everything), accepts any text as base64 and any query value as a boolean, and
fails with an internal error on bodies that are not UTF-8 or nested too deeply (not reported upstream).
"""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import anyio
from a2a.compat.v0_3 import a2a_v0_3_pb2
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers import RequestHandler
from a2a.server.routes import DefaultServerCallContextBuilder
from a2a.server.routes.jsonrpc_dispatcher import JsonRpcDispatcher
from a2a.types import ListTasksRequest, SendMessageRequest, TaskPushNotificationConfig
from a2a.utils.errors import A2AError, VersionNotSupportedError
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message as ProtobufMessage
from starlette.authentication import AuthCredentials, AuthenticationBackend, AuthenticationError, SimpleUser
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from codex_workspace.common.a2a_terms import version_of
from codex_workspace.common.values import JsonObject, JsonValue, quoted
from codex_workspace.config.settings import OPERATOR
from codex_workspace.server.errors import (
    INVALID,
    TENANT,
    ForeignCaller,
    error_info,
    error_response,
    invalid,
    no_tenants,
    rest_error,
    rpc_error,
)
from codex_workspace.server.limits import (
    REPLACEMENT,
    RateLimiter,
    Replacement,
    active_extensions,
    body_first,
    check_size,
    is_huge,
    too_many_requests,
)
from codex_workspace.server.sdk_fixes import (
    check_0_3_call,
    check_0_3_parts,
    check_base64,
    check_history_length,
    check_translatable,
    is_int32,
    page_json,
    without_content,
)

if TYPE_CHECKING:
    from typing import TypeAlias

    from a2a.compat.v0_3.jsonrpc_adapter import JSONRPC03Adapter
    from google._upb._message import Descriptor as UpbDescriptor
    from google._upb._message import FieldDescriptor as UpbFieldDescriptor
    from google.protobuf.descriptor import Descriptor

    AnyDescriptor: TypeAlias = Descriptor | UpbDescriptor
    AnyField: TypeAlias = FieldDescriptor | UpbFieldDescriptor

RPC_PATH: Final = "/"
API_KEY_HEADER: Final = "X-API-Key"
"""The header for the token of clients that do not support bearer tokens."""

EXTENSION_HEADERS: Final = ("A2A-Extensions", "X-A2A-Extensions")
"""The headers of requested and active extensions, in A2A 1.0 and 0.3."""

VERSION_HEADER: Final = "A2A-Version"
JSON_TYPES: Final = frozenset({"application/json", "application/a2a+json"})
"""The accepted content types. A web page can send every other type without a preflight request."""

CONTENT_TYPE_CODE: Final = -32005
PARSE_ERROR_CODE: Final = -32700
"""JSON-RPC error codes: A2A's ContentTypeNotSupportedError, and an unreadable body."""

CONTENT: Final = "codex_workspace.content"
"""Key in a request's scope: its JSON body; None if there is none, or if it is no JSON."""

BODY_S: Final = 30.0
BODY_BYTES_PER_S: Final = 4096
"""A body may take `BODY_S` seconds, and one more for each `BODY_BYTES_PER_S` that have arrived: 12 MiB 52 minutes."""


class Authenticator:
    """Identifies principals by their tokens.

    `tokens` are the tokens, or their SHA-256, by principal. If there are none, no token is needed.
    """

    def __init__(self, tokens: Mapping[str, str | bytes]) -> None:
        self._digests = {name: _digest(token) for name, token in tokens.items()}
        self._added: dict[str, bytes] = {}

    @property
    def needs_token(self) -> bool:
        """Whether every request needs a token."""
        return bool(self._digests)

    def add(self, name: str, token: str) -> None:
        """Add a principal's token; if no token was needed before, none is needed now."""
        self._added[name] = _digest(token)

    def authenticate(self, headers: Mapping[str, str]) -> str | None:
        """Return the principal of the token in the Authorization header, or else in the X-API-Key header.

        None if no token is needed, and none that is known is shown. `headers` are indexed by their lower-case names.

        Raises:
            AuthenticationError: the token is missing or unknown; the text is for the client.
        """
        authorization, shown = headers.get("authorization", ""), headers.get(API_KEY_HEADER.lower(), "")
        if authorization or not shown:
            scheme, _, shown = authorization.partition(" ")
            if self._digests and scheme.lower() != "bearer":
                raise AuthenticationError("this agent requires `Authorization: Bearer <token>`")
        # Compare all digests, so that the duration reveals neither content, length nor owner of a token.
        digest = _digest(shown.strip())
        known_ones = self._digests | self._added
        owners = [name for name, known in known_ones.items() if hmac.compare_digest(known, digest)]
        if self._digests and not owners:
            raise AuthenticationError("the token is unknown")
        return owners[0] if owners else None


def _digest(token: str | bytes) -> bytes:
    return token if isinstance(token, bytes) else hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class PageCheck:
    """Rejects requests that web pages send with the rights of their visitor, which is a danger if no token is needed.

    A page can give its own host name any address (DNS rebinding), but its browser sends this name as the host. A GET
    request whose answer the page cannot read has no origin, but the header Sec-Fetch-Site, and so has a link.
    """

    hosts: re.Pattern[str]
    origins: frozenset[str]

    def check(self, host: str | None, origin: str | None, site: str | None) -> None:
        """Check the headers Host, Origin and Sec-Fetch-Site; `host` is None if the transport does not tell it.

        Raises:
            ForeignCaller: the host is not this agent's, or the origin is neither allowed nor this host.
        """
        if host is not None and self.hosts.fullmatch(host) is None:
            problem = f"does not answer to the host name {quoted(host)}"
            raise ForeignCaller(421, problem, "add it to a2a.allowed_hosts")
        if origin is None and site in ("cross-site", "same-site"):
            problem = "does not accept links and plain requests of other sites' pages"
            raise ForeignCaller(403, problem, "enter the address in the browser")
        if origin is not None and origin not in self.origins and origin.partition("://")[2] != host:
            problem = f"does not accept requests of web pages from {quoted(origin)}"
            raise ForeignCaller(403, problem, "add it to a2a.allowed_origins")


@dataclass(frozen=True, slots=True)
class TokenBackend(AuthenticationBackend):
    """Authenticates requests, except those for public paths; `authenticators` are for paths with their own tokens.

    Probes are public, and `pages` does not check them. It checks all other requests that need and show no known token.
    """

    authenticator: Authenticator
    public_paths: frozenset[str]
    probes: frozenset[str]
    authenticators: Mapping[str, Authenticator]
    pages: PageCheck

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser] | None:
        """Return the principal; None for a public path.

        Raises:
            AuthenticationError: the token is missing or unknown.
            ForeignCaller: a web page may have sent the request.
        """
        path, headers = conn.scope["path"], conn.headers
        if path in self.probes:
            return None
        is_public, authenticator = path in self.public_paths, self.authenticators.get(path, self.authenticator)
        if is_public and authenticator.needs_token:
            return None
        principal = authenticator.authenticate(headers)
        if principal is None:
            # Of several origins, none is allowed.
            origin = ", ".join(headers.getlist("origin")) if "origin" in headers else None
            self.pages.check(headers.get("host", ""), origin, headers.get("sec-fetch-site"))
        return None if is_public else (AuthCredentials(["authenticated"]), SimpleUser(principal or OPERATOR))


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """Checks an authenticated request, reads its body, and adds the active extensions to the response's headers.

    The head of a response is held back until its body starts, so that `limits.busy` can replace the response. The A2A
    version can be a query parameter, as the specification allows.
    """

    app: ASGIApp
    rates: RateLimiter
    max_bytes: int
    extensions: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request, or reject it."""
        headers, is_rpc = Headers(scope=scope), scope["path"] == RPC_PATH
        try:
            self._check_rate(scope, is_rpc)
            body = await self._body(Request(scope, receive), headers) if scope["user"].is_authenticated else b""
            _check_type(headers, is_rpc)
            scope[CONTENT] = _read_json(body, is_rpc)
        except ClientDisconnect:
            # The client disconnected within its body, and does not read a response.
            return
        except _Rejected as error:
            await error.response(scope, receive, send)
            return
        scope[REPLACEMENT] = Replacement()
        _set_version(scope, headers)
        await self.app(scope, body_first(body, receive), self._sending(scope, headers, receive, send))

    def _check_rate(self, scope: Scope, is_rpc: bool) -> None:
        """Count a request that is not for a public path."""
        wait_s = self.rates.take(scope["user"].display_name) if scope["user"].is_authenticated else 0
        if wait_s:
            raise _Rejected(too_many_requests("the rate limit of this principal is exceeded", wait_s, is_rpc=is_rpc))

    async def _body(self, request: Request, headers: Headers) -> bytes:
        declared = headers.get("content-length", "0")
        is_over = not declared.isdigit() or int(declared) > self.max_bytes
        body = bytearray()
        with anyio.move_on_after(BODY_S) as patience:
            async with aclosing(request.stream()) as chunks:
                while not is_over and (chunk := await anext(chunks, b"")):
                    body += chunk
                    patience.deadline += len(chunk) / BODY_BYTES_PER_S
                    is_over = len(body) > self.max_bytes
        if patience.cancelled_caught:
            raise _Rejected(error_response(408, "the body arrived too slowly", {"Connection": "close"}))
        if is_over:
            raise _Rejected(error_response(413, f"the body exceeds the limit of {self.max_bytes} bytes"))
        return bytes(body)

    def _sending(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> Send:
        active = {name: active_extensions(headers.getlist(name), self.extensions) for name in EXTENSION_HEADERS}
        replacement: Replacement = scope[REPLACEMENT]
        head: Message | None = None
        is_replaced = False

        async def send_checked(message: Message) -> None:
            nonlocal head, is_replaced
            if message["type"] == "http.response.start":
                head = message
                return
            if head is not None:
                start, head = head, None
                if replacement.response is not None:
                    is_replaced = True
                    await replacement.response(scope, receive, send)
                    return
                MutableHeaders(scope=start).update({name: ", ".join(uris) for name, uris in active.items() if uris})
                await send(start)
            if not is_replaced:
                await send(message)

        return send_checked


class _Rejected(Exception):
    """The request is rejected with this response."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status_code)
        self.response = response


def _check_type(headers: Headers, is_rpc: bool) -> None:
    given = headers.get("content-type", "").partition(";")[0].strip().lower()
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if not has_body or given in JSON_TYPES:
        return
    sentence = f"the content type must be application/json, but is {given[:100] or 'missing'}"
    info = error_info("CONTENT_TYPE_NOT_SUPPORTED", "a2a-protocol.org")
    body = rpc_error(CONTENT_TYPE_CODE, sentence, [info]) if is_rpc else rest_error(415, INVALID, sentence, info)
    raise _Rejected(JSONResponse(body, 415))


def _read_json(body: bytes, is_rpc: bool) -> JsonValue:
    """Return the content of a body; None if it is no JSON, for which the SDK's error names the position."""
    if is_huge(body):
        raise _unreadable("contains too many values", is_rpc)
    try:
        content: JsonValue = json.loads(body)
    except json.JSONDecodeError:
        return None
    except UnicodeDecodeError as error:
        raise _unreadable("is not UTF-8", is_rpc) from error
    except RecursionError as error:
        raise _unreadable("is nested too deeply", is_rpc) from error
    except ValueError as error:
        # Python's limit is 4300 digits.
        raise _unreadable("contains an integer of too many digits", is_rpc) from error
    return content


def _unreadable(reason: str, is_rpc: bool) -> _Rejected:
    sentence = f"the body {reason}"
    return _Rejected(JSONResponse(rpc_error(PARSE_ERROR_CODE, sentence)) if is_rpc else error_response(400, sentence))


def _set_version(scope: Scope, headers: Headers) -> None:
    """Set the header of the A2A version from the query parameter, if there is no header."""
    version = QueryParams(scope["query_string"]).get(VERSION_HEADER)
    if version is not None and VERSION_HEADER not in headers:
        scope["headers"] = [*scope["headers"], (VERSION_HEADER.lower().encode(), version.encode())]


def check_version(given: str | None, served: str) -> None:
    """Raise VersionNotSupportedError unless a request's A2A version is the one of its method, path or service."""
    if given != served and version_of(given) != served:
        asked = f"A2A version {quoted(given)}" if given else "A request without A2A-Version, which means 0.3,"
        raise VersionNotSupportedError(message=f"{asked} is not supported here; send the header A2A-Version: {served}")


@dataclass
class CheckedContextBuilder(DefaultServerCallContextBuilder):
    """Builds the SDK's call context of an HTTP request; for HTTP+JSON, checks its parameters first."""

    max_parts: int

    def build(self, request: Request) -> ServerCallContext:
        """Return the context.

        Raises:
            InvalidParamsError: there are too many values, or the SDK would drop or misread a parameter.
            VersionNotSupportedError: the path is of another version.
        """
        path = request.scope["path"]
        if path != RPC_PATH:
            check_version(request.headers.get(VERSION_HEADER), "0.3" if path.startswith("/v1/") else "1.0")
            _check_parameters(path, request.scope[CONTENT], request.query_params, self.max_parts)
        context: ServerCallContext = super().build(request)
        context.state[REPLACEMENT] = request.scope[REPLACEMENT]
        return context


class CheckedDispatcher(JsonRpcDispatcher):
    """Checks the parameters of JSON-RPC calls before the SDK converts them; `old` handles those of A2A 0.3."""

    def __init__(
        self, handler: RequestHandler, contexts: CheckedContextBuilder, old: "JSONRPC03Adapter | None"
    ) -> None:
        super().__init__(handler, contexts)
        self.enable_v0_3_compat, self._v03_adapter = old is not None, old
        self._max_parts = contexts.max_parts

    async def handle_requests(self, request: Request) -> Response:
        """Return the response to a call; without content if it is a notification, which 0.3 does not have."""
        content, old = request.scope[CONTENT], self._v03_adapter
        call = content if isinstance(content, dict) else {}
        method, params, version = call.get("method"), call.get("params"), request.headers.get(VERSION_HEADER)
        if old is not None and not (isinstance(method, str) and old.supports_method(method)):
            old = None
        try:
            check_size(content, params, self._max_parts)
            if isinstance(method, str):
                _check_call(method, params, version, is_old=old is not None)
        except A2AError as error:
            adapter = None if isinstance(error, VersionNotSupportedError) else old
            request_id = call.get("id")
            response: Response = (adapter or self)._generate_error_response(
                request_id if type(request_id) in (str, int) else None, error
            )
        else:
            response = await super().handle_requests(request)
        is_notification = "id" not in call and call.get("jsonrpc") == "2.0" and isinstance(method, str) and old is None
        return await without_content(response) if is_notification else response

    async def _handle_list_tasks(self, request_obj: ListTasksRequest, context: ServerCallContext) -> JsonObject:
        return page_json(await self.request_handler.on_list_tasks(request_obj, context), request_obj)


def _check_parameters(path: str, content: JsonValue, query: QueryParams, max_parts: int) -> None:
    check_size(content, content, max_parts)
    is_old, method = path.startswith("/v1/"), path.rpartition("/")[2]
    if is_old:
        check_history_length(query.get("historyLength"))
    else:
        _check_query(query)
    if not isinstance(content, dict):
        return
    match method, is_old:
        case "message:send" | "message:stream", True:
            check_translatable(content)
            _check_message(a2a_v0_3_pb2.SendMessageRequest.DESCRIPTOR, content)
            check_0_3_parts(ParseDict(content, a2a_v0_3_pb2.SendMessageRequest(), ignore_unknown_fields=True))
        case "message:send" | "message:stream", False:
            _check_message(SendMessageRequest.DESCRIPTOR, content)
        case "pushNotificationConfigs", False:
            _check_message(TaskPushNotificationConfig.DESCRIPTOR, content)
        case _:
            pass


def _check_call(method: str, params: JsonValue, version: str | None, *, is_old: bool) -> None:
    model = JsonRpcDispatcher.METHOD_TO_MODEL.get(method)
    if is_old or model is not None:
        check_version(version, "0.3" if is_old else "1.0")
    if is_old:
        check_0_3_call(params)
    elif model is not None and issubclass(model, ProtobufMessage):
        _check_message(model.DESCRIPTOR, {} if params is None else params)


def _check_query(query: QueryParams) -> None:
    # The other methods' parameters are some of these.
    fields = _fields(ListTasksRequest.DESCRIPTOR)
    for name, value in query.items():
        if name in fields:
            is_flag = fields[name].type == FieldDescriptor.TYPE_BOOL and value.lower() in ("true", "false")
            _check_field(fields[name], is_flag or value, name)


def _check_message(descriptor: "AnyDescriptor", value: JsonValue, at: str = "") -> None:
    """Check the JSON of a protobuf message; `at` is its place, ending with a dot."""
    if not isinstance(value, dict):
        raise invalid(at.removesuffix(".") or "params", "is not an object")
    fields = _fields(descriptor)
    for name, given in value.items():
        if name not in fields or given is None:
            continue
        if not fields[name].is_repeated:
            _check_field(fields[name], given, f"{at}{name}")
        elif isinstance(given, list):
            for index, each in enumerate(given):
                _check_field(fields[name], each, f"{at}{name}[{index}]")
        else:
            raise invalid(f"{at}{name}", "is not an array")


def _check_field(field: "AnyField", value: JsonValue, at: str) -> None:
    enum, message = field.enum_type, field.message_type
    if field.name == TENANT and value:
        raise no_tenants(at, str(value))
    if enum is not None:
        names = enum.values_by_name
        if str(value) not in {*names, *map(str, enum.values_by_number)}:
            raise invalid(at, f"{quoted(str(value))} is not one of {', '.join(names)}")
    elif message is None:
        _check_scalar(field, value, at)
    elif not message.full_name.startswith("google."):
        _check_message(message, value, f"{at}.")
    elif message.full_name == "google.protobuf.Struct" and not isinstance(value, dict):
        raise invalid(at, "is not an object")
    elif message.full_name == "google.protobuf.Timestamp" and not isinstance(value, str):
        raise invalid(at, "is not a string")


def _check_scalar(field: "AnyField", value: JsonValue, at: str) -> None:
    match field.type:
        case FieldDescriptor.TYPE_BOOL if not isinstance(value, bool):
            raise invalid(at, "is not a boolean")
        case FieldDescriptor.TYPE_INT32 if isinstance(value, bool) or not is_int32(value):
            raise invalid(at, "is not a whole number")
        case FieldDescriptor.TYPE_STRING | FieldDescriptor.TYPE_BYTES if not isinstance(value, str):
            raise invalid(at, "is not a string")
        case FieldDescriptor.TYPE_BYTES:
            check_base64(str(value), at)
        case _:
            pass


@cache
def _fields(descriptor: "AnyDescriptor") -> Mapping[str, "AnyField"]:
    """Return a message's fields by their protobuf and JSON names."""
    return {name: field for field in descriptor.fields for name in (field.name, field.json_name)}
