"""Has letters answered by the agent, and their answers sent: the way of one message of the platform's, from where it is
written down to where its sender has the answer.

The agent is reached as by any client of A2A, through its handler: so a message that comes again joins its task, and one
that a death cut off goes on. What its task asks on the way is sent as a message of its own; the next message of the
same sender is the answer to that.
"""

import hashlib
import logging
from collections import deque
from dataclasses import dataclass, replace
from typing import Final

import anyio
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers import RequestHandler
from a2a.types import GetTaskRequest, Message, SendMessageRequest, Task, TaskState
from a2a.utils.errors import A2AError, InternalError, TaskNotFoundError, UnsupportedOperationError
from anyio.abc import TaskGroup
from google.protobuf.json_format import MessageToDict

from codex_workspace.common.a2a_terms import AWAITING_INPUT, TERMINAL, AuthenticatedUser
from codex_workspace.common.concurrency import backoff
from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.platform.activity_rows import DELEGATION, IncomingMessage, is_answer
from codex_workspace.platform.client import PlatformClient
from codex_workspace.platform.client_types import PlatformError
from codex_workspace.platform.reply_sender import ReplySender, sender_of
from codex_workspace.server.limits import INTERNAL_ERROR
from codex_workspace.server.overload import BusyError
from codex_workspace.storage.outbox import Outbox, OutboxMessage, OutboxState, Route
from codex_workspace.tasks.replies import answer_text

logger = logging.getLogger(__name__)

OWNER: Final = "platform:workspace"
"""Whose messages those of the platform are; no principal of config.yaml can be called so."""

NO_ANSWER: Final = "Done. Codex said nothing at the end."
"""An empty answer counts as a failure on the platform."""

STILL_WORKING: Final = "I am still at work on this. The answer comes as a message of its own as soon as it is there."
"""What is said where an answer takes longer than the platform waits."""

SENT_APART: Final = "The answer to this is a message of its own, which was sent already or is on its way."
"""What is said where a message comes again after that."""

FORGOTTEN: Final = "The agent does not know this message any more; send it again."
UNKNOWN: Final = "The agent cannot find out what became of this; its log says more."
FILES: Final = "\n\n[Files that cannot be sent this way: {names}]"

LOOK_S: Final = 0.5
"""While a person is asked, and where following a task breaks off, it is looked at this often."""

FULL_S: Final = 1.0
"""Where the agent takes nothing more, it is asked again after this."""

LONGEST_LOOK_S: Final = 30.0
TRIES: Final = 60
"""How often following a task may fail, half an hour in all; a stop of the agent ends it before."""

ROUTE_TRIES: Final = 4
ROW_S: Final = 0.5
"""A platform that knows nothing of a message yet is asked again this often, with this pause: once while the answer is
made, and once when it is there."""


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """What came of a task, in words; `is_good`: it came to a good end."""

    text: str
    is_good: bool = True


def answer_of_task(task: Task) -> TaskAnswer:
    """Return what a task has to say, at its end or as it asks something."""
    told = "".join(part.text for part in task.status.message.parts)
    if task.status.state != TaskState.TASK_STATE_COMPLETED:
        return TaskAnswer(told or "the task has not come to a good end", task.status.state in AWAITING_INPUT)
    names = [each.name or "a file" for each in task.artifacts if each.artifact_id.startswith("file-")]
    files = FILES.format(names=", ".join(names)) if names else ""
    return TaskAnswer((answer_text(task) or NO_ANSWER) + files)


def reply_text(letter: OutboxMessage) -> str:
    """Return what is said to a message that comes again, and whose answer is a letter's."""
    return STILL_WORKING if letter.state is OutboxState.RECEIVED else SENT_APART


def message_from_row(row_id: str, created_at: str, incoming: IncomingMessage) -> OutboxMessage:
    """Return the letter that a row of the inbox is."""
    return OutboxMessage(
        row_id,
        OWNER,
        incoming.message_id,
        incoming.route,
        incoming.peer,
        incoming.said_id,
        incoming.delegation_id,
        created_at,
        hashlib.sha256(incoming.request.SerializeToString(deterministic=True)).digest(),
        incoming.request.SerializeToString(deterministic=True),
    )


def message_from_push(message: Message, owner: str) -> OutboxMessage:
    """Return the letter that a message is which the platform has pushed, as it was written down."""
    # The whole request: the same message finds its task again.
    body = SendMessageRequest(message=message).SerializeToString(deterministic=True)
    metadata = MessageToDict(message.metadata)
    delegation_id = metadata.get(DELEGATION)
    return OutboxMessage(
        id=f"push-{hashlib.sha256(f'{owner} {message.message_id}'.encode()).hexdigest()}",
        owner=owner,
        message_id=message.message_id,
        # A peer's answer is not answered: two that do would never end.
        route=Route.USER if is_answer(metadata, message.message_id) else Route.LOOK_UP,
        source_id=message.message_id,
        delegation_id=delegation_id if isinstance(delegation_id, str) else "",
        digest=hashlib.sha256(body).digest(),
        request=body,
    )


class Dispatcher:
    """Works on letters until their answers are out.

    Args:
        handler: the agent.
        mail: where letters are kept.
        api: tells who has sent what was pushed.
        followers: where those run that wait for an answer.
        postman: sends answers; `sent` has to be told when that is over.
    """

    def __init__(
        self,
        handler: RequestHandler,
        mail: Outbox,
        api: PlatformClient,
        followers: TaskGroup,
        postman: ReplySender,
    ) -> None:
        self._handler = handler
        self._mail = mail
        self._api = api
        self._followers = followers
        self._post = postman.post
        self._open: dict[str, OutboxMessage] = {}
        self._lines: dict[_Line, deque[str]] = {}
        self._to_post: dict[str, OutboxMessage] = {}
        self._asking: dict[tuple[str, str], Task] = {}
        self._resting: set[str] = set()

    @property
    def open(self) -> frozenset[str]:
        """The letters whose answers are not out."""
        return frozenset(self._open)

    @property
    def at_work(self) -> int:
        """How many of them take a place: not those that wait for a person, or for a peer to take its answer."""
        return len(self._open.keys() - self._resting)

    @property
    def is_asking(self) -> bool:
        """Whether somebody is asked something."""
        return bool(self._asking)

    def asks_in(self, context_id: str) -> str | None:
        """Return the task of a letter that asks something in a context; None where there is none."""
        return next((task.id for task in self._asking.values() if task.context_id == context_id), None)

    def sent(self, letter: OutboxMessage) -> None:
        """Take note that nothing is owed any more."""
        self._open.pop(letter.id, None)
        self._resting.discard(letter.id)

    async def resume(self) -> None:
        """Go on with what an earlier process has left, in the order it came."""
        for letter in await self._mail.unfinished():
            if not letter.request:
                # A question: whose it is waits for its answer.
                self._open[letter.id] = letter
                self._resting.add(letter.id)
                self._post(letter)
            elif letter.state is OutboxState.ANSWERED:
                self._begin(letter)
                self._ready(letter)
            else:
                await self.work_on(letter)

    async def work_on(self, letter: OutboxMessage) -> None:
        """Give a letter to the agent; returns when it is the agent's, in its order, and its answer is waited for.

        An agent that takes nothing at the moment is waited for.
        """
        self._begin(letter)
        letter = await self._as_word(letter)
        while True:
            try:
                await self._hand_over(letter)
                break
            except BusyError as full:
                await anyio.sleep(min(FULL_S, full.retry_after_s))
            except StoreUnavailable:
                await anyio.sleep(FULL_S)
            except UnsupportedOperationError as error:
                if not _request(letter).message.task_id:
                    await self._end(letter, TaskAnswer(str(error), is_good=False))
                    return
                letter = await self._not_a_word(letter)
            except InternalError as error:
                if str(error) == INTERNAL_ERROR:
                    await self._end(letter, TaskAnswer(str(error), is_good=False))
                    return
                # Nothing can be written down at the moment.
                await anyio.sleep(FULL_S)
            except A2AError as error:
                await self._end(letter, TaskAnswer(str(error), is_good=False))
                return
        if _request(letter).message.task_id:
            # The task that has asked gives the answer.
            await self._end(letter, None)
        else:
            self._followers.start_soon(self._follow, letter)

    async def follow(self, letter: OutboxMessage) -> None:
        """Wait for the answer to a letter that the agent is at work on already."""
        self._begin(letter)
        self._followers.start_soon(self._follow, letter)

    async def _hand_over(self, letter: OutboxMessage) -> None:
        request = _request(letter)
        request.configuration.return_immediately = True
        await self._handler.on_message_send(request, _call(letter))

    async def _follow(self, letter: OutboxMessage) -> None:
        if letter.route is Route.LOOK_UP:
            # Now its row is among the newest.
            letter = await self._routed(letter)
        await self._end(letter, await self._said(letter))

    async def _said(self, letter: OutboxMessage) -> TaskAnswer:
        """Return what came of a letter's task at its end, and say on the way what it asks."""
        tries = 0
        while True:
            try:
                task = await self._handler.on_message_send(_request(letter), _call(letter))
                while isinstance(task, Task) and task.status.state in AWAITING_INPUT:
                    task = await self._answered(letter, task)
            except TaskNotFoundError:
                return TaskAnswer(FORGOTTEN, is_good=False)
            except (A2AError, StoreUnavailable) as error:
                tries += 1
                logger.info("a task cannot be followed at the moment: %s", error)
                if tries == TRIES:
                    return TaskAnswer(UNKNOWN, is_good=False)
            else:
                if isinstance(task, Task) and task.status.state in TERMINAL:
                    return answer_of_task(task)
            await anyio.sleep(backoff(LOOK_S, LONGEST_LOOK_S, tries))

    async def _answered(self, letter: OutboxMessage, task: Task) -> Task:
        """Have somebody asked what a task asks, and return the task when it asks that no more."""
        prompt_id = task.status.message.message_id
        question = replace(letter, id=f"{letter.id[:200]}?{prompt_id}"[:255], message_id=f"?{prompt_id}", request=b"")
        kept = await self._mail.add(
            replace(question, state=OutboxState.ANSWERED, reply=answer_of_task(task).text, digest=prompt_id.encode())
        )
        if kept is not None and letter.route is not Route.NONE:
            self._open[kept.id] = kept
            self._resting.add(kept.id)
            self._post(kept)
        sender = letter.route, letter.peer
        self._asking[sender] = task
        self._resting.add(letter.id)
        try:
            while True:
                await anyio.sleep(LOOK_S)
                now = await self._handler.on_get_task(GetTaskRequest(id=task.id), _call(letter))
                if now is None:
                    raise TaskNotFoundError
                if now.status.message.message_id != prompt_id or now.status.state not in AWAITING_INPUT:
                    break
        finally:
            self._asking.pop(sender, None)
            self._resting.discard(letter.id)
        if now.status.state in TERMINAL or now.status.state in AWAITING_INPUT:
            return now
        rested = await self._handler.on_message_send(_request(letter), _call(letter))
        return rested if isinstance(rested, Task) else now

    async def _as_word(self, letter: OutboxMessage) -> OutboxMessage:
        """Make a letter the answer to what its sender was asked, if that was so."""
        task = self._asking.get((letter.route, letter.peer))
        request = _request(letter)
        if task is None or request.message.task_id or request.message.context_id:
            return letter
        request.message.task_id, request.message.context_id = task.id, task.context_id
        return await self._rewritten(letter, request)

    async def _not_a_word(self, letter: OutboxMessage) -> OutboxMessage:
        """Make a letter a message of its own again: nothing is asked any more."""
        request = _request(letter)
        request.message.task_id = ""
        return await self._rewritten(letter, request)

    async def _rewritten(self, letter: OutboxMessage, request: SendMessageRequest) -> OutboxMessage:
        letter = replace(letter, request=request.SerializeToString(deterministic=True))
        await self._mail.save(letter)
        return letter

    async def _end(self, letter: OutboxMessage, said: TaskAnswer | None) -> None:
        """Have an answer sent; None: there is none to be sent."""
        line = _line(self._open[letter.id])
        if letter.route is Route.LOOK_UP:
            letter = await self._routed(letter)
        if letter.route is Route.LOOK_UP:
            letter = replace(letter, route=Route.USER)
            await self._mail.save(letter)
        if said is None or letter.route is Route.NONE:
            await self._mail.complete(letter)
            self._lines[line].remove(letter.id)
            self.sent(letter)
            self._post_next(line)
            return
        self._ready(await self._mail.set_reply(letter, said.text, is_failure=not said.is_good), line)

    def _begin(self, letter: OutboxMessage) -> None:
        """Keep a letter's place in the line of its sender's conversation: in this order the answers go out."""
        if letter.id not in self._open:
            self._lines.setdefault(_line(letter), deque()).append(letter.id)
        self._open[letter.id] = letter

    def _ready(self, letter: OutboxMessage, line: "_Line | None" = None) -> None:
        """Have an answer sent behind those of its line. Turns end in their order; who hears first of it is chance."""
        self._to_post[letter.id] = letter
        if letter.route is Route.PEER:
            self._resting.add(letter.id)
        self._post_next(line or _line(letter))

    def _post_next(self, line: "_Line") -> None:
        waiting = self._lines[line]
        while waiting and waiting[0] in self._to_post:
            self._post(self._to_post.pop(waiting.popleft()))
        if not waiting:
            del self._lines[line]

    async def _routed(self, letter: OutboxMessage) -> OutboxMessage:
        """Find out who has sent what was pushed: the platform tells it in its rows, and in nothing else.

        It is asked until it answers: a peer's answer is not the user's. `Route.ASK` stays where it shows no such row.
        """
        missed = failed = 0
        while missed < ROUTE_TRIES:
            try:
                row = await sender_of(self._api, letter)
            except PlatformError as error:
                logger.info("who has sent a message is not known yet: %s", error)
                await anyio.sleep(max(backoff(LOOK_S, LONGEST_LOOK_S, failed), error.retry_after_s))
                failed += 1
                continue
            if row is None:
                # The platform writes it down when it has what we said at first; a short turn may be quicker.
                missed += 1
                await anyio.sleep(ROW_S)
                continue
            peer = row.source_id or ""
            route = Route.USER if not peer else Route.NONE if peer == self._api.workspace_id else Route.PEER
            letter = replace(letter, route=route, peer=peer, created_at=row.created_at)
            await self._mail.save(letter)
            break
        return letter


_Line = tuple[Route, str, str]
"""Whose conversation, and which: its messages are answered one after the other."""


def _line(letter: OutboxMessage) -> _Line:
    if letter.route is Route.LOOK_UP:
        return Route.LOOK_UP, letter.id, ""
    context_id = _request(letter).message.context_id if letter.request else ""
    return letter.route, letter.peer, context_id


def _request(letter: OutboxMessage) -> SendMessageRequest:
    request = SendMessageRequest.FromString(letter.request)
    # Another message may have had its id.
    request.message.message_id = letter.message_id
    return request


def _call(letter: OutboxMessage) -> ServerCallContext:
    return ServerCallContext(user=AuthenticatedUser(letter.owner))
