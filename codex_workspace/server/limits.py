"""Cuts off clients that do not take what they are sent.

What waits for a slow reader stays in memory: in the connection's buffer, and above it in the task's queue of events,
each of which the SDK keeps with a copy of the task as it was then. Neither knows time. A reader that was cut off can
subscribe again, or get the task, and has everything.

What stands before the handler on every transport: which media types and values are taken, how many streams may be
open, how long one may be silent, and that nothing of an error nobody foresaw gets out but that it happened.
"""

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
    """Return uvicorn's HTTP/1.1 protocol, with connections that are cut off where a reader does not catch up.

    A connection's buffer has `patience_s` seconds to drain once it holds more than asyncio's high-water mark (64 KiB);
    what the kernels hold on both sides comes on top, and is several megabytes.
    """

    class Impatient(H11Protocol):
        _giving_up: asyncio.TimerHandle | None = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._giving_up = self.loop.call_later(patience_s, self._give_up)

        def resume_writing(self) -> None:
            self._wait_on()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._wait_on()
            super().connection_lost(exc)

        def _wait_on(self) -> None:
            if self._giving_up is not None:
                self._giving_up.cancel()
                self._giving_up = None

        def _give_up(self) -> None:
            logger.warning("client %s has not taken what it was sent for %g s and is cut off", self.client, patience_s)
            # Not `close`: that waits for the buffer to drain.
            self.transport.abort()

    return Impatient


T = TypeVar("T")

INTERNAL_ERROR = "The agent made a mistake of its own; its log says more."

MAX_NESTING: Final = 30
"""How many objects and lists may lie within one another in data and metadata. Protobuf reads 100 levels, and an object
makes three of them; a task with the message in its history has to be read, too."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How many streams may be open at once, and after how many seconds without an event one is ended."""

    per_principal: int = 1000
    total: int = 2000
    idle_s: float = 1800.0


class LimitedHandler(RequestHandler):
    """Hands requests on to a handler, within bounds.

    `card` names the media types that are taken; `extended` is what is told to those who were let in, None: no more.
    `tracer` gets a span of each request, which joins the caller's trace.
    """

    def __init__(
        self,
        handler: RequestHandler,
        bounds: StreamLimits,
        card: AgentCard,
        extended: AgentCard | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._handler = handler
        self._tracer = tracer
        self._modes = frozenset(card.default_input_modes).union(*(skill.input_modes for skill in card.skills))
        self._extended = extended
        self._places = ConcurrencyLimiter(bounds.per_principal, bounds.total)
        self._idle_s = bounds.idle_s

    @property
    def open_streams(self) -> int:
        """How many streams are open."""
        return self._places.count

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
        """Stream what comes of a task."""
        return self._stream("SubscribeToTask", self._handler.on_subscribe_to_task(params, context), context)

    async def on_get_task(self, params: GetTaskRequest, context: ServerCallContext) -> Task | None:
        """Return a task."""
        return await self._answer("GetTask", context, self._handler.on_get_task(params, context))

    async def on_list_tasks(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        """Return a page of tasks."""
        if params.status not in TaskState.values():
            raise InvalidParamsError(message=f"status: {params.status} is none of the states of a task")
        return await self._answer("ListTasks", context, self._handler.on_list_tasks(params, context))

    async def on_cancel_task(self, params: CancelTaskRequest, context: ServerCallContext) -> Task | None:
        """Cancel a task."""
        return await self._answer("CancelTask", context, self._handler.on_cancel_task(params, context))

    async def on_create_task_push_notification_config(
        self, params: TaskPushNotificationConfig, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        """Keep where a task's events are pushed to."""
        return await self._answer(
            "CreateTaskPushNotificationConfig",
            context,
            self._handler.on_create_task_push_notification_config(params, context),
        )

    async def on_get_task_push_notification_config(
        self, params: GetTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        """Return where a task's events are pushed to."""
        return await self._answer(
            "GetTaskPushNotificationConfig",
            context,
            self._handler.on_get_task_push_notification_config(params, context),
        )

    async def on_list_task_push_notification_configs(
        self, params: ListTaskPushNotificationConfigsRequest, context: ServerCallContext
    ) -> ListTaskPushNotificationConfigsResponse:
        """Return all the places that a task's events are pushed to."""
        return await self._answer(
            "ListTaskPushNotificationConfigs",
            context,
            self._handler.on_list_task_push_notification_configs(params, context),
        )

    async def on_delete_task_push_notification_config(
        self, params: DeleteTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> None:
        """Forget where a task's events are pushed to."""
        await self._answer(
            "DeleteTaskPushNotificationConfig",
            context,
            self._handler.on_delete_task_push_notification_config(params, context),
        )

    async def on_get_extended_agent_card(
        self, params: GetExtendedAgentCardRequest, context: ServerCallContext
    ) -> AgentCard:
        """Return the card for those who were let in."""
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
        with self._request(method, context), _unforeseen():
            return await answer

    def _request(self, method: str, context: ServerCallContext) -> Span:
        """Begin the span of a request, where the job that it begins finds it."""
        about = {"rpc.system": "a2a", "rpc.method": method, "a2a.principal": _name(context)}
        headers = context.state.get(HEADERS)
        span = self._tracer.start_span(method, SpanKind.SERVER, about, headers if isinstance(headers, dict) else None)
        context.state[REQUEST_SPAN] = span
        return span

    async def _stream(
        self, method: str, events: AsyncGenerator[Event, None], context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Yield the events, until there is none for so long that the reader may as well come again."""
        with self._request(method, context), self._place(context):
            async with aclosing(events):
                while True:
                    event: Event | None = None
                    with anyio.move_on_after(self._idle_s) as silence, _unforeseen():
                        event = await anext(events, None)
                    if event is None:
                        if silence.cancelled_caught:
                            logger.info("a stream of %s is ended: no event for %g s", _name(context), self._idle_s)
                        return
                    yield event

    @contextmanager
    def _place(self, context: ServerCallContext) -> Iterator[None]:
        try:
            place = self._places.hold(_name(context), "streams")
            with place:
                yield
        except LimitExceeded as full:
            raise busy(context, str(full), RETRY_STREAM_S) from full


def _check_message(params: SendMessageRequest, modes: Set[str]) -> None:
    """Refuse what could not be taken, or not be given out again once it is written down.

    `modes` are the media types that are taken. Where plain text is, so is every other kind of text.
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
            raise InvalidParamsError(message=f"{place} holds a number that JSON does not have: {value.number_value}")
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
        raise InvalidParamsError(message=f"{place} is nested too deeply: at most {MAX_NESTING} within one another")


@contextmanager
def _unforeseen() -> Iterator[None]:
    """Let only A2A's errors through; the SDK would tell clients the text of every other one."""
    try:
        yield
    except A2AError:
        raise
    except StoreUnavailable as error:
        # It passes; whoever comes again later is served.
        raise InternalError(message=error.public) from error
    except Exception as error:
        logger.exception("a request failed for a reason that nobody foresaw")
        raise InternalError(message=INTERNAL_ERROR) from error


def _name(context: ServerCallContext) -> str:
    name: str = context.user.user_name
    return name
