"""Stores the platform's messages until their replies are sent, and how far the platform's inbox was read.

A message comes from a row of the inbox, or the platform pushed it and the reply took longer than the platform waits.
Its states:

    RECEIVED ──set_reply──> ANSWERED ──complete──> DONE
      └────────────complete──────────────────────────^   no reply has to be sent

While a reply is being sent, `may_be_sent` is set: after a crash the next process checks first whether it arrived.
Messages that are done stay for `KEEP_S`, because the platform may show a row again.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Final

import anyio
from sqlalchemy import and_, delete, func, insert, select, update
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from codex_workspace.storage.database import retry_until_stored
from codex_workspace.storage.schema import inbox_cursors as _cursors
from codex_workspace.storage.schema import outbox as _outbox

KEEP_S: Final = 35 * 86_400.0
"""The platform shows rows of at most 30 days."""

PRUNE_INTERVAL_S: Final = 3600.0


class Route(StrEnum):
    """Where a reply goes. NONE: nowhere. LOOK_UP: to the sender that the platform names."""

    USER = "user"
    PEER = "peer"
    NONE = "none"
    LOOK_UP = "look_up"


class OutboxState(StrEnum):
    """The state of a message."""

    RECEIVED = "received"
    ANSWERED = "answered"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    """A message whose reply is sent as a message of its own.

    id: the inbox row's ID, or a generated one. owner, message_id: the delivery's key. peer: the workspace that sent it.
    source_id: the message's ID at its sender. delegation_id: the sender's delegation that it belongs to.
    digest, request: the A2A request made from it; `request` is empty once it is done.
    reply, is_failure: the reply. may_be_sent: the reply may have been sent already.
    """

    id: str
    owner: str
    message_id: str
    route: Route
    peer: str = ""
    source_id: str = ""
    delegation_id: str = ""
    created_at: str = ""
    digest: bytes = b""
    request: bytes = b""
    state: OutboxState = OutboxState.RECEIVED
    reply: str = ""
    is_failure: bool = False
    may_be_sent: bool = False
    received_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last row up to which the inbox is processed; `created_at` is the platform's text."""

    row_id: str
    created_at: str


class Outbox:
    """The stored messages, and the inbox cursor of each workspace."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @retry_until_stored
    async def add(self, message: OutboxMessage) -> OutboxMessage | None:
        """Store a message durably and return it as stored; None if its ID is stored already.

        A message with the message ID and digest of another one is done at once. A message with the message ID of
        another one, but other content, gets its own ID as its message ID.
        """
        async with self._writing() as connection:
            if (
                await connection.execute(select(_outbox.c.number).where(_outbox.c.id == message.id))
            ).first() is not None:
                return None
            duplicate = await _digest_of_duplicate(connection, message)
            now = time.time()
            stored = replace(message, received_at=now)
            if duplicate is not None and duplicate != message.digest:
                stored = replace(stored, message_id=message.id)
            elif duplicate is not None:
                stored = replace(stored, state=OutboxState.DONE, request=b"")
            await connection.execute(insert(_outbox).values(asdict(stored) | {"changed_at": now}))
        return stored

    @retry_until_stored
    async def find(self, row_id: str) -> OutboxMessage | None:
        """Return a stored message; None if it is unknown or was deleted."""
        async with self._reading() as connection:
            row = (await connection.execute(select(_outbox).where(_outbox.c.id == row_id))).one_or_none()
        return None if row is None else _message(row)

    @retry_until_stored
    async def unfinished(self) -> list[OutboxMessage]:
        """Return the messages that are not done, in the order they came."""
        rows = select(_outbox).where(_outbox.c.state != OutboxState.DONE).order_by(_outbox.c.number)
        async with self._reading() as connection:
            return [_message(row) for row in await connection.execute(rows)]

    async def set_reply(self, message: OutboxMessage, reply: str, *, is_failure: bool = False) -> OutboxMessage:
        """Store a message's reply, and return the message with it; from now on it only has to be sent."""
        answered = replace(message, state=OutboxState.ANSWERED, reply=reply, is_failure=is_failure)
        await self.save(answered)
        return answered

    async def mark_sending(self, message: OutboxMessage, *, may_be_sent: bool) -> OutboxMessage:
        """Store whether a message's reply may have been sent."""
        changed = replace(message, may_be_sent=may_be_sent)
        if message.may_be_sent != may_be_sent:
            await self.save(changed)
        return changed

    @retry_until_stored
    async def save(self, message: OutboxMessage) -> None:
        """Store a message as it is now, such as its route."""
        async with self._writing() as connection:
            row = update(_outbox).where(_outbox.c.id == message.id)
            await connection.execute(row.values(asdict(message) | {"changed_at": time.time()}))

    async def complete(self, message: OutboxMessage) -> None:
        """Record that no reply has to be sent any more."""
        await self.save(replace(message, state=OutboxState.DONE, request=b""))

    @retry_until_stored
    async def count_sent(self, text: str, since: float) -> int:
        """Return how many replies to the user with exactly this text were sent since a time (Unix seconds)."""
        same = and_(_outbox.c.route == Route.USER, _outbox.c.state == OutboxState.DONE, _outbox.c.reply == text)
        count = select(func.count()).select_from(_outbox).where(same, _outbox.c.changed_at >= since)
        async with self._reading() as connection:
            return int((await connection.execute(count)).scalar_one())

    @retry_until_stored
    async def load_cursor(self, workspace_id: str) -> Cursor | None:
        """Return how far an inbox was processed; None if it never was."""
        found = select(_cursors).where(_cursors.c.workspace_id == workspace_id)
        async with self._reading() as connection:
            row = (await connection.execute(found)).one_or_none()
        return None if row is None else Cursor(row.row_id, row.created_at)

    @retry_until_stored
    async def save_cursor(self, workspace_id: str, to: Cursor) -> None:
        """Store how far an inbox was processed."""
        async with self._writing() as connection:
            row = update(_cursors).where(_cursors.c.workspace_id == workspace_id).values(asdict(to))
            if (await connection.execute(row)).rowcount == 0:
                await connection.execute(insert(_cursors).values(asdict(to) | {"workspace_id": workspace_id}))

    @retry_until_stored
    async def delete_expired(self, now: float) -> None:
        """Delete messages that were done long before `now` (Unix seconds)."""
        expired = and_(_outbox.c.state == OutboxState.DONE, _outbox.c.changed_at < now - KEEP_S)
        async with self._writing() as connection:
            await connection.execute(delete(_outbox).where(expired))

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[AsyncConnection]:
        # A cancelled query would invalidate its connection.
        with anyio.CancelScope(shield=True):
            async with self._engine.begin() as connection:
                yield connection

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncConnection]:
        with anyio.CancelScope(shield=True):
            async with self._engine.connect() as connection:
                yield connection


async def delete_expired(outbox: Outbox) -> None:
    """Delete expired messages every `PRUNE_INTERVAL_S`, until cancelled."""
    while True:
        await outbox.delete_expired(time.time())
        await anyio.sleep(PRUNE_INTERVAL_S)


async def _digest_of_duplicate(connection: AsyncConnection, message: OutboxMessage) -> bytes | None:
    """Return the digest of the stored message with the same message ID; None if there is none."""
    same = and_(_outbox.c.owner == message.owner, _outbox.c.message_id == message.message_id)
    found: bytes | None = (await connection.execute(select(_outbox.c.digest).where(same))).scalars().first()
    return found


def _message(row: Row[tuple[object, ...]]) -> OutboxMessage:
    values = {field.name: getattr(row, field.name) for field in fields(OutboxMessage)}
    return OutboxMessage(**values | {"route": Route(row.route), "state": OutboxState(row.state)})
