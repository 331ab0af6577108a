"""The request handler where the platform pushes: it waits for an answer for about 180 s, then sends the same again.

So its messages are answered by one message each, in time: with the task's answer, or with the word that it is at work
and the answer comes later. That later answer is a letter, written down before the word goes out.
"""

import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
from a2a.server.context import ServerCallContext
from a2a.types import Message, Part, Role, SendMessageRequest, Task
from a2a.utils.errors import InternalError

from codex_workspace.callers import is_of_0_3
from codex_workspace.handler import OnceHandler
from codex_workspace.letters import OWNER, STILL_AT_WORK, letter_of_push, said_in
from codex_workspace.mail import Letter, Mail
from codex_workspace.task_states import ASKING, TERMINAL

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Pushing:
    """What the handler has to know of the platform.

    answer_within_s: how long a message may stay without any answer. owners: whose messages may be the platform's.
    is_on: it pushes at the moment. follow: has a letter's answer waited for and sent.
    """

    mail: Mail
    answer_within_s: float
    owners: frozenset[str] = frozenset({OWNER})
    is_on: bool = False
    follow: Callable[[Letter], Awaitable[None]] | None = None

    def is_from_platform(self, params: SendMessageRequest, context: ServerCallContext) -> bool:
        """Tell whether a message may be the platform's: it waits for its answer, and speaks A2A 0.3."""
        is_waiting = not params.configuration.return_immediately and not params.message.task_id
        return self.is_on and is_waiting and context.user.user_name in self.owners and is_of_0_3(context)


class PunctualHandler(OnceHandler):
    """Answers what the platform pushes in time; everybody else as `OnceHandler` does."""

    def serve_platform(self, pushing: Pushing) -> None:
        """Say when and how the platform is to be answered."""
        self._pushing = pushing

    async def on_message_send(self, params: SendMessageRequest, context: ServerCallContext) -> Message | Task:
        """Answer a message: the platform with one message, whose first part is the text."""
        pushing: Pushing | None = getattr(self, "_pushing", None)
        if pushing is None or not pushing.is_from_platform(params, context):
            return await super().on_message_send(params, context)
        params.message.message_id = params.message.message_id or str(uuid.uuid4())
        at_once = SendMessageRequest()
        at_once.CopyFrom(params)
        at_once.configuration.return_immediately = True
        begun = await super().on_message_send(at_once, context)
        answer: Message | Task | None = None
        with anyio.move_on_after(pushing.answer_within_s):
            answer = await super().on_message_send(params, context)
        if isinstance(answer, Task) and answer.status.state in TERMINAL | ASKING:
            return _answer(answer)
        if isinstance(answer, Message):
            return answer
        assert isinstance(begun, Task)
        await self._owe(pushing, params, context)
        return _message(STILL_AT_WORK, f"{begun.id}-at-work", begun.context_id)

    async def _owe(self, pushing: Pushing, params: SendMessageRequest, context: ServerCallContext) -> None:
        """Write down that the answer has to be sent later, and have that done; once for each message."""
        letter = letter_of_push(params.message, context.user.user_name)
        kept = await pushing.mail.take(letter)
        if kept is not None and pushing.follow is not None:
            await pushing.follow(kept)


def _answer(task: Task) -> Message:
    """Return a task's answer as the platform reads it.

    Raises:
        InternalError: the task has not come to a good end; an answer's text would look like one.
    """
    said = said_in(task)
    if not said.is_good:
        raise InternalError(message=said.text)
    return _message(said.text, f"{task.id}-answer", task.context_id)


def _message(text: str, message_id: str, context_id: str) -> Message:
    return Message(role=Role.ROLE_AGENT, message_id=message_id, context_id=context_id, parts=[Part(text=text)])
