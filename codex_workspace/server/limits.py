"""Limits on all transports: slow clients, open and idle streams, media types and values of messages, internal
errors."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Iterator, Set
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import anyio
from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.server.request_handlers import RequestHandler
from a2a.types import (
    AgentCard,
    CancelTaskRequest,
    DeleteTaskPushNotificationConfigRequest,
    GetExtendedAgentCardRequest,
    GetTaskPushNotificationConfigRequest,
    GetTaskRequest,
    ListTaskPushNotificationConfigsRequest,
    ListTaskPushNotificationConfigsResponse,
    ListTasksRequest,
    ListTasksResponse,
    Message,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskPushNotificationConfig,
    TaskState,
)
from a2a.utils.errors import A2AError, ContentTypeNotSupportedError, InternalError, InvalidParamsError
from google.protobuf.struct_pb2 import Struct, Value
from uvicorn.protocols.http.h11_impl import H11Protocol

from codex_workspace.common.a2a_terms import HEADERS
from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.common.tracing import NO_TRACER, REQUEST_SPAN, Span, SpanKind, Tracer
from codex_workspace.server.overload import RETRY_STREAM_S, ConcurrencyLimiter, LimitExceeded, busy
from codex_workspace.tasks.parts import is_text_type, media_type_of

logger = logging.getLogger(__name__)


def cut_off_slow_readers(patience_s: float) -> type[H11Protocol]:
    """Return uvicorn's HTTP/1.1 protocol, extended to close the connections of clients that do not read.

    When a connection's buffer exceeds asyncio's high-water mark (64 KiB), it has `patience_s` seconds to drain. The
    kernels buffer several more megabytes. The pending events of a slow client stay in memory, each with a copy of its
    task. A disconnected client can resubscribe or get the task.
    """

    class SlowReaderTimeout(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._timer = self.loop.call_later(patience_s, self._close)

        def resume_writing(self) -> None:
            self._stop_timer()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _close(self) -> None:
            logger.warning("closing the connection of client %s, which has not read for %g s", self.client, patience_s)
            # `close` would wait for the buffer to drain.
            self.transport.abort()

    return SlowReaderTimeout


T = TypeVar("T")

INTERNAL_ERROR: Final = "Internal error; see the agent's log."

MAX_NESTING: Final = 30
"""The nesting limit of data and metadata. Protobuf reads 100 levels, of which an object takes three, and a task
contains the message in its history."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How many streams may be open at the same time, and after how many seconds without an event one is closed."""

    per_principal: int = 1000
    total: int = 2000
    idle_s: float = 1800.0


class LimitedHandler(RequestHandler):
    """Passes requests to a handler within limits, and starts a span for each.

    `card` lists the accepted media types; `extended` is the card for authenticated clients, None if there is none.
    """

    def __init__(
        self,
        handler: RequestHandler,
        limits: StreamLimits,
        card: AgentCard,
        extended: AgentCard | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._handler = handler
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
        return await self._answer("SendMessage", context, self._handler.on_message_send(params, context))

    def on_message_send_stream(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Stream a message's answer."""
        return self._stream("SendStreamingMessage", self._answered(params, context), context)

    def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Stream the events of a task."""
        return self._stream("SubscribeToTask", self._handler.on_subscribe_to_task(params, context), context)

    async def on_get_task(self, params: GetTaskRequest, context: ServerCallContext) -> Task | None:
        """Return a task."""
        return await self._answer("GetTask", context, self._handler.on_get_task(params, context))

    async def on_list_tasks(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        """Return a page of tasks."""
        if params.status not in TaskState.values():
            raise InvalidParamsError(message=f"status: {params.status} is not a task state")
        return await self._answer("ListTasks", context, self._handler.on_list_tasks(params, context))

    async def on_cancel_task(self, params: CancelTaskRequest, context: ServerCallContext) -> Task | None:
        """Cancel a task."""
        return await self._answer("CancelTask", context, self._handler.on_cancel_task(params, context))

    async def on_create_task_push_notification_config(
        self, params: TaskPushNotificationConfig, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        """Store a push configuration."""
        return await self._answer(
            "CreateTaskPushNotificationConfig",
            context,
            self._handler.on_create_task_push_notification_config(params, context),
        )

    async def on_get_task_push_notification_config(
        self, params: GetTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        """Return a push configuration."""
        return await self._answer(
            "GetTaskPushNotificationConfig",
            context,
            self._handler.on_get_task_push_notification_config(params, context),
        )

    async def on_list_task_push_notification_configs(
        self, params: ListTaskPushNotificationConfigsRequest, context: ServerCallContext
    ) -> ListTaskPushNotificationConfigsResponse:
        """Return all push configurations of a task."""
        return await self._answer(
            "ListTaskPushNotificationConfigs",
            context,
            self._handler.on_list_task_push_notification_configs(params, context),
        )

    async def on_delete_task_push_notification_config(
        self, params: DeleteTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> None:
        """Delete a push configuration."""
        await self._answer(
            "DeleteTaskPushNotificationConfig",
            context,
            self._handler.on_delete_task_push_notification_config(params, context),
        )

    async def on_get_extended_agent_card(
        self, params: GetExtendedAgentCardRequest, context: ServerCallContext
    ) -> AgentCard:
        """Return the card for authenticated clients."""
        if self._extended is not None:
            return self._extended
        return await self._answer(
            "GetExtendedAgentCard", context, self._handler.on_get_extended_agent_card(params, context)
        )

    async def _answered(self, params: SendMessageRequest, context: ServerCallContext) -> AsyncGenerator[Event, None]:
        _check_message(params, self._modes)
        async with aclosing(self._handler.on_message_send_stream(params, context)) as events:
            async for event in events:
                yield event

    async def _answer(self, method: str, context: ServerCallContext, answer: Awaitable[T]) -> T:
        with self._request(method, context), _hide_internal_errors():
            return await answer

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
    except A2AError:
        raise
    except StoreUnavailable as error:
        raise InternalError(message=error.public) from error
    except Exception as error:
        logger.exception("a request failed with an unexpected error")
        raise InternalError(message=INTERNAL_ERROR) from error


def _name(context: ServerCallContext) -> str:
    name: str = context.user.user_name
    return name
