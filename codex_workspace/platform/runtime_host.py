"""The agent under a host that is not ours: an executor for that host, with our own handler behind it.

Such a host knows nothing of deliveries: it makes up ids of task and context for every message, forgets its tasks when
it ends, and hands in a message again whose answer took too long. So each message goes through `IdempotentHandler`, as
under our own host: written down, joined when it comes again, taken up after a restart. What the host gets is one
message whose first part is the answer, which is what every generation of the platform reads; a task that has not come
to a good end is an error.
"""

import logging
import math
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

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
    TaskState,
)
from a2a.utils.errors import InternalError, InvalidParamsError

from codex_workspace.common.a2a_terms import ANSWER, AWAITING_INPUT, OPERATOR, WORKING, AuthenticatedUser
from codex_workspace.common.concurrency import task_group
from codex_workspace.platform.dispatcher import NO_ANSWER, STILL_WORKING
from codex_workspace.platform.runtime_contract import (
    WAKE_UP_MESSAGE,
    ActiveTasks,
    DelegationResults,
    NewResults,
    clear_wedge,
    mark_wedged,
)
from codex_workspace.server.handler import IdempotentHandler
from codex_workspace.server.open_questions import MAX_OPEN, OpenQuestions
from codex_workspace.storage.deliveries import HANDLED, DeliveryKey
from codex_workspace.storage.store import Store
from codex_workspace.tasks.replies import answer_text
from codex_workspace.tasks.scheduling import AdmissionControl

logger = logging.getLogger(__name__)

RESULTS: Final = "urn:codex-workspace:delegation-results"
"""Metadata key of the part that we put before a message: what peers have answered meanwhile."""

LOOK_S: Final = 5.0
"""Codex's state is looked at this often; the platform hears of it with the next beat, 30 s apart."""

NOTHING_NEW: Final = "These results were told before; there is nothing new."

UNKNOWN_END: Final = "The task has not come to its end; send the message again to join it."


class DeferredReplySender(Protocol):
    """Where an answer goes that takes longer than its host waits."""

    @property
    def within_s(self) -> float:
        """How long a message may stay without any answer."""

    async def word(self, message: Message, owner: str) -> str | None:
        """Return what is said to a message whose answer is sent later, or was; None where that is not so."""

    async def owe(self, message: Message, owner: str) -> None:
        """Have the answer to a message, as it was written down, sent when it is there; durable on return."""


class RuntimeHostAdapter(AgentExecutor):
    """Answers what a foreign host hands in, each message once.

    Args:
        handler: answers messages.
        store: where they are written down.
        results: what peers have answered; it goes to the model with the next message.
        one_main_context: whether messages of no context we know belong to their sender's main one.
    """

    def __init__(
        self,
        handler: IdempotentHandler,
        store: Store,
        results: DelegationResults,
        *,
        one_main_context: bool,
    ) -> None:
        self._handler = handler
        self._store = store
        self._delegations = results
        self.later: DeferredReplySender | None = None
        self._one_main_context = one_main_context
        self._one_is_accepted = anyio.Lock()
        self._asked = OpenQuestions(store)
        self._late: deque[str] = deque(maxlen=MAX_OPEN)
        self._tasks: dict[str, str] = {}
        self._restored: str | None = None
        self.thread_id: str | None = None

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Answer one message with one message.

        Raises:
            A2AError: the task has failed or was canceled, or the message was refused; its sentence may be shown.
        """
        begun = await self._accept(context)
        if begun is None:
            nothing = Message(role=Role.ROLE_AGENT, message_id=str(uuid.uuid4()), parts=[Part(text=NOTHING_NEW)])
            await event_queue.enqueue_event(nothing)
            return
        try:
            answer = await self._answer(begun, context)
        finally:
            self._tasks.pop(context.task_id or "", None)
        await event_queue.enqueue_event(answer)

    async def _accept(self, context: RequestContext) -> "_Begun | None":
        """Have a message written down, if it was not before; None where there is nothing to do for it."""
        assert context.message is not None
        call, named = _call(context), context.message.context_id
        message = _as_sent(context.message)
        message.message_id = message.message_id or str(uuid.uuid4())
        # One after the other: two of the same message are to find the same request.
        async with self._one_is_accepted:
            request, news = await self._request(message, named, call)
            task: Message | Task | None = None
            if request is not None:
                at_once = _copy(request)
                at_once.configuration.return_immediately = True
                task = await self._handler.on_message_send(at_once, call)
            if news is not None:
                await anyio.to_thread.run_sync(self._delegations.told, news)
            if request is None or not isinstance(task, Task):
                return None
            self._tasks[context.task_id or ""] = task.id
        return _Begun(request, task)

    async def _answer(self, begun: "_Begun", context: RequestContext) -> Message:
        """Return the answer to a message that is accepted, or the word that it is sent later."""
        call, later = _call(context), self.later
        owner = call.user.user_name
        if begun.request.message.task_id in self._late:
            # A word for a task whose end, and all that it asks, a letter tells.
            return _message(STILL_WORKING, begun.task, "at-work")
        word = await self._word(begun, owner)
        if word is not None:
            return word
        task: Message | Task | None = None
        with anyio.move_on_after(math.inf if later is None else later.within_s):
            task = await self._handler.on_message_send(_copy(begun.request), call)
        # The same may have come twice, and the other one have waited long enough.
        word = await self._word(begun, owner)
        if word is not None:
            return word
        # The SDK takes a cancellation for the end of what it follows.
        is_at_work = not isinstance(task, Task) or task.status.state in WORKING
        if is_at_work and later is not None:
            await later.owe(begun.request.message, owner)
            self._asked.record(owner, begun.task.context_id, begun.task.id)
            self._late.append(begun.task.id)
            return _message(STILL_WORKING, begun.task, "at-work")
        assert isinstance(task, Task)
        if task.status.state in AWAITING_INPUT:
            self._asked.record(owner, task.context_id, task.id)
        await self.look_back()
        return reply_of(task)

    async def _word(self, begun: "_Begun", owner: str) -> Message | None:
        """Return what is said where the answer is, or was, sent by a letter: else it would be there twice."""
        word = None if self.later is None else await self.later.word(begun.request.message, owner)
        return None if word is None else _message(word, begun.task, "at-work")

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Have the task canceled that answers a message; whoever waits for the answer is told so."""
        del event_queue
        async with self._one_is_accepted:
            task_id = self._tasks.get(context.task_id or "")
        if task_id is not None:
            await self._handler.on_cancel_task(CancelTaskRequest(id=task_id), _call(context))

    def restore(self, thread_id: str) -> None:
        """Go on in this codex thread where the main context has none; before the first message."""
        self._restored = thread_id

    async def look_back(self) -> None:
        """Find the main context's thread, for a snapshot."""
        if self._one_main_context:
            main = await self._store.main_context(OPERATOR)
            self.thread_id = await self._store.context_thread(OPERATOR, main).load()

    async def _request(
        self, message: Message, named: str, call: ServerCallContext
    ) -> tuple[SendMessageRequest | None, NewResults | None]:
        """Return the request that stands for a message, and what peers have answered, which is in it.

        For a message that comes again it is the request that was written down. None where a message only wakes the
        agent for results that were told before.

        Raises:
            InvalidParamsError: its id was used for another message.
        """
        known = await self._store.deliveries.request(DeliveryKey(call.user.user_name, message.message_id))
        if known is None:
            return await self._new(message, named, call)
        if _as_sent(known.message) != message:
            raise InvalidParamsError(
                message=f"messageId {message.message_id} was used for another message; give each message its own id"
            )
        return SendMessageRequest(message=known.message), None

    async def _new(
        self, message: Message, named: str, call: ServerCallContext
    ) -> tuple[SendMessageRequest | None, NewResults | None]:
        await self._restore()
        text = _text(message)
        await anyio.to_thread.run_sync(self._delegations.heard, text)
        owner = call.user.user_name
        request = SendMessageRequest(message=message)
        if not self._one_main_context or not await self._is_made_up(owner, named):
            request.message.context_id = named
        context_id = request.message.context_id or await self._store.main_context(owner)
        asking = await self._asked.find(owner, context_id, call)
        if asking is not None:
            request.message.task_id, request.message.context_id = asking, context_id
            return request, None
        news = await anyio.to_thread.run_sync(self._delegations.take)
        if news.is_replay and not news.text and text.startswith(WAKE_UP_MESSAGE):
            return None, news
        if news.text:
            part = Part(text=news.text)
            part.metadata[RESULTS] = True
            request.message.parts.insert(0, part)
        return request, news

    async def _is_made_up(self, owner: str, context_id: str) -> bool:
        """Tell whether the host, and not the sender, has named a context: nothing was ever said in it."""
        if await self._store.context_thread(owner, context_id).load() is not None:
            return False
        try:
            return uuid.UUID(context_id).version == 4
        except ValueError:
            return not context_id

    async def _restore(self) -> None:
        thread_id, self._restored = self._restored, None
        if thread_id is None or not self._one_main_context:
            return
        memory = self._store.context_thread(OPERATOR, await self._store.main_context(OPERATOR))
        if await memory.load() is None:
            await memory.save(thread_id)
            logger.info("the main context goes on in thread %s, as the snapshot says", thread_id)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A message as it was written down, and the task that answers it."""

    request: SendMessageRequest
    task: Task


@asynccontextmanager
async def open_runtime_host(
    executor: AgentExecutor,
    store: Store,
    admission: AdmissionControl | None,
    results: DelegationResults,
    *,
    heartbeat: object = None,
    open_later: Callable[[IdempotentHandler], AbstractAsyncContextManager[DeferredReplySender]] | None = None,
    one_main_context: bool = True,
    is_smoke: bool = False,
) -> AsyncIterator[RuntimeHostAdapter]:
    """Give an executor for a foreign host, with what an earlier process left unanswered at work again.

    Leaving ends what waits in it. In a smoke test nothing is taken up. `open_later` makes the block in which late
    answers are sent; without it a host waits as long as it takes.
    """
    at_work = ActiveTasks(heartbeat)
    handler = IdempotentHandler(_Seen(executor, at_work), store, admission, _card(), one_main_context=one_main_context)
    host = RuntimeHostAdapter(handler, store, results, one_main_context=one_main_context)
    async with task_group() as beside:
        beside.start_soon(at_work.tell)
        try:
            await host.look_back()
            if not is_smoke and (resumed := await handler.resume()):
                logger.warning("resuming %d unanswered messages of an earlier process", resumed)
            async with nullcontext() if open_later is None else open_later(handler) as host.later:
                yield host
        finally:
            with anyio.CancelScope(shield=True):
                await handler.aclose()
            beside.cancel_scope.cancel()


async def report_unhealthy(look: Callable[[], Awaitable[str | None]], every_s: float = LOOK_S) -> None:
    """Tell the platform's heartbeat, until cancelled, when the agent cannot work, and when it can again.

    `look` gives why not, for a reason that lasts; None when it can.
    """
    is_wedged = False
    while True:
        reason = await look()
        if reason is not None:
            mark_wedged(reason)
        elif is_wedged:
            clear_wedge()
        is_wedged = reason is not None
        await anyio.sleep(every_s)


def reply_of(task: Task) -> Message:
    """Return a task's answer as the one message that the platform reads: its text first, then files.

    A question is an answer too, whose own answer is the next message of its context.

    Raises:
        InternalError: the task has failed, was canceled or refused, or is not at its end.
    """
    said = "".join(part.text for part in task.status.message.parts)
    if task.status.state == TaskState.TASK_STATE_COMPLETED:
        said = answer_text(task) or NO_ANSWER
    elif task.status.state not in AWAITING_INPUT:
        raise InternalError(message=said or UNKNOWN_END)
    files = [part for each in task.artifacts if each.artifact_id.startswith("file-") for part in each.parts]
    return _message(said, task, ANSWER, files)


def _message(text: str, task: Task, what: str, files: Iterable[Part] = ()) -> Message:
    # What is said of a task again is the same message.
    message_id = f"{task.id}-{what}"
    return Message(
        role=Role.ROLE_AGENT, message_id=message_id, context_id=task.context_id, parts=[Part(text=text), *files]
    )


class _Seen(AgentExecutor):
    """An executor whose tasks the platform sees while they are at work."""

    def __init__(self, executor: AgentExecutor, at_work: ActiveTasks) -> None:
        self._executor = executor
        self._at_work = at_work

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Do it, and be seen."""
        with self._at_work.shown(_said_in(context)):
            await self._executor.execute(context, event_queue)

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Do it."""
        await self._executor.cancel(context, event_queue)


def _said_in(context: RequestContext) -> str:
    """Return what the sender has said, without what we have put before it."""
    return context.get_user_input() if context.message is None else _text(_as_sent(context.message))


def _text(message: Message) -> str:
    # As the runtime puts a message's texts together.
    return " ".join(part.text for part in message.parts if part.text)


def _card() -> AgentCard:
    """Return a card that nobody sees: without `streaming` the SDK lets no task be followed."""
    text = ["text/plain"]
    return AgentCard(
        name="hosted",
        description="The agent behind a host's executor.",
        version="0",
        capabilities=AgentCapabilities(streaming=True),
        default_input_modes=text,
        default_output_modes=text,
        supported_interfaces=[AgentInterface(url="urn:hosted", protocol_binding="JSONRPC", protocol_version="1.0")],
        skills=[AgentSkill(id="answer", name="Answer", description="Answers messages.", tags=["text"])],
    )


def _call(context: RequestContext) -> ServerCallContext:
    """Return the call of this agent's handler for a host's request; without a token the sender has no name."""
    user = AuthenticatedUser(context.call_context.user.user_name or OPERATOR)
    return ServerCallContext(user=user, state={HANDLED: True})


def _as_sent(message: Message) -> Message:
    """Return a message without what a host, or we, have put into it."""
    sent = Message()
    sent.CopyFrom(message)
    sent.ClearField("task_id")
    sent.ClearField("context_id")
    if sent.parts and RESULTS in sent.parts[0].metadata:
        del sent.parts[0]
    return sent


def _copy(request: SendMessageRequest) -> SendMessageRequest:
    copy = SendMessageRequest()
    copy.CopyFrom(request)
    return copy
