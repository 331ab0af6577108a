"""The request handler: processes each message exactly once.

It extends the SDK's handler: a message is stored before it is processed, a repeated message joins the running task or
gets the stored answer, and unanswered messages are resumed after a restart.
"""

import logging
import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext, suppress
from typing import Final

import anyio
from a2a.server.agent_execution import AgentExecutor, RequestContext, SimpleRequestContextBuilder
from a2a.server.agent_execution.active_task import ActiveTask
from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.server.events.event_queue import QueueShutDown  # type: ignore[attr-defined]
from a2a.server.id_generator import IDGenerator, IDGeneratorContext
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.types import (
    AgentCard,
    Message,
    Part,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskArtifactUpdateEvent,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from a2a.utils.errors import (
    A2AError,
    InternalError,
    InvalidParamsError,
    PushNotificationNotSupportedError,
    TaskNotFoundError,
    UnsupportedOperationError,
)

from codex_workspace.common.a2a_terms import HEADERS, OFFSET, TERMINAL, WORKING, AuthenticatedUser
from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.server.errors import invalid
from codex_workspace.server.limits import busy
from codex_workspace.server.push import PushService
from codex_workspace.server.questions import AnsweredQuestions, asking_task
from codex_workspace.storage.deliveries import (
    ANSWERED_PROMPT,
    RECORDED,
    RESUMED,
    Delivery,
    DeliveryKey,
    MessageIdReused,
    RecordedMessage,
    message_digest,
)
from codex_workspace.storage.schema import MAX_CONTEXT_ID_CHARS, MAX_ID_CHARS
from codex_workspace.storage.store import Store
from codex_workspace.tasks.approval_answers import is_answer_word
from codex_workspace.tasks.scheduling import AdmissionControl, QueueFull


class Snapshot:
    """The content of a task that a subscriber has received.

    The SDK starts to collect a subscriber's events before it reads the task. Without the snapshot, events in between
    would be sent twice.
    """

    def __init__(self, task: Task) -> None:
        self._chars = {artifact.artifact_id: _chars(artifact.parts) for artifact in task.artifacts}
        self._message_ids = {message.message_id for message in task.history}
        self._message_ids.add(task.status.message.message_id)

    def contains(self, event: Event) -> bool:
        """Whether the snapshot contains an event's content. If not, add it."""
        match event:
            case TaskArtifactUpdateEvent():
                return self._has_chunk(event)
            case TaskStatusUpdateEvent() if event.status.message.message_id:
                is_known = event.status.message.message_id in self._message_ids
                self._message_ids.add(event.status.message.message_id)
                return is_known
            case _:
                return False

    def _has_chunk(self, update: TaskArtifactUpdateEvent) -> bool:
        name, chars = update.artifact.artifact_id, _chars(update.artifact.parts)
        known = self._chars.get(name, 0)
        if not update.append:
            self._chars[name] = chars
            return False
        if OFFSET in update.metadata and _number(update.metadata[OFFSET]) < known:
            return True
        self._chars[name] = known + chars
        return False


def _number(value: object) -> float:
    return value if isinstance(value, float) else math.inf


def _chars(parts: Iterable[Part]) -> int:
    return sum(len(part.text) for part in parts)


logger = logging.getLogger(__name__)

TASK_APPEARS_WITHIN_S: Final = 5.0
"""How long to wait for the task of an accepted message; it takes milliseconds."""

NOT_STORED: Final = "The agent was stopped during this task, and its message was not stored."


class IdempotentHandler(DefaultRequestHandler):
    """Processes a message once, no matter how often it is sent."""

    def __init__(
        self,
        executor: AgentExecutor,
        store: Store,
        admission: AdmissionControl | None,
        card: AgentCard,
        *,
        one_main_context: bool,
        push: PushService | None = None,
    ) -> None:
        self._answered = AnsweredQuestions()
        acceptor = _MessageAcceptor(
            store, admission, self._answered, card, one_main_context=one_main_context, has_push=push is not None
        )
        super().__init__(
            executor,
            store.tasks,
            card,
            request_context_builder=acceptor,
            push_config_store=push.configs if push else None,
            push_sender=push,
            push_url_validator=push.validate_url if push else None,
        )
        self._store = store

    async def on_message_send(self, params: SendMessageRequest, context: ServerCallContext) -> Message | Task:
        """Answer a message; for a repeated message, return the first one's answer."""
        known = await self._find_delivery(params, context)
        if known is None:
            try:
                async with self._withdraw_if_rejected(context):
                    answer: Message | Task = await super().on_message_send(params, context)
            except _AcceptedMeanwhile as accepted:
                known = accepted.delivery
            else:
                if isinstance(answer, Task):
                    # The SDK reads the task while it is being saved.
                    await self._store.tasks.settled(answer.id)
                return answer
        if not params.configuration.return_immediately:
            async for _ in self._join(known, context):
                pass
        return await self._task(known, context)

    async def on_message_send_stream(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Stream a message's answer; for a repeated message, join the first one's stream."""
        # The reader of a stream waits, whatever its configuration says.
        params.configuration.return_immediately = False
        known = await self._find_delivery(params, context)
        if known is None:
            try:
                async with self._withdraw_if_rejected(context):
                    async for event in super().on_message_send_stream(params, context):
                        yield event
            except _AcceptedMeanwhile as accepted:
                known = accepted.delivery
        if known is not None:
            async for event in self._join(known, context):
                yield event

    async def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Stream the current task, then its further events."""
        known: Snapshot | None = None
        events: AsyncGenerator[Event, None] = super().on_subscribe_to_task(params, context)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Task):
                    # The SDK changes this task in place, so the snapshot comes after the wait.
                    await self._store.tasks.settled(event.id)
                    known = Snapshot(event)
                elif known is not None and known.contains(event):
                    continue
                yield event

    async def resume(self) -> int:
        """Resume the messages that an earlier process left unfinished, in their order; return their number."""
        unfinished = await self._store.deliveries.unfinished()
        resumed = [delivery for delivery in unfinished if await self._resume(delivery)]
        await self._store.tasks.fail_unfinished(NOT_STORED, excluded=[delivery.task_id for delivery in resumed])
        # A client may ask at once for a task whose beginning the earlier process did not write.
        with anyio.move_on_after(TASK_APPEARS_WITHIN_S):
            for delivery in resumed:
                await self._task(delivery, _context_of(delivery))
        return len(resumed)

    async def _resume(self, delivery: Delivery) -> bool:
        """Have a stored message answered; return False if its task has ended."""
        self._store.deliveries.resume(delivery)
        context = _context_of(delivery)
        task = await self._store.tasks.get(delivery.task_id, context)
        if task is not None and task.status.state in TERMINAL:
            await self._store.deliveries.acknowledge(delivery.task_id)
            return False
        context.state[RESUMED] = delivery
        request = SendMessageRequest.FromString(delivery.request)
        active_task, request_context = await self._setup_active_task(request, context)
        await active_task.enqueue_request(request_context)
        return True

    async def _setup_active_task(
        self, params: SendMessageRequest, call_context: ServerCallContext
    ) -> tuple[ActiveTask, RequestContext]:
        # The disconnect of a 0.3 streaming client cancels the request, but a stored message must be processed.
        with anyio.CancelScope(shield=True):
            accepted: tuple[ActiveTask, RequestContext] = await super()._setup_active_task(params, call_context)
        return accepted

    @asynccontextmanager
    async def _withdraw_if_rejected(self, context: ServerCallContext) -> AsyncIterator[None]:
        """Delete the stored message if the request is rejected afterwards.

        A task may end after it was checked and before it receives the message.
        """
        try:
            yield
        except (A2AError, QueueShutDown) as error:
            recorded = context.state.get(RECORDED)
            if isinstance(recorded, RecordedMessage):
                delivery = recorded.delivery
                self._answered.release(delivery.task_id, delivery.key.message_id)
                await recorded.deliveries.withdraw(delivery.key)
            if isinstance(error, QueueShutDown):
                raise UnsupportedOperationError(
                    message="the task ended first; the message was not processed"
                ) from error
            raise

    async def _find_delivery(self, params: SendMessageRequest, context: ServerCallContext) -> Delivery | None:
        message_id = params.message.message_id
        if len(message_id) > MAX_ID_CHARS:
            raise invalid("messageId", f"at most {MAX_ID_CHARS} characters")
        if not message_id:
            return None
        try:
            known = await self._store.deliveries.find(_key(params, context), message_digest(params))
        except MessageIdReused as error:
            raise InvalidParamsError(message=str(error)) from error
        if known is not None and self._store.deliveries.is_forgotten(known):
            await self._resume(known)
        return known

    async def _join(self, delivery: Delivery, context: ServerCallContext) -> AsyncGenerator[Event, None]:
        """Yield the current task, then its events."""
        task = await self._task(delivery, context)
        if not self._is_idle(task.id, task.status):
            # If the task ends at this moment, the SDK raises, omits the last event, or sends it twice.
            with suppress(UnsupportedOperationError):
                request = SubscribeToTaskRequest(id=task.id)
                async with aclosing(self.on_subscribe_to_task(request, context)) as events:
                    async for event in events:
                        yield event
                        if isinstance(event, Task | TaskStatusUpdateEvent) and self._is_idle(task.id, event.status):
                            return
            task = await self._task(delivery, context)
        yield task

    def _is_idle(self, task_id: str, status: TaskStatus) -> bool:
        return status.state not in WORKING and not self._answered.is_answered(task_id, status)

    async def _task(self, delivery: Delivery, context: ServerCallContext) -> Task:
        with anyio.move_on_after(TASK_APPEARS_WITHIN_S):
            while True:
                await self._store.tasks.settled(delivery.task_id)
                task = await self._store.tasks.get(delivery.task_id, context)
                if task is not None:
                    return task
                await anyio.sleep(0.01)
        raise TaskNotFoundError


class _AcceptedMeanwhile(Exception):
    """The same message was accepted by a concurrent request."""

    def __init__(self, delivery: Delivery) -> None:
        super().__init__(delivery.key.message_id)
        self.delivery = delivery


class _MessageAcceptor(SimpleRequestContextBuilder):
    """Determines the context and task of a message, stores it, and rejects messages that cannot be processed."""

    def __init__(
        self,
        store: Store,
        admission: AdmissionControl | None,
        answered: AnsweredQuestions,
        card: AgentCard,
        *,
        one_main_context: bool,
        has_push: bool,
    ) -> None:
        super().__init__()
        self._has_tokens = bool(card.security_requirements)
        self._answered = answered
        self._has_push = has_push
        self._store = store
        self._admission = admission
        self._one_main_context = one_main_context

    async def build(
        self,
        context: ServerCallContext,
        params: SendMessageRequest | None = None,
        task_id: str | None = None,
        context_id: str | None = None,
        task: Task | None = None,
    ) -> RequestContext:
        """Store the message and return the request's context.

        Raises:
            InvalidParamsError: the context ID is too long, or the message ID was used for another message.
            TaskNotFoundError: the message's task does not exist.
            UnsupportedOperationError: the message's task is running or has ended, or its question was answered already.
            BusyError: too many messages wait.
            InternalError: the message cannot be stored.
        """
        if params is None:
            return await super().build(context, params, task_id, context_id, task)
        resumed = context.state.get(RESUMED)
        if isinstance(resumed, Delivery):
            return _request_context(context, params, resumed.task_id, resumed.context_id)
        self._check(params, context_id)
        if task_id is None and context_id is not None and self._may_answer(params.message, context):
            task_id = await asking_task(self._store.tasks, context_id, context)
        if task_id is not None:
            try:
                context_id = await self._claim_question(task_id, params.message.message_id, context)
            except UnsupportedOperationError:
                # A concurrent request may have had the same message accepted.
                with suppress(MessageIdReused):
                    if known := await self._store.deliveries.find(_key(params, context), message_digest(params)):
                        raise _AcceptedMeanwhile(known) from None
                raise
        try:
            return await self._accept(context, params, task_id, context_id)
        except (A2AError, StoreUnavailable) as error:
            if task_id is not None:
                self._answered.release(task_id, params.message.message_id)
            if isinstance(error, StoreUnavailable):
                raise InternalError(message=error.public) from error
            raise
        except QueueFull as full:
            raise busy(context, str(full), full.retry_after_s) from full

    def _check(self, params: SendMessageRequest, context_id: str | None) -> None:
        if params.configuration.HasField("task_push_notification_config") and not self._has_push:
            raise PushNotificationNotSupportedError
        if context_id is not None and len(context_id) > MAX_CONTEXT_ID_CHARS:
            raise invalid("contextId", f"at most {MAX_CONTEXT_ID_CHARS} characters")

    async def _accept(
        self, context: ServerCallContext, params: SendMessageRequest, task_id: str | None, context_id: str | None
    ) -> RequestContext:
        """Determine the message's task and context, reserve a slot, and store the message."""
        is_answer, message_id, digest = task_id is not None, params.message.message_id, message_digest(params)
        if not is_answer and context_id is None and self._one_main_context:
            context_id = await self._store.main_context(context.user.user_name)
        # The stored request of an answer has the task's ID, also if the message named the context only.
        params.message.task_id = task_id or ""
        task_id, context_id = task_id or self._store.tasks.make_id(), context_id or str(uuid.uuid4())
        slot: AbstractContextManager[None] = nullcontext()
        # An answer to a question needs no place in the queue, because its task already has one.
        if self._admission is not None and not is_answer:
            slot = self._admission.enter(context.user.user_name, context_id, message_id or task_id)
        with slot:
            if message_id:
                await self._store_message(params, digest, context, task_id, context_id)
        return _request_context(context, params, task_id, context_id)

    async def _store_message(
        self, params: SendMessageRequest, digest: bytes, context: ServerCallContext, task_id: str, context_id: str
    ) -> None:
        key, deliveries = _key(params, context), self._store.deliveries
        try:
            accepted = await deliveries.accept(key, params, digest, task_id, context_id)
            if accepted is not None:
                context.state[RECORDED] = RecordedMessage(accepted, deliveries)
                return
            known = await deliveries.find(key, digest)
        except MessageIdReused as error:
            raise InvalidParamsError(message=str(error)) from error
        assert known is not None
        raise _AcceptedMeanwhile(known)

    def _may_answer(self, message: Message, context: ServerCallContext) -> bool:
        """Whether a message without a task ID can answer the question of its context.

        Callers without tokens may be strangers to each other, and so may the senders behind the agent's own calls.
        """
        return self._has_tokens and HEADERS in context.state and is_answer_word(message)

    async def _claim_question(self, task_id: str, message_id: str, context: ServerCallContext) -> str:
        """Claim a task's question for a message; return the task's context ID."""
        # The SDK would queue a message for a running task, and drop it later with a success response.
        known = await self._store.tasks.get(task_id, context)
        if known is None:
            raise TaskNotFoundError
        if known.status.state in WORKING:
            raise UnsupportedOperationError(
                message=f"task {task_id} is running and does not wait for input; "
                f"wait for its end or its next question, or send a new message with contextId {known.context_id} only"
            )
        if known.status.state in TERMINAL:
            raise UnsupportedOperationError(
                message=f"task {task_id} has ended; send the message without taskId, with contextId {known.context_id}"
            )
        if not self._answered.claim(known, message_id):
            raise UnsupportedOperationError(
                message=(
                    f"the question of task {task_id} has been answered; wait until the task ends or asks another "
                    "question"
                )
            )
        context.state[ANSWERED_PROMPT] = known.status.message.message_id
        return known.context_id


class _StoredTaskId(IDGenerator):
    """Generates the task ID that was stored."""

    def __init__(self, task_id: str) -> None:
        self._task_id = task_id

    def generate(self, context: IDGeneratorContext) -> str:
        """Return the stored ID."""
        del context
        return self._task_id


def _context_of(delivery: Delivery) -> ServerCallContext:
    return ServerCallContext(user=AuthenticatedUser(delivery.key.owner))


def _key(params: SendMessageRequest, context: ServerCallContext) -> DeliveryKey:
    return DeliveryKey(context.user.user_name, params.message.message_id)


def _request_context(
    context: ServerCallContext, params: SendMessageRequest, task_id: str, context_id: str
) -> RequestContext:
    # The ID comes from a generator, so that the SDK creates the task if it does not exist.
    return RequestContext(context, params, None, context_id, task_id_generator=_StoredTaskId(task_id))
