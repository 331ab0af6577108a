"""A2A over gRPC, for 1.0 and 0.3; imported only if gRPC is on."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio
import grpc.aio
from a2a.compat.v0_3 import a2a_v0_3_pb2
from a2a.compat.v0_3.a2a_v0_3_pb2_grpc import add_A2AServiceServicer_to_server as add_old_service
from a2a.compat.v0_3.grpc_handler import CompatGrpcHandler
from a2a.extensions.common import get_requested_extensions
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers import RequestHandler
from a2a.server.request_handlers.grpc_handler import GrpcHandler, GrpcServerCallContextBuilder
from a2a.types.a2a_pb2_grpc import add_A2AServiceServicer_to_server as add_service
from a2a.utils.constants import VERSION_HEADER
from a2a.utils.errors import A2AError, InvalidParamsError
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage
from starlette.authentication import AuthenticationError

from codex_workspace.common.a2a_terms import HEADERS, AuthenticatedUser
from codex_workspace.config.settings import OPERATOR
from codex_workspace.server.errors import TENANT, ForeignCaller, no_tenants
from codex_workspace.server.limits import (
    MAX_VALUES,
    BusyError,
    RateLimiter,
    active_extensions,
    check_parts,
    check_values,
)
from codex_workspace.server.middleware import EXTENSION_HEADERS, Authenticator, PageCheck, check_version
from codex_workspace.server.sdk_fixes import check_0_3_parts
from codex_workspace.server.sockets import GrpcListener

if TYPE_CHECKING:
    from typing import TypeAlias

    from codex_workspace.server.middleware import AnyDescriptor

    Context: TypeAlias = grpc.aio.ServicerContext[object, object]
    Handler: TypeAlias = grpc.RpcMethodHandler[object, object]

CLOSE_GRACE_S: Final = 2.0
"""How long open calls may take to end after their tasks have ended."""

MAX_FIELDS: Final = 8 * MAX_VALUES
"""The fields of a message's bytes; a JSON value takes at most four, and its object in memory many times its bytes."""

MALFORMED: Final[ContextVar[str]] = ContextVar("MALFORMED", default="")
"""Why the request of the current call is no message; gRPC's own error for it would be UNKNOWN."""

REQUEST: Final[ContextVar[ProtobufMessage | None]] = ContextVar("REQUEST", default=None)
"""The request of the current call."""


class UnauthenticatedError(A2AError):
    """The caller is not authenticated."""


class ForbiddenError(A2AError):
    """The caller may be a web page."""


@dataclass(frozen=True, slots=True)
class GrpcContextBuilder(GrpcServerCallContextBuilder):
    """Builds the call context of a gRPC call after authentication, rate limit and version check.

    The SDK does not check the version (a2a-python issue #1166); `version` is the service's.
    grpc.aio does not tell the host (grpc issue #38906), but no web page can send unencrypted HTTP/2 to any host.
    """

    authenticator: Authenticator
    pages: PageCheck
    rates: RateLimiter
    extensions: frozenset[str]
    version: str
    max_parts: int

    def build(self, context: "Context") -> ServerCallContext:
        """Return the context, and set the active extensions in the response.

        Raises:
            UnauthenticatedError: the token is missing or unknown.
            ForbiddenError: no token is needed or shown, and a web page may have sent the call.
            BusyError: the principal's rate limit is exceeded.
            VersionNotSupportedError: the service does not support the client's version.
            InvalidParamsError: the request is no message.
        """
        headers = _headers(context)
        try:
            principal = self.authenticator.authenticate(headers)
            if principal is None:
                self.pages.check(None, headers.get("origin"), headers.get("sec-fetch-site"))
                principal = OPERATOR
        except ForeignCaller as error:
            raise ForbiddenError(str(error)) from error
        except AuthenticationError as error:
            raise UnauthenticatedError(str(error)) from error
        if wait_s := self.rates.take(principal):
            raise BusyError("the rate limit of this principal is exceeded", wait_s)
        check_version(headers.get(VERSION_HEADER.lower()), self.version)
        if malformed := MALFORMED.get():
            raise InvalidParamsError(malformed)
        return ServerCallContext(
            user=AuthenticatedUser(principal),
            state={HEADERS: headers},
            requested_extensions=self._requested_extensions(context, headers),
        )

    def _requested_extensions(self, context: "Context", headers: Mapping[str, str]) -> set[str]:
        """Return the requested extensions, and set the active ones in the response."""
        asked = {name.lower(): headers.get(name.lower(), "") for name in EXTENSION_HEADERS}
        active = {name: active_extensions([value], self.extensions) for name, value in asked.items()}
        context.set_trailing_metadata(tuple((name, ", ".join(uris)) for name, uris in active.items() if uris))
        return set(get_requested_extensions(list(asked.values())))


def _headers(context: "Context") -> dict[str, str]:
    """Return a call's text metadata; values of the same name are joined as in HTTP."""
    found: dict[str, str] = {}
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            found[name] = f"{found[name]}, {value}" if name in found else value
    return found


@asynccontextmanager
async def serving_grpc(
    listener: GrpcListener, handler: RequestHandler, callers: GrpcContextBuilder, old_callers: GrpcContextBuilder | None
) -> AsyncIterator[None]:
    """Serve until the block is left, then let open calls end; `old_callers` is None if 0.3 is off."""
    services = _Services(listener.server)
    add_service(_Service(handler, callers), services)  # type: ignore[no-untyped-call]
    if old_callers is not None:
        add_old_service(_OldService(handler, old_callers), services)  # type: ignore[no-untyped-call]
    await listener.server.start()
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await listener.server.stop(CLOSE_GRACE_S)


@dataclass(frozen=True, slots=True)
class _Services:
    """Adds services to a server, which report bytes that are no message to the context builder."""

    server: grpc.aio.Server

    def add_registered_method_handlers(self, service: str, handlers: "Mapping[str, Handler]") -> None:
        self.server.add_registered_method_handlers(service, {name: _reporting(each) for name, each in handlers.items()})

    def add_generic_rpc_handlers(self, _handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Do nothing: these are the same methods, for older versions of gRPC."""


def _reporting(handler: "Handler") -> "Handler":
    parse, serialize = handler.request_deserializer, handler.response_serializer
    assert parse is not None
    empty = parse(b"")
    assert isinstance(empty, ProtobufMessage)
    descriptor = empty.DESCRIPTOR

    def read(content: bytes) -> object:
        try:
            # gRPC reads a message before the call is authenticated.
            _check_fields(content, descriptor)
            request = parse(content)
            assert isinstance(request, ProtobufMessage)
            REQUEST.set(request)
            return request
        except DecodeError as error:
            MALFORMED.set(f"{descriptor.full_name}: {error}")
            return None

    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(handler.unary_stream, read, serialize)
    assert handler.unary_unary is not None
    return grpc.unary_unary_rpc_method_handler(handler.unary_unary, read, serialize)


def _check_fields(content: bytes, descriptor: "AnyDescriptor") -> None:
    """Raise DecodeError if a message's bytes have too many fields at all depths; stops at the limit."""
    count, unread = 0, [(0, len(content), descriptor)]
    while unread:
        at, end, kind = unread.pop()
        while at < end:
            count += 1
            if count > MAX_FIELDS:
                raise DecodeError(f"the message has more than {MAX_FIELDS} fields")
            tag, at = _varint(content, at)
            match tag & 7:
                case 0:
                    _, at = _varint(content, at)
                case 1:
                    at += 8
                case 5:
                    at += 4
                case 2:
                    size, at = _varint(content, at)
                    field = kind.fields_by_number.get(tag >> 3)
                    if field is not None and field.message_type is not None:
                        unread.append((at, min(at + size, end), field.message_type))
                    at += size
                case _:
                    raise DecodeError("the message has a field of an unknown form")


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, and the place behind it."""
    value = 0
    for shift, byte in enumerate(content[at : at + 10]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    raise DecodeError("the message ends within a number, or has one that is too large")


class _Service(GrpcHandler):
    def __init__(self, handler: RequestHandler, callers: GrpcContextBuilder) -> None:
        super().__init__(handler, callers)
        self._max_parts = callers.max_parts

    def _build_call_context(self, context: "Context", request: ProtobufMessage) -> ServerCallContext:
        built: ServerCallContext = super()._build_call_context(context, request)
        _check(request, self._max_parts)
        return built

    async def abort_context(self, error: A2AError, context: "Context") -> None:
        await _refuse(error, context)
        await super().abort_context(error, context)


class _OldService(CompatGrpcHandler):
    def __init__(self, handler: RequestHandler, callers: GrpcContextBuilder) -> None:
        super().__init__(handler, callers)
        self._max_parts = callers.max_parts

    async def SendMessage(
        self, request: a2a_v0_3_pb2.SendMessageRequest, context: "Context"
    ) -> a2a_v0_3_pb2.SendMessageResponse:
        await self._check_message(request, context)
        return await super().SendMessage(request, context)

    async def SendStreamingMessage(
        self, request: a2a_v0_3_pb2.SendMessageRequest, context: "Context"
    ) -> AsyncIterator[a2a_v0_3_pb2.StreamResponse]:
        await self._check_message(request, context)
        async for event in super().SendStreamingMessage(request, context):
            yield event

    async def _check_message(self, request: a2a_v0_3_pb2.SendMessageRequest, context: "Context") -> None:
        """Check a request; the SDK converts it before anything else sees it. The context builder reports no message."""
        if MALFORMED.get():
            return
        try:
            _check(request, self._max_parts)
            check_0_3_parts(request)
        except InvalidParamsError as error:
            await self.abort_context(error, context)

    async def abort_context(self, error: A2AError, context: "Context") -> None:
        await _refuse(error, context)
        await super().abort_context(error, context)


def _check(request: ProtobufMessage, max_parts: int) -> None:
    """Raise InvalidParamsError for a request with too many parts or values, or a tenant, at any depth."""
    count, unread = 0, [request]
    while unread:
        for field, value in unread.pop().ListFields():
            if field.name == TENANT:
                raise no_tenants(TENANT, value)
            kind = field.message_type
            is_map = kind is not None and kind.GetOptions().map_entry
            inner = value.values() if is_map else value if field.is_repeated else [value]
            # The number in a `Value` is not another value.
            count += len(inner) if field.is_repeated else 0
            if kind is not None and kind.name == "Part":
                check_parts(len(inner), max_parts)
            check_values(count)
            unread += [each for each in inner if isinstance(each, ProtobufMessage)]


async def _refuse(error: A2AError, context: "Context") -> None:
    """Abort the call for errors that A2A does not define; return for all others."""
    if isinstance(error, UnauthenticatedError | ForbiddenError) and (request := REQUEST.get()) is not None:
        # The error that `abort` raises keeps the call's frames in memory until a garbage collection.
        request.Clear()
    match error:
        case UnauthenticatedError():
            context.set_trailing_metadata((("www-authenticate", "Bearer"),))
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
        case ForbiddenError():
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, error.message)
        case BusyError():
            context.set_trailing_metadata((("retry-after", str(error.retry_after_s)),))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        case _:
            pass
