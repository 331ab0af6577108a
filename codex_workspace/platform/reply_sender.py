"""Sends answers to who the platform says they are for: in order for each reader, tried again until they are out.

An answer is written down as `unsure` before it is sent. Where nobody knows whether it arrived, because the line broke
or the process died, the user's view is looked at first; a peer knows an answer that comes twice by its message id.
"""

import logging
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final, assert_never

import anyio
from anyio.abc import TaskGroup

from codex_workspace.common.concurrency import backoff
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.platform.activity_rows import DELEGATION, ECHO, IN_REPLY_TO, message_id_of
from codex_workspace.platform.client import MAX_PAGE, PlatformClient
from codex_workspace.platform.client_types import (
    ActivityRow,
    PlatformBusy,
    PlatformError,
    PlatformRejected,
    PlatformUnauthorized,
    PlatformUnreachable,
    WorkspaceRemoved,
)
from codex_workspace.storage.outbox import Outbox, OutboxMessage, Route

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

PEER_PATIENCE_S: Final = 3600.0
"""A peer that takes nothing for so long gets what is owed to it tried once more, and then no more."""

MAX_WAITING: Final = 100
"""Answers that wait for one peer; of more, the oldest is given up."""

LOOKED_PAGE: Final = 100
MAX_LOOKED: Final = 100
"""Rows of one look back over the activity, and how many looks: a day of much work."""

SENDER_BEFORE_S: Final = 3600.0
"""A pushed message's row is so much older than our letter at the most; the platform's clock may differ."""

LOOK_BACK_S: Final = 60.0
"""Answers with the same text count as told, if they went out so long before the message came at the most."""

_NAMESPACE: Final = uuid.UUID("6f1ad1f2-2f0c-4d34-9c57-9a52b4f5a0c5")


class ReplySender:
    """Sends what is owed."""

    def __init__(
        self,
        api: PlatformClient,
        mail: Outbox,
        workers: TaskGroup,
        jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._mail = mail
        self._workers = workers
        self._jitter = jitter
        self._sent: Callable[[OutboxMessage], None] = lambda _letter: None
        self._removed: Callable[[], None] = lambda: None
        self._queues: dict[str, deque[OutboxMessage]] = {}
        self._clock = clock
        self._silent_since: dict[str, float] = {}

    def tell(self, sent: Callable[[OutboxMessage], None], removed: Callable[[], None]) -> None:
        """Have `sent` told of each letter that is over, and `removed` that the workspace is gone."""
        self._sent = sent
        self._removed = removed

    def post(self, letter: OutboxMessage) -> None:
        """Have a letter's answer sent, behind those that go to the same reader."""
        reader = letter.peer if letter.route is Route.PEER else ""
        queue = self._queues.get(reader)
        if queue is None:
            queue = self._queues[reader] = deque()
            self._workers.start_soon(self._work, reader, queue)
        queue.append(letter)
        if reader and len(queue) > MAX_WAITING:
            self._workers.start_soon(self._leave_out, queue.popleft())

    async def _leave_out(self, letter: OutboxMessage) -> None:
        await self._give_up(letter, "too many wait for the same peer")
        self._sent(letter)

    async def _work(self, reader: str, queue: deque[OutboxMessage]) -> None:
        try:
            while queue:
                letter = queue.popleft()
                if not await self._deliver(letter):
                    return
                self._sent(letter)
        finally:
            del self._queues[reader]

    async def _deliver(self, letter: OutboxMessage) -> bool:
        """Send an answer until it is out, or refused, or its peer is silent for long; False where we are gone."""
        tries = looks = 0
        while True:
            is_look = letter.may_be_sent and looks < LOOKS
            try:
                if is_look:
                    looks += 1
                    if await self._has_arrived(letter):
                        break
                    is_look = False
                before = letter.may_be_sent
                letter = await self._mail.mark_sending(letter, may_be_sent=True)
                await self._send(letter)
                self._silent_since.pop(letter.peer, None)
                break
            except WorkspaceRemoved:
                self._removed()
                return False
            except (PlatformBusy, PlatformUnauthorized, PlatformUnreachable, PlatformRejected) as error:
                if isinstance(error, PlatformRejected) and not self._may_pass(letter, error, tries):
                    await self._give_up(letter, str(error))
                    return True
                if not is_look and not (isinstance(error, PlatformUnreachable) and error.outcome_unknown):
                    # This try has done nothing; the one before may have.
                    letter = await self._mail.mark_sending(letter, may_be_sent=before)
                if self._is_silent(letter):
                    await self._give_up(letter, str(error))
                    return True
                await self._pause(error, tries)
            tries += 1
        await self._mail.complete(letter)
        return True

    async def _give_up(self, letter: OutboxMessage, why: str) -> None:
        logger.warning("an answer is given up: %s", why)
        await self._mail.complete(letter)

    def _is_silent(self, letter: OutboxMessage) -> bool:
        """Tell whether a letter's peer has taken nothing for so long that it is not waited for any more."""
        if letter.route is not Route.PEER:
            return False
        now = self._clock()
        return now - self._silent_since.setdefault(letter.peer, now) >= PEER_PATIENCE_S

    def _may_pass(self, letter: OutboxMessage, refused: PlatformRejected, tries: int) -> bool:
        return letter.route is Route.USER and refused.status == 404 and tries < NOT_FOUND_TRIES

    async def _pause(self, error: PlatformError, tries: int) -> None:
        pause_s = max(backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, tries) * self._jitter(), error.retry_after_s)
        logger.info("an answer is not out yet: %s Tried again in %.1f s", error, pause_s)
        await anyio.sleep(pause_s)

    async def _send(self, letter: OutboxMessage) -> None:
        text = words_for(letter)
        match letter.route:
            case Route.USER | Route.LOOK_UP:
                await self._api.notify(text)
            case Route.PEER:
                answer = await self._api.send(letter.peer, text, answer_id(letter), _about(letter))
                # Whatever it says to that is the last word: two that answer each other would never end.
                logger.debug("a peer has got its answer%s", " in its inbox" if answer.queued else "")
            case Route.NONE:
                pass
            case _:
                assert_never(letter.route)

    async def _has_arrived(self, letter: OutboxMessage) -> bool:
        """Tell whether the user has got an answer already, as far as the platform tells."""
        if letter.route is not Route.USER:
            return False
        text = words_for(letter)
        since = instant(letter.created_at) or letter.received_at - LOOK_BACK_S
        echoes = await look_back(
            self._api, lambda row: row.method == ECHO and _is_after(row, letter) and _tells(row, text), since
        )
        if not echoes:
            return False
        # Others may have been answered in the same words.
        return len(echoes) > await self._mail.count_sent(letter.reply, letter.received_at - LOOK_BACK_S)


async def look_back(
    api: PlatformClient, wanted: Callable[[ActivityRow], bool], since: float, enough: int = MAX_PAGE
) -> list[ActivityRow]:
    """Return the newest rows of our activity that are `wanted`, `enough` of them or a few more.

    since: where to end, in seconds since 1970, by the platform's clock.
    """
    found: dict[str, ActivityRow] = {}
    before, limit = None, LOOKED_PAGE
    for _ in range(MAX_LOOKED):
        page = await api.page(before=before, limit=limit)
        found |= {row.id: row for row in reversed(page.rows) if row.id not in found and wanted(row)}
        oldest = page.rows[0].created_at if page.rows else ""
        if page.is_last or len(found) >= enough or instant(oldest) < since:
            break
        # The next page begins with the moment at which this one ends: it may have more of it.
        is_stuck = just_after(oldest) == before
        can_grow = limit < MAX_PAGE and not page.is_reduced
        limit = min(limit * 4, MAX_PAGE) if is_stuck and can_grow else LOOKED_PAGE
        before = oldest if is_stuck and not can_grow else just_after(oldest)
    return list(found.values())


async def sender_of(api: PlatformClient, letter: OutboxMessage) -> ActivityRow | None:
    """Return the platform's row of a message that it has pushed; None where it shows none."""
    since = letter.received_at - SENDER_BEFORE_S
    found = await look_back(api, lambda row: message_id_of(row) == letter.source_id, since, 1)
    return next(iter(found), None)


def words_for(letter: OutboxMessage) -> str:
    """Return an answer as its reader gets it."""
    text = f"{FAILED}{letter.reply}" if letter.is_failure else letter.reply
    return text if len(text) <= MAX_REPLY_CHARS else text[: MAX_REPLY_CHARS - len(CUT)] + CUT


def answer_id(letter: OutboxMessage) -> str:
    """Return the id of the message that answers a letter: the same for each try."""
    return str(uuid.uuid5(_NAMESPACE, letter.id))


def _about(letter: OutboxMessage) -> JsonObject:
    about: JsonObject = {IN_REPLY_TO: letter.source_id or letter.id}
    if letter.delegation_id:
        about[DELEGATION] = letter.delegation_id
    if letter.is_failure:
        about["status"] = "failed"
    return about


def _is_after(row: ActivityRow, letter: OutboxMessage) -> bool:
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
    except (ValueError, OverflowError):
        return 0.0


def just_after(created_at: str) -> str | None:
    """Return the platform's time a microsecond later, None for what is no time."""
    try:
        moment = datetime.fromisoformat(created_at).astimezone(UTC) + timedelta(microseconds=1)
    except (ValueError, OverflowError):
        return None
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
