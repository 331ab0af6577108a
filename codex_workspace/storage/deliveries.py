"""Stores every accepted message before it is processed, and tracks its state.

A delivery is identified by its sender (owner) and the sender's message ID. `MOVES` are the transitions between its
states:

    ACCEPTED ──> STARTED ──> ANSWERED ──> ACKNOWLEDGED
      │ │           └─ again: another turn continues an interrupted one
      │ └──────────────────────^   an end without a turn: canceled while waiting, codex does not start
      └──withdraw──> (deleted)     the sender was told that the message is rejected

    ACCEPTED ──complete──> ACKNOWLEDGED   the answer to a question: the task that asked gives the reply

ACCEPTED and ANSWERED are on the disk before anybody is told of them. STARTED of a backend that keeps a record of its
messages is deferred, because that record tells whether a turn began. ACKNOWLEDGED is stored with the end of the task,
where the sender finds the reply; it can be reached from every state because a cancel, or an executor without
deliveries, may end the task. A new process resumes every delivery that is not ACKNOWLEDGED.
"""

import hashlib
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar

import anyio
from a2a.types import SendMessageRequest

from codex_workspace.common.errors import AgentError, StoreUnavailable
from codex_workspace.storage.database import (
    Connection,
    Database,
    DatabaseFailed,
    Value,
    Work,
    placeholders,
    retry_until_stored,
)

logger = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")

COUNT_TIMEOUT_S: Final = 2.0
"""A database that does not answer must not delay the metrics for longer."""

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


_COLUMNS: Final = "owner, message_id, task_id, context_id, state, request, thread_id, turn_id, deaths, ending"
_IS_THIS: Final = "owner = ? and message_id = ?"


class Deliveries:
    """The table of deliveries.

    accepted_tasks: the unfinished tasks with a delivery, which a new process would resume; answered_tasks: those whose
    end is stored in their delivery.
    """

    def __init__(self, database: Database, *, stores_starts: bool = True) -> None:
        """`stores_starts`: whether the start of a turn is stored at once; otherwise codex's record tells of it."""
        self.accepted_tasks: Final[set[str]] = set()
        self.answered_tasks: Final[set[str]] = set()
        self._accepting: set[DeliveryKey] = set()
        self._database = database
        self._stores_starts = stores_starts

    async def find(self, key: DeliveryKey, digest: bytes) -> Delivery | None:
        """Return the delivery of a message that was accepted before; None for a new one.

        Raises:
            MessageIdReused: the ID was used for a message with another digest.
        """
        query = f"select digest, {_COLUMNS} from deliveries where {_IS_THIS}"
        found = await self._database.lookup(lambda rows: rows.first(_with_digest, query, key.owner, key.message_id))
        if found is None:
            return None
        if found[0] != digest:
            raise MessageIdReused(
                f"messageId {key.message_id} was used for another message; use a new ID for each message"
            )
        return found[1]

    async def accept(
        self, key: DeliveryKey, request: SendMessageRequest, digest: bytes, task_id: str, context_id: str
    ) -> Delivery | None:
        """Store a message durably and return its delivery; None if the same message was accepted meanwhile.

        Raises:
            MessageIdReused: the ID was used for a message with another digest.
        """
        now, body = time.time(), request.SerializeToString()
        accepted = Delivery(key, task_id, context_id, DeliveryState.ACCEPTED, body, None, None, 0, b"")

        def insert(rows: Connection) -> bool:
            columns = "owner, message_id, digest, task_id, context_id, state, request, deaths, ending, "
            rows.change(
                f"insert into deliveries ({columns} accepted_at, changed_at) "
                "values (?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?) on conflict do nothing",
                *(key.owner, key.message_id, digest, task_id, context_id, accepted.state, body, b"", now, now),
            )
            # The row is this one also if the commit of an earlier attempt was not confirmed.
            stored = f"select task_id, accepted_at from deliveries where {_IS_THIS}"
            return rows.first(_pair, stored, key.owner, key.message_id) == (task_id, now)

        # A look-up can see the row before this coroutine goes on.
        self._accepting.add(key)
        try:
            if await self._database.write(insert):
                self.accepted_tasks.add(task_id)
                return accepted
        finally:
            self._accepting.discard(key)
        await self.find(key, digest)
        return None

    async def request(self, key: DeliveryKey) -> SendMessageRequest | None:
        """Return the stored request of a message; None for a new one."""
        query = f"select request from deliveries where {_IS_THIS}"
        return await self._database.lookup(
            lambda rows: rows.first(SendMessageRequest.FromString, query, key.owner, key.message_id)
        )

    async def find_by_task(self, task_id: str) -> Delivery | None:
        """Return the newest delivery that a task answers."""
        query = f"select {_COLUMNS} from deliveries where task_id = ? order by accepted_at desc limit 1"
        return await self._database.lookup(lambda rows: rows.first(_delivery, query, task_id))

    async def count_by_state(self) -> Mapping[str, int] | None:
        """Return the number of stored messages in each state; None if the database fails or is busy."""
        query = "select state, count(*) from deliveries group by state"
        try:
            with anyio.fail_after(COUNT_TIMEOUT_S):
                found = dict(await self._database.read(lambda rows: rows.all(_pair, query)))
        except (DatabaseFailed, StoreUnavailable, TimeoutError) as error:
            logger.debug("cannot count the messages: %s", error)
            return None
        return {str(state): found.get(state, 0) for state in DeliveryState}

    async def newest_thread(self, context_id: str | None = None) -> str | None:
        """Return the codex thread that worked last, of all contexts or of one; None if there is none."""
        query = (
            "select thread_id from deliveries where thread_id is not null and context_id = coalesce(?, context_id) "
            "order by changed_at desc limit 1"
        )
        return await self._database.read(lambda rows: rows.first(str, query, context_id))

    async def unfinished(self) -> list[Delivery]:
        """Return the deliveries that are not acknowledged, in the order of acceptance."""
        query = f"select {_COLUMNS} from deliveries where state in (?, ?, ?) order by accepted_at"
        states = tuple(state for state in DeliveryState if state is not DeliveryState.ACKNOWLEDGED)
        return await self._database.read(lambda rows: rows.all(_delivery, query, *states))

    def is_forgotten(self, delivery: Delivery) -> bool:
        """Whether nobody works on an unfinished delivery: its commit was made, but not confirmed."""
        is_known = delivery.key in self._accepting or delivery.task_id in self.accepted_tasks
        return delivery.state is not DeliveryState.ACKNOWLEDGED and not is_known

    def resume(self, delivery: Delivery) -> None:
        """Take over a delivery that an earlier process left unfinished."""
        self.accepted_tasks.add(delivery.task_id)
        if delivery.state is DeliveryState.ANSWERED:
            self.answered_tasks.add(delivery.task_id)

    async def mark_started(self, key: DeliveryKey, thread_id: str, turn_id: str) -> None:
        """Record that a turn started for a message."""
        work = _move(key, DeliveryState.STARTED, {"thread_id": thread_id, "turn_id": turn_id})
        if self._stores_starts:
            # Without room on the disk, the turn goes on.
            with suppress(StoreUnavailable):
                await self._database.write(work)
                return
        self._database.write_later(work)

    async def mark_answered(self, key: DeliveryKey, ending: bytes) -> None:
        """Store the end of a message's reply: from now on it is replayed and never generated again."""
        self.answered_tasks.add(await self._write(_move(key, DeliveryState.ANSWERED, {"ending": ending})))

    async def withdraw(self, key: DeliveryKey) -> None:
        """Delete a message that no turn was started for, because it is rejected."""
        delete = f"delete from deliveries where {_IS_THIS} and state = ? returning task_id"
        values = key.owner, key.message_id, DeliveryState.ACCEPTED
        task_id = await self._write(lambda rows: rows.first(str, delete, *values))
        if task_id is not None:
            self.forget(task_id)

    async def complete(self, key: DeliveryKey) -> None:
        """Record that a message needs no reply of its own because it answers a question of its task."""
        done = f"update deliveries set state = ?, changed_at = ? where {_IS_THIS}"
        values = DeliveryState.ACKNOWLEDGED, time.time(), key.owner, key.message_id
        await self._write(lambda rows: rows.change(done, *values))

    async def acknowledge(self, task_id: str) -> None:
        """Record that the sender can find a task's replies: the task has ended in the store."""
        await self._write(lambda rows: acknowledge(rows, task_id))
        self.forget(task_id)

    def forget(self, task_id: str) -> None:
        """Record that a task's deliveries are acknowledged."""
        self.accepted_tasks.discard(task_id)
        self.answered_tasks.discard(task_id)

    async def count_codex_death(self, key: DeliveryKey) -> int:
        """Count a codex process that ended during a message's turn; return the new number."""
        now = time.time()
        # Once, also if the commit of an earlier attempt was not confirmed.
        count = f"update deliveries set deaths = deaths + 1, changed_at = ? where {_IS_THIS} and changed_at <> ?"
        current = f"select deaths from deliveries where {_IS_THIS}"

        def work(rows: Connection) -> int:
            rows.change(count, now, key.owner, key.message_id, now)
            return rows.first(int, current, key.owner, key.message_id) or 0

        return await self._write(work)

    @retry_until_stored
    async def count_restart(self, task_id: str) -> int:
        """Count an agent process that ended during a task's turn; return the new number."""
        current = "select restarts from task_restarts where task_id = ?"
        known = await self._database.read(lambda rows: rows.first(int, current, task_id))
        restarts = 1 + (known or 0)
        count = (
            "insert into task_restarts (task_id, restarts) values (?, ?) "
            "on conflict (task_id) do update set restarts = excluded.restarts"
        )
        await self._write(lambda rows: rows.change(count, task_id, restarts))
        return restarts

    @retry_until_stored
    async def _write(self, work: Work[T]) -> T:
        return await self._database.write(work)


def acknowledge(rows: Connection, task_id: str) -> None:
    """Acknowledge a task's deliveries, in the transaction that stores the task's end."""
    done = DeliveryState.ACKNOWLEDGED
    changed = "update deliveries set state = ?, changed_at = ? where task_id = ? and state <> ?"
    rows.change(changed, done, time.time(), task_id, done)


def _move(key: DeliveryKey, to: DeliveryState, values: Mapping[str, Value]) -> Work[str]:
    """Return the work that makes a transition; its result is the ID of the task."""
    sources = [state for state, reachable in MOVES.items() if to in reachable]
    columns = {"state": to, "changed_at": time.time(), **values}
    change = (
        f"update deliveries set {', '.join(f'{column} = ?' for column in columns)} where {_IS_THIS} "
        f"and state in ({placeholders(sources)}) returning task_id"
    )
    current = f"select state, changed_at, task_id from deliveries where {_IS_THIS}"

    def move(rows: Connection) -> str:
        task_id = rows.first(str, change, *columns.values(), key.owner, key.message_id, *sources)
        if task_id is not None:
            return task_id
        state, at, task_id = rows.first(_triple, current, key.owner, key.message_id) or (None, None, None)
        # This change is stored already if the commit of an earlier attempt was not confirmed.
        if task_id is None or (state, at) != (to, columns["changed_at"]):
            raise InvalidTransition(f"{key.message_id}: {state} -> {to}")
        return task_id

    return move


def _triple(state: str, changed_at: float, task_id: str) -> tuple[str, float, str]:
    return state, changed_at, task_id


def _pair(first: T, second: S) -> tuple[T, S]:
    return first, second


def _with_digest(digest: bytes, *columns: Any) -> tuple[bytes, Delivery]:
    return digest, _delivery(*columns)


def _delivery(
    owner: str,
    message_id: str,
    task_id: str,
    context_id: str,
    state: str,
    request: bytes,
    thread_id: str | None,
    turn_id: str | None,
    deaths: int,
    ending: bytes,
) -> Delivery:
    key = DeliveryKey(owner, message_id)
    return Delivery(key, task_id, context_id, DeliveryState(state), request, thread_id, turn_id, deaths, ending)
