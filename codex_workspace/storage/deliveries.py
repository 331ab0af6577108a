"""Stores every accepted message before it is processed, and tracks its state.

A delivery is identified by its sender (owner) and the sender's message ID. `MOVES` are the transitions between its
states:

    ACCEPTED ──> STARTED ──> ANSWERED ──> ACKNOWLEDGED
      │ │           └─ again: another turn continues an interrupted one
      │ └──────────────────────^   an end without a turn: canceled while waiting, codex does not start
      └──withdraw──> (deleted)     the sender was told that the message is rejected

    ACCEPTED ──complete──> ACKNOWLEDGED   the answer to a question: the task that asked gives the reply

Each transition is one transaction. ACKNOWLEDGED is stored with the end of the task, where the sender finds the reply;
it can be reached from every state because a cancel, or an executor without deliveries, may end the task. A new process
resumes every delivery that is not ACKNOWLEDGED.
"""

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from a2a.types import SendMessageRequest
from sqlalchemy import ColumnElement, Update, and_, delete, func, insert, select, update
from sqlalchemy.engine import Row
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from codex_workspace.common.errors import AgentError
from codex_workspace.storage.database import retry_until_stored
from codex_workspace.storage.schema import deliveries as _deliveries
from codex_workspace.storage.schema import task_restarts

logger = logging.getLogger(__name__)

RESUMED: Final = "codex_workspace.delivery"
"""Key in the call context's state: the delivery of a message that is resumed."""

RECORDED: Final = "codex_workspace.recorded"
"""Key in the call context's state: the `RecordedMessage` of a new message."""

HANDLED: Final = "codex_workspace.handled"
"""Key in the call context's state: set if this agent's handler makes the call on behalf of another host."""

ANSWERED_PROMPT: Final = "codex_workspace.answered_prompt"
"""Key in the call context's state: the ID of the message whose question a message answers."""


class DeliveryState(StrEnum):
    """The state of a delivery."""

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
"""The states that can follow each state."""


class InvalidTransition(RuntimeError):
    """A transition that is not in `MOVES`: a programming error."""


class MessageIdReused(AgentError):
    """The sender used this message ID for another message."""


@dataclass(frozen=True, slots=True)
class DeliveryKey:
    """Identifies a message: its sender, and the sender's message ID."""

    owner: str
    message_id: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """An accepted message.

    `request` is the serialized request, `deaths` the number of codex processes that ended during its turn, `ending` the
    last events of its reply as `tasks.replies` encodes them (empty before ANSWERED).
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
    """The delivery of a new message, and the table that holds it: a host may have its own store."""

    delivery: Delivery
    deliveries: "Deliveries"


def message_digest(request: SendMessageRequest) -> bytes:
    """Return the digest that identifies a message's content; the request's configuration is not part of it."""
    return hashlib.sha256(request.message.SerializeToString(deterministic=True)).digest()


class Deliveries:
    """The table of deliveries."""

    def __init__(self, engine: AsyncEngine, lookups: AsyncEngine | None = None) -> None:
        self._engine = engine
        self._lookups = lookups or engine

    async def find(self, key: DeliveryKey, digest: bytes) -> Delivery | None:
        """Return the delivery of a message that was accepted before; None for a new one.

        Raises:
            MessageIdReused: the ID was used for a message with another digest.
        """
        async with self._lookups.connect() as connection:
            row = (await connection.execute(select(_deliveries).where(_is(key)))).one_or_none()
        if row is None:
            return None
        if row.digest != digest:
            raise MessageIdReused(
                f"messageId {key.message_id} was used for another message; use a new ID for each message"
            )
        return _delivery(row)

    async def accept(
        self, key: DeliveryKey, request: SendMessageRequest, digest: bytes, task_id: str, context_id: str
    ) -> Delivery | None:
        """Store a message durably and return its delivery; None if the same message was accepted meanwhile.

        Raises:
            MessageIdReused: the ID was used for a message with another digest.
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
        """Return the stored request of a message; None for a new one."""
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
        """Return the number of stored messages in each state; None if the database fails."""
        counted = select(_deliveries.c.state, func.count()).group_by(_deliveries.c.state)
        try:
            async with self._lookups.connect() as connection:
                rows = (await connection.execute(counted)).all()
        except SQLAlchemyError as error:
            logger.debug("cannot count the messages: %s", error)
            return None
        found = {row[0]: int(row[1]) for row in rows}
        return {str(state): found.get(state, 0) for state in DeliveryState}

    async def newest_thread(self, context_id: str | None = None) -> str | None:
        """Return the codex thread that worked last, of all contexts or of one; None if there is none."""
        known = select(_deliveries.c.thread_id).where(_deliveries.c.thread_id.is_not(None))
        if context_id is not None:
            known = known.where(_deliveries.c.context_id == context_id)
        async with self._lookups.connect() as connection:
            newest = await connection.execute(known.order_by(_deliveries.c.changed_at.desc()).limit(1))
            thread_id: str | None = newest.scalar_one_or_none()
            return thread_id

    async def unfinished(self) -> list[Delivery]:
        """Return the deliveries that are not acknowledged, in the order of acceptance."""
        finished = _deliveries.c.state == DeliveryState.ACKNOWLEDGED
        async with self._engine.connect() as connection:
            rows = await connection.execute(select(_deliveries).where(~finished).order_by(_deliveries.c.accepted_at))
            return [_delivery(row) for row in rows]

    async def mark_started(self, key: DeliveryKey, thread_id: str, turn_id: str) -> None:
        """Record that a turn started for a message."""
        await self._move(key, DeliveryState.STARTED, {"thread_id": thread_id, "turn_id": turn_id})

    async def mark_answered(self, key: DeliveryKey, ending: bytes) -> None:
        """Store the end of a message's reply: from now on it is replayed and never generated again."""
        await self._move(key, DeliveryState.ANSWERED, {"ending": ending})

    @retry_until_stored
    async def withdraw(self, key: DeliveryKey) -> None:
        """Delete a message that no turn was started for, because it is rejected."""
        untouched = and_(_is(key), _deliveries.c.state == DeliveryState.ACCEPTED)
        async with self._engine.begin() as connection:
            await connection.execute(delete(_deliveries).where(untouched))

    @retry_until_stored
    async def complete(self, key: DeliveryKey) -> None:
        """Record that a message needs no reply of its own because it answers a question of its task."""
        async with self._engine.begin() as connection:
            out = {"state": DeliveryState.ACKNOWLEDGED, "changed_at": time.time()}
            await connection.execute(update(_deliveries).where(_is(key)).values(out))

    @retry_until_stored
    async def acknowledge(self, task_id: str) -> None:
        """Record that the sender can find a task's replies: the task has ended in the store."""
        async with self._engine.begin() as connection:
            await connection.execute(acknowledgement(task_id))

    @retry_until_stored
    async def count_codex_death(self, key: DeliveryKey) -> int:
        """Count a codex process that ended during a message's turn; return the new number."""
        async with self._engine.begin() as connection:
            counted = {"deaths": _deliveries.c.deaths + 1, "changed_at": time.time()}
            await connection.execute(update(_deliveries).where(_is(key)).values(counted))
            deaths = await connection.execute(select(_deliveries.c.deaths).where(_is(key)))
            return int(deaths.scalar_one())

    @retry_until_stored
    async def count_restart(self, task_id: str) -> int:
        """Count an agent process that ended during a task's turn; return the new number."""
        row = task_restarts.c.task_id == task_id
        async with self._engine.begin() as connection:
            counted = await connection.execute(
                update(task_restarts).where(row).values(restarts=task_restarts.c.restarts + 1)
            )
            if counted.rowcount == 0:
                await connection.execute(insert(task_restarts).values(task_id=task_id, restarts=1))
            restarts = await connection.execute(select(task_restarts.c.restarts).where(row))
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
    """Return the statement that acknowledges a task's deliveries, for the transaction that stores the task's end."""
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
