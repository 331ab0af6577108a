"""Answer pushed messages by the deadline, or promise the answer and send it later.

The platform waits about 180 s for the response to a message that it pushes, then delivers the message again. So the
response is one message: the task's answer, or a promise. A promised answer is stored in the outbox before the promise
is returned; from then on every delivery of the message gets a promise, and the answer is sent once.
"""

import math
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import cached_property
from typing import Final

import anyio
from a2a.server.context import ServerCallContext
from a2a.types import ListTasksRequest, Message, Part, Role, SendMessageRequest, Task, TaskState
from a2a.utils.errors import InternalError, UnsupportedOperationError
from google.protobuf.json_format import MessageToDict

from codex_workspace.common.a2a_terms import ANSWER, WORKING, is_protocol_0_3
from codex_workspace.common.values import JsonObject
from codex_workspace.platform.activity_rows import DELEGATION, IN_REPLY_TO, UNKNOWN_PEER, answer_heading, is_answer
from codex_workspace.platform.dispatcher import Dispatcher, answer_of_task
from codex_workspace.server.handler import IdempotentHandler
from codex_workspace.storage.deliveries import DeliveryKey
from codex_workspace.storage.outbox import OutboxState
from codex_workspace.storage.store import Store

STILL_WORKING: Final = "I am still working on this. I will send the answer as a separate message."
SENT_SEPARATELY: Final = "The answer to this message is a separate message, which was already sent or will follow."
RESULTS: Final = "urn:codex-workspace:delegation-results"
"""Metadata key of the part that is added to a message: the results of delegations."""

RECEIVED: Final = "Received, thank you. I'll continue and report the result to my user."
"""The response to a peer's answer, which is not answered itself."""


MAX_DEFERRED: Final = 1000
"""How many tasks are remembered whose answers are sent later."""


class DeadlineReplies:
    """Turns the task of a message into its response, by the deadline.

    Args:
        store: where tasks and messages are.
        send: has a message processed, and waits for the end of its task unless it should return at once.
        attach_files: attach the task's files to the response, instead of naming them.

    late: sends the answers that take more than `deadline_s` seconds; None: there is no deadline.
    """

    def __init__(
        self,
        store: Store,
        send: Callable[[SendMessageRequest, ServerCallContext], Awaitable[Message | Task]],
        *,
        attach_files: bool,
    ) -> None:
        self.late: Dispatcher | None = None
        self.deadline_s = 0.0
        self._store = store
        self._send = send
        self._attach_files = attach_files
        self._deferred: deque[str] = deque(maxlen=MAX_DEFERRED)

    async def stored(self, message: Message, owner: str) -> SendMessageRequest | None:
        """Return the request for a repeated message as it was stored; None if the message is new.

        If its id was used for another message, the request is for the message itself, and is rejected later.
        """
        known = await self._store.deliveries.request(DeliveryKey(owner, message.message_id))
        if known is None:
            return None
        return SendMessageRequest(message=known.message if as_sent(known.message) == as_sent(message) else message)

    async def address(self, request: SendMessageRequest, call: ServerCallContext) -> bool:
        """Address a new message to the task in its context that waits for input; return whether there is one."""
        message = request.message
        context_id = message.context_id or await self._store.main_context(call.user.user_name)
        open_ones = ListTasksRequest(context_id=context_id, status=TaskState.TASK_STATE_INPUT_REQUIRED, page_size=1)
        for task in (await self._store.tasks.list(open_ones, call)).tasks:
            if self.late is not None and self.late.is_asking(task.id):
                self._deferred.append(task.id)
            message.task_id, message.context_id = task.id, context_id
            return True
        return False

    async def start(self, request: SendMessageRequest, call: ServerCallContext) -> Task:
        """Have a message stored and its task started; return the task."""
        request = _copy(request)
        request.configuration.return_immediately = True
        started = await self._send(request, call)
        assert isinstance(started, Task)
        return started

    async def respond(self, request: SendMessageRequest, started: Task, call: ServerCallContext) -> Message:
        """Return the answer to a message, or the promise that it is sent later.

        Raises:
            InternalError: the task failed, was canceled or was rejected.
        """
        late, message, owner = self.late, request.message, call.user.user_name
        promise = await self._promise(message, started, owner)
        if promise is not None:
            return promise
        if late is not None and message.task_id in self._deferred:
            await late.absorb(message, owner)
            return status_reply(STILL_WORKING, started)
        answer: Message | Task | None = None
        with anyio.move_on_after(math.inf if late is None else self.deadline_s):
            answer = await self._send(_copy(request), call)
        # Another delivery of the same message may have reached its deadline.
        promise = await self._promise(message, started, owner)
        if promise is not None:
            return promise
        # The SDK returns a working task if the request is cancelled.
        if late is not None and (not isinstance(answer, Task) or answer.status.state in WORKING):
            await self.defer(message, started, owner)
            return status_reply(STILL_WORKING, started)
        await anyio.lowlevel.checkpoint_if_cancelled()
        assert isinstance(answer, Task)
        return reply_of(answer, attach_files=self._attach_files)

    async def defer(self, message: Message, started: Task, owner: str) -> None:
        """Have the answer to a message sent later."""
        if self.late is not None:
            await self.late.defer(message, owner)
            self._deferred.append(started.id)

    async def _promise(self, message: Message, started: Task, owner: str) -> Message | None:
        """Return the promise for a message whose answer is sent separately; None for any other message."""
        state = None if self.late is None else await self.late.state(message, owner)
        if state is None:
            return None
        return status_reply(STILL_WORKING if state is OutboxState.RECEIVED else SENT_SEPARATELY, started)


class DeadlineReplyHandler(IdempotentHandler):
    """Answers the platform by the deadline, and other callers as `IdempotentHandler` does.

    `senders`: the principals whose messages may come from the platform; empty while it does not push.
    """

    senders: frozenset[str] = frozenset()

    @cached_property
    def replies(self) -> DeadlineReplies:
        """The responses to the platform's messages."""
        return DeadlineReplies(self._store, super().on_message_send, attach_files=False)

    async def on_message_send(self, params: SendMessageRequest, context: ServerCallContext) -> Message | Task:
        """Answer a message; the platform gets one message whose first part is the text."""
        # The platform waits for the answer, and speaks A2A 0.3.
        is_waiting = not params.configuration.return_immediately and not params.message.task_id
        if not (is_waiting and context.user.user_name in self.senders and is_protocol_0_3(context)):
            return await super().on_message_send(params, context)
        params.message.message_id = params.message.message_id or str(uuid.uuid4())
        metadata = MessageToDict(params.message.metadata)
        if is_answer(metadata, params.message.message_id):
            return await self._receive_answer(params, metadata, context)
        request = await self.replies.stored(params.message, context.user.user_name)
        if request is None:
            request = _copy(params)
            await self.replies.address(request, context)
        try:
            started = await self.replies.start(request, context)
        except UnsupportedOperationError:
            if not request.message.task_id:
                raise
            # The question was answered meanwhile.
            request = params
            started = await self.replies.start(request, context)
        return await self.replies.respond(request, started, context)

    async def _receive_answer(
        self, params: SendMessageRequest, metadata: JsonObject, context: ServerCallContext
    ) -> Message:
        """Accept a peer's answer; the result of its turn goes to the user."""
        request = _copy(params)
        work = metadata.get(DELEGATION) or metadata.get(IN_REPLY_TO)
        request.message.parts.insert(0, answer_heading(UNKNOWN_PEER, work if isinstance(work, str) else ""))
        started = await self.replies.start(request, context)
        await self.replies.defer(request.message, started, context.user.user_name)
        return status_reply(RECEIVED, started, "received")


def reply_of(task: Task, *, attach_files: bool) -> Message:
    """Return the answer of a task that has ended or waits for input, as one message with the text first.

    Raises:
        InternalError: the task failed, was canceled or was rejected.
    """
    answer = answer_of_task(task)
    if answer.is_failure:
        raise InternalError(message=answer.text)
    return (
        status_reply(answer.text, task, ANSWER, answer.files)
        if attach_files
        else status_reply(answer.text_with_files, task, ANSWER)
    )


def status_reply(text: str, task: Task, kind: str = "at-work", files: Iterable[Part] = ()) -> Message:
    """Return a message about a task; repeated deliveries get the same message."""
    return Message(
        role=Role.ROLE_AGENT,
        message_id=f"{task.id}-{kind}",
        context_id=task.context_id,
        parts=[Part(text=text), *files],
    )


def as_sent(message: Message) -> Message:
    """Return a message without what a host, or the agent, has added."""
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
