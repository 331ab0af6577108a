"""What stands before the handler on every transport: which media types are taken, how many streams may be open, how
long one may be silent, and that nothing of an error nobody foresaw gets out but that it happened."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TypeVar

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
)
from a2a.utils.errors import A2AError, InternalError
from a2a.utils.input_mode_validator import validate_input_modes

from codex_workspace.busy import busy
from codex_workspace.rates import RETRY_STREAM_S, Places, TooMany

logger = logging.getLogger(__name__)

T = TypeVar("T")

MISTAKE = "The agent made a mistake of its own; its log says more."


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """How many streams may be open at once, and after how many seconds without an event one is ended."""

    per_principal: int = 1000
    in_all: int = 2000
    idle_s: float = 1800.0


class Bounded(RequestHandler):
    """Hands requests on to a handler, within bounds.

    `card` names the media types that are taken; `extended` is what is told to those who were let in, None: no more.
    """

    def __init__(
        self, handler: RequestHandler, bounds: StreamBounds, card: AgentCard, extended: AgentCard | None = None
    ) -> None:
        self._handler = handler
        self._card = card
        self._extended = extended
        self._places = Places(bounds.per_principal, bounds.in_all)
        self._idle_s = bounds.idle_s

    @property
    def open_streams(self) -> int:
        """How many streams are open."""
        return self._places.held

    async def on_message_send(self, params: SendMessageRequest, context: ServerCallContext) -> Task | Message:
        """Answer a message."""
        validate_input_modes(params.message, self._card)
        return await _safe(self._handler.on_message_send(params, context))

    def on_message_send_stream(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Stream a message's answer."""
        return self._stream(self._answered(params, context), context)

    def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Stream what comes of a task."""
        return self._stream(self._handler.on_subscribe_to_task(params, context), context)

    async def on_get_task(self, params: GetTaskRequest, context: ServerCallContext) -> Task | None:
        """Return a task."""
        return await _safe(self._handler.on_get_task(params, context))

    async def on_list_tasks(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        """Return a page of tasks."""
        return await _safe(self._handler.on_list_tasks(params, context))

    async def on_cancel_task(self, params: CancelTaskRequest, context: ServerCallContext) -> Task | None:
        """Cancel a task."""
        return await _safe(self._handler.on_cancel_task(params, context))

    async def on_create_task_push_notification_config(
        self, params: TaskPushNotificationConfig, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        """Keep where a task's events are pushed to."""
        return await _safe(self._handler.on_create_task_push_notification_config(params, context))

    async def on_get_task_push_notification_config(
        self, params: GetTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        """Return where a task's events are pushed to."""
        return await _safe(self._handler.on_get_task_push_notification_config(params, context))

    async def on_list_task_push_notification_configs(
        self, params: ListTaskPushNotificationConfigsRequest, context: ServerCallContext
    ) -> ListTaskPushNotificationConfigsResponse:
        """Return all the places that a task's events are pushed to."""
        return await _safe(self._handler.on_list_task_push_notification_configs(params, context))

    async def on_delete_task_push_notification_config(
        self, params: DeleteTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> None:
        """Forget where a task's events are pushed to."""
        await _safe(self._handler.on_delete_task_push_notification_config(params, context))

    async def on_get_extended_agent_card(
        self, params: GetExtendedAgentCardRequest, context: ServerCallContext
    ) -> AgentCard:
        """Return the card for those who were let in."""
        if self._extended is not None:
            return self._extended
        return await _safe(self._handler.on_get_extended_agent_card(params, context))

    async def _answered(self, params: SendMessageRequest, context: ServerCallContext) -> AsyncGenerator[Event, None]:
        validate_input_modes(params.message, self._card)
        async with aclosing(self._handler.on_message_send_stream(params, context)) as events:
            async for event in events:
                yield event

    async def _stream(
        self, events: AsyncGenerator[Event, None], context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Yield the events, until there is none for so long that the reader may as well come again."""
        with self._place(context):
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
        except TooMany as full:
            raise busy(context, str(full), RETRY_STREAM_S) from full


async def _safe(answer: Awaitable[T]) -> T:
    with _unforeseen():
        return await answer


@contextmanager
def _unforeseen() -> Iterator[None]:
    """Let only A2A's errors through; the SDK would tell clients the text of every other one."""
    try:
        yield
    except A2AError:
        raise
    except Exception as error:
        logger.exception("a request failed for a reason that nobody foresaw")
        raise InternalError(message=MISTAKE) from error


def _name(context: ServerCallContext) -> str:
    name: str = context.user.user_name
    return name
