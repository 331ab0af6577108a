"""The deadlines of a turn: total time, inactivity, and the grace periods of its end."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import anyio

from codex_workspace.common.values import MAX_INPUT_CHARS

IDLE_GRACE_S: Final = 1.5
"""Codex reports an idle thread less than 1 ms before the turn's end; after this long it will not report the end."""

STOP_GRACE_S: Final = 5.0
"""An interrupted turn ends within 15 ms; a codex that takes this long does not respond any more and is killed."""

INTERRUPT_RETRY_S: Final = 0.05
"""Codex rejects an interrupt for up to 52 ms after it has accepted the turn."""

SUSPENDED_S: Final = 1.0
"""If a deadline is noticed this late, this process or its machine was suspended."""


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Time limits in seconds, and the maximum number of characters of a turn's text."""

    inactivity_s: float = 300.0
    total_s: float = 3600.0
    request_s: float = 30.0
    max_text_chars: int = MAX_INPUT_CHARS


class Expired(Enum):
    """The deadline that has passed."""

    NONE = auto()
    IDLE = auto()
    STOP = auto()
    TOTAL = auto()
    INACTIVITY = auto()


class TurnDeadlines:
    """Tracks the deadlines of one turn, which starts now."""

    def __init__(self, limits: TurnLimits) -> None:
        self._inactivity_s = limits.inactivity_s
        now = anyio.current_time()
        self._total = now + limits.total_s
        self._inactivity = now + limits.inactivity_s
        self._paused_since: float | None = None
        self._idle: float | None = None
        self._stop: float | None = None
        self._interrupt: float | None = None

    def activity(self) -> None:
        """Start the inactivity limit again."""
        self._inactivity = anyio.current_time() + self._inactivity_s

    def pause(self) -> None:
        """Stop the time limits while codex waits for an answer."""
        self._paused_since = self._paused_since or anyio.current_time()

    def resume(self) -> None:
        """Continue the time limits after `pause`."""
        if self._paused_since is not None:
            self._postpone(anyio.current_time() - self._paused_since)
            self._paused_since = None

    def idle(self) -> None:
        """Expect the turn's end within `IDLE_GRACE_S`."""
        self._idle = anyio.current_time() + IDLE_GRACE_S

    def stopping(self) -> None:
        """Expect the turn's end within `STOP_GRACE_S`; the time limits do not apply any more."""
        self._stop = anyio.current_time() + STOP_GRACE_S

    def interrupt_rejected(self) -> None:
        """Retry the interrupt after `INTERRUPT_RETRY_S`."""
        self._interrupt = anyio.current_time() + INTERRUPT_RETRY_S

    def interrupt_accepted(self) -> None:
        """Do not retry the interrupt."""
        self._interrupt = None

    @property
    def may_interrupt(self) -> bool:
        """Whether an interrupt may be sent now."""
        return self._interrupt is None or anyio.current_time() >= self._interrupt

    def next(self, by: float) -> float:
        """Return the time of the next deadline, `by` at the latest."""
        if self._stop is not None:
            limits: tuple[float, ...] = (self._stop,)
        else:
            limits = () if self._paused_since is not None else (self._total, self._inactivity)
        others = (deadline for deadline in (self._idle, self._interrupt) if deadline is not None)
        return min((by, *limits, *others))

    def expired(self, due: float) -> Expired:
        """Return which deadline has passed at the time `due`; after a suspension none, because events may be unread."""
        now = anyio.current_time()
        if (late := now - due) > SUSPENDED_S:
            self._postpone(late)
            return Expired.NONE
        if self._idle is not None and now >= self._idle:
            self._idle = None
            return Expired.IDLE
        if self._stop is not None:
            return Expired.STOP if now >= self._stop else Expired.NONE
        if self._paused_since is not None:
            return Expired.NONE
        if now >= self._total:
            return Expired.TOTAL
        return Expired.INACTIVITY if now >= self._inactivity else Expired.NONE

    def _postpone(self, seconds: float) -> None:
        self._total += seconds
        self._inactivity += seconds
