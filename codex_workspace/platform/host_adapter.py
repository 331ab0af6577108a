"""Answers the messages that a foreign host, such as the platform's runtime, passes to the executor.

Such a host makes up task and context ids, forgets its tasks when it ends, and delivers a message again if the answer
takes too long. So each message goes through an `IdempotentHandler` of this agent: it is stored, joined when it is
repeated, and resumed after a restart. The host gets one message whose first part is the answer, which every generation
of the platform reads; a failed task is an error.
"""

import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.context import ServerCallContext
from a2a.server.events import EventQueue
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    CancelTaskRequest,
    Message,
    Part,
    Role,
    SendMessageRequest,
    Task,
)
from a2a.utils.errors import InvalidParamsError

from codex_workspace.common.a2a_terms import AuthenticatedUser
from codex_workspace.common.concurrency import task_group
from codex_workspace.config.settings import OPERATOR
from codex_workspace.platform.active_tasks import TrackedExecutor
from codex_workspace.platform.deadline_reply import DeadlineReplies, DeferredReplies, copy_request
from codex_workspace.platform.delegation_results import WAKE_UP_MESSAGE, DelegationResults, NewResults
from codex_workspace.platform.runtime_contract import update_heartbeat
from codex_workspace.server.handler import IdempotentHandler
from codex_workspace.storage.deliveries import DeliveryKey
from codex_workspace.storage.store import Store
from codex_workspace.tasks.scheduling import AdmissionControl

logger = logging.getLogger(__name__)

RESULTS: Final = "urn:codex-workspace:delegation-results"
"""Metadata key of the part that is added to a message: the results of delegations."""

NOTHING_NEW: Final = "These results were reported before; there is nothing new."


class RuntimeHostAdapter(AgentExecutor):
    """Answers each message of a foreign host once.

    Args:
        handler: answers messages.
        store: where messages are stored.
        results: results of delegations, which are added to the next message.
        one_main_context: whether messages without a known context belong to their sender's main context.
    """

    def __init__(
        self, handler: IdempotentHandler, store: Store, results: DelegationResults, *, one_main_context: bool
    ) -> None:
        self.handler: Final = handler
        self.thread_id: str | None = None
        self.replies: Final = DeadlineReplies(store, handler.on_message_send, attach_files=True)
        self._store = store
        self._results = results
        self._one_main_context = one_main_context
        self._accepting = anyio.Lock()
        self._tasks: dict[str, str] = {}
        self._restored_thread: str | None = None

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Answer one message with one message.

        Raises:
            A2AError: the task failed or was canceled, or the message was rejected.
        """
        accepted = await self._accept(context)
        if accepted is None:
            reply = Message(role=Role.ROLE_AGENT, message_id=str(uuid.uuid4()), parts=[Part(text=NOTHING_NEW)])
        else:
            try:
                reply = await self.replies.respond(*accepted, _call(context))
            finally:
                self._tasks.pop(context.task_id or "", None)
            await self.update_thread_id()
        await event_queue.enqueue_event(reply)

    async def _accept(self, context: RequestContext) -> tuple[SendMessageRequest, Task] | None:
        """Have a message stored and its task started; None if there is nothing to do for it."""
        assert context.message is not None
        call, context_id = _call(context), context.message.context_id
        message = _as_sent(context.message)
        message.message_id = message.message_id or str(uuid.uuid4())
        # Two deliveries of one message must find the same request.
        async with self._accepting:
            request, results = await self._request(message, context_id, call)
            task: Message | Task | None = None
            if request is not None:
                at_once = copy_request(request)
                at_once.configuration.return_immediately = True
                task = await self.handler.on_message_send(at_once, call)
            if results is not None:
                await anyio.to_thread.run_sync(self._results.mark_reported, results)
            if request is None or not isinstance(task, Task):
                return None
            self._tasks[context.task_id or ""] = task.id
        return request, task

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Cancel the task that answers a message."""
        del event_queue
        async with self._accepting:
            task_id = self._tasks.get(context.task_id or "")
        if task_id is not None:
            await self.handler.on_cancel_task(CancelTaskRequest(id=task_id), _call(context))

    def restore(self, thread_id: str) -> None:
        """Resume this codex thread if the main context has none; before the first message."""
        self._restored_thread = thread_id

    async def update_thread_id(self) -> None:
        """Read the main context's thread, for a snapshot."""
        if self._one_main_context:
            main = await self._store.main_context(OPERATOR)
            self.thread_id = await self._store.context_thread(OPERATOR, main).load()

    async def _request(
        self, message: Message, context_id: str, call: ServerCallContext
    ) -> tuple[SendMessageRequest | None, NewResults | None]:
        """Return the request for a message, as it was stored if it is repeated, and the results that were added to it.

        The request is None if the message only reports results that are known.

        Raises:
            InvalidParamsError: the message id was used for another message.
        """
        known = await self._store.deliveries.request(DeliveryKey(call.user.user_name, message.message_id))
        if known is None:
            return await self._new_request(message, context_id, call)
        if _as_sent(known.message) != message:
            raise InvalidParamsError(
                message=f"messageId {message.message_id} was used for another message; give each message its own id"
            )
        return SendMessageRequest(message=known.message), None

    async def _new_request(
        self, message: Message, context_id: str, call: ServerCallContext
    ) -> tuple[SendMessageRequest | None, NewResults | None]:
        await self._restore_thread()
        text = _text(message)
        await anyio.to_thread.run_sync(self._results.record_message, text)
        owner = call.user.user_name
        request = SendMessageRequest(message=message)
        if not self._one_main_context or not await self._is_made_up(owner, context_id):
            request.message.context_id = context_id
        context_id = request.message.context_id or await self._store.main_context(owner)
        asking = await self.replies.find_question(owner, context_id, call)
        if asking is not None:
            request.message.task_id, request.message.context_id = asking, context_id
            return request, None
        results = await anyio.to_thread.run_sync(self._results.take)
        if results.is_replay and not results.text and text.startswith(WAKE_UP_MESSAGE):
            return None, results
        if results.text:
            part = Part(text=results.text)
            part.metadata[RESULTS] = True
            request.message.parts.insert(0, part)
        return request, results

    async def _is_made_up(self, owner: str, context_id: str) -> bool:
        """Tell whether the host, not the sender, has chosen a context: it is a random UUID without a thread."""
        if await self._store.context_thread(owner, context_id).load() is not None:
            return False
        try:
            return uuid.UUID(context_id).version == 4
        except ValueError:
            return not context_id

    async def _restore_thread(self) -> None:
        thread_id, self._restored_thread = self._restored_thread, None
        if thread_id is None or not self._one_main_context:
            return
        thread = self._store.context_thread(OPERATOR, await self._store.main_context(OPERATOR))
        if await thread.load() is None:
            await thread.save(thread_id)
            logger.info("the main context continues in thread %s of the snapshot", thread_id)


@asynccontextmanager
async def open_host_adapter(
    executor: AgentExecutor,
    store: Store,
    admission: AdmissionControl | None,
    results: DelegationResults,
    *,
    heartbeat: object = None,
    late: DeferredReplies | None = None,
    one_main_context: bool = True,
    resumes: bool = True,
) -> AsyncIterator[RuntimeHostAdapter]:
    """Open the adapter of a foreign host.

    Args:
        executor: does the work of a message.
        store: where messages are stored.
        admission: the limits of queues.
        results: results of delegations.
        heartbeat: the host's, which reports active tasks.
        late: sends late answers; None: the host waits as long as a task takes.
        one_main_context: see `RuntimeHostAdapter`.
        resumes: resume the messages that an earlier process left unanswered.
    """
    tracked = TrackedExecutor(executor, _text_as_sent)
    handler = IdempotentHandler(tracked, store, admission, _card(), one_main_context=one_main_context)
    adapter = RuntimeHostAdapter(handler, store, results, one_main_context=one_main_context)
    adapter.replies.late = late
    async with task_group() as tasks:
        tasks.start_soon(update_heartbeat, heartbeat, tracked.tasks)
        try:
            await adapter.update_thread_id()
            if resumes and (resumed := await handler.resume()):
                logger.warning("resuming %d messages that an earlier process left unanswered", resumed)
            yield adapter
        finally:
            with anyio.CancelScope(shield=True):
                await handler.aclose()
            tasks.cancel_scope.cancel()


def _text_as_sent(context: RequestContext) -> str:
    return context.get_user_input() if context.message is None else _text(_as_sent(context.message))


def _text(message: Message) -> str:
    """Return a message's text, joined as the runtime does it."""
    return " ".join(part.text for part in message.parts if part.text)


def _card() -> AgentCard:
    """Return the handler's own card: without `streaming` the SDK does not let a task be followed."""
    text = ["text/plain"]
    return AgentCard(
        name="hosted",
        description="hosted",
        version="1",
        capabilities=AgentCapabilities(streaming=True),
        default_input_modes=text,
        default_output_modes=text,
        supported_interfaces=[AgentInterface(url="urn:hosted", protocol_binding="JSONRPC", protocol_version="1.0")],
        skills=[AgentSkill(id="answer", name="Answer", description="Answers messages.", tags=["text"])],
    )


def _call(context: RequestContext) -> ServerCallContext:
    """Return the call context of the agent's own handler; without a token the sender has no name."""
    return ServerCallContext(user=AuthenticatedUser(context.call_context.user.user_name or OPERATOR))


def _as_sent(message: Message) -> Message:
    """Return a message without what the host, or this module, has added."""
    sent = Message()
    sent.CopyFrom(message)
    sent.ClearField("task_id")
    sent.ClearField("context_id")
    if sent.parts and RESULTS in sent.parts[0].metadata:
        del sent.parts[0]
    return sent
