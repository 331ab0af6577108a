"""The store: opens the database and holds the contexts' thread IDs, the A2A tasks, and the other tables.

A SQLite file in the state folder, or the database that DATABASE_URL names. Each row belongs to a principal (`owner`),
who sees only their own rows.
"""

import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.common.database_url import sqlite_file, url_problem
from codex_workspace.common.errors import ConfigError, DatabaseTaken, StoreUnavailable
from codex_workspace.common.files import WatchedPaths
from codex_workspace.storage.contexts import ContextThreadId, main_context
from codex_workspace.storage.database import Connection, Database, DatabaseFailed
from codex_workspace.storage.deliveries import Deliveries
from codex_workspace.storage.engine import Engine
from codex_workspace.storage.memories import ConversationLog, Memories
from codex_workspace.storage.outbox import Outbox
from codex_workspace.storage.push_configs import PushConfigs
from codex_workspace.storage.retention import Retention
from codex_workspace.storage.schema import create_schema, require_known_version, version_of
from codex_workspace.storage.sqlite import SqliteEngine, mark, require_intact
from codex_workspace.storage.tasks import TaskStore

logger = logging.getLogger(__name__)

TAKEOVER_S: Final = 30.0
"""How long a new agent waits for the one that uses the database, which a rolling update is about to stop."""

TAKEOVER_INTERVAL_S: Final = 0.5

LOCK_CHECK_S: Final = 5.0
"""An agent that has lost the lock of its database cannot write; within this time it takes it again, or ends."""


class Store:
    """The persistent state of one agent."""

    def __init__(self, database: Database, *, stores_starts: bool = True) -> None:
        """See `Deliveries` for `stores_starts`."""
        self._database = database
        self.deliveries: Final = Deliveries(database, stores_starts=stores_starts)
        self.tasks: Final = TaskStore(database, self.deliveries)
        self.push_configs: Final = PushConfigs(database, self.tasks)
        self.memories: Final = Memories(database)
        self.conversations: Final = ConversationLog(database, self.tasks.flush)
        self.outbox: Final = Outbox(database)

    async def main_context(self, owner: str) -> str:
        """Return the owner's main context; the first call creates it."""
        return await main_context(self._database, owner)

    def context_thread(self, owner: str, context_id: str) -> ContextThreadId:
        """Return access to the thread ID of a context."""
        return ContextThreadId(self._database, owner, context_id)

    def retention(self, keep_days: float, keep_tasks: int) -> Retention:
        """Return the retention of old tasks."""
        return Retention(self._database, keep_days, keep_tasks)

    async def keep_lock(self) -> None:
        """Keep other agents out of a shared database, until cancelled.

        Raises:
            DatabaseTaken: one of them has taken it.
        """
        while self._database.engine.is_shared:
            await anyio.sleep(LOCK_CHECK_S)
            try:
                await self._database.write(lambda _connection: None)
            except (StoreUnavailable, DatabaseFailed) as error:
                if isinstance(error.__cause__, DatabaseTaken):
                    raise error.__cause__ from None
                logger.debug("the database cannot be locked now: %s", error)

    async def write_problem(self) -> str | None:
        """Return why the database cannot be written to; None if no problem is known. Probes the database again."""
        return await self._database.problem()


@asynccontextmanager
async def open_store(
    url: str, *, stores_starts: bool = True, watched: Mapping[str, Path] | None = None
) -> AsyncIterator[Store]:
    """Open the store at a database URL; leaving the block writes pending states and closes it.

    `watched` has the paths besides the database's file without which nothing must be stored; see `WatchedPaths`.

    Raises:
        ConfigError: the database cannot be opened, is damaged or another program's, or has another schema version.
    """
    async with open_database(url, watched) as database:
        store = Store(database, stores_starts=stores_starts)
        try:
            yield store
        finally:
            with anyio.CancelScope(shield=True):
                await store.tasks.close()


@asynccontextmanager
async def open_database(url: str, watched: Mapping[str, Path] | None = None) -> AsyncIterator[Database]:
    """Open a database, create its tables if it is empty, and close it when the block ends.

    Raises:
        ConfigError: as `open_store`, or another agent uses it.
    """
    engine = engine_of(url)
    writing = await anyio.to_thread.run_sync(_prepare, engine)
    paths, marked = dict(watched or {}), None
    if isinstance(engine, SqliteEngine):
        paths["the database"] = engine.file
        marked = await anyio.to_thread.run_sync(mark, engine.file)
    with closing(WatchedPaths(paths, marked)) as kept:
        database = Database(engine, kept, writing)
        try:
            yield database
        finally:
            await database.close()


async def wait_until_free(url: str, timeout_s: float = TAKEOVER_S) -> None:
    """Wait until no other agent uses the database; a SQLite file has a lock file instead.

    Raises:
        ConfigError: another agent still uses it after `timeout_s`, or it cannot be opened.
    """
    engine, end = engine_of(url), anyio.current_time() + timeout_s
    is_reported = False
    while engine.is_shared and (holder := await anyio.to_thread.run_sync(_holder, engine, abandon_on_cancel=True)):
        if anyio.current_time() >= end:
            raise DatabaseTaken(engine.name, holder)
        if not is_reported:
            logger.warning("another agent uses the database; waiting up to %g s for its end: %s", timeout_s, holder)
        is_reported = True
        await anyio.sleep(TAKEOVER_INTERVAL_S)


def _holder(engine: Engine) -> str | None:
    with _explained(engine):
        return engine.holder()


def engine_of(url: str) -> Engine:
    """Return the kind of database that a URL names.

    Raises:
        ConfigError: the URL has another form.
    """
    problem, file = url_problem(url), sqlite_file(url)
    if problem is not None:
        raise ConfigError(f"DATABASE_URL: {problem}")
    if file is not None:
        return SqliteEngine(file)
    # Imported only if it is used: the driver takes 8 MB.
    try:
        from codex_workspace.storage.postgresql import PostgresqlEngine
    except ImportError as error:
        cause, remedy = " ".join(str(error).split()), "pip install 'codex-workspace[postgres]'"
        raise ConfigError(f"DATABASE_URL: PostgreSQL's driver cannot be loaded ({cause}); run: {remedy}") from error
    return PostgresqlEngine(url)


def _prepare(engine: Engine) -> Connection:
    """Check a database, and create its tables if it is empty; return the connection that writes."""
    if isinstance(engine, SqliteEngine):
        require_intact(engine.file)
    with _explained(engine):
        connection = engine.connect_for_writing()
        try:
            connection.begin()
            version = version_of(connection, engine.table_names)
            require_known_version(version, engine.name)
            if version == 0:
                create_schema(connection, engine.types)
            engine.claim(connection)
            connection.run("commit")
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def _explained(engine: Engine) -> Iterator[None]:
    try:
        yield
    except DatabaseTaken:
        raise
    except engine.errors as error:
        cause = " ".join(str(error).split())
        raise ConfigError(f"DATABASE_URL: the database {engine.name} cannot be opened: {cause}") from error
