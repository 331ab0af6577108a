"""Admission control: how many messages may wait and how many turns may run; and the mid-turn modes of messages.

The phases of a message's slot, and the only moves between them:

    (nothing) ──enter──> PROMISED ──claim──> WAITING ──turn──> RUNNING ──> (nothing)
        └────────────────── claim ──────────────^                │ ^
            a host without admission, or a message                v │
            of an earlier process                               ASKING   a question is open; another turn may run

PROMISED and WAITING count as waiting. Only `enter` rejects messages; every accepted message is answered.
"""

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Final

import anyio

from codex_workspace.common.errors import AgentError
from codex_workspace.config.settings import LimitsConfig


class MidTurn(StrEnum):
    """queue: wait. steer: join the running turn, which answers both. interrupt: replace the running turn."""

    QUEUE = "queue"
    STEER = "steer"
    INTERRUPT = "interrupt"


@dataclass(frozen=True, slots=True)
class EarlierMessage:
    """An earlier message that was superseded, with the part of its answer that exists."""

    text: str
    partial_answer: str


def superseding_prompt(earlier: Sequence[EarlierMessage]) -> str:
    """Return the text that precedes a newer message, with the superseded messages and their partial answers."""
    return "\n\n".join([*(_story(each) for each in earlier), "The newer message, which takes precedence:"])


def _story(each: EarlierMessage) -> str:
    told = f"An earlier message was interrupted by a newer one. It said:\n\n{each.text}"
    return f"{told}\n\nYour partial answer to it:\n\n{each.partial_answer}" if each.partial_answer else told


PROMISE_S: Final = 30.0
"""A promised slot that is not claimed within this time is free again: its request failed or was cancelled."""

MIN_RETRY_S: Final = 1
MAX_RETRY_S: Final = 60

UNKNOWN_TURN_S: Final = 10.0
"""The assumed duration of a turn before the first one has ended."""

REMEMBERED_TURNS: Final = 16
"""The number of turns from which a turn's duration is estimated."""


UPDATE_INTERVAL_S: Final = 0.1
"""At most ten updates of an answer per second; each one costs every client and the store some work."""

UPDATES_PER_S: Final = 160
"""At most this many updates per second of all running turns, as long as none waits for `MAX_UPDATE_INTERVAL_S`."""

MAX_UPDATE_INTERVAL_S: Final = 1.0


class QueueFull(AgentError):
    """The queue is full; there may be room in `retry_after_s` seconds."""

    def __init__(self, what_is_full: str, retry_after_s: int) -> None:
        super().__init__(f"The agent is busy: {what_is_full}. Try again in {retry_after_s} s.")
        self.retry_after_s = retry_after_s


class _Phase(Enum):
    PROMISED = auto()
    WAITING = auto()
    RUNNING = auto()
    ASKING = auto()


_WAITING: Final = (_Phase.PROMISED, _Phase.WAITING)


@dataclass(eq=False, slots=True)
class QueueSlot:
    """The slot of one message."""

    owner: str
    context_id: str
    phase: _Phase
    since: float


@dataclass(slots=True)
class AdmissionControl:
    """Counts the messages and turns of this process, and rejects messages beyond the limits.

    A message is identified by its owner and its message id.
    """

    limits: LimitsConfig = field(default_factory=LimitsConfig)
    clock: Callable[[], float] = anyio.current_time
    _slots_by_message: dict[tuple[str, str], QueueSlot] = field(default_factory=dict)
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_TURNS))
    _slots: anyio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        """Create the semaphore for running turns."""
        self._slots = anyio.Semaphore(self.limits.max_running_turns, fast_acquire=True)

    @property
    def waiting(self) -> int:
        """How many messages wait."""
        return sum(slot.phase in _WAITING for slot in self._slots_by_message.values())

    @property
    def running(self) -> int:
        """How many turns run."""
        return self.limits.max_running_turns - self._slots.value

    @property
    def update_interval_s(self) -> float:
        """The seconds between two updates of an answer, by the number of running turns."""
        return min(MAX_UPDATE_INTERVAL_S, max(UPDATE_INTERVAL_S, self.running / UPDATES_PER_S))

    @property
    def asking(self) -> int:
        """How many turns wait for an answer to a question."""
        return sum(slot.phase is _Phase.ASKING for slot in self._slots_by_message.values())

    @contextmanager
    def enter(self, owner: str, context_id: str, message: str) -> Iterator[None]:
        """Promise a slot to a new message; an error in the block withdraws the promise.

        A message that has a slot keeps it and is not counted again.

        Raises:
            QueueFull: there is no room.
        """
        key = owner, message
        if key in self._slots_by_message:
            yield
            return
        self._remove_broken_promises()
        self._check(owner, context_id)
        slot = self._slots_by_message[key] = QueueSlot(owner, context_id, _Phase.PROMISED, self.clock())
        try:
            yield
        except BaseException:
            if self._slots_by_message.get(key) is slot and slot.phase is _Phase.PROMISED:
                del self._slots_by_message[key]
            raise

    @contextmanager
    def claim(self, owner: str, context_id: str, message: str) -> Iterator[QueueSlot]:
        """Hold a message's slot, promised or not, while the block is open."""
        slot = QueueSlot(owner, context_id, _Phase.WAITING, self.clock())
        self._slots_by_message[owner, message] = slot
        try:
            yield slot
        finally:
            if self._slots_by_message.get((owner, message)) is slot:
                del self._slots_by_message[owner, message]

    @asynccontextmanager
    async def turn(self, slot: QueueSlot) -> AsyncIterator[None]:
        """Wait in order of arrival until another turn may run; it counts as running until the block is left."""
        await self._slots.acquire()
        slot.phase, slot.since = _Phase.RUNNING, self.clock()
        try:
            yield
        finally:
            if slot.phase is _Phase.RUNNING:
                self._release(slot)

    def release_slot(self, slot: QueueSlot) -> None:
        """Let another turn run while a question is open; does nothing for a slot that is not running."""
        if slot.phase is _Phase.RUNNING:
            self._release(slot)
            slot.phase = _Phase.ASKING

    async def reacquire_slot(self, slot: QueueSlot) -> None:
        """Wait until the turn may run again; does nothing for a running slot."""
        if slot.phase is _Phase.ASKING:
            await self._slots.acquire()
            slot.phase, slot.since = _Phase.RUNNING, self.clock()

    def _release(self, slot: QueueSlot) -> None:
        self._durations.append(self.clock() - slot.since)
        self._slots.release()

    def _remove_broken_promises(self) -> None:
        too_old, slots = self.clock() - PROMISE_S, self._slots_by_message
        for key in [key for key, slot in slots.items() if slot.phase is _Phase.PROMISED and slot.since <= too_old]:
            del slots[key]

    def _check(self, owner: str, context_id: str) -> None:
        waiting = [slot for slot in self._slots_by_message.values() if slot.phase in _WAITING]
        if len(waiting) >= self.limits.max_waiting:
            lanes = self.limits.max_running_turns
            raise QueueFull(f"its queue is full ({len(waiting)} messages)", self._retry_after_s(lanes))
        in_context = sum(slot.owner == owner and slot.context_id == context_id for slot in waiting)
        if in_context >= self.limits.max_waiting_per_context:
            raise QueueFull(f"the queue of this context is full ({in_context} messages)", self._retry_after_s(1))

    def _retry_after_s(self, lanes: int) -> int:
        """Return in how many seconds one of `lanes` concurrent turns is expected to end."""
        turn_s = sum(self._durations) / len(self._durations) if self._durations else UNKNOWN_TURN_S
        return max(MIN_RETRY_S, min(MAX_RETRY_S, math.ceil(turn_s / lanes)))
