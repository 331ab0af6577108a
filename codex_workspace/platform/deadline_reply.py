"""Answer pushed messages by the deadline, or promise the answer and send it later.

The platform waits about 180 s for the response to a message that it pushes, then delivers the message again. So the
response is one message: the task's answer, or a promise. A promised answer is stored in the outbox before the promise
is returned; from then on every delivery of the message gets a promise, and the answer is sent once.
"""

import math
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import anyio
from a2a.server.context import ServerCallContext
from a2a.types import Message, Part, Role, SendMessageRequest, Task
from a2a.utils.errors import InternalError, UnsupportedOperationError
from google.protobuf.json_format import MessageToDict

from codex_workspace.common.a2a_terms import ANSWER, AWAITING_INPUT, WORKING, is_protocol_0_3
from codex_workspace.platform.activity_rows import DELEGATION, IN_REPLY_TO, UNKNOWN_PEER, answer_heading, is_answer
from codex_workspace.platform.dispatcher import OWNER, Dispatcher, answer_of_task, message_from_push
from codex_workspace.server.handler import IdempotentHandler
from codex_workspace.server.open_questions import MAX_OPEN, OpenQuestions
from codex_workspace.storage.deliveries import DeliveryKey
from codex_workspace.storage.outbox import Outbox, OutboxState, Route
from codex_workspace.storage.store import Store

STILL_WORKING: Final = "I am still working on this. I will send the answer as a separate message."
SENT_SEPARATELY: Final = "The answer to this message is a separate message, which was sent already or is on its way."
RECEIVED: Final = "Received, thank you. I'll continue and report the result to my user."
"""The response to a peer's answer, which is not answered itself."""


class DeferredReplies:
    """Sends late answers through the outbox.

    `dispatcher` returns None if none is running: then the next process sends the answer.
    """

    def __init__(self, outbox: Outbox, deadline_s: float, dispatcher: Callable[[], Dispatcher | None]) -> None:
        self.deadline_s = deadline_s
        self._outbox = outbox
        self._dispatcher = dispatcher

    async def promise(self, message: Message, owner: str) -> str | None:
        """Return the promise for a message whose answer is sent separately; None for any other message."""
        known = await self._outbox.find(message_from_push(message, owner).id)
        if known is None:
            return None
        return STILL_WORKING if known.state is OutboxState.RECEIVED else SENT_SEPARATELY

    async def defer(self, message: Message, owner: str) -> None:
        """Send the answer to a message, as it was stored, when its task ends; durable on return, idempotent."""
        added = await self._outbox.add(message_from_push(message, owner))
        dispatcher = self._dispatcher()
        if added is not None and dispatcher is not None:
            await dispatcher.follow(added)

    async def absorb(self, message: Message, owner: str) -> None:
        """Record that the answer to an earlier message answers this one, too."""
        done = replace(message_from_push(message, owner), state=OutboxState.DONE, route=Route.NONE, request=b"")
        await self._outbox.add(done)

    def question_task(self, context_id: str) -> str | None:
        """Return the task with a deferred answer that waits for input in a context, if there is one."""
        dispatcher = self._dispatcher()
        return None if dispatcher is None else dispatcher.question_task(context_id)


class DeadlineReplies:
    """Turns the task of an accepted message into its response, by the deadline.

    Args:
        store: where tasks are.
        follow: waits for the end of a request's task.
        attach_files: attach the task's files to the response, instead of naming them.

    `late` sends late answers; None: there is no deadline.
    """

    def __init__(
        self,
        store: Store,
        follow: Callable[[SendMessageRequest, ServerCallContext], Awaitable[Message | Task]],
        *,
        attach_files: bool,
    ) -> None:
        self.late: DeferredReplies | None = None
        self._questions = OpenQuestions(store)
        self._follow = follow
        self._attach_files = attach_files
        self._deferred: deque[str] = deque(maxlen=MAX_OPEN)

    async def find_question(self, owner: str, context_id: str, call: ServerCallContext) -> str | None:
        """Return the task in a context that waits for input: the next message answers it."""
        task_id = None if self.late is None else self.late.question_task(context_id)
        if task_id is None:
            return await self._questions.find(owner, context_id, call)
        self._deferred.append(task_id)
        return task_id

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
        with anyio.move_on_after(math.inf if late is None else late.deadline_s):
            answer = await self._follow(copy_request(request), call)
        # Another delivery of the same message may have reached its deadline.
        promise = await self._promise(message, started, owner)
        if promise is not None:
            return promise
        if isinstance(answer, Message):
            return answer
        # The SDK returns a working task if the request is cancelled.
        if late is not None and (answer is None or answer.status.state in WORKING):
            await self.defer(message, started, owner)
            return status_reply(STILL_WORKING, started)
        await anyio.lowlevel.checkpoint_if_cancelled()
        assert answer is not None
        if answer.status.state in AWAITING_INPUT:
            self._questions.record(owner, answer.context_id, answer.id)
        return reply_of(answer, attach_files=self._attach_files)

    async def defer(self, message: Message, started: Task, owner: str) -> None:
        """Have the answer to a message sent later."""
        if self.late is None:
            return
        await self.late.defer(message, owner)
        self._questions.record(owner, started.context_id, started.id)
        self._deferred.append(started.id)

    async def _promise(self, message: Message, started: Task, owner: str) -> Message | None:
        text = None if self.late is None else await self.late.promise(message, owner)
        return None if text is None else status_reply(text, started)


@dataclass(slots=True)
class PushDelivery:
    """When and how our own host answers the platform.

    owners: the principals whose messages may come from the platform. is_on: the platform pushes at the moment.
    late: sends late answers, while the agent is on the platform.
    """

    deadline_s: float
    owners: frozenset[str] = frozenset({OWNER})
    is_on: bool = False
    late: DeferredReplies | None = None

    def is_from_platform(self, params: SendMessageRequest, context: ServerCallContext) -> bool:
        """Tell whether a message may come from the platform: its sender waits for the answer, in A2A 0.3."""
        is_waiting = not params.configuration.return_immediately and not params.message.task_id
        return self.is_on and is_waiting and context.user.user_name in self.owners and is_protocol_0_3(context)


class DeadlineReplyHandler(IdempotentHandler):
    """Answers the platform by the deadline, and other callers as `IdempotentHandler` does."""

    _push: PushDelivery | None = None

    def serve_platform(self, push: PushDelivery) -> None:
        """Answer the platform from now on."""
        self._push = push
        self._replies = DeadlineReplies(self._store, super().on_message_send, attach_files=False)

    async def on_message_send(self, params: SendMessageRequest, context: ServerCallContext) -> Message | Task:
        """Answer a message; the platform gets one message whose first part is the text."""
        push = self._push
        if push is None or not push.is_from_platform(params, context):
            return await super().on_message_send(params, context)
        self._replies.late = push.late
        params.message.message_id = params.message.message_id or str(uuid.uuid4())
        metadata = MessageToDict(params.message.metadata)
        if is_answer(metadata, params.message.message_id):
            return await self._receive_answer(params, context)
        request = await self._read(params, context)
        try:
            started = await self._start(request, context)
        except UnsupportedOperationError:
            if not request.message.task_id:
                raise
            # The question was answered meanwhile.
            request = copy_request(params)
            started = await self._start(request, context)
        return await self._replies.respond(request, started, context)

    async def _start(self, request: SendMessageRequest, context: ServerCallContext) -> Task:
        request = copy_request(request)
        request.configuration.return_immediately = True
        started = await super().on_message_send(request, context)
        assert isinstance(started, Task)
        return started

    async def _receive_answer(self, params: SendMessageRequest, context: ServerCallContext) -> Message:
        """Accept a peer's answer; the result of its turn goes to the user."""
        request, metadata = copy_request(params), MessageToDict(params.message.metadata)
        work = metadata.get(DELEGATION) or metadata.get(IN_REPLY_TO)
        request.message.parts.insert(0, answer_heading(UNKNOWN_PEER, work if isinstance(work, str) else ""))
        started = await self._start(request, context)
        await self._replies.defer(request.message, started, context.user.user_name)
        return status_reply(RECEIVED, started, "received")

    async def _read(self, params: SendMessageRequest, context: ServerCallContext) -> SendMessageRequest:
        """Return the request for a message: as it was stored, or addressed to the task that waits for input."""
        request, owner = copy_request(params), context.user.user_name
        known = await self._store.deliveries.request(DeliveryKey(owner, params.message.message_id))
        if known is not None:
            if _as_sent(known.message, params.message) == params.message:
                request.message.CopyFrom(known.message)
            return request
        context_id = params.message.context_id or await self._store.main_context(owner)
        task_id = await self._replies.find_question(owner, context_id, context)
        if task_id is not None:
            request.message.task_id, request.message.context_id = task_id, context_id
        return request


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


def _as_sent(known: Message, sent: Message) -> Message:
    """Return a stored message without the task and context that its sender did not name."""
    message = Message()
    message.CopyFrom(known)
    message.ClearField("task_id")
    if not sent.context_id:
        message.ClearField("context_id")
    return message


def copy_request(request: SendMessageRequest) -> SendMessageRequest:
    """Return a copy of a request."""
    copy = SendMessageRequest()
    copy.CopyFrom(request)
    return copy
