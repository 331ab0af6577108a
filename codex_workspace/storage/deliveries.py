"""Every accepted message, written down before anything else happens to it, and how far it has come.

A delivery is known by its sender (owner) and the sender's message id. Its states, and the only moves between them:

    ACCEPTED ──> STARTED ──> ANSWERED ──> ACKNOWLEDGED
      │ │           └─ again: another turn goes on where one was cut off
      │ └──────────────────────^   an end without a turn: canceled while waiting, codex does not start
      └──withdraw──> (nothing)     its sender was told that it is not taken

    ACCEPTED ──settle──> ACKNOWLEDGED   somebody's word on a question: the task whose question it was gives the answer

Every move is one transaction. ACKNOWLEDGED comes with the task's end in the store, where the source finds the answer;
that is the end from every state, as an executor that knows no deliveries, or a cancel, may have ended the task. What
is not ACKNOWLEDGED when a process begins is taken up then.
"""

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from a2a.types import SendMessageRequest
from sqlalchemy import (
    Column,
    ColumnElement,
    Float,
    Integer,
    LargeBinary,
    String,
    Table,
    Update,
    and_,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.engine import Row
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from codex_workspace.common.errors import AgentError
from codex_workspace.storage.database import retry_until_stored
from codex_workspace.storage.schema import MAX_CONTEXT_ID_CHARS, tables

logger = logging.getLogger(__name__)

MAX_MESSAGE_ID_CHARS: Final = 255
"""What the key's column holds; a UUID has 36."""


RESUMED: Final = "codex_workspace.delivery"
"""Where the call context of a message that is taken up again holds its delivery."""


RECORDED: Final = "codex_workspace.written_down"
"""Where the call context of a new message holds the `RecordedMessage` of it."""


HANDLED: Final = "codex_workspace.handled"
"""In the state of a call that a handler of this agent makes on behalf of a foreign host."""


ANSWERED_PROMPT: Final = "codex_workspace.said_to"
"""Where the call context of a person's word holds the id of the message that had asked for it."""


class DeliveryState(StrEnum):
    """How far a message has come."""

    ACCEPTED = "accepted"
    STARTED = "started"
    ANSWERED = "answered"
    ACKNOWLEDGED = "acknowledged"


MOVES: Final[Mapping[DeliveryState, frozenset[DeliveryState]]] = {
    DeliveryState.ACCEPTED: frozenset({DeliveryState.STARTED, DeliveryState.ANSWERED, DeliveryState.ACKNOWLEDGED}),
    DeliveryState.STARTED: frozenset({DeliveryState.STARTED, DeliveryState.ANSWERED, DeliveryState.ACKNOWLEDGED}),
    DeliveryState.ANSWERED: frozenset({DeliveryState.ACKNOWLEDGED}),
    DeliveryState.ACKNOWLEDGED: frozenset(),
}
"""Where a delivery may go from each state."""


class InvalidTransition(RuntimeError):
    """A delivery was to be moved where it cannot go: a mistake of this program."""


class MessageIdReused(AgentError):
    """The sender has used this message id for another message."""


@dataclass(frozen=True, slots=True)
class DeliveryKey:
    """Whose message, and which."""

    owner: str
    message_id: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """An accepted message.

    `request` is the whole request as it came, `deaths` how many codex processes ended while they worked on it, `ending`
    the last events of its answer (empty before ANSWERED), in the shape that `replies` gave them.
    """

    key: DeliveryKey
    task_id: str
    context_id: str
    state: DeliveryState
    request: bytes
    thread_id: str | None
    turn_id: str | None
    deaths: int
    ending: bytes


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """What a host has written down of a new message, and where: its store need not be the one that answers."""

    delivery: Delivery
    deliveries: "Deliveries"


_deliveries = Table(
    "deliveries",
    tables,
    Column("owner", String(255), primary_key=True),
    Column("message_id", String(MAX_MESSAGE_ID_CHARS), primary_key=True),
    Column("digest", LargeBinary(32), nullable=False),
    Column("task_id", String(36), nullable=False, index=True),
    Column("context_id", String(MAX_CONTEXT_ID_CHARS), nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("request", LargeBinary, nullable=False),
    Column("thread_id", String(64), nullable=True),
    Column("turn_id", String(64), nullable=True),
    Column("deaths", Integer, nullable=False, default=0),
    Column("ending", LargeBinary, nullable=False, default=b""),
    Column("accepted_at", Float, nullable=False),
    Column("changed_at", Float, nullable=False),
)


_cut_off = Table(
    "cut_off_tasks",
    tables,
    Column("task_id", String(36), primary_key=True),
    Column("restarts", Integer, nullable=False),
)
"""How many processes of ours have ended over a task's turn."""


def message_digest(request: SendMessageRequest) -> bytes:
    """Return what makes two bodies the same message: all of the message, and nothing of how it is sent."""
    return hashlib.sha256(request.message.SerializeToString(deterministic=True)).digest()


class Deliveries:
    """The table of deliveries."""

    def __init__(self, engine: AsyncEngine, lookups: AsyncEngine | None = None) -> None:
        self._engine = engine
        self._lookups = lookups or engine

    async def find(self, key: DeliveryKey, digest: bytes) -> Delivery | None:
        """Return the delivery of a message that was accepted before, None for a new one.

        Raises:
            OtherBody: the id was used for a message with another digest.
        """
        async with self._lookups.connect() as connection:
            row = (await connection.execute(select(_deliveries).where(_is(key)))).one_or_none()
        if row is None:
            return None
        if row.digest != digest:
            raise MessageIdReused(
                f"messageId {key.message_id} was used for another message; give each message its own id"
            )
        return _delivery(row)

    async def accept(
        self, key: DeliveryKey, request: SendMessageRequest, digest: bytes, task_id: str, context_id: str
    ) -> Delivery | None:
        """Write a message down; it is durable on return. None: the same message was accepted a moment ago.

        Raises:
            OtherBody: the id was used for a message with another digest.
        """
        now, body = time.time(), request.SerializeToString()
        row = {
            "owner": key.owner,
            "message_id": key.message_id,
            "digest": digest,
            "task_id": task_id,
            "context_id": context_id,
            "state": DeliveryState.ACCEPTED,
            "request": body,
            "accepted_at": now,
            "changed_at": now,
        }
        try:
            async with self._engine.begin() as connection:
                await connection.execute(insert(_deliveries).values(row))
        except IntegrityError:
            await self.find(key, digest)
            return None
        return Delivery(key, task_id, context_id, DeliveryState.ACCEPTED, body, None, None, 0, b"")

    async def request(self, key: DeliveryKey) -> SendMessageRequest | None:
        """Return the request as which a message was written down; None for a new one."""
        async with self._lookups.connect() as connection:
            body = (await connection.execute(select(_deliveries.c.request).where(_is(key)))).scalar_one_or_none()
        return None if body is None else SendMessageRequest.FromString(body)

    async def find_by_task(self, task_id: str) -> Delivery | None:
        """Return the newest delivery that a task answers."""
        newest = select(_deliveries).where(_deliveries.c.task_id == task_id).order_by(_deliveries.c.accepted_at.desc())
        async with self._engine.connect() as connection:
            row = (await connection.execute(newest.limit(1))).one_or_none()
        return None if row is None else _delivery(row)

    async def count_by_state(self) -> Mapping[str, int] | None:
        """Return how many messages are kept in each state; None where the database does not say."""
        counted = select(_deliveries.c.state, func.count()).group_by(_deliveries.c.state)
        try:
            async with self._lookups.connect() as connection:
                rows = (await connection.execute(counted)).all()
        except SQLAlchemyError as error:
            logger.debug("the messages cannot be counted: %s", error)
            return None
        found = {row[0]: int(row[1]) for row in rows}
        return {str(state): found.get(state, 0) for state in DeliveryState}

    async def newest_thread(self, context_id: str | None = None) -> str | None:
        """Return the codex thread that was last at work, of everybody's or of one context; None where there is none."""
        known = select(_deliveries.c.thread_id).where(_deliveries.c.thread_id.is_not(None))
        if context_id is not None:
            known = known.where(_deliveries.c.context_id == context_id)
        async with self._lookups.connect() as connection:
            newest = await connection.execute(known.order_by(_deliveries.c.changed_at.desc()).limit(1))
            thread_id: str | None = newest.scalar_one_or_none()
            return thread_id

    async def unfinished(self) -> list[Delivery]:
        """Return what has no answer, or an answer whose source does not know of it, in the order of acceptance."""
        finished = _deliveries.c.state == DeliveryState.ACKNOWLEDGED
        async with self._engine.connect() as connection:
            rows = await connection.execute(select(_deliveries).where(~finished).order_by(_deliveries.c.accepted_at))
            return [_delivery(row) for row in rows]

    async def mark_started(self, key: DeliveryKey, thread_id: str, turn_id: str) -> None:
        """Take note that a turn has begun for it."""
        await self._move(key, DeliveryState.STARTED, {"thread_id": thread_id, "turn_id": turn_id})

    async def mark_answered(self, key: DeliveryKey, ending: bytes) -> None:
        """Keep the end of its answer: from now on it is only handed out, never made again."""
        await self._move(key, DeliveryState.ANSWERED, {"ending": ending})

    @retry_until_stored
    async def withdraw(self, key: DeliveryKey) -> None:
        """Forget a message that nothing has been done for, because its sender is told that it is not taken."""
        untouched = and_(_is(key), _deliveries.c.state == DeliveryState.ACCEPTED)
        async with self._engine.begin() as connection:
            await connection.execute(delete(_deliveries).where(untouched))

    @retry_until_stored
    async def complete(self, key: DeliveryKey) -> None:
        """Take note that a message needs no answer of its own: it was somebody's word on what its task had asked."""
        async with self._engine.begin() as connection:
            out = {"state": DeliveryState.ACKNOWLEDGED, "changed_at": time.time()}
            await connection.execute(update(_deliveries).where(_is(key)).values(out))

    @retry_until_stored
    async def acknowledge(self, task_id: str) -> None:
        """Take note that the source has a task's answers: the task is known to have ended."""
        async with self._engine.begin() as connection:
            await connection.execute(acknowledgement(task_id))

    @retry_until_stored
    async def count_codex_death(self, key: DeliveryKey) -> int:
        """Count a codex that ended while it worked on it; return how many that makes."""
        async with self._engine.begin() as connection:
            counted = {"deaths": _deliveries.c.deaths + 1, "changed_at": time.time()}
            await connection.execute(update(_deliveries).where(_is(key)).values(counted))
            deaths = await connection.execute(select(_deliveries.c.deaths).where(_is(key)))
            return int(deaths.scalar_one())

    @retry_until_stored
    async def count_restart(self, task_id: str) -> int:
        """Count a process of ours that ended over a task's turn; return how many that makes."""
        row = _cut_off.c.task_id == task_id
        async with self._engine.begin() as connection:
            counted = await connection.execute(update(_cut_off).where(row).values(restarts=_cut_off.c.restarts + 1))
            if counted.rowcount == 0:
                await connection.execute(insert(_cut_off).values(task_id=task_id, restarts=1))
            restarts = await connection.execute(select(_cut_off.c.restarts).where(row))
            return int(restarts.scalar_one())

    @retry_until_stored
    async def _move(self, key: DeliveryKey, to: DeliveryState, values: Mapping[str, object]) -> None:
        sources = [state for state, reachable in MOVES.items() if to in reachable]
        async with self._engine.begin() as connection:
            changed = await connection.execute(
                update(_deliveries)
                .where(_is(key), _deliveries.c.state.in_(sources))
                .values(state=to, changed_at=time.time(), **values)
            )
            if changed.rowcount != 1:
                found = await connection.execute(select(_deliveries.c.state).where(_is(key)))
                raise InvalidTransition(f"{key.message_id}: {found.scalar_one_or_none()} -> {to}")


def acknowledgement(task_id: str) -> Update:
    """Return the statement that takes note that the source has a task's answers, for the transaction of its end."""
    open_ones = and_(_deliveries.c.task_id == task_id, _deliveries.c.state != DeliveryState.ACKNOWLEDGED)
    return update(_deliveries).where(open_ones).values(state=DeliveryState.ACKNOWLEDGED, changed_at=time.time())


def _is(key: DeliveryKey) -> ColumnElement[bool]:
    return and_(_deliveries.c.owner == key.owner, _deliveries.c.message_id == key.message_id)


def _delivery(row: Row[tuple[object, ...]]) -> Delivery:
    return Delivery(
        key=DeliveryKey(row.owner, row.message_id),
        task_id=row.task_id,
        context_id=row.context_id,
        state=DeliveryState(row.state),
        request=row.request,
        thread_id=row.thread_id,
        turn_id=row.turn_id,
        deaths=row.deaths,
        ending=row.ending,
    )
