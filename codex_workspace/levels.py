"""How much there is of everything at this moment, gathered for a scrape."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import anyio

from codex_workspace.admission import Admission
from codex_workspace.deliveries import Deliveries
from codex_workspace.metrics import CodexLevels, Levels
from codex_workspace.supply import SupplyFigures

COUNTED_S: Final = 5.0
"""The database is asked at most this often, however many scrape."""


@dataclass(slots=True)
class LevelReader:
    """Reads the levels of one agent.

    Args:
        deliveries: counts the messages that are kept.
        streams: counts the open streams.
        admission: counts what waits and runs; None where nobody counts it.
        codex: tells of codex; None where there is none.
        push_waiting: counts the notifications for webhooks; None where there are none.
    """

    deliveries: Deliveries
    streams: Callable[[], int]
    admission: Admission | None = None
    codex: Callable[[], SupplyFigures] | None = None
    push_waiting: Callable[[], int] | None = None
    _one_counts: anyio.Lock = field(default_factory=anyio.Lock)
    _counted: Mapping[str, int] | None = None
    _counted_at: float = -COUNTED_S

    async def read(self) -> Levels:
        """Return the levels; messages are at most `COUNTED_S` old."""
        counted = await self._count()
        admission, codex = self.admission, self.codex
        return Levels(
            waiting=0 if admission is None else admission.waiting,
            running=0 if admission is None else admission.running,
            asking=0 if admission is None else admission.asking,
            streams=self.streams(),
            codex=None if codex is None else _levels_of(codex()),
            deliveries=counted,
            push_waiting=None if self.push_waiting is None else self.push_waiting(),
        )

    async def _count(self) -> Mapping[str, int] | None:
        async with self._one_counts:
            now = anyio.current_time()
            if now - self._counted_at >= COUNTED_S:
                self._counted, self._counted_at = await self.deliveries.counts(), now
            return self._counted


def _levels_of(figures: SupplyFigures) -> CodexLevels:
    return CodexLevels(
        is_up=figures.is_up,
        threads=figures.threads,
        resident_bytes=figures.resident_bytes,
        starts=figures.starts,
        deaths=figures.deaths,
    )
