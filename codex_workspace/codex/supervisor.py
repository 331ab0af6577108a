"""Codex for whoever needs it: started again after a death, with growing pauses where it keeps dying, and replaced
between turns when it has grown too big.

How codex is started is left to the block that is handed in, and how a block is held open, to `owner`.
"""

import logging
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

import anyio

from codex_workspace.common.concurrency import backoff
from codex_workspace.common.errors import CodexCannotStart, CodexEnded, CodexError, CodexGone
from codex_workspace.common.processes import resident_bytes
from codex_workspace.runtimes.backend import BackendStats

logger = logging.getLogger(__name__)

STEADY_S: Final = 5.0
"""A codex that dies within this time of its start has failed, whatever it did before. After as many failures as count
as broken, one that has lived this long is ready again."""

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
"""Between them the pause doubles with each failure."""

DRAIN_S: Final = 60.0
"""New turns wait this long for the running ones to end, so that a codex that is too big can be replaced."""

DRAIN_AGAIN_S: Final = 300.0
"""Where running turns took longer than `DRAIN_S`, new ones are let in for this long before they wait again."""

MAX_SILENCE_S: Final = 30.0
"""A codex that has answered no probe for so long is ended: without traffic nobody else would find out, and a platform
sends none to an agent that is not ready."""

MEGABYTE: Final = 1 << 20


class ManagedProcess(Protocol):
    """What the supply has to know of a codex."""

    has_completed_turn: bool
    """Whether a turn has come to its end on it."""

    @property
    def error(self) -> CodexGone | None:
        """Why it is of no more use; None while it is."""

    @property
    def pid(self) -> int | None:
        """Its process, where it has one."""

    @property
    def threads(self) -> int:
        """How many threads it holds in memory."""

    async def responds(self, within_s: float) -> bool:
        """Tell whether it answers a request."""

    def kill(self) -> None:
        """End it at once."""


T = TypeVar("T", bound=ManagedProcess)
T_co = TypeVar("T_co", covariant=True)


class ResourceHolder(Protocol[T_co]):
    """What holds a block open: `Owner`, as the supply uses it."""

    @property
    def current(self) -> T_co | None:
        """What is open and usable at this moment."""

    async def get(self) -> T_co:
        """Return the open thing, after opening it where needed; what opening raises arrives here, plain."""

    def retire(self) -> None:
        """Have the open thing closed; the next `get` waits for that, and opens another."""

    async def close(self) -> None:
        """Close it for good."""


Hold = Callable[[Callable[[], AbstractAsyncContextManager[T]], Callable[[T], bool]], ResourceHolder[T]]
"""Makes a holder of what opens a block, and of what tells whether the thing in it can still be used."""


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """What the operator allows: how long somebody waits for a codex that does not start, after how many failures in a
    row it counts as broken, and how much memory (MiB) and how many threads one codex may hold."""

    restart_wait_s: float = 120.0
    max_restarts: int = 5
    memory_mb: int = 1024
    threads: int = 400


def pause_after(failures: int, max_restarts: int) -> float:
    """Return the seconds before the next start after so many failures in a row: none after the first."""
    if failures <= 1:
        return 0.0
    if failures >= max_restarts:
        return LONGEST_PAUSE_S
    return backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, failures - 2)


def some_shorter() -> float:
    """Return a factor for a pause, so that agents that failed together do not start together."""
    return random.uniform(0.75, 1.0)


class CodexSupervisor(Generic[T]):
    """Gives out the codex of the moment.

    Args:
        open_it: makes the block in which a codex lives.
        bounds: the operator's word.
        hold: makes what holds that block open.
        jitter: gives a factor for each pause.
    """

    def __init__(
        self,
        open_it: Callable[[], AbstractAsyncContextManager[T]],
        bounds: SupervisorLimits,
        hold: Hold[T],
        jitter: Callable[[], float] = some_shorter,
    ) -> None:
        self._open_it = open_it
        self._bounds = bounds
        self._jitter = jitter
        self._holder = hold(self._opened, lambda codex: codex.error is None)
        self._one_tries = anyio.Lock()
        self._charge: _Charge[T] | None = None
        self._starts = 0
        self._deaths = 0
        self._failures = 0
        self._last_failure: CodexEnded | None = None
        self._next_try = 0.0

    def stats(self) -> BackendStats:
        """Return what there is of codex at this moment."""
        self._take_note()
        codex = self._holder.current
        if codex is None:
            return BackendStats(self._starts, self._deaths, False, 0, 0)
        resident = resident_bytes(codex.pid) if codex.pid is not None else 0
        return BackendStats(self._starts, self._deaths, True, codex.threads, resident)

    @property
    def broken_reason(self) -> str | None:
        """Why codex counts as broken; None while it does not."""
        self._take_note()
        return self._why_not(0.0) if self._is_broken() and not self._is_steady() else None

    async def close(self) -> None:
        """End codex; nothing is given out any more."""
        await self._holder.close()

    async def start(self) -> T:
        """Return codex after one try, without pause and without patience.

        Raises:
            CodexCannotStart: it does not start.
        """
        async with self._one_tries:
            return (await self._try()).codex

    async def get(self) -> T:
        """Return codex, started again where the last one died; whoever runs a turn on it takes it by `use`.

        Raises:
            CodexCannotStart: it did not start within `restart_wait_s`, however often it was tried.
        """
        return (await self._in_charge()).codex

    @asynccontextmanager
    async def use(self) -> AsyncIterator[T]:
        """Hold codex for the length of the block: unless it dies, it is not replaced before.

        Where it is about to be replaced, this waits at most `DRAIN_S` for others to leave theirs: no block in another.

        Raises:
            CodexCannotStart: as `get` does.
        """
        charge = await self._admitted()
        charge.users += 1
        try:
            yield charge.codex
        finally:
            charge.users -= 1
            self._left(charge)

    async def not_ready_reason(self, within_s: float) -> str | None:
        """Return why codex does not answer, None when it does; a start that is due is tried for `within_s` seconds.

        One that runs is asked, and may take as long to answer.
        """
        self._take_note()
        if self._pause() == 0:
            with anyio.move_on_after(within_s), suppress(CodexError):
                async with self._one_tries:
                    self._take_note()
                    if self._pause() == 0:
                        await self._try()
        if not self._is_steady():
            return self._why_not(within_s)
        return await self._silence(within_s)

    async def _silence(self, within_s: float) -> str | None:
        """Ask the codex that runs; one that has been silent for too long is ended."""
        charge = self._charge
        assert charge is not None
        asked = anyio.current_time()
        if await charge.codex.responds(within_s):
            charge.silent_since = None
            return None
        charge.silent_since = charge.silent_since or asked
        silent_s = anyio.current_time() - charge.silent_since
        if silent_s >= MAX_SILENCE_S:
            logger.warning("codex has answered nothing for %.0f s and is ended", silent_s)
            charge.codex.kill()
        return f"codex has not answered for {silent_s:.0f} s"

    async def _admitted(self) -> "_Charge[T]":
        while True:
            charge = await self._in_charge()
            if charge.retired:
                continue
            if charge.drained_by is None:
                return charge
            with anyio.CancelScope(deadline=charge.drained_by):
                await charge.over.wait()
            if not charge.over.is_set():
                charge.let_in(until=anyio.current_time() + DRAIN_AGAIN_S)
                return charge

    async def _in_charge(self) -> "_Charge[T]":
        with anyio.move_on_after(self._bounds.restart_wait_s):
            # Whoever has the lock pauses and tries for all.
            async with self._one_tries:
                while True:
                    self._take_note()
                    if pause := self._pause():
                        await anyio.sleep(pause)
                    with suppress(CodexEnded):
                        return await self._try()
        raise self._given_up()

    async def _try(self) -> "_Charge[T]":
        codex = await self._holder.get()
        charge = self._charge
        assert charge is not None
        assert charge.codex is codex
        return charge

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[T]:
        """Open the block and take note of how that goes, also where whoever asked for it has left."""
        charge: _Charge[T] | None = None
        try:
            async with self._open_it() as codex:
                self._take_note()
                charge = self._charge = _Charge(codex, anyio.current_time())
                self._starts += 1
                yield codex
        except CodexEnded as error:
            if charge is None:
                self._failed(error)
            raise

    def _left(self, charge: "_Charge[T]") -> None:
        """Judge a codex whose block was left."""
        self._take_note()
        if charge.over.is_set():
            return
        if charge.codex.has_completed_turn:
            self._works()
        burden = self._burden(charge.codex)
        if burden is None:
            return
        now = anyio.current_time()
        if charge.users == 0:
            logger.info("codex %s and is replaced between turns", burden)
            charge.retire()
            self._holder.retire()
        elif charge.drained_by is None and now >= charge.let_in_until:
            logger.info("codex %s: new turns wait until %d running ones have ended", burden, charge.users)
            charge.drained_by = now + DRAIN_S

    def _burden(self, codex: T) -> str | None:
        """Return what is too much of it, as half a sentence."""
        if codex.threads >= self._bounds.threads:
            return f"holds {codex.threads} threads"
        megabytes = resident_bytes(codex.pid) // MEGABYTE if codex.pid is not None else 0
        return f"holds {megabytes} MiB of memory" if megabytes >= self._bounds.memory_mb else None

    def _take_note(self) -> None:
        """Notice a death. It is a failure where no turn had come to its end on that codex, or it had just started."""
        charge = self._charge
        gone = charge.codex.error if charge is not None else None
        if charge is None or gone is None or charge.over.is_set():
            return
        charge.over.set()
        self._deaths += 1
        if charge.codex.has_completed_turn and charge.age() >= STEADY_S:
            logger.warning("%s; another one is started when it is needed", gone)
        else:
            self._failed(gone)

    def _failed(self, error: CodexEnded) -> None:
        self._failures += 1
        self._last_failure = error
        pause = pause_after(self._failures, self._bounds.max_restarts) * self._jitter()
        self._next_try = anyio.current_time() + pause
        if self._failures == self._bounds.max_restarts:
            logger.error("codex counts as broken after %s; it is tried further: %s", self._times(), error)
        else:
            level = logging.WARNING if self._failures < self._bounds.max_restarts else logging.DEBUG
            logger.log(level, "%s, the next try is in %.1f s: %s", self._times(), pause, error)

    def _works(self) -> None:
        if self._is_broken():
            logger.warning("codex works again after %s", self._times())
        self._failures, self._last_failure, self._next_try = 0, None, 0.0

    def _is_broken(self) -> bool:
        return self._failures >= self._bounds.max_restarts

    def _is_steady(self) -> bool:
        if self._holder.current is None or self._charge is None:
            return False
        return not self._is_broken() or self._charge.age() >= STEADY_S

    def _pause(self) -> float:
        """Return the seconds until codex may be started; 0 also where it runs."""
        return 0.0 if self._holder.current is not None else max(0.0, self._next_try - anyio.current_time())

    def _why_not(self, waited_s: float) -> str:
        failure = self._last_failure
        if failure is None:
            return f"codex did not start within {waited_s:g} s"
        if self._holder.current is not None:
            then = "it was started just now"
        elif pause := self._pause():
            then = f"next try in {math.ceil(pause)} s"
        else:
            then = "it is being started again"
        return f"{failure.public}; {self._times()}, {then}"

    def _given_up(self) -> CodexCannotStart:
        failure = self._last_failure
        if failure is None:
            return CodexCannotStart(f"codex did not start within {self._bounds.restart_wait_s:g} s")
        return CodexCannotStart(f"{failure.sentence}; given up after {self._times()}", failure.tail)

    def _times(self) -> str:
        return f"{self._failures} failure{'s' if self._failures > 1 else ''} in a row"


@dataclass(eq=False, slots=True)
class _Charge(Generic[T]):
    """A codex that is given out, and who has it.

    over: it is dead, or is being replaced. drained_by: until then, nobody is let in. let_in_until: until then,
    nobody is kept out. silent_since: it has answered no probe since.
    """

    codex: T
    started: float
    users: int = 0
    retired: bool = False
    drained_by: float | None = None
    let_in_until: float = 0.0
    silent_since: float | None = None
    over: anyio.Event = field(default_factory=anyio.Event)

    def age(self) -> float:
        return anyio.current_time() - self.started

    def retire(self) -> None:
        self.retired = True
        self.over.set()

    def let_in(self, until: float) -> None:
        self.drained_by, self.let_in_until = None, until
