"""How often, and how many at once: counters of what one principal may ask for. No input or output."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

BURST_S: Final = 10.0
"""A principal that was quiet this long may ask for as much at once as it may ask for in that time."""

RETRY_STREAM_S: Final = 5
"""When to try a stream again for which there is no place: another one may end at any moment, or much later."""


@dataclass(slots=True)
class _Bucket:
    left: float
    since: float


class Rates:
    """Lets each principal make `per_minute` requests a minute, in bursts of up to `BURST_S` seconds' worth."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_minute / 60
        self._most = max(1.0, self._per_second * BURST_S)
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, principal: str) -> int:
        """Count a request; return 0 where it may be made, else after how many seconds to come back."""
        now = self._clock()
        bucket = self._buckets.setdefault(principal, _Bucket(self._most, now))
        bucket.left = min(self._most, bucket.left + (now - bucket.since) * self._per_second)
        bucket.since = now
        if bucket.left < 1:
            return max(1, math.ceil((1 - bucket.left) / self._per_second))
        bucket.left -= 1
        return 0


class TooMany(Exception):
    """There is no place; says so in a sentence for the client."""


@dataclass(slots=True)
class Places:
    """So many may be held at once, by one principal and by all."""

    per_principal: int
    in_all: int
    _held: dict[str, int] = field(default_factory=dict)

    @property
    def held(self) -> int:
        """How many are held by all."""
        return sum(self._held.values())

    @contextmanager
    def hold(self, principal: str, what: str) -> Iterator[None]:
        """Hold a place for as long as the block takes; `what` names in the plural what it is for.

        Raises:
            TooMany: all places are held.
        """
        own = self._held.get(principal, 0)
        if own >= self.per_principal:
            raise TooMany(f"you have {own} {what} open, and may have {self.per_principal}")
        if self.held >= self.in_all:
            raise TooMany(f"as many {what} are open as may ({self.in_all})")
        self._held[principal] = own + 1
        try:
            yield
        finally:
            self._held[principal] -= 1
            if not self._held[principal]:
                del self._held[principal]
