"""Gives the platform's messages to the agent, follows their tasks, and has the replies sent.

The agent is called through its request handler, as by any A2A client: a repeated message joins its task, and a message
that an earlier process left unfinished is resumed. A question that a task asks is sent as a message of its own; the
next message of the same sender answers it.
"""

import hashlib
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import anyio
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers import RequestHandler
from a2a.types import GetTaskRequest, Message, Part, SendMessageRequest, Task, TaskState
from a2a.utils.errors import A2AError, InternalError, TaskNotFoundError, UnsupportedOperationError
from anyio.abc import TaskGroup
from google.protobuf.json_format import MessageToDict

from codex_workspace.common.a2a_terms import AWAITING_INPUT, TERMINAL, AuthenticatedUser
from codex_workspace.common.concurrency import backoff, task_group
from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.platform.activity_rows import DELEGATION, is_answer
from codex_workspace.platform.client import PlatformClient
from codex_workspace.platform.client_types import PlatformError
from codex_workspace.platform.reply_sender import ReplySender, find_row
from codex_workspace.server.errors import INTERNAL_ERROR
from codex_workspace.server.limits import BusyError
from codex_workspace.storage.outbox import Outbox, OutboxMessage, OutboxState, Route, delete_expired
from codex_workspace.tasks.replies import answer_text

logger = logging.getLogger(__name__)

OWNER: Final = "platform:workspace"
"""The principal of the platform's messages; config.yaml cannot name a principal like this."""

NO_ANSWER: Final = "Done. Codex sent no final message."
"""The platform treats an empty answer as a failure."""

UNFINISHED: Final = "The task is still running; send the message again to wait for its result."
NOT_FOUND: Final = "The agent no longer has this message; send it again."
UNKNOWN: Final = "Internal error: the task cannot be followed; see the agent's log."
FILES: Final = "\n\n[Files that cannot be sent this way: {names}]"

POLL_S: Final = 0.5
"""The interval at which a task that waits for input is read, and the first pause after an error."""

FULL_S: Final = 1.0
"""The pause before a message is submitted again to an agent whose queue is full."""

LONGEST_PAUSE_S: Final = 30.0
TRIES: Final = 60
"""Errors in a row after which a task is given up, after about half an hour."""

ROW_TRIES: Final = 4
ROW_S: Final = 0.5
"""The platform may write a pushed message's row only after our response, so it is looked for this often."""


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """What a task said at its end, or what it asks."""

    text: str
    is_failure: bool = False
    files: tuple[Part, ...] = ()

    @property
    def text_with_files(self) -> str:
        """The text, followed by the names of the files."""
        names = ", ".join(part.filename or "a file" for part in self.files)
        return self.text + (FILES.format(names=names) if names else "")


def answer_of_task(task: Task) -> TaskAnswer:
    """Return the answer of a task that has ended or waits for input."""
    text = "".join(part.text for part in task.status.message.parts)
    if task.status.state != TaskState.TASK_STATE_COMPLETED:
        return TaskAnswer(text or UNFINISHED, is_failure=task.status.state not in AWAITING_INPUT)
    files = [part for each in task.artifacts if each.artifact_id.startswith("file-") for part in each.parts]
    return TaskAnswer(answer_text(task) or NO_ANSWER, files=tuple(files))


def message_from_push(message: Message, owner: str) -> OutboxMessage:
    """Return the outbox message for a message that the platform has pushed, as it was stored."""
    request = SendMessageRequest(message=message).SerializeToString(deterministic=True)
    metadata = MessageToDict(message.metadata)
    delegation_id = metadata.get(DELEGATION)
    return OutboxMessage(
        id=f"push-{hashlib.sha256(f'{owner} {message.message_id}'.encode()).hexdigest()}",
        owner=owner,
        message_id=message.message_id,
        # A peer's answer is not answered: two agents would answer each other for ever.
        route=Route.USER if is_answer(metadata, message.message_id) else Route.LOOK_UP,
        source_id=message.message_id,
        delegation_id=delegation_id if isinstance(delegation_id, str) else "",
        digest=hashlib.sha256(request).digest(),
        request=request,
    )


class Dispatcher:
    """Has outbox messages answered and their replies sent; from `open_dispatcher`.

    The messages of one conversation are answered in their order.
    """

    def __init__(self, handler: RequestHandler, outbox: Outbox, client: PlatformClient, tasks: TaskGroup) -> None:
        self.is_closed = False
        self._handler = handler
        self._outbox = outbox
        self._client = client
        self._tasks = tasks
        self._sender = ReplySender(client, outbox, tasks)
        self._unanswered = set[str]()
        self._queues: dict[_Conversation, deque[tuple[OutboxMessage, TaskAnswer | None]]] = {}
        self._questions: dict[tuple[str, str], Task] = {}

    def free_slots(self, slots: int) -> int:
        """Return how many more messages may be dispatched if `slots` may be active, those that ask a person aside.

        While a task asks, there are twice as many: the message that answers it may be behind others.
        """
        return slots * (2 if self._questions else 1) - len(self._unanswered) + len(self._questions)

    def is_asking(self, task_id: str) -> bool:
        """Tell whether a task with a deferred answer waits for input."""
        return any(task.id == task_id for task in self._questions.values())

    async def state(self, message: Message, owner: str) -> OutboxState | None:
        """Return the state of a pushed message whose answer is sent separately; None for any other message."""
        known = await self._outbox.find(message_from_push(message, owner).id)
        return None if known is None else known.state

    async def defer(self, message: Message, owner: str) -> None:
        """Send the answer to a pushed message, as it was stored, when its task ends; durable on return, idempotent."""
        added = await self._outbox.add(message_from_push(message, owner))
        if added is not None and not self.is_closed and added.id not in self._unanswered:
            self._unanswered.add(added.id)
            self._enqueue(added)

    async def absorb(self, message: Message, owner: str) -> None:
        """Record that the answer to an earlier message answers this pushed one, too."""
        done = replace(message_from_push(message, owner), state=OutboxState.DONE, route=Route.NONE, request=b"")
        await self._outbox.add(done)

    async def resume(self) -> None:
        """Resume the messages of an earlier process, in the order they came."""
        left = [message for message in await self._outbox.unfinished() if message.id not in self._unanswered]
        self._unanswered |= {message.id for message in left if message.state is OutboxState.RECEIVED}
        for message in left:
            if message.state is OutboxState.RECEIVED:
                await self.dispatch(message)
            else:
                self._sender.enqueue(message)

    async def dispatch(self, message: OutboxMessage) -> None:
        """Submit a message to the agent, waiting while its queue is full; then follow its task in the background."""
        self._unanswered.add(message.id)
        message = await self._as_input(message)
        rejection: TaskAnswer | None = None
        while rejection is None:
            try:
                await self._submit(message)
                break
            except BusyError as full:
                await anyio.sleep(min(FULL_S, full.retry_after_s))
            except StoreUnavailable:
                await anyio.sleep(FULL_S)
            except A2AError as error:
                sent = _request(message).message
                if isinstance(error, UnsupportedOperationError) and sent.task_id:
                    # The question is no longer open.
                    message = await self._address(message, "", sent.context_id)
                elif isinstance(error, InternalError) and str(error) != INTERNAL_ERROR:
                    # The message could not be stored.
                    await anyio.sleep(FULL_S)
                else:
                    rejection = TaskAnswer(str(error), is_failure=True)
        if rejection is None and _request(message).message.task_id:
            # The task that asked gives the answer.
            await self._outbox.complete(message)
            self._unanswered.discard(message.id)
        else:
            self._enqueue(message, rejection)

    def _enqueue(self, message: OutboxMessage, answer: TaskAnswer | None = None) -> None:
        """Have a message answered after those of its conversation that came before; None: by its task."""
        conversation = _conversation(message)
        queue = self._queues.get(conversation)
        if queue is None:
            queue = self._queues[conversation] = deque()
            self._tasks.start_soon(self._answer_all, conversation)
        queue.append((message, answer))

    async def _answer_all(self, conversation: "_Conversation") -> None:
        queue = self._queues[conversation]
        while queue:
            message = await self._answer(*queue.popleft())
            self._unanswered.discard(message.id)
            self._sender.enqueue(message)
        del self._queues[conversation]

    async def _answer(self, message: OutboxMessage, answer: TaskAnswer | None) -> OutboxMessage:
        """Store the answer to a message, and its sender; return the message with both."""
        # At this moment the row of a pushed message is among the newest.
        message = await self._look_up_sender(message)
        answer = answer or await self._wait_for_answer(message)
        message = await self._look_up_sender(message)
        if message.route is Route.LOOK_UP:
            message = replace(message, route=Route.USER)
        return await self._outbox.set_reply(message, answer.text_with_files, is_failure=answer.is_failure)

    async def _submit(self, message: OutboxMessage) -> None:
        request = _request(message)
        request.configuration.return_immediately = True
        await self._handler.on_message_send(request, _context(message))

    async def _wait_for_answer(self, message: OutboxMessage) -> TaskAnswer:
        tries = 0
        while tries < TRIES:
            try:
                task = await self._handler.on_message_send(_request(message), _context(message))
                while isinstance(task, Task) and task.status.state in AWAITING_INPUT:
                    task = await self._ask(message, task)
            except TaskNotFoundError:
                return TaskAnswer(NOT_FOUND, is_failure=True)
            except (A2AError, StoreUnavailable) as error:
                tries += 1
                logger.info("cannot follow the task of a message at the moment: %s", error)
            else:
                if isinstance(task, Task) and task.status.state in TERMINAL:
                    return answer_of_task(task)
            await anyio.sleep(backoff(POLL_S, LONGEST_PAUSE_S, tries))
        return TaskAnswer(UNKNOWN, is_failure=True)

    async def _ask(self, message: OutboxMessage, task: Task) -> Task:
        """Send a task's question, and return the task when the question is no longer open."""
        prompt_id = task.status.message.message_id
        question = replace(
            message,
            id=f"{message.id[:200]}?{prompt_id}"[:255],
            message_id=f"?{prompt_id}",
            request=b"",
            state=OutboxState.ANSWERED,
            reply=answer_of_task(task).text,
            digest=prompt_id.encode(),
        )
        added = await self._outbox.add(question)
        if added is not None:
            self._sender.enqueue(added)
        sender = message.route, message.peer
        self._questions[sender] = task
        try:
            while task.status.message.message_id == prompt_id and task.status.state in AWAITING_INPUT:
                await anyio.sleep(POLL_S)
                found = await self._handler.on_get_task(GetTaskRequest(id=task.id), _context(message))
                if found is None:
                    raise TaskNotFoundError
                task = found
        finally:
            self._questions.pop(sender, None)
        if task.status.state in TERMINAL or task.status.state in AWAITING_INPUT:
            return task
        rested = await self._handler.on_message_send(_request(message), _context(message))
        return rested if isinstance(rested, Task) else task

    async def _as_input(self, message: OutboxMessage) -> OutboxMessage:
        """Address a message to the task that waits for its sender's input, if there is one."""
        task = self._questions.get((message.route, message.peer))
        sent = _request(message).message
        if task is None or sent.task_id or sent.context_id:
            return message
        return await self._address(message, task.id, task.context_id)

    async def _address(self, message: OutboxMessage, task_id: str, context_id: str) -> OutboxMessage:
        request = _request(message)
        request.message.task_id, request.message.context_id = task_id, context_id
        message = replace(message, request=request.SerializeToString(deterministic=True))
        await self._outbox.save(message)
        return message

    async def _look_up_sender(self, message: OutboxMessage) -> OutboxMessage:
        """Find out who sent a pushed message: only the platform's row of the message says so.

        While the platform fails, it is asked again: a peer's answer must not go to the user. The route stays `LOOK_UP`
        if there is no such row.
        """
        missing = failed = 0
        while message.route is Route.LOOK_UP and missing < ROW_TRIES:
            try:
                row = await find_row(self._client, message)
            except PlatformError as error:
                logger.info("cannot look up the sender of a message at the moment: %s", error)
                await anyio.sleep(max(backoff(POLL_S, LONGEST_PAUSE_S, failed), error.retry_after_s))
                failed += 1
                continue
            if row is None:
                missing += 1
                await anyio.sleep(ROW_S)
            else:
                peer = row.source_id or ""
                route = Route.USER if not peer else Route.NONE if peer == self._client.workspace_id else Route.PEER
                message = replace(message, route=route, peer=peer, created_at=row.created_at)
                await self._outbox.save(message)
        return message


@asynccontextmanager
async def open_dispatcher(client: PlatformClient, outbox: Outbox, handler: RequestHandler) -> AsyncIterator[Dispatcher]:
    """Run a dispatcher while the block is open."""
    async with task_group() as tasks:
        tasks.start_soon(delete_expired, outbox)
        dispatcher = Dispatcher(handler, outbox, client, tasks)
        try:
            yield dispatcher
        finally:
            dispatcher.is_closed = True
            tasks.cancel_scope.cancel()


_Conversation = tuple[Route, str, str]
"""Route, peer and context."""


def _conversation(message: OutboxMessage) -> _Conversation:
    if message.route is Route.LOOK_UP:
        return message.route, message.id, ""
    return message.route, message.peer, _request(message).message.context_id


def _request(message: OutboxMessage) -> SendMessageRequest:
    request = SendMessageRequest.FromString(message.request)
    # The outbox gives a message an id of its own if another one used its id.
    request.message.message_id = message.message_id
    return request


def _context(message: OutboxMessage) -> ServerCallContext:
    return ServerCallContext(user=AuthenticatedUser(message.owner))
