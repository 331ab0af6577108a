"""Limits on all transports: heads, request rates, streams, and the values of messages; hides internal errors.

A2A defines no error for overload, and the SDK answers JSON-RPC errors with HTTP 200. `busy` replaces the response by
HTTP 429 with `Retry-After`; gRPC gets RESOURCE_EXHAUSTED.
"""

import logging
import math
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Set
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Concatenate, Final, ParamSpec, TypeVar

import anyio
from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.server.request_handlers import RequestHandler
from a2a.types import (
    AgentCard,
    GetExtendedAgentCardRequest,
    ListTasksRequest,
    ListTasksResponse,
    Message,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskState,
)
from a2a.utils.errors import A2AError, ContentTypeNotSupportedError, InternalError, InvalidParamsError
from google.protobuf.struct_pb2 import Struct, Value
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from codex_workspace.common.a2a_terms import HEADERS
from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.common.telemetry import NO_TRACER, REQUEST_SPAN, Span, SpanKind, Tracer
from codex_workspace.common.values import JsonValue
from codex_workspace.config.a2a_server import AnswerUpdates
from codex_workspace.server.answer_updates import ANSWER_UPDATES, answer_updates, shaped
from codex_workspace.server.errors import INTERNAL_ERROR, error_info, invalid, named_fields, rest_error, rpc_error
from codex_workspace.tasks.parts import is_text_type, media_type_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

BUSY_CODE: Final = -32000
"""A JSON-RPC server error code that A2A leaves to implementations."""

REPLACEMENT: Final = "codex_workspace.replacement"
"""Key in an HTTP request's scope and call context: its `Replacement`."""

MAX_NESTING: Final = 30
"""The nesting limit of data and metadata. Protobuf reads 100 levels, of which an object takes three, and a task
contains the message in its history."""

MAX_TOKENS: Final = 600_000
TEXTS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
"""JSON with more commas and brackets outside of texts is not read: it takes half a second for each million."""

MAX_VALUES: Final = 10_000
"""The limit of values in a request: to convert, check, store and return one takes up to 20 µs of the event loop."""

MAX_HEADERS: Final = 100
MAX_QUERY_BYTES: Final = 8192
"""The limits of a request's head, as in Apache: to look up each of 9000 headers takes more than a second."""

BURST_S: Final = 10.0
"""The burst size: an idle principal may send the requests of this many seconds at once."""

RETRY_STREAM_S: Final = 5
"""When to retry a rejected stream; nothing is known about when another one ends."""


@dataclass(slots=True)
class Replacement:
    """The response to send instead of the SDK's, as long as the body of that has not started."""

    response: Response | None = None


class BusyError(A2AError):
    """The agent is overloaded; retry after `retry_after_s` seconds."""

    def __init__(self, sentence: str, retry_after_s: int) -> None:
        super().__init__(sentence, {"retryAfterSeconds": retry_after_s})
        self.retry_after_s = retry_after_s


def busy(context: ServerCallContext, sentence: str, retry_after_s: int) -> BusyError:
    """Return the error to raise; over HTTP, also replace the response by a 429."""
    replacement, method = context.state.get(REPLACEMENT), context.state.get("method")
    if isinstance(replacement, Replacement):
        replacement.response = too_many_requests(
            sentence,
            retry_after_s,
            is_rpc=method is not None,
            is_old="/" in str(method),
            request_id=context.state.get("request_id"),
        )
    return BusyError(sentence, retry_after_s)


def too_many_requests(
    sentence: str, retry_after_s: int, *, is_rpc: bool, is_old: bool = False, request_id: JsonValue = None
) -> Response:
    """Return the response of JSON-RPC or HTTP+JSON; A2A 0.3 (`is_old`) does not define the form of the details."""
    info = error_info("BUSY", "codex-workspace", retryAfterSeconds=str(retry_after_s))
    if is_rpc:
        data: JsonValue = {"retryAfterSeconds": retry_after_s} if is_old else [info]
        body = rpc_error(BUSY_CODE, sentence, data, request_id)
    else:
        body = rest_error(429, "RESOURCE_EXHAUSTED", sentence, info)
    return JSONResponse(body, 429, {"Retry-After": str(retry_after_s)})


@dataclass(slots=True)
class _Bucket:
    left: float
    since: float


class RateLimiter:
    """A token bucket per principal: `per_minute` requests per minute, with bursts of `BURST_S` seconds."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_minute / 60
        self._most = max(1.0, self._per_second * BURST_S)
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, principal: str) -> int:
        """Count a request; return 0 if it is allowed, else the seconds to wait."""
        now = self._clock()
        bucket = self._buckets.setdefault(principal, _Bucket(self._most, now))
        bucket.left = min(self._most, bucket.left + (now - bucket.since) * self._per_second)
        bucket.since = now
        if bucket.left < 1:
            return max(1, math.ceil((1 - bucket.left) / self._per_second))
        bucket.left -= 1
        return 0


class LimitExceeded(Exception):
    """The limit is reached; the text is a sentence for the client."""


@dataclass(slots=True)
class ConcurrencyLimiter:
    """Limits how many slots one principal, and all together, can hold at the same time."""

    per_principal: int
    total: int
    _held: dict[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of held slots."""
        return sum(self._held.values())

    @contextmanager
    def hold(self, principal: str, what: str) -> Iterator[None]:
        """Hold a slot during the block; `what` is its plural noun for the error.

        Raises:
            LimitExceeded: all slots are held.
        """
        own = self._held.get(principal, 0)
        if own >= self.per_principal:
            raise LimitExceeded(f"you have {own} open {what}; at most {self.per_principal} are allowed")
        if self.count >= self.total:
            raise LimitExceeded(f"the limit of {self.total} open {what} is reached")
        self._held[principal] = own + 1
        try:
            yield
        finally:
            self._held[principal] -= 1
            if not self._held[principal]:
                del self._held[principal]


def check_parts(count: int, limit: int) -> None:
    """Raise InvalidParamsError if a message has too many parts."""
    if count > limit:
        raise InvalidParamsError(message=f"The message has {count} parts; at most {limit} are accepted.")


def check_values(count: int) -> None:
    """Raise InvalidParamsError if a request has too many values."""
    if count > MAX_VALUES:
        sentence = f"The request has more than {MAX_VALUES} values; send large data as a file (raw)."
        raise InvalidParamsError(message=sentence)


def limit_heads(app: ASGIApp) -> ASGIApp:
    """Return an application that rejects requests with too many headers or too long a query."""

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        chosen = app
        if len(scope["headers"]) > MAX_HEADERS:
            sentence = f"the request has more than {MAX_HEADERS} headers"
            chosen = JSONResponse(rest_error(431, "INVALID_ARGUMENT", sentence), 431)
        elif len(scope["query_string"]) > MAX_QUERY_BYTES:
            sentence = f"the query exceeds the limit of {MAX_QUERY_BYTES} bytes"
            chosen = JSONResponse(rest_error(414, "INVALID_ARGUMENT", sentence), 414)
        await chosen(scope, receive, send)

    return limited


def active_extensions(asked: list[str], known: frozenset[str]) -> list[str]:
    """Return the known extensions in comma-separated header values, in their order."""
    uris = [uri.strip() for value in asked for uri in value.split(",")]
    return [uri for uri in dict.fromkeys(uris) if uri in known]


def body_first(body: bytes, receive: Receive) -> Receive:
    """Return a function that receives a body that was read, and then what follows it."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive_next() -> AsgiMessage:
        return next(messages, None) or await receive()

    return receive_next


def is_huge(body: bytes) -> bool:
    """Whether the values of a JSON text are so many that reading it would stop the event loop for long."""
    count = sum(map(body.count, (b",", b"[", b"{")))
    if count <= MAX_TOKENS:
        return False
    plain = TEXTS.sub(b"", body)
    return sum(map(plain.count, (b",", b"[", b"{"))) > MAX_TOKENS


def check_size(content: JsonValue, params: JsonValue, max_parts: int) -> None:
    """Raise InvalidParamsError if a request's JSON has too many values, or its message too many parts."""
    count, unread = 0, [content]
    while unread:
        value = unread.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        count += len(inner)
        check_values(count)
        unread.extend(inner)
    match params:
        # The protobuf of 0.3 has other names.
        case {"message": dict(message)} | {"request": dict(message)}:
            for parts in (message.get("parts"), message.get("content")):
                check_parts(len(parts) if isinstance(parts, list) else 0, max_parts)
        case _:
            pass


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How many streams may be open at the same time, and after how many seconds without an event one is closed."""

    per_principal: int = 1000
    total: int = 2000
    idle_s: float = 1800.0


def _limited(
    method: Callable[Concatenate[RequestHandler, P], Coroutine[object, object, T]],
) -> Callable[Concatenate["LimitedHandler", P], Coroutine[object, object, T]]:
    """Return a method that passes its arguments, parameters and context, to the same method of the inner handler."""
    name = method.__name__.removeprefix("on_").title().replace("_", "")

    async def answer(self: "LimitedHandler", /, *params_and_context: P.args, **named: P.kwargs) -> T:
        context = params_and_context[1]
        assert isinstance(context, ServerCallContext)
        call: Awaitable[T] = getattr(self.handler, method.__name__)(*params_and_context, **named)
        return await self.answer(name, context, call)

    return answer


class LimitedHandler(RequestHandler):
    """Passes requests to a handler within limits, and starts a span for each.

    `card` lists the accepted media types; `extended` is the card for authenticated clients, None if there is none.
    `updates` is how streams bring the answer, unless the request says it.
    """

    def __init__(
        self,
        handler: RequestHandler,
        limits: StreamLimits,
        card: AgentCard,
        extended: AgentCard | None = None,
        tracer: Tracer = NO_TRACER,
        updates: AnswerUpdates = "by-client",
    ) -> None:
        self._updates = updates
        uris = [each.uri for each in card.capabilities.extensions]
        self._shapes_answers = any(uri.startswith(ANSWER_UPDATES) for uri in uris)
        self.handler: Final = handler
        self._tracer = tracer
        self._modes = frozenset(card.default_input_modes).union(*(skill.input_modes for skill in card.skills))
        self._extended = extended
        self._streams = ConcurrencyLimiter(limits.per_principal, limits.total)
        self._idle_s = limits.idle_s

    @property
    def open_streams(self) -> int:
        """The number of open streams."""
        return self._streams.count

    async def on_message_send(self, params: SendMessageRequest, context: ServerCallContext) -> Task | Message:
        """Answer a message."""
        _check_message(params, self._modes)
        return await self.answer("SendMessage", context, self.handler.on_message_send(params, context))

    def on_message_send_stream(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Stream a message's answer."""
        return self._stream("SendStreamingMessage", self._answered(params, context), context)

    def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Stream a task's events."""
        events = self._shaped(self.handler.on_subscribe_to_task(params, context), context)
        return self._stream("SubscribeToTask", events, context)

    async def on_list_tasks(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        """Return a page of tasks."""
        if params.status not in TaskState.values():
            raise invalid("status", f"{params.status} is not a task state")
        return await self.answer("ListTasks", context, self.handler.on_list_tasks(params, context))

    async def on_get_extended_agent_card(
        self, params: GetExtendedAgentCardRequest, context: ServerCallContext
    ) -> AgentCard:
        """Return the card for authenticated clients."""
        if self._extended is not None:
            return self._extended
        return await self.answer(
            "GetExtendedAgentCard", context, self.handler.on_get_extended_agent_card(params, context)
        )

    on_get_task = _limited(RequestHandler.on_get_task)
    on_cancel_task = _limited(RequestHandler.on_cancel_task)
    on_create_task_push_notification_config = _limited(RequestHandler.on_create_task_push_notification_config)
    on_get_task_push_notification_config = _limited(RequestHandler.on_get_task_push_notification_config)
    on_list_task_push_notification_configs = _limited(RequestHandler.on_list_task_push_notification_configs)
    on_delete_task_push_notification_config = _limited(RequestHandler.on_delete_task_push_notification_config)

    async def answer(self, method: str, context: ServerCallContext, answer: Awaitable[T]) -> T:
        """Await the handler's answer to a request."""
        with self._request(method, context), _hide_internal_errors():
            return await answer

    async def _answered(self, params: SendMessageRequest, context: ServerCallContext) -> AsyncGenerator[Event, None]:
        _check_message(params, self._modes)
        events = self.handler.on_message_send_stream(params, context)
        async with aclosing(self._shaped(events, context, params.message.metadata)) as shown:
            async for event in shown:
                yield event

    def _shaped(
        self, events: AsyncGenerator[Event, None], context: ServerCallContext, metadata: Struct | None = None
    ) -> AsyncGenerator[Event, None]:
        """Return a stream that brings the answer as its reader wants it, if the card offers that."""
        if not self._shapes_answers:
            return events
        return shaped(events, answer_updates(context, metadata, self._updates))

    def _request(self, method: str, context: ServerCallContext) -> Span:
        """Start the span of a request, and store it in the call context for the request's task."""
        about = {"rpc.system": "a2a", "rpc.method": method, "a2a.principal": _name(context)}
        headers = context.state.get(HEADERS)
        span = self._tracer.start_span(method, SpanKind.SERVER, about, headers if isinstance(headers, dict) else None)
        context.state[REQUEST_SPAN] = span
        return span

    async def _stream(
        self, method: str, events: AsyncGenerator[Event, None], context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Yield the events until the stream ends or is idle for too long."""
        with self._request(method, context), self._open_stream(context):
            async with aclosing(events):
                while True:
                    event: Event | None = None
                    with anyio.move_on_after(self._idle_s) as silence, _hide_internal_errors():
                        event = await anext(events, None)
                    if event is None:
                        if silence.cancelled_caught:
                            logger.info("closing a stream of %s: no event for %g s", _name(context), self._idle_s)
                        return
                    yield event

    @contextmanager
    def _open_stream(self, context: ServerCallContext) -> Iterator[None]:
        try:
            with self._streams.hold(_name(context), "streams"):
                yield
        except LimitExceeded as full:
            raise busy(context, str(full), RETRY_STREAM_S) from full


def _check_message(params: SendMessageRequest, modes: Set[str]) -> None:
    """Reject a message with unsupported media types, or with values that could not be returned after they are stored.

    `modes` are the accepted media types; plain text includes every other kind of text.
    """
    for part in params.message.parts:
        mode = media_type_of(part.media_type)
        if mode and mode not in modes and not ("text/plain" in modes and is_text_type(mode)):
            raise ContentTypeNotSupportedError(
                message=f"Media type {mode} is not supported. Supported input modes: {', '.join(sorted(modes))}"
            )
        _check_value("a data part", part.data)
        _check_struct("a part's metadata", part.metadata)
    _check_struct("the message's metadata", params.message.metadata)
    _check_struct("the request's metadata", params.metadata)


def _check_value(place: str, value: Value, depth: int = 0) -> None:
    match value.WhichOneof("kind"):
        case "number_value" if not math.isfinite(value.number_value):
            raise InvalidParamsError(message=f"{place} contains a number that JSON does not have: {value.number_value}")
        case "struct_value":
            _check_struct(place, value.struct_value, depth)
        case "list_value":
            _check_depth(place, depth + 1)
            for each in value.list_value.values:
                _check_value(place, each, depth + 1)
        case _:
            pass


def _check_struct(place: str, struct: Struct, depth: int = 0) -> None:
    _check_depth(place, depth + 1)
    for each in struct.fields.values():
        _check_value(place, each, depth + 1)


def _check_depth(place: str, depth: int) -> None:
    if depth > MAX_NESTING:
        raise InvalidParamsError(message=f"{place} is nested too deeply: at most {MAX_NESTING} levels")


@contextmanager
def _hide_internal_errors() -> Iterator[None]:
    """Raise only A2A errors; the SDK would return the text of every other error to the client."""
    try:
        yield
    except A2AError as error:
        if (named := named_fields(error)) is not None:
            raise named from error
        raise
    except StoreUnavailable as error:
        raise InternalError(message=error.public) from error
    except Exception as error:
        logger.exception("a request failed with an unexpected error")
        raise InternalError(message=INTERNAL_ERROR) from error


def _name(context: ServerCallContext) -> str:
    name: str = context.user.user_name
    return name
