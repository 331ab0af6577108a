"""Answers that take longer than a foreign host waits: sent by the platform's own means as soon as they are there.

That host is pushed to and tells nobody who has sent a message; the platform's own list of messages does, once it is
through with one.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from a2a.server.request_handlers import RequestHandler
from a2a.types import Message

from codex_workspace.groups import plain_task_group
from codex_workspace.letters import Clerk, letter_of_push, word_for
from codex_workspace.mail import Letter, Mail, forgetting
from codex_workspace.platform_api import PlatformApi
from codex_workspace.platform_replies import Postman

logger = logging.getLogger(__name__)


class LateAnswers:
    """Has late answers sent; from `answering_later`.

    within_s: how long a message may stay without any answer.
    """

    def __init__(self, within_s: float, mail: Mail, follow: Callable[[Letter], Awaitable[None]]) -> None:
        self.within_s = within_s
        self._mail = mail
        self._follow = follow

    async def word(self, message: Message, owner: str) -> str | None:
        """Return what is said to a message whose answer is sent later, or was; None where that is not so."""
        known = await self._mail.find(letter_of_push(message, owner).id)
        return None if known is None else word_for(known)

    async def owe(self, message: Message, owner: str) -> None:
        """Have the answer to a message sent when it is there, once however often this is asked; durable on return."""
        kept = await self._mail.take(letter_of_push(message, owner))
        if kept is not None:
            await self._follow(kept)


@asynccontextmanager
async def answering_later(
    api: PlatformApi, mail: Mail, handler: RequestHandler, within_s: float
) -> AsyncIterator[LateAnswers]:
    """Send late answers while the block is open, those first that an earlier process has left."""
    async with plain_task_group() as tasks:
        postman = Postman(api, mail, tasks)
        clerk = Clerk(handler, mail, api, tasks, postman)
        postman.tell(clerk.sent, _removed)
        tasks.start_soon(clerk.resume)
        tasks.start_soon(forgetting, mail)
        try:
            yield LateAnswers(within_s, mail, clerk.follow)
        finally:
            tasks.cancel_scope.cancel()


def _removed() -> None:
    logger.warning("the workspace was removed from the platform; late answers have no reader any more")
