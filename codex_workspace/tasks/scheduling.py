"""What becomes of a message that comes while another turn of its context is at work. Pure decisions and words.

How many messages may wait, and how many turns may run: what is over the bounds hears at once when to come back.

A message's place, and the only moves between its phases:

    (nothing) ──enter──> PROMISED ──claim──> WAITING ──turn──> RUNNING ──> (nothing)
        └────────────────── claim ──────────────^                │ ^
            a host that asks nobody, or a message                 v │
            of an earlier process                               ASKING   a person has the word; another turn may run

PROMISED and WAITING count as waiting. Only `enter` refuses; whatever was accepted before, whoever accepted it, is
answered.
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


class MidTurn(StrEnum):
    """queue: it waits. steer: it joins the running turn, which answers both. interrupt: it takes that one's place."""

    QUEUE = "queue"
    STEER = "steer"
    INTERRUPT = "interrupt"


@dataclass(frozen=True, slots=True)
class EarlierMessage:
    """A message that was answered in part, or not at all."""

    text: str
    partial_answer: str


def superseding_prompt(earlier: Sequence[EarlierMessage]) -> str:
    """Return what a newer message begins with, so that nothing of the earlier ones is lost with their turns."""
    return "\n\n".join([*(_story(each) for each in earlier), "The newer message, which goes before:"])


def _story(each: EarlierMessage) -> str:
    told = f"An earlier message was interrupted by a newer one. It said:\n\n{each.text}"
    return (
        f"{told}\n\nOf your answer to it, this much was said:\n\n{each.partial_answer}" if each.partial_answer else told
    )


PROMISE_S: Final = 30.0
"""A promised place that nobody has claimed for so long is free again. Between the two lie milliseconds; a request that
ends in between (a database that fails, a client that leaves) would hold its place for ever."""

MIN_RETRY_S: Final = 1
MAX_RETRY_S: Final = 60

UNKNOWN_TURN_S: Final = 10.0
"""What a turn is taken to last before one has ended."""

REMEMBERED_TURNS: Final = 16
"""The last turns, of whose durations the next one's is estimated."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """At most so many messages wait in one context and in all; so many turns run at a time."""

    waiting_per_context: int = 50
    waiting: int = 500
    running_turns: int = 16


class QueueFull(AgentError):
    """There is no place for a further message; in `retry_after_s` seconds there may be one."""

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
    """The place of one message."""

    owner: str
    context_id: str
    phase: _Phase
    since: float


@dataclass(slots=True)
class AdmissionControl:
    """Counts the messages and turns of this process, and refuses messages beyond the bounds.

    A message is known by its owner and a name that is the owner's own: its message id.
    """

    bounds: QueueLimits = field(default_factory=QueueLimits)
    clock: Callable[[], float] = anyio.current_time
    _places: dict[tuple[str, str], QueueSlot] = field(default_factory=dict)
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_TURNS))
    _slots: anyio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        """Make the slots for turns."""
        self._slots = anyio.Semaphore(self.bounds.running_turns)

    @property
    def waiting(self) -> int:
        """How many messages wait."""
        return sum(place.phase in _WAITING for place in self._places.values())

    @property
    def running(self) -> int:
        """How many turns run."""
        return sum(place.phase is _Phase.RUNNING for place in self._places.values())

    @property
    def asking(self) -> int:
        """How many turns wait for a person."""
        return sum(place.phase is _Phase.ASKING for place in self._places.values())

    @contextmanager
    def enter(self, owner: str, context_id: str, message: str) -> Iterator[None]:
        """Promise a place to a new message; an error inside of the block takes the promise back.

        A message that has its place already keeps it, and is not counted again.

        Raises:
            Busy: there is none.
        """
        key = owner, message
        if key in self._places:
            yield
            return
        self._forget_broken_promises()
        self._check(owner, context_id)
        place = self._places[key] = QueueSlot(owner, context_id, _Phase.PROMISED, self.clock())
        try:
            yield
        except BaseException:
            if self._places.get(key) is place and place.phase is _Phase.PROMISED:
                del self._places[key]
            raise

    @contextmanager
    def claim(self, owner: str, context_id: str, message: str) -> Iterator[QueueSlot]:
        """Take a message's place, promised or not, for as long as the block is open."""
        place = QueueSlot(owner, context_id, _Phase.WAITING, self.clock())
        self._places[owner, message] = place
        try:
            yield place
        finally:
            if self._places.get((owner, message)) is place:
                del self._places[owner, message]

    @asynccontextmanager
    async def turn(self, place: QueueSlot) -> AsyncIterator[None]:
        """Wait, first come first served, until a further turn may run; it is counted until the block is left."""
        await self._slots.acquire()
        place.phase, place.since = _Phase.RUNNING, self.clock()
        try:
            yield
        finally:
            if place.phase is _Phase.RUNNING:
                self._give_back(place)

    def step_aside(self, place: QueueSlot) -> None:
        """Let another turn run while a person is asked; nothing to do for a place that has done so."""
        if place.phase is _Phase.RUNNING:
            self._give_back(place)
            place.phase = _Phase.ASKING

    async def step_back(self, place: QueueSlot) -> None:
        """Wait until the turn may run again; nothing to do for a place that runs."""
        if place.phase is _Phase.ASKING:
            await self._slots.acquire()
            place.phase, place.since = _Phase.RUNNING, self.clock()

    def _give_back(self, place: QueueSlot) -> None:
        self._durations.append(self.clock() - place.since)
        self._slots.release()

    def _forget_broken_promises(self) -> None:
        too_old = self.clock() - PROMISE_S
        broken = [key for key, place in self._places.items() if _is_broken(place, too_old)]
        for key in broken:
            del self._places[key]

    def _check(self, owner: str, context_id: str) -> None:
        waiting = [place for place in self._places.values() if place.phase in _WAITING]
        if len(waiting) >= self.bounds.waiting:
            lanes = self.bounds.running_turns
            raise QueueFull(f"as many messages wait as may ({len(waiting)})", self._retry_after_s(lanes))
        in_context = sum(place.owner == owner and place.context_id == context_id for place in waiting)
        if in_context >= self.bounds.waiting_per_context:
            raise QueueFull(f"as many messages wait in this context as may ({in_context})", self._retry_after_s(1))

    def _retry_after_s(self, lanes: int) -> int:
        """Return in how many seconds one of `lanes` turns that run side by side will have ended."""
        turn_s = sum(self._durations) / len(self._durations) if self._durations else UNKNOWN_TURN_S
        return max(MIN_RETRY_S, min(MAX_RETRY_S, math.ceil(turn_s / lanes)))


def _is_broken(place: QueueSlot, too_old: float) -> bool:
    return place.phase is _Phase.PROMISED and place.since <= too_old
