"""What has come from the platform and has to be answered by a message of its own: kept until the answer is out.

A letter is a row of the platform's inbox, or a message that it has pushed and that takes longer than it waits. Its
states, and the only moves between them:

    TAKEN ──owe──> OWED ──settle──> DONE
      └────────────settle────────────^      nothing is owed to anybody

An answer that is being sent is `unsure`: where the process dies over it, the next one looks first whether it arrived.
Letters that are done stay for `KEEP_S`: the platform may show a row again, whatever becomes of its cursor.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import anyio
from sqlalchemy import (
    Boolean,
    Column,
    Float,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    and_,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from codex_workspace.storage.database import retry_until_stored
from codex_workspace.storage.schema import tables

KEEP_S: Final = 35 * 86_400.0
"""The platform tells of at most 30 days, whoever asks."""

WORDS_KEPT_S: Final = 86_400.0
"""An answer's words stay so long after it went out: by them it is known whether another one of the same words did."""

FORGET_EVERY_S: Final = 3600.0

MAX_ID_CHARS: Final = 255


class Route(StrEnum):
    """Where an answer goes: to the user, to a peer, to nobody (the agent has spoken to itself), or, for what was
    pushed, to whom the platform says that it came from."""

    USER = "user"
    PEER = "peer"
    NONE = "nobody"
    LOOK_UP = "ask"


class OutboxState(StrEnum):
    """How far a letter has come."""

    RECEIVED = "taken"
    ANSWERED = "owed"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    """A message that is answered by another one.

    id: the inbox row's, or one of ours. owner, message_id: the delivery's key. peer: the workspace it came from.
    source_id: the message's own id, as its sender knows it; delegation_id: which work of the sender's it belongs to.
    digest, request: the A2A request that it becomes; the latter is empty once it is done.
    reply, is_failure: the answer. unsure: it may have been sent already.
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
    """The row up to which all of the inbox is done; `created_at` is the platform's text."""

    row_id: str
    created_at: str


_mail = Table(
    "platform_mail",
    tables,
    Column("number", Integer, primary_key=True),
    Column("id", String(MAX_ID_CHARS), nullable=False, unique=True),
    Column("owner", String(255), nullable=False),
    Column("message_id", String(MAX_ID_CHARS), nullable=False, index=True),
    Column("route", String(16), nullable=False),
    Column("peer", String(MAX_ID_CHARS), nullable=False),
    Column("said_id", String(MAX_ID_CHARS), nullable=False),
    Column("delegation_id", String(MAX_ID_CHARS), nullable=False),
    Column("created_at", String(64), nullable=False),
    Column("digest", LargeBinary(32), nullable=False),
    Column("request", LargeBinary, nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("reply", Text, nullable=False),
    Column("is_failure", Boolean, nullable=False),
    Column("unsure", Boolean, nullable=False),
    Column("taken_at", Float, nullable=False),
    Column("changed_at", Float, nullable=False),
)
_cursor = Table(
    "platform_cursor",
    tables,
    Column("workspace_id", String(255), primary_key=True),
    Column("row_id", String(MAX_ID_CHARS), nullable=False),
    Column("created_at", String(64), nullable=False),
)


class Outbox:
    """The letters, and how far the inbox of a workspace was read."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @retry_until_stored
    async def add(self, letter: OutboxMessage) -> OutboxMessage | None:
        """Write a letter down, and return it as it is kept; it is durable on return. None: it was taken before.

        The same message under another id is done at once: it is answered already, or going to be. Another message that
        has the same message id gets the letter's own.
        """
        async with self._writing() as connection:
            if (await connection.execute(select(_mail.c.number).where(_mail.c.id == letter.id))).first() is not None:
                return None
            same = await _same_message(connection, letter)
            now = time.time()
            kept = replace(letter, received_at=now)
            if same is not None and same != letter.digest:
                kept = replace(kept, message_id=letter.id)
            elif same is not None:
                kept = replace(kept, state=OutboxState.DONE, request=b"")
            await connection.execute(insert(_mail).values(_values(kept) | {"changed_at": now}))
        return kept

    @retry_until_stored
    async def find(self, letter_id: str) -> OutboxMessage | None:
        """Return a letter as it is kept; None where it was not taken, or was forgotten."""
        async with self._reading() as connection:
            row = (await connection.execute(select(_mail).where(_mail.c.id == letter_id))).one_or_none()
        return None if row is None else _letter(row)

    @retry_until_stored
    async def unfinished(self) -> list[OutboxMessage]:
        """Return what has no answer yet, or one that is not out, in the order it came."""
        rows = select(_mail).where(_mail.c.state != OutboxState.DONE).order_by(_mail.c.number)
        async with self._reading() as connection:
            return [_letter(row) for row in await connection.execute(rows)]

    @retry_until_stored
    async def set_reply(self, letter: OutboxMessage, reply: str, *, is_failure: bool = False) -> OutboxMessage:
        """Keep a letter's answer, and return the letter with it; from now on it has only to be sent."""
        owed = replace(letter, state=OutboxState.ANSWERED, reply=reply, is_failure=is_failure)
        await self._change(owed)
        return owed

    @retry_until_stored
    async def mark_sending(self, letter: OutboxMessage, *, may_be_sent: bool) -> OutboxMessage:
        """Keep whether a letter's answer may be out."""
        changed = replace(letter, may_be_sent=may_be_sent)
        if letter.may_be_sent != may_be_sent:
            await self._change(changed)
        return changed

    @retry_until_stored
    async def save(self, letter: OutboxMessage) -> None:
        """Keep a letter as it is now, such as where its answer goes."""
        await self._change(letter)

    @retry_until_stored
    async def complete(self, letter: OutboxMessage) -> None:
        """Take note that nothing is owed any more."""
        await self._change(replace(letter, state=OutboxState.DONE, request=b""))

    @retry_until_stored
    async def count_sent(self, text: str, since: float) -> int:
        """Return how many answers to the user with this very text are out since a time (Unix seconds)."""
        same = and_(_mail.c.route == Route.USER, _mail.c.state == OutboxState.DONE, _mail.c.reply == text)
        count = select(func.count()).select_from(_mail).where(same, _mail.c.changed_at >= since)
        async with self._reading() as connection:
            return int((await connection.execute(count)).scalar_one())

    @retry_until_stored
    async def load_cursor(self, workspace_id: str) -> Cursor | None:
        """Return how far an inbox was read; None where it never was."""
        found = select(_cursor).where(_cursor.c.workspace_id == workspace_id)
        async with self._reading() as connection:
            row = (await connection.execute(found)).one_or_none()
        return None if row is None else Cursor(row.row_id, row.created_at)

    @retry_until_stored
    async def save_cursor(self, workspace_id: str, to: Cursor) -> None:
        """Keep how far an inbox was read."""
        values = {"row_id": to.row_id, "created_at": to.created_at}
        async with self._writing() as connection:
            here = _cursor.c.workspace_id == workspace_id
            changed = await connection.execute(update(_cursor).where(here).values(values))
            if changed.rowcount == 0:
                await connection.execute(insert(_cursor).values(values | {"workspace_id": workspace_id}))

    @retry_until_stored
    async def delete_expired(self, now: float) -> None:
        """Forget letters that have been done for long by `now` (Unix seconds), and their words earlier."""
        done = _mail.c.state == OutboxState.DONE
        async with self._writing() as connection:
            await connection.execute(delete(_mail).where(done, _mail.c.changed_at < now - KEEP_S))
            # What is not out yet may still be looked for among all that went out since it came.
            first = select(func.min(_mail.c.taken_at)).where(_mail.c.state != OutboxState.DONE)
            open_since = (await connection.execute(first)).scalar_one_or_none()
            before = min(now, now if open_since is None else open_since) - WORDS_KEPT_S
            old = and_(done, _mail.c.changed_at < before, _mail.c.reply != "")
            await connection.execute(update(_mail).where(old).values(reply=""))

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[AsyncConnection]:
        # A query that is cancelled takes its connection with it.
        with anyio.CancelScope(shield=True):
            async with self._engine.begin() as connection:
                yield connection

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncConnection]:
        with anyio.CancelScope(shield=True):
            async with self._engine.connect() as connection:
                yield connection

    async def _change(self, letter: OutboxMessage) -> None:
        async with self._writing() as connection:
            row = _mail.c.id == letter.id
            await connection.execute(update(_mail).where(row).values(_values(letter) | {"changed_at": time.time()}))


async def delete_expired(mail: Outbox) -> None:
    """Forget letters now and then, until cancelled."""
    while True:
        await mail.delete_expired(time.time())
        await anyio.sleep(FORGET_EVERY_S)


async def _same_message(connection: AsyncConnection, letter: OutboxMessage) -> bytes | None:
    """Return the digest of the letter with this message id; None where there is none."""
    same = and_(_mail.c.owner == letter.owner, _mail.c.message_id == letter.message_id)
    found: bytes | None = (await connection.execute(select(_mail.c.digest).where(same))).scalars().first()
    return found


def _values(letter: OutboxMessage) -> dict[str, object]:
    return {
        "id": letter.id,
        "owner": letter.owner,
        "message_id": letter.message_id,
        "route": letter.route,
        "peer": letter.peer,
        "said_id": letter.source_id,
        "delegation_id": letter.delegation_id,
        "created_at": letter.created_at,
        "digest": letter.digest,
        "request": letter.request,
        "state": letter.state,
        "reply": letter.reply,
        "is_failure": letter.is_failure,
        "unsure": letter.may_be_sent,
        "taken_at": letter.received_at,
    }


def _letter(row: Row[tuple[object, ...]]) -> OutboxMessage:
    return OutboxMessage(
        id=row.id,
        owner=row.owner,
        message_id=row.message_id,
        route=Route(row.route),
        peer=row.peer,
        source_id=row.said_id,
        delegation_id=row.delegation_id,
        created_at=row.created_at,
        digest=row.digest,
        request=row.request,
        state=OutboxState(row.state),
        reply=row.reply,
        is_failure=row.is_failure,
        may_be_sent=row.unsure,
        received_at=row.taken_at,
    )
