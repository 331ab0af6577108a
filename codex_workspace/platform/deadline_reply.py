"""Answers that take longer than a foreign host waits: sent by the platform's own means as soon as they are there.

That host is pushed to and tells nobody who has sent a message; the platform's own list of messages does, once it is
through with one.

The request handler where the platform pushes: it waits for an answer for about 180 s, then sends the same again.

So its messages are answered by one message each, in time: with the task's answer, or with the word that it is at work
and the answer comes later. That later answer is a letter, written down before the word goes out; from then on whoever
asks again gets a word, and the answer once, by the letter.
"""

import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import anyio
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers import RequestHandler
from a2a.types import Message, Part, Role, SendMessageRequest, Task
from a2a.utils.errors import InternalError, UnsupportedOperationError
from google.protobuf.json_format import MessageToDict

from codex_workspace.common.a2a_terms import AWAITING_INPUT, TERMINAL, is_protocol_0_3
from codex_workspace.common.concurrency import task_group
from codex_workspace.platform.activity_rows import DELEGATION, IN_REPLY_TO, UNKNOWN_PEER, answer_mark, is_answer
from codex_workspace.platform.client import PlatformClient
from codex_workspace.platform.dispatcher import (
    OWNER,
    STILL_WORKING,
    Dispatcher,
    answer_of_task,
    message_from_push,
    reply_text,
)
from codex_workspace.platform.reply_sender import ReplySender
from codex_workspace.server.handler import IdempotentHandler
from codex_workspace.server.open_questions import OpenQuestions
from codex_workspace.storage.deliveries import DeliveryKey
from codex_workspace.storage.outbox import Outbox, OutboxMessage, OutboxState, Route, delete_expired

logger = logging.getLogger(__name__)


class DeferredReplies:
    """Has late answers sent; from `open_deferred_replies`.

    within_s: how long a message may stay without any answer.
    """

    def __init__(self, within_s: float, mail: Outbox, follow: Callable[[OutboxMessage], Awaitable[None]]) -> None:
        self.within_s = within_s
        self._mail = mail
        self._follow = follow

    async def word(self, message: Message, owner: str) -> str | None:
        """Return what is said to a message whose answer is sent later, or was; None where that is not so."""
        known = await self._mail.find(message_from_push(message, owner).id)
        return None if known is None else reply_text(known)

    async def owe(self, message: Message, owner: str) -> None:
        """Have the answer to a message sent when it is there, once however often this is asked; durable on return."""
        kept = await self._mail.add(message_from_push(message, owner))
        if kept is not None:
            await self._follow(kept)


@asynccontextmanager
async def open_deferred_replies(
    api: PlatformClient, mail: Outbox, handler: RequestHandler, within_s: float
) -> AsyncIterator[DeferredReplies]:
    """Send late answers while the block is open, those first that an earlier process has left."""
    async with task_group() as tasks:
        postman = ReplySender(api, mail, tasks)
        clerk = Dispatcher(handler, mail, api, tasks, postman)
        postman.tell(clerk.sent, _removed)
        tasks.start_soon(clerk.resume)
        tasks.start_soon(delete_expired, mail)
        try:
            yield DeferredReplies(within_s, mail, clerk.follow)
        finally:
            tasks.cancel_scope.cancel()


def _removed() -> None:
    logger.warning("the workspace was removed from the platform; late answers have no reader any more")


NOTED: Final = "Thank you. I go on with this; what comes of it goes to my user."
"""What a peer's answer is answered with: no answer of the agent's, which would be answered in turn."""


@dataclass(slots=True)
class PushDelivery:
    """What the handler has to know of the platform.

    answer_within_s: how long a message may stay without any answer. owners: whose messages may be the platform's.
    is_on: it pushes at the moment. follow: has a letter's answer waited for and sent. asks_in: gives the task of a
    letter that asks something in a context.
    """

    mail: Outbox
    answer_within_s: float
    owners: frozenset[str] = frozenset({OWNER})
    is_on: bool = False
    follow: Callable[[OutboxMessage], Awaitable[None]] | None = None
    asks_in: Callable[[str], str | None] = lambda _context_id: None

    def is_from_platform(self, params: SendMessageRequest, context: ServerCallContext) -> bool:
        """Tell whether a message may be the platform's: it waits for its answer, and speaks A2A 0.3."""
        is_waiting = not params.configuration.return_immediately and not params.message.task_id
        return self.is_on and is_waiting and context.user.user_name in self.owners and is_protocol_0_3(context)


@dataclass(frozen=True, slots=True)
class _Asking:
    """A message of the platform's, as it is, or is to be, written down.

    is_answer: a peer's to one of ours. is_word_for_letter: for the task of a letter, which tells all that comes of it.
    """

    request: SendMessageRequest
    is_answer: bool = False
    is_word_for_letter: bool = False


class DeadlineReplyHandler(IdempotentHandler):
    """Answers what the platform pushes in time; everybody else as `IdempotentHandler` does."""

    def serve_platform(self, pushing: PushDelivery) -> None:
        """Say when and how the platform is to be answered."""
        self._pushing = pushing
        self._asked = OpenQuestions(self._store)

    async def on_message_send(self, params: SendMessageRequest, context: ServerCallContext) -> Message | Task:
        """Answer a message: the platform with one message, whose first part is the text."""
        pushing: PushDelivery | None = getattr(self, "_pushing", None)
        if pushing is None or not pushing.is_from_platform(params, context):
            return await super().on_message_send(params, context)
        params.message.message_id = params.message.message_id or str(uuid.uuid4())
        asking = await self._read(pushing, params, context)
        try:
            begun = await self._begin(asking.request, context)
        except UnsupportedOperationError:
            if not asking.request.message.task_id:
                raise
            # Somebody was quicker: nothing is asked any more.
            asking = _Asking(_copy(params))
            begun = await self._begin(asking.request, context)
        letter = message_from_push(asking.request.message, context.user.user_name)
        if asking.is_answer:
            await self._owe(pushing, letter)
            return _message(NOTED, f"{begun.id}-noted", begun.context_id)
        word = await self._word(pushing, letter, begun)
        if word is not None:
            return word
        if asking.is_word_for_letter:
            await pushing.mail.add(replace(letter, state=OutboxState.DONE, route=Route.NONE, request=b""))
            return _message(STILL_WORKING, f"{begun.id}-at-work", begun.context_id)
        return await self._in_time(pushing, asking.request, begun, letter, context)

    async def _begin(self, request: SendMessageRequest, context: ServerCallContext) -> Task:
        at_once = _copy(request)
        at_once.configuration.return_immediately = True
        begun = await super().on_message_send(at_once, context)
        assert isinstance(begun, Task)
        return begun

    async def _in_time(
        self,
        pushing: PushDelivery,
        request: SendMessageRequest,
        begun: Task,
        letter: OutboxMessage,
        context: ServerCallContext,
    ) -> Message:
        """Return a message's answer, or the word that it comes later; then it is owed."""
        answer: Message | Task | None = None
        with anyio.move_on_after(pushing.answer_within_s):
            answer = await super().on_message_send(_copy(request), context)
        # The same may have come twice, and the other one have waited long enough.
        word = await self._word(pushing, letter, begun)
        if word is not None:
            return word
        if isinstance(answer, Task) and answer.status.state in AWAITING_INPUT:
            self._asked.record(context.user.user_name, answer.context_id, answer.id)
        if isinstance(answer, Task) and answer.status.state in TERMINAL | AWAITING_INPUT:
            return _answer(answer)
        if isinstance(answer, Message):
            return answer
        await self._owe(pushing, letter)
        return _message(STILL_WORKING, f"{begun.id}-at-work", begun.context_id)

    async def _read(self, pushing: PushDelivery, params: SendMessageRequest, context: ServerCallContext) -> _Asking:
        """Return what a message is: one that comes again is as it was written down."""
        request = _copy(params)
        metadata = MessageToDict(params.message.metadata)
        if is_answer(metadata, params.message.message_id):
            work = metadata.get(DELEGATION) or metadata.get(IN_REPLY_TO)
            request.message.parts.insert(0, answer_mark(UNKNOWN_PEER, work if isinstance(work, str) else ""))
            return _Asking(request, is_answer=True)
        owner = context.user.user_name
        known = await self._store.deliveries.request(DeliveryKey(owner, params.message.message_id))
        if known is not None:
            if _as_sent(known.message, params.message) == params.message:
                request.message.CopyFrom(known.message)
            return _Asking(request)
        context_id = params.message.context_id or await self._store.main_context(owner)
        by_letter = pushing.asks_in(context_id)
        task_id = by_letter or await self._asked.find(owner, context_id, context)
        if task_id is not None:
            request.message.task_id, request.message.context_id = task_id, context_id
        return _Asking(request, is_word_for_letter=by_letter is not None)

    async def _word(self, pushing: PushDelivery, letter: OutboxMessage, begun: Task) -> Message | None:
        """Return what is said to a message whose answer is sent by a letter; None where there is no letter."""
        known = await pushing.mail.find(letter.id)
        if known is None:
            return None
        return _message(reply_text(known), f"{begun.id}-at-work", begun.context_id)

    async def _owe(self, pushing: PushDelivery, letter: OutboxMessage) -> None:
        """Write down that the answer has to be sent later, and have that done; once for each message."""
        kept = await pushing.mail.add(letter)
        if kept is not None and pushing.follow is not None:
            await pushing.follow(kept)


def _answer(task: Task) -> Message:
    """Return a task's answer as the platform reads it.

    Raises:
        InternalError: the task has not come to a good end; an answer's text would look like one.
    """
    said = answer_of_task(task)
    if not said.is_good:
        raise InternalError(message=said.text)
    return _message(said.text, f"{task.id}-answer", task.context_id)


def _message(text: str, message_id: str, context_id: str) -> Message:
    return Message(role=Role.ROLE_AGENT, message_id=message_id, context_id=context_id, parts=[Part(text=text)])


def _as_sent(known: Message, sent: Message) -> Message:
    """Return a message that was written down, without the task and context that its sender did not name."""
    message = Message()
    message.CopyFrom(known)
    message.ClearField("task_id")
    if not sent.context_id:
        message.ClearField("context_id")
    return message


def _copy(request: SendMessageRequest) -> SendMessageRequest:
    copy = SendMessageRequest()
    copy.CopyFrom(request)
    return copy
