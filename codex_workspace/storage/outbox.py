"""Stores the platform's messages until their replies are sent, and how far the platform's inbox was read.

A message comes from a row of the inbox, or the platform pushed it and the reply took longer than the platform waits.
Its states:

    RECEIVED ──set_reply──> ANSWERED ──complete──> DONE
      └────────────complete──────────────────────────^   no reply has to be sent

While a reply is being sent, `may_be_sent` is set: after a crash the next process checks first whether it arrived.
Messages that are done stay for `KEEP_S`, because the platform may show a row again.
"""

import time
from dataclasses import astuple, dataclass, fields, replace
from enum import StrEnum
from typing import Final

import anyio

from codex_workspace.storage.database import Connection, Database, Value, retry_until_stored

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


_NAMES: Final = tuple(field.name for field in fields(OutboxMessage))
_INSERT: Final = (
    f"insert into outbox ({', '.join(_NAMES)}, changed_at) values ({'?, ' * len(_NAMES)}?) on conflict (id) do nothing"
)
_UPDATE: Final = f"update outbox set {', '.join(f'{name} = ?' for name in _NAMES)}, changed_at = ? where id = ?"


class Outbox:
    """The stored messages, and the inbox cursor of each workspace."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @retry_until_stored
    async def add(self, message: OutboxMessage) -> OutboxMessage | None:
        """Store a message durably and return it as stored; None if its ID is stored already.

        A message with the message ID and digest of another one is done at once. A message with the message ID of
        another one, but other content, gets its own ID as its message ID.
        """
        now = time.time()

        def insert(connection: Connection) -> OutboxMessage | None:
            stored = replace(message, received_at=now)
            duplicate = _digest_of_duplicate(connection, message)
            if duplicate is not None and duplicate != message.digest:
                stored = replace(stored, message_id=message.id)
            elif duplicate is not None:
                stored = replace(stored, state=OutboxState.DONE, request=b"")
            connection.change(_INSERT, *_values(stored), now)
            # The row is this one also if the commit of an earlier attempt was not confirmed.
            known = connection.first(float, "select received_at from outbox where id = ?", message.id)
            return stored if known == now else None

        return await self._database.write(insert)

    @retry_until_stored
    async def find(self, row_id: str) -> OutboxMessage | None:
        """Return a stored message; None if it is unknown or was deleted."""
        found = await self._database.lookup(lambda connection: _select(connection, "id = ?", row_id))
        return found[0] if found else None

    @retry_until_stored
    async def unfinished(self) -> list[OutboxMessage]:
        """Return the messages that are not done, in the order they came."""
        condition = "state <> ? order by number"
        return await self._database.read(lambda connection: _select(connection, condition, OutboxState.DONE))

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

    async def save(self, message: OutboxMessage) -> None:
        """Store a message as it is now, such as its route."""
        await self._change(_UPDATE, *_values(message), time.time(), message.id)

    async def complete(self, message: OutboxMessage) -> None:
        """Record that no reply has to be sent any more."""
        await self.save(replace(message, state=OutboxState.DONE, request=b""))

    @retry_until_stored
    async def count_sent(self, text: str, since: float) -> int:
        """Return how many replies to the user with exactly this text were sent since a time (Unix seconds)."""
        same = "select count(*) from outbox where route = ? and state = ? and reply = ? and changed_at >= ?"

        def count(connection: Connection) -> int:
            return connection.first(int, same, Route.USER, OutboxState.DONE, text, since) or 0

        return await self._database.read(count)

    @retry_until_stored
    async def load_cursor(self, workspace_id: str) -> Cursor | None:
        """Return how far an inbox was processed; None if it never was."""
        query = "select row_id, created_at from inbox_cursors where workspace_id = ?"
        return await self._database.lookup(lambda connection: connection.first(Cursor, query, workspace_id))

    async def save_cursor(self, workspace_id: str, to: Cursor) -> None:
        """Store how far an inbox was processed."""
        await self._change(
            "insert into inbox_cursors (workspace_id, row_id, created_at) values (?, ?, ?) "
            "on conflict (workspace_id) do update set row_id = excluded.row_id, created_at = excluded.created_at",
            *(workspace_id, to.row_id, to.created_at),
        )

    async def delete_expired(self, now: float) -> None:
        """Delete messages that were done long before `now` (Unix seconds)."""
        await self._change("delete from outbox where state = ? and changed_at < ?", OutboxState.DONE, now - KEEP_S)

    @retry_until_stored
    async def _change(self, sql: str, *values: Value) -> None:
        await self._database.write(lambda connection: connection.change(sql, *values))


async def delete_expired(outbox: Outbox) -> None:
    """Delete expired messages every `PRUNE_INTERVAL_S`, until cancelled."""
    while True:
        await outbox.delete_expired(time.time())
        await anyio.sleep(PRUNE_INTERVAL_S)


def _digest_of_duplicate(connection: Connection, message: OutboxMessage) -> bytes | None:
    """Return the digest of the stored message with the same message ID; None if there is none."""
    query = "select digest from outbox where owner = ? and message_id = ?"
    return connection.first(bytes, query, message.owner, message.message_id)


def _values(message: OutboxMessage) -> tuple[Value, ...]:
    return tuple(int(value) if isinstance(value, bool) else value for value in astuple(message))


def _select(connection: Connection, condition: str, *values: Value) -> list[OutboxMessage]:
    query = f"select {', '.join(_NAMES)} from outbox where {condition}"
    return [
        replace(
            row,
            route=Route(row.route),
            state=OutboxState(row.state),
            is_failure=bool(row.is_failure),
            may_be_sent=bool(row.may_be_sent),
        )
        for row in connection.all(OutboxMessage, query, *values)
    ]
