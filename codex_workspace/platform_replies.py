"""Sends answers to who the platform says they are for: in order for each reader, tried again until they are out.

An answer is written down as `unsure` before it is sent. Where nobody knows whether it arrived, because the line broke
or the process died, the user's view is looked at first; a peer knows an answer that comes twice by its message id.
"""

import logging
import random
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Final, assert_never

import anyio
from anyio.abc import TaskGroup

from codex_workspace.inbox_rows import DELEGATION, ECHO, IN_REPLY_TO, message_id_of
from codex_workspace.mail import Letter, Mail, Route
from codex_workspace.platform_api import (
    ActivityRow,
    Busy,
    PlatformApi,
    PlatformError,
    Refused,
    Removed,
    Unauthorized,
    Unreachable,
)
from codex_workspace.wire import JsonObject, JsonValue

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
"""Before the second try, and at the most; in between it doubles."""

MAX_REPLY_CHARS: Final = 200_000
"""Of an answer; a request may have 1 MB, and a character four bytes."""

CUT: Final = "\n\n[The answer is longer than the platform takes; the rest is left out.]"
FAILED: Final = "This could not be done: "

NOT_FOUND_TRIES: Final = 10
"""A platform that was just restarted may not know the workspace until it registers again."""

LOOKS: Final = 10
"""How often the user's view is asked for, before an answer that is perhaps there is sent again."""

LOOK_BACK_S: Final = 60.0
"""Answers with the same text count as told, if they went out so long before the message came at the most."""

_NAMESPACE: Final = uuid.UUID("6f1ad1f2-2f0c-4d34-9c57-9a52b4f5a0c5")


class Postman:
    """Sends what is owed."""

    def __init__(
        self,
        api: PlatformApi,
        mail: Mail,
        workers: TaskGroup,
        jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0),
    ) -> None:
        self._api = api
        self._mail = mail
        self._workers = workers
        self._jitter = jitter
        self._sent: Callable[[Letter], None] = lambda _letter: None
        self._removed: Callable[[], None] = lambda: None
        self._queues: dict[str, deque[Letter]] = {}

    def tell(self, sent: Callable[[Letter], None], removed: Callable[[], None]) -> None:
        """Have `sent` told of each letter that is over, and `removed` that the workspace is gone."""
        self._sent = sent
        self._removed = removed

    def post(self, letter: Letter) -> None:
        """Have a letter's answer sent, behind those that go to the same reader."""
        reader = letter.peer if letter.route is Route.PEER else ""
        queue = self._queues.get(reader)
        if queue is None:
            queue = self._queues[reader] = deque()
            self._workers.start_soon(self._work, reader, queue)
        queue.append(letter)

    async def _work(self, reader: str, queue: deque[Letter]) -> None:
        try:
            while queue:
                letter = queue.popleft()
                if not await self._deliver(letter):
                    return
                self._sent(letter)
        finally:
            del self._queues[reader]

    async def _deliver(self, letter: Letter) -> bool:
        """Send an answer until it is out or refused; False where the workspace is gone."""
        tries = looks = 0
        while True:
            is_look = letter.unsure and looks < LOOKS
            try:
                if is_look:
                    looks += 1
                    if await self._has_arrived(letter):
                        break
                    is_look = False
                before = letter.unsure
                letter = await self._mail.sending(letter, unsure=True)
                await self._send(letter)
                break
            except Removed:
                self._removed()
                return False
            except (Busy, Unauthorized, Unreachable, Refused) as error:
                if isinstance(error, Refused) and not self._may_pass(letter, error, tries):
                    logger.warning("an answer is given up: %s", error)
                    break
                if not is_look and not (isinstance(error, Unreachable) and error.maybe_done):
                    # This try has done nothing; the one before may have.
                    letter = await self._mail.sending(letter, unsure=before)
                await self._pause(error, tries)
            tries += 1
        await self._mail.settle(letter)
        return True

    def _may_pass(self, letter: Letter, refused: Refused, tries: int) -> bool:
        return letter.route is Route.USER and refused.status == 404 and tries < NOT_FOUND_TRIES

    async def _pause(self, error: PlatformError, tries: int) -> None:
        pause_s = min(FIRST_PAUSE_S * 2 ** min(tries, 16), LONGEST_PAUSE_S) * self._jitter()
        if isinstance(error, Busy):
            pause_s = max(pause_s, error.retry_after_s)
        logger.info("an answer is not out yet: %s Tried again in %.1f s", error, pause_s)
        await anyio.sleep(pause_s)

    async def _send(self, letter: Letter) -> None:
        text = words_for(letter)
        match letter.route:
            case Route.USER | Route.ASK:
                await self._api.notify(text)
            case Route.PEER:
                answer = await self._api.send(letter.peer, text, answer_id(letter), _about(letter))
                # Whatever it says to that is the last word: two that answer each other would never end.
                logger.debug("a peer has got its answer%s", " in its inbox" if answer.queued else "")
            case Route.NOBODY:
                pass
            case _:
                assert_never(letter.route)

    async def _has_arrived(self, letter: Letter) -> bool:
        """Tell whether the user has got an answer already, as far as the platform tells."""
        if letter.route is not Route.USER:
            return False
        text = words_for(letter)
        rows = await self._api.activity(limit=100)
        echoes = [row for row in rows if row.method == ECHO and _is_after(row, letter) and _tells(row, text)]
        if not echoes:
            return False
        # Others may have been answered in the same words.
        return len(echoes) > await self._mail.told_lately(letter.reply, letter.taken_at - LOOK_BACK_S)


async def sender_of(api: PlatformApi, said_id: str) -> ActivityRow | None:
    """Return the platform's row of a message that it has pushed; None where it shows none."""
    rows = await api.activity(limit=100)
    return next((row for row in reversed(rows) if message_id_of(row) == said_id), None)


def words_for(letter: Letter) -> str:
    """Return an answer as its reader gets it."""
    text = f"{FAILED}{letter.reply}" if letter.is_failure else letter.reply
    return text if len(text) <= MAX_REPLY_CHARS else text[: MAX_REPLY_CHARS - len(CUT)] + CUT


def answer_id(letter: Letter) -> str:
    """Return the id of the message that answers a letter: the same for each try."""
    return str(uuid.uuid5(_NAMESPACE, letter.id))


def _about(letter: Letter) -> JsonObject:
    about: JsonObject = {IN_REPLY_TO: letter.said_id or letter.id}
    if letter.delegation_id:
        about[DELEGATION] = letter.delegation_id
    if letter.is_failure:
        about["status"] = "failed"
    return about


def _is_after(row: ActivityRow, letter: Letter) -> bool:
    """Tell whether a row is later than the one that is answered, by the platform's clock."""
    return not letter.created_at or not row.created_at or instant(row.created_at) >= instant(letter.created_at)


def _tells(row: ActivityRow, text: str) -> bool:
    held = [each for body in (row.request, row.response) for each in _strings(body)]
    return text in held if held else bool(row.summary) and text.startswith(row.summary[:60])


def _strings(value: JsonValue) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for each in value.values():
                yield from _strings(each)
        case list():
            for each in value:
                yield from _strings(each)


def instant(created_at: str) -> float:
    """Return the platform's text of a time in seconds since 1970, 0 for what is none."""
    try:
        return datetime.fromisoformat(created_at).timestamp()
    except ValueError:
        return 0.0
