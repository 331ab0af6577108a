"""One interface to SQLite and PostgreSQL: a thread that writes in groups, one that reads, and quick look-ups.

A `Work` is a function that runs statements on a `Connection`, in a thread of the database. They are plain SQL in the
dialect that both databases share, with `?` for values.

`Database.write` returns when the work is on the disk. Works that come in while a commit is flushed share the next
commit, each behind a savepoint, so that one that fails takes no other with it. `write_later` does not wait: its work is
committed with the next write, or after `DELAY_S`. The works of both run in the order of the calls.
"""

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Final, Generic, ParamSpec, Protocol, TypeVar

import anyio

from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.common.files import WatchedPaths
from codex_workspace.storage.engine import Engine, Failure

logger = logging.getLogger(__name__)

DELAY_S: Final = 1.0
"""A deferred work is committed after this time at the latest."""

PROBE_INTERVAL_S: Final = 3.0
"""While writes fail, `Database.problem` tries a write at most this often."""

# Enough for a few messages, so that free space in an existing page is not mistaken for free disk space.
PROBE_BYTES: Final = 1 << 18
RETRY_INTERVAL_S: Final = 1.0
CLOSE_TIMEOUT_S: Final = 10.0

Value = str | bytes | int | float | None
"""A value of a column."""

P = ParamSpec("P")
T = TypeVar("T")


class DatabaseFailed(Exception):
    """The database rejected a statement, for a reason that a later attempt does not mend."""


class Cursor(Protocol):
    """The part of a driver's cursor that is used."""

    @property
    def rowcount(self) -> int:
        """How many rows the statement changed."""

    def fetchall(self) -> list[tuple[object, ...]]:
        """Return the rows that the statement selected."""


class Connection:
    """A connection, used by one thread at a time. Errors are raised as the driver raises them.

    Args:
        execute: runs a statement with values.
        close: closes the driver's connection.
        begin: the statement that begins a transaction.
    """

    def __init__(
        self, execute: Callable[[str, Sequence[Value]], Cursor], close: Callable[[], None], begin: str = "begin"
    ) -> None:
        self.close: Final = close
        self._execute = execute
        self._begin = begin

    def run(self, sql: str, values: Sequence[Value] = ()) -> Cursor:
        """Run a statement."""
        return self._execute(sql, values)

    def begin(self) -> None:
        """Begin a transaction that may write."""
        self.run(self._begin)

    def change(self, sql: str, *values: Value) -> int:
        """Run a statement that changes rows; return how many."""
        return self.run(sql, values).rowcount

    def all(self, make: Callable[..., T], sql: str, *values: Value) -> list[T]:
        """Return what `make` makes of the columns of each selected row."""
        return [make(*row) for row in self.run(sql, values).fetchall()]

    def first(self, make: Callable[..., T], sql: str, *values: Value) -> T | None:
        """Return what `make` makes of the columns of the first selected row; None if there is no row."""
        rows = self.run(sql, values).fetchall()
        return make(*rows[0]) if rows else None


Work = Callable[[Connection], T]


def placeholders(values: Sequence[object]) -> str:
    """Return the placeholders for `in (...)`; `null`, which no value equals, for no values."""
    return ", ".join("?" * len(values)) or "null"


class Database:
    """An open database; use it in the event loop that opened it.

    It writes only while `watched` has no problem. `writing` is its first connection that writes.
    """

    def __init__(self, engine: Engine, watched: WatchedPaths, writing: Connection | None = None) -> None:
        self.engine: Final = engine
        self.is_closing = False
        self._health = _Health(watched)
        self._writer = _Writer(engine, self._health, engine.connect_for_writing, writing)
        self._reader = _Reader(engine, self._health, engine.connect)
        self._local = engine.connect_for_lookups()

    async def write(self, work: Work[T]) -> T:
        """Run a work in a transaction; its changes are on the disk on return. A cancelled caller does not stop it.

        Raises:
            StoreUnavailable: nothing can be stored now; nothing was changed.
            DatabaseFailed: the database rejected a statement.
        """
        return await self.submit(work)

    def submit(self, work: Work[T]) -> asyncio.Future[T]:
        """Have a work run at once, in the order of all writes; return its future result, see `write`."""
        return self._writer.submit(work)

    def write_later(self, work: Work[object]) -> None:
        """Run a work within `DELAY_S`, in the order of all writes; later if nothing can be stored now."""
        self._writer.submit(work, is_urgent=False).add_done_callback(partial(self._repeat, work))

    def _repeat(self, work: Work[object], stored: asyncio.Future[object]) -> None:
        error = None if stored.cancelled() else stored.exception()
        if isinstance(error, StoreUnavailable) and not self.is_closing:
            self.write_later(work)
        elif error is not None:
            logger.warning("a deferred write was not made: %s", error)

    async def flush(self) -> None:
        """Return when everything submitted before was run, and is on the disk if it could be stored."""
        if self._writer.is_busy:
            await self._writer.submit(lambda _connection: None)

    async def read(self, work: Work[T]) -> T:
        """Run a work that only selects; it sees every write submitted before, as far as it could be stored.

        Raises:
            StoreUnavailable: the database cannot be reached.
            DatabaseFailed: the database rejected a statement.
        """
        await self.flush()
        return await self._reader.submit(work)

    async def lookup(self, work: Work[T]) -> T:
        """Like `read`, for a look-up by key that needs to see only what `write` has returned from."""
        if self._local is None:
            return await self._reader.submit(work)
        try:
            return work(self._local)
        except self.engine.errors as error:
            logger.debug("a look-up is repeated by the reading thread: %s", error)
            return await self._reader.submit(work)

    async def problem(self) -> str | None:
        """Return why writes fail; None if no problem is found or a write succeeds now."""
        with suppress(StoreUnavailable, DatabaseFailed):
            if self._health.reason is None and self._health.refusal() is None:
                await self._reader.submit(self._look)
            elif self._health.may_probe():
                # Only a commit proves that there is space: a rolled back transaction never reaches the disk.
                await self.write(_probe)
                await self.write(_clear_probe)
                self._health.recover()
        return self._health.reason

    def _look(self, connection: Connection) -> None:
        """Look for a problem: a new connection reads the file, whose pages the others have in memory."""
        fresh = self.engine.connect_for_lookups()
        with nullcontext(connection) if fresh is None else closing(fresh) as looked:
            looked.all(int, "select version from schema_version")

    async def close(self) -> None:
        """Commit what was deferred, and close all connections."""
        self.is_closing = True
        if self._local is not None:
            self._local.close()
        # A server that does not respond must not prevent the end; its threads end with the process.
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await asyncio.gather(self._writer.close(), self._reader.close())


def retry_until_stored(write: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[object, object, T]]:
    """Retry a write, or a read, until the database accepts it: for what a message that was accepted already needs."""

    @wraps(write)
    async def retrying(*args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            try:
                return await write(*args, **kwargs)
            except StoreUnavailable:
                await anyio.sleep(RETRY_INTERVAL_S)

    return retrying


def _probe(connection: Connection) -> None:
    _clear_probe(connection)
    connection.change("insert into write_probe (id, filler) values (1, ?)", bytes(PROBE_BYTES))


def _clear_probe(connection: Connection) -> None:
    connection.change("delete from write_probe where id = 1")


class _Health:
    """Why the database cannot be written to, from the first error until a write succeeds again. For all threads."""

    def __init__(self, watched: WatchedPaths) -> None:
        self.reason: str | None = None
        self._watched = watched
        self._is_damaged = False
        self._probe_at = 0.0

    def may_probe(self) -> bool:
        """Whether it is time for another probe; the next one is due `PROBE_INTERVAL_S` later."""
        now = time.monotonic()
        if self.reason is None or self._is_damaged or now < self._probe_at:
            return False
        self._probe_at = now + PROBE_INTERVAL_S
        return True

    def recover(self) -> None:
        """Record that a write has succeeded."""
        logger.warning("the database can be written to again (before: %s)", self.reason)
        self.reason = None

    def refusal(self) -> StoreUnavailable | None:
        """Return the error of a write that must not be tried: the data is damaged, or a watched path is lost."""
        reason = self.reason if self._is_damaged else self._watched.problem()
        return None if reason is None else self._unavailable(reason, "nothing is stored until then")

    def judged(self, error: Exception, failure: Failure) -> Exception:
        """Record a failure; return the error for the caller."""
        self._is_damaged |= failure.is_damaged
        if failure.reason is None:
            return DatabaseFailed(_one_line(error))
        return self._unavailable(failure.reason, _one_line(error))

    def _unavailable(self, reason: str, cause: str) -> StoreUnavailable:
        if self.reason is None:
            logger.error("%s: %s", reason, cause)
            self._probe_at = time.monotonic() + PROBE_INTERVAL_S
        self.reason = reason
        return StoreUnavailable(
            f"The agent cannot store data now ({reason}); the request was not accepted, send it again later."
        )


def _one_line(error: Exception) -> str:
    """Return an error's first line; PostgreSQL quotes the row, and so messages of users, in the next one."""
    return str(error).partition("\n")[0]


@dataclass(slots=True)
class _Job(Generic[T]):
    """A submitted work, and what became of it."""

    work: Work[T]
    done: asyncio.Future[T]
    result: T | None = None
    error: Exception | None = None

    def settle(self) -> None:
        """Hand the result to the caller; in the event loop."""
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.result)  # type: ignore[arg-type]


class _ConnectionThread(ABC):
    """A thread with a connection of its own, which runs the submitted works."""

    def __init__(
        self, engine: Engine, health: _Health, connect: Callable[[], Connection], connection: Connection | None = None
    ) -> None:
        self._engine = engine
        self._connect = connect
        self._health = health
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._changed = threading.Condition()
        self._jobs: list[_Job[object]] = []
        self._running = 0
        self._commit_at: float | None = None
        """When the waiting jobs are run, on the monotonic clock; None while there is none."""
        self.is_closing = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(
            target=self._work_until_closed, name=f"database{type(self).__name__.lower()}", daemon=True
        ).start()

    @property
    def is_busy(self) -> bool:
        """Whether a work waits or runs."""
        with self._changed:
            return bool(self._jobs or self._running)

    def submit(self, work: Work[T], *, is_urgent: bool = True) -> asyncio.Future[T]:
        """Have a work run, at once or within `DELAY_S`; return its future result."""
        job = _Job(work, self._loop.create_future())
        with self._changed:
            if self.is_closing:
                raise StoreUnavailable("The agent is stopping; send the request again later.")
            self._jobs.append(job)
            if is_urgent:
                self._commit_at = 0.0
                self._changed.notify()
            elif self._commit_at is None:
                self._commit_at = time.monotonic() + DELAY_S
                self._changed.notify()
        return job.done

    async def close(self) -> None:
        """Run the works that wait, close the connection, and end the thread."""
        with self._changed:
            self.is_closing = True
            self._changed.notify()
        await self._ended

    def _work_until_closed(self) -> None:
        try:
            while jobs := self._next_jobs():
                self._run_jobs(jobs)
                self._loop.call_soon_threadsafe(self._settle, jobs)
        finally:
            self._disconnect()
            self._loop.call_soon_threadsafe(self._ended.set_result, None)

    def _settle(self, jobs: Sequence[_Job[object]]) -> None:
        with self._changed:
            self._running -= len(jobs)
        for job in jobs:
            job.settle()

    def _next_jobs(self) -> list[_Job[object]]:
        """Wait for jobs that are due; return none once the thread is to end."""
        with self._changed:
            while not self.is_closing:
                wait_s = None if self._commit_at is None else self._commit_at - time.monotonic()
                if wait_s is not None and wait_s <= 0:
                    break
                self._changed.wait(wait_s)
            jobs, self._jobs, self._commit_at = self._jobs, [], None
            self._running += len(jobs)
            return jobs

    def _run_jobs(self, jobs: Sequence[_Job[object]]) -> None:
        """Run jobs; after the loss of a connection once more, and each by itself if they cannot be stored together."""
        for is_last in (False, True):
            try:
                if self._connection is None:
                    self._connection = self._connect()
                self._try(self._connection, jobs)
            except self._engine.errors as error:
                failure = self._engine.judge(error)
                if failure.is_lost:
                    self._disconnect()
                    if not is_last:
                        continue
                elif failure.reason is not None and len(jobs) > 1:
                    # A small one may still fit on the disk.
                    for job in jobs:
                        self._run_jobs([job])
                    return
                self._fail(jobs, self._health.judged(error, failure), error)
            except Exception as error:
                logger.exception("a database thread failed")
                self._disconnect()
                self._fail(jobs, DatabaseFailed(_one_line(error)), error)
            return

    def _fail(self, jobs: Sequence[_Job[object]], error: Exception, cause: Exception | None = None) -> None:
        error.__cause__ = cause
        for job in jobs:
            job.error = job.error or error

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @abstractmethod
    def _try(self, connection: Connection, jobs: Sequence[_Job[object]]) -> None:
        """Run jobs; errors of single jobs are stored in them, those of the connection are raised."""

    def _run_one(self, connection: Connection, job: _Job[object]) -> bool:
        """Run one job; return whether it succeeded. Raises the errors of the driver that concern all jobs."""
        job.error = None
        try:
            job.result = job.work(connection)
        except self._engine.errors as error:
            failure = self._engine.judge(error)
            if failure.reason is not None or failure.is_lost:
                raise
            job.error = self._health.judged(error, failure)
            job.error.__cause__ = error
        except Exception as error:
            # An error of the work itself, such as a transition that is not allowed, is its caller's.
            job.error = error
        return job.error is None


class _Reader(_ConnectionThread):
    """Runs each work by itself."""

    def _try(self, connection: Connection, jobs: Sequence[_Job[object]]) -> None:
        for job in jobs:
            self._run_one(connection, job)


class _Writer(_ConnectionThread):
    """Runs all works that wait in one transaction, each behind a savepoint."""

    def _run_jobs(self, jobs: Sequence[_Job[object]]) -> None:
        if (refusal := self._health.refusal()) is None:
            super()._run_jobs(jobs)
        else:
            self._fail(jobs, refusal)

    def _try(self, connection: Connection, jobs: Sequence[_Job[object]]) -> None:
        try:
            connection.begin()
            if len(jobs) == 1:
                is_stored = self._run_one(connection, jobs[0])
                connection.run("commit" if is_stored else "rollback")
                return
            for job in jobs:
                connection.run("savepoint work")
                if not self._run_one(connection, job):
                    connection.run("rollback to savepoint work")
                connection.run("release savepoint work")
            connection.run("commit")
        except self._engine.errors:
            self._roll_back(connection)
            raise

    def _roll_back(self, connection: Connection) -> None:
        # SQLite has ended the transaction itself, or the server is gone.
        with suppress(*self._engine.errors):
            connection.run("rollback")
