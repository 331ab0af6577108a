"""Sends replies to the user and to peers, in order for each recipient, until they arrive.

A reply is marked `may_be_sent` before it is sent. If the connection breaks or the process dies then, the sender first
looks for the reply among the user's notifications. A peer recognizes a repeated reply by its message id.
"""

import logging
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Final

import anyio
from anyio.abc import TaskGroup

from codex_workspace.common.concurrency import backoff
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.platform.activity_rows import DELEGATION, ECHO, IN_REPLY_TO, message_id_of
from codex_workspace.platform.client import PlatformClient
from codex_workspace.platform.client_types import (
    ActivityRow,
    PlatformBusy,
    PlatformError,
    PlatformRejected,
    PlatformUnauthorized,
    PlatformUnreachable,
    WorkspaceRemoved,
    parse_time,
)
from codex_workspace.storage.outbox import Outbox, OutboxMessage, Route

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0

MAX_REPLY_CHARS: Final = 200_000
"""The platform accepts 1 MB; a character may have four bytes."""

CUT: Final = "\n\n[The answer is too long for the platform; the rest is left out.]"
FAILED: Final = "The task failed: "

NOT_FOUND_TRIES: Final = 10
"""A platform that was restarted may not know the workspace until it registers again."""

ECHO_LOOKUPS: Final = 10
"""Lookups after which a reply that may have arrived is sent again: reading the activity may fail for ever."""

PEER_TIMEOUT_S: Final = 3600.0
"""If a peer accepts nothing for this long, each reply to it is tried once more and then dropped."""

MAX_WAITING: Final = 100
"""Replies that wait for one peer; the oldest is dropped."""

LOOK_BACK_PAGE: Final = 100
MAX_PAGES: Final = 1000

PAGE_FAILURES: Final = 5
"""Failures in a row after which reading a later page is given up, and the pages before it are lost."""

ROW_AGE_S: Final = 3600.0
"""How much older than the outbox message the row of a pushed message may be, by the platform's clock."""

SAME_REPLY_S: Final = 60.0
"""How long before a message came an equal reply may have been sent to count as its echo."""

_NAMESPACE: Final = uuid.UUID("6f1ad1f2-2f0c-4d34-9c57-9a52b4f5a0c5")


class ReplySender:
    """Sends the replies of outbox messages."""

    def __init__(self, client: PlatformClient, outbox: Outbox, tasks: TaskGroup) -> None:
        self._client = client
        self._outbox = outbox
        self._tasks = tasks
        self._queues: dict[str, deque[OutboxMessage]] = {}
        self._silent_since: dict[str, float] = {}

    def enqueue(self, message: OutboxMessage) -> None:
        """Send a message's reply after the other replies to the same recipient."""
        recipient = message.peer if message.route is Route.PEER else ""
        queue = self._queues.get(recipient)
        if queue is None:
            queue = self._queues[recipient] = deque()
            self._tasks.start_soon(self._send_queue, recipient)
        queue.append(message)
        if recipient and len(queue) > MAX_WAITING:
            logger.warning("dropping a reply: too many replies wait for the same peer")
            self._tasks.start_soon(self._outbox.complete, queue.popleft())

    async def _send_queue(self, recipient: str) -> None:
        queue = self._queues[recipient]
        while queue:
            await self._deliver(queue.popleft())
        del self._queues[recipient]

    async def _deliver(self, message: OutboxMessage) -> None:
        """Send a reply until it has arrived, was rejected, or its peer has been silent for too long."""
        lookups = 0
        for tries in count():
            may_be_sent = message.may_be_sent
            try:
                if may_be_sent and lookups < ECHO_LOOKUPS:
                    lookups += 1
                    if await self._has_arrived(message):
                        break
                message = await self._outbox.mark_sending(message, may_be_sent=True)
                await self._send(message)
                break
            except PlatformError as error:
                if not error.outcome_unknown:
                    # This attempt had no effect; an earlier one may have.
                    message = await self._outbox.mark_sending(message, may_be_sent=may_be_sent)
                if self._is_final(message, error, tries):
                    logger.warning("dropping a reply: %s", error)
                    break
                pause_s = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, tries) * random.uniform(0.5, 1.0)
                pause_s = max(pause_s, error.retry_after_s)
                logger.info("cannot send a reply: %s Retrying in %.1f s", error, pause_s)
                await anyio.sleep(pause_s)
        await self._outbox.complete(message)

    def _is_final(self, message: OutboxMessage, error: PlatformError, tries: int) -> bool:
        """Tell whether there is no further try: the reply was rejected, or its peer has accepted nothing for long."""
        if isinstance(error, WorkspaceRemoved):
            return True
        if message.route is not Route.PEER:
            return isinstance(error, PlatformRejected) and (error.status != 404 or tries >= NOT_FOUND_TRIES)
        now = time.monotonic()
        is_silent = now - self._silent_since.setdefault(message.peer, now) >= PEER_TIMEOUT_S
        return is_silent or isinstance(error, PlatformRejected)

    async def _send(self, message: OutboxMessage) -> None:
        text = reply_text(message)
        if message.route is Route.PEER:
            # The same id for each attempt, by which the peer recognizes a repeated reply.
            id_ = str(uuid.uuid5(_NAMESPACE, message.id))
            # The peer's reply to this is dropped: two agents would answer each other for ever.
            await self._client.send(message.peer, text, id_, _reply_metadata(message))
            self._silent_since.pop(message.peer, None)
        elif message.route is not Route.NONE:
            await self._client.notify(text)

    async def _has_arrived(self, message: OutboxMessage) -> bool:
        """Tell whether the user's notifications contain the reply."""
        if message.route is not Route.USER:
            return False
        text, since = reply_text(message), parse_time(message.created_at)
        echoes = await look_back(
            self._client,
            lambda row: (
                row.method == ECHO
                and parse_time(row.created_at) >= since
                and text in _strings([row.request, row.response])
            ),
            since or message.received_at - SAME_REPLY_S,
        )
        # Other messages may have had the same reply.
        return bool(echoes) and len(echoes) > await self._outbox.count_sent(
            message.reply, message.received_at - SAME_REPLY_S
        )


async def look_back(
    client: PlatformClient,
    matches: Callable[[ActivityRow], bool],
    since: float = 0.0,
    *,
    since_s: int | None = None,
    only_newest: bool = False,
    keep: int | None = None,
) -> list[ActivityRow]:
    """Read the activity from its newest row backwards; return the matching rows, newest first.

    Reading ends at `since` (seconds since 1970, the platform's clock), `since_s` seconds ago, or, with `only_newest`,
    with the page that has a matching row; at the latest after `MAX_PAGES`. `keep`: return only so many, the oldest.

    Raises:
        PlatformError: the first page cannot be read, or a later one after some tries.
    """
    found: deque[ActivityRow] = deque(maxlen=keep)
    seen = set[str]()
    before: str | None = None
    failures = 0
    for _ in range(MAX_PAGES):
        try:
            rows = await client.activity(before_ts=before, since_secs=since_s, limit=LOOK_BACK_PAGE)
        except (PlatformBusy, PlatformUnauthorized, PlatformUnreachable) as error:
            if not seen or failures == PAGE_FAILURES:
                raise
            await anyio.sleep(max(backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, failures), error.retry_after_s))
            failures += 1
            continue
        failures = 0
        new = [row for row in reversed(rows) if row.id not in seen]
        found += filter(matches, new)
        if not rows or (only_newest and found) or parse_time(rows[0].created_at) < since:
            break
        if not new and before == rows[0].created_at:
            # The platform does not read on: the timestamp is invalid, or included in the page before it.
            break
        seen |= {row.id for row in new}
        # The next page begins with the moment at which this one ends: there may be more rows of it.
        before = just_after(rows[0].created_at) if new else rows[0].created_at
    return list(found)


async def find_row(client: PlatformClient, message: OutboxMessage) -> ActivityRow | None:
    """Return the platform's row of a pushed message, if it has one."""
    since = message.received_at - ROW_AGE_S
    found = await look_back(client, lambda row: message_id_of(row) == message.source_id, since, only_newest=True)
    return next(iter(found), None)


def reply_text(message: OutboxMessage) -> str:
    """Return a reply's text as it is sent."""
    text = f"{FAILED}{message.reply}" if message.is_failure else message.reply
    return text if len(text) <= MAX_REPLY_CHARS else text[: MAX_REPLY_CHARS - len(CUT)] + CUT


def _reply_metadata(message: OutboxMessage) -> JsonObject:
    metadata: JsonObject = {IN_REPLY_TO: message.source_id or message.id}
    if message.delegation_id:
        metadata[DELEGATION] = message.delegation_id
    if message.is_failure:
        metadata["status"] = "failed"
    return metadata


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


def just_after(created_at: str) -> str | None:
    """Return the platform's timestamp plus a microsecond; None if it is invalid."""
    try:
        moment = datetime.fromisoformat(created_at).astimezone(UTC) + timedelta(microseconds=1)
    except (ValueError, OverflowError):
        return None
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
