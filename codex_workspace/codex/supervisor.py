"""Keeps one codex running: restarts it with backoff if it died, and replaces it between turns if it grew too large."""

import logging
import math
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import TaskGroup

from codex_workspace.app_server import Connection
from codex_workspace.common.concurrency import backoff
from codex_workspace.common.errors import CodexCannotStart, CodexEnded, CodexError
from codex_workspace.common.values import Version
from codex_workspace.runtimes.backend import BackendStats

logger = logging.getLogger(__name__)

STEADY_S: Final = 5.0
"""A codex that dies within this time of its start counts as a failure. After so many failures that codex counts as
broken, one that has lived this long counts as ready again."""

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0

DRAIN_S: Final = 60.0
"""How long new turns wait for the running ones to end, so that a codex that is too large can be replaced."""

DRAIN_AGAIN_S: Final = 300.0
"""If the running turns took longer than `DRAIN_S`, new turns are admitted for this long before they wait again."""

MAX_SILENCE_S: Final = 30.0
"""A codex that has not responded to probes for so long is killed. Without turns, only the probes notice that it hangs,
and a platform sends no message to an agent that is not ready."""

MEGABYTE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """The limits of the supervisor.

    restart_wait_s: how long a caller waits for a codex that does not start.
    max_restarts: codex counts as broken after so many consecutive failures.
    memory_mb, threads: codex is replaced when it holds so many MiB of memory, or so many threads.
    """

    restart_wait_s: float = 120.0
    max_restarts: int = 5
    memory_mb: int = 1024
    threads: int = 400


def pause_after(failures: int, max_restarts: int) -> float:
    """Return the seconds before the next start after so many consecutive failures; none after the first."""
    if failures <= 1:
        return 0.0
    return LONGEST_PAUSE_S if failures >= max_restarts else backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, failures - 2)


def resident_bytes(process_id: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    with suppress(OSError, IndexError):
        pages = (Path("/proc") / str(process_id) / "statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return 0


class CodexSupervisor:
    """Provides the current codex.

    Args:
        tasks: runs the task that holds codex open; `close` must be called before it ends.
        open_it: opens a codex.
        limits: the limits.
        jitter: returns a factor for each pause, so that agents that failed together do not start together.
    """

    def __init__(
        self,
        tasks: TaskGroup,
        open_it: Callable[[], AbstractAsyncContextManager[Connection]],
        limits: SupervisorLimits,
        jitter: Callable[[], float] = lambda: random.uniform(0.75, 1.0),
    ) -> None:
        self._tasks = tasks
        self._open_it = open_it
        self._limits = limits
        self._jitter = jitter
        self._start_lock = anyio.Lock(fast_acquire=True)
        self._instance: _Instance | None = None
        self._early: _Instance | None = None
        self._starts = 0
        self._deaths = 0
        self._failures = 0
        self._last_failure: CodexEnded | None = None
        self._next_start = 0.0

    def stats(self) -> BackendStats:
        """Return the current process statistics."""
        self._check_death()
        codex = self._current()
        if codex is None:
            return BackendStats(self._starts, self._deaths, False, 0, 0)
        resident = resident_bytes(codex.pid) if codex.pid is not None else 0
        return BackendStats(self._starts, self._deaths, True, codex.threads, resident)

    @property
    def broken_reason(self) -> str | None:
        """Why codex counts as broken; None if it does not."""
        self._check_death()
        return self._unready_reason(0.0) if self._is_broken() and not self._is_steady() else None

    async def close(self) -> None:
        """Stop codex for good."""
        if self._instance is not None:
            await self._instance.close()

    def start_soon(self) -> None:
        """Begin to start codex; `start` then waits for this attempt."""
        self._early = self._begin()

    async def start(self) -> Version:
        """Start codex with one attempt without a pause, and return its version.

        Raises:
            CodexCannotStart: codex does not start.
        """
        async with self._start_lock:
            early, self._early = self._early, None
            if early is not None:
                await self._opened(early)
            return (await self._open())[1].version

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Connection]:
        """Hold codex while the block is open, restarted if it died; it is not replaced before, unless it dies.

        If codex is about to be replaced, this waits at most `DRAIN_S` for the other blocks, so blocks must not nest.

        Raises:
            CodexCannotStart: codex did not start within `restart_wait_s`.
        """
        while True:
            instance, codex = await self._running()
            if anyio.current_time() >= instance.drain_until:
                break
            with anyio.CancelScope(deadline=instance.drain_until):
                await instance.over.wait()
        instance.users += 1
        try:
            yield codex
        finally:
            instance.users -= 1
            self._released(instance, codex)

    async def not_ready_reason(self, within_s: float) -> str | None:
        """Return why codex is not ready, or None; a start that is due, and a probe, take at most `within_s` each."""
        self._check_death()
        if self._pause() == 0:
            with anyio.move_on_after(within_s), suppress(CodexError):
                async with self._start_lock:
                    self._check_death()
                    if self._pause() == 0:
                        await self._open()
        if not self._is_steady():
            return self._unready_reason(within_s)
        return await self._probe(within_s)

    async def _probe(self, within_s: float) -> str | None:
        instance, codex = await self._open()
        started = anyio.current_time()
        if await codex.responds(within_s):
            instance.silent_since = None
            return None
        instance.silent_since = instance.silent_since or started
        silent_s = anyio.current_time() - instance.silent_since
        if silent_s >= MAX_SILENCE_S:
            logger.warning("codex has not responded for %.0f s; killing it", silent_s)
            codex.kill()
        return f"codex has not responded for {silent_s:.0f} s"

    async def _running(self) -> "tuple[_Instance, Connection]":
        with anyio.move_on_after(self._limits.restart_wait_s):
            # The holder of the lock pauses and retries for all callers.
            async with self._start_lock:
                while True:
                    self._check_death()
                    if pause := self._pause():
                        await anyio.sleep(pause)
                    with suppress(CodexEnded):
                        return await self._open()
        failure = self._last_failure
        if failure is None:
            raise CodexCannotStart(f"codex did not start within {self._limits.restart_wait_s:g} s")
        raise CodexCannotStart(f"{failure.sentence}; gave up after {self._count()}", failure.tail)

    async def _open(self) -> "tuple[_Instance, Connection]":
        """Return the usable codex; wait for the one that is opening, or open one."""
        self._check_death()
        instance = self._instance
        if instance is None or (instance.opened.is_set() and self._current() is None):
            if instance is not None:
                await instance.close()
            instance = self._begin()
        return instance, await self._opened(instance)

    def _begin(self) -> "_Instance":
        instance = self._instance = _Instance()
        self._tasks.start_soon(self._hold, instance)
        return instance

    async def _opened(self, instance: "_Instance") -> Connection:
        if not instance.opened.is_set():
            await instance.opened.wait()
        if instance.codex is None:
            raise instance.error or CodexCannotStart("codex was stopped while it started")
        return instance.codex

    async def _hold(self, instance: "_Instance") -> None:
        """Hold a codex open until it is over; callers may be cancelled meanwhile."""
        try:
            with instance.scope:
                async with self._open_it() as instance.codex:
                    instance.started = anyio.current_time()
                    self._starts += 1
                    instance.opened.set()
                    await instance.over.wait()
        except Exception as error:
            if instance.codex is not None:
                logger.exception("stopping codex failed")
            elif isinstance(error, CodexEnded):
                self._failed(error)
            instance.error = error
        finally:
            instance.opened.set()
            instance.closed.set()

    def _released(self, instance: "_Instance", codex: Connection) -> None:
        self._check_death()
        if instance.over.is_set():
            return
        if codex.has_completed_turn:
            self._recovered()
        excess = self._excess(codex)
        if excess is None:
            return
        if instance.users == 0:
            logger.info("codex %s; replacing it between turns", excess)
            instance.over.set()
        elif anyio.current_time() >= instance.drain_until + DRAIN_AGAIN_S:
            logger.info("codex %s; new turns wait until %d running ones have ended", excess, instance.users)
            instance.drain_until = anyio.current_time() + DRAIN_S

    def _excess(self, codex: Connection) -> str | None:
        """Return which limit codex exceeds, as half a sentence."""
        if codex.threads >= self._limits.threads:
            return f"holds {codex.threads} threads"
        megabytes = resident_bytes(codex.pid) // MEGABYTE if codex.pid is not None else 0
        return f"holds {megabytes} MiB of memory" if megabytes >= self._limits.memory_mb else None

    def _check_death(self) -> None:
        """Count a death; it is a failure if codex completed no turn, or had just started."""
        instance = self._instance
        codex = instance.codex if instance is not None else None
        if instance is None or codex is None or codex.error is None or instance.over.is_set():
            return
        instance.over.set()
        self._deaths += 1
        if codex.has_completed_turn and instance.age() >= STEADY_S:
            logger.warning("%s; the next turn restarts it", codex.error)
        else:
            self._failed(codex.error)

    def _failed(self, error: CodexEnded) -> None:
        self._failures += 1
        self._last_failure = error
        pause = pause_after(self._failures, self._limits.max_restarts) * self._jitter()
        self._next_start = anyio.current_time() + pause
        if self._failures == self._limits.max_restarts:
            logger.error("codex is broken after %s; still retrying: %s", self._count(), error)
        else:
            level = logging.WARNING if self._failures < self._limits.max_restarts else logging.DEBUG
            logger.log(level, "%s, next start in %.1f s: %s", self._count(), pause, error)

    def _recovered(self) -> None:
        if self._is_broken():
            logger.warning("codex works again after %s", self._count())
        self._failures, self._last_failure, self._next_start = 0, None, 0.0

    def _is_broken(self) -> bool:
        return self._failures >= self._limits.max_restarts

    def _is_steady(self) -> bool:
        if self._instance is None or self._current() is None:
            return False
        return not self._is_broken() or self._instance.age() >= STEADY_S

    def _current(self) -> Connection | None:
        """Return the usable codex, if there is one."""
        instance = self._instance
        codex = instance.codex if instance is not None and not instance.over.is_set() else None
        return codex if codex is not None and codex.error is None else None

    def _pause(self) -> float:
        """Return the seconds until codex may be started; 0 if it runs."""
        return 0.0 if self._current() is not None else max(0.0, self._next_start - anyio.current_time())

    def _unready_reason(self, waited_s: float) -> str:
        failure = self._last_failure
        if failure is None:
            return f"codex did not start within {waited_s:g} s"
        if self._current() is not None:
            then = "it has just started"
        elif pause := self._pause():
            then = f"next attempt in {math.ceil(pause)} s"
        else:
            then = "it is restarting"
        return f"{failure.public}; {self._count()}, {then}"

    def _count(self) -> str:
        return f"{self._failures} failure{'s' if self._failures > 1 else ''} in a row"


@dataclass(eq=False, slots=True)
class _Instance:
    """An attempt to start codex, the codex, and its users.

    error: why it did not start.
    started: when it had started.
    opened: set when it has started, or failed to.
    over: set when it has died or is being replaced.
    closed: set when it has ended.
    scope: shielded, so that only `close` ends an attempt to start.
    drain_until: new users wait until then.
    silent_since: it has not responded to a probe since.
    """

    codex: Connection | None = None
    error: Exception | None = None
    started: float = 0.0
    users: int = 0
    drain_until: float = -math.inf
    silent_since: float | None = None
    opened: anyio.Event = field(default_factory=anyio.Event)
    over: anyio.Event = field(default_factory=anyio.Event)
    closed: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=lambda: anyio.CancelScope(shield=True))

    def age(self) -> float:
        return anyio.current_time() - self.started

    async def close(self) -> None:
        self.over.set()
        if not self.opened.is_set():
            self.scope.cancel()
        await self.closed.wait()
