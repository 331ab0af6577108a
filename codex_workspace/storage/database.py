"""Write health and file integrity of the database.

`WriteHealth` turns database errors that prevent writes into `StoreUnavailable` and probes until writes succeed again.
The integrity functions check whether a SQLite file is this agent's and intact, and rename one that is not. No file is
ever overwritten.
"""

import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import anyio
from sqlalchemy import create_engine, delete, event, insert
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from codex_workspace.common.errors import ConfigError, StoreUnavailable
from codex_workspace.storage.schema import SCHEMA_VERSION, TABLES, schema_version, version_of, write_probe

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S: Final = 3.0
"""While writes fail, `WriteHealth.problem` tries a write at most this often."""

PROBE_BYTES: Final = 1 << 18
"""Enough for a few messages, so that free space in an existing page is not mistaken for free disk space."""

RETRY_INTERVAL_S: Final = 1.0

CHECK_TIME_S: Final = 0.5
"""How long pages are checked at the start; SQLite checks a few hundred MB in this time."""

SIDE_FILES: Final = ("-wal", "-shm", "-journal")

_REASONS: Final = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_IOERR: "the disk fails",
    sqlite3.SQLITE_READONLY: "the database is read-only",
    sqlite3.SQLITE_CANTOPEN: "the database cannot be opened",
    sqlite3.SQLITE_BUSY: "another program has locked the database",
}
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_MAGIC: Final = b"SQLite format 3\0"

P = ParamSpec("P")
T = TypeVar("T")


class WriteHealth:
    """Why the database cannot be written to, from the first error until a write succeeds again."""

    def __init__(self, engine: AsyncEngine, *others: AsyncEngine) -> None:
        """Observe the errors of the engine that writes, and of the `others` on the same database."""
        self._engine = engine
        self._reason: str | None = None
        self._is_damaged = False
        self._probe_at = 0.0
        for each in (engine, *others):
            event.listen(each.sync_engine, "handle_error", self._on_error)

    async def problem(self) -> str | None:
        """Return why writes fail; None if no problem is known or a write succeeds now."""
        now = time.monotonic()
        if self._reason is not None and not self._is_damaged and now >= self._probe_at:
            self._probe_at = now + PROBE_INTERVAL_S
            await self._probe()
        return self._reason

    async def _probe(self) -> None:
        try:
            async with self._engine.begin() as connection:
                await connection.execute(delete(write_probe))
                await connection.execute(insert(write_probe).values(id=1, filler=bytes(PROBE_BYTES)))
            # Only a commit proves that there is space: a rolled back transaction never reaches the disk.
            async with self._engine.begin() as connection:
                await connection.execute(delete(write_probe))
        except (StoreUnavailable, SQLAlchemyError, OSError) as error:
            logger.debug("the database still cannot be written to: %s", error)
        else:
            logger.warning("the database can be written to again (before: %s)", self._reason)
            self._reason = None

    def _on_error(self, context: ExceptionContext) -> None:
        if not isinstance(context.original_exception, Exception):
            # The cancellation of a caller is not an error of the database.
            return
        code = getattr(context.original_exception, "sqlite_errorcode", 0) & 0xFF
        if code in _DAMAGED:
            self._is_damaged = True
            self._set_reason("the database is damaged; run `python -m codex_workspace doctor`", context)
            return
        reason = _REASONS.get(code) or _server_reason(context)
        if reason is not None:
            self._set_reason(reason, context)
            raise StoreUnavailable(
                f"The agent cannot store data now ({reason}); the request was not accepted, send it again later."
            ) from context.original_exception

    def _set_reason(self, reason: str, context: ExceptionContext) -> None:
        if self._reason is None:
            logger.error("%s: %s", reason, context.original_exception)
            self._probe_at = time.monotonic() + PROBE_INTERVAL_S
        self._reason = reason


def _server_reason(context: ExceptionContext) -> str | None:
    if context.is_disconnect:
        return "the database cannot be reached"
    # SQL's class 53 is "insufficient resources": disk, memory, connections.
    return "the disk is full" if str(getattr(context.original_exception, "sqlstate", "")).startswith("53") else None


def retry_until_stored(write: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[object, object, T]]:
    """Retry a write until the database accepts it: for consequences of a message that was accepted already."""

    @wraps(write)
    async def retrying(*args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            try:
                return await write(*args, **kwargs)
            except StoreUnavailable:
                await anyio.sleep(RETRY_INTERVAL_S)

    return retrying


def sqlite_file(url: str) -> Path | None:
    """Return the file of a SQLite database's URL; None for an in-memory database and for other databases."""
    parsed = make_url(url)
    name = parsed.database
    if parsed.get_backend_name() != "sqlite" or not name or name == ":memory:" or name.startswith("file:"):
        return None
    return Path(name)


def require_intact(file: Path) -> None:
    """Accept a file that the store can open, or that does not exist yet.

    Raises:
        ConfigError: it is damaged, or another program's.
    """
    problem = integrity_problem(file)
    if problem is not None:
        raise ConfigError(
            f"DATABASE_URL: {file} {problem}; restore a backup, or rename the file with "
            "`python -m codex_workspace doctor --set-aside` to start with an empty database"
        )


def integrity_problem(file: Path) -> str | None:
    """Return what is wrong with a SQLite file, as the rest of a sentence that starts with its name; None if intact.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        if not file.exists() or file.stat().st_size == 0:
            return None
        with file.open("rb") as opened:
            if opened.read(len(_MAGIC)) != _MAGIC:
                return "is not a SQLite database"
        with closing(_open_read_only(file)) as connection:
            return _damage(connection) or _foreign_or_missing_tables(connection)
    except OSError as error:
        raise ConfigError(
            f"DATABASE_URL: {file} cannot be read: {error.strerror}; give this user read and write permission"
        ) from error
    except sqlite3.OperationalError as error:
        # Permissions, locks and space, not the file's content.
        raise ConfigError(
            f"DATABASE_URL: {file} cannot be opened: {error}; check its folder and permissions"
        ) from error
    except sqlite3.DatabaseError as error:
        return f"is damaged: {error}"


def file_version(file: Path) -> int | None:
    """Return the schema version of an intact SQLite file; see `version_of`."""
    engine = create_engine("sqlite://", creator=lambda: _open_read_only(file))
    try:
        with engine.connect() as connection:
            return version_of(connection)
    finally:
        engine.dispose()


def set_aside(file: Path) -> Path:
    """Rename a file that is damaged or another program's, with its side files; return its new name.

    Raises:
        ConfigError: the file is intact, or it cannot be renamed.
    """
    if integrity_problem(file) is None:
        raise ConfigError(f"DATABASE_URL: {file} is intact, so it was not renamed")
    aside = file.with_name(f"{file.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
    try:
        # The main file last: if this is interrupted, the file is still found damaged and the rest follows next time.
        for suffix in (*SIDE_FILES, ""):
            source = file.with_name(file.name + suffix)
            if source.exists():
                source.rename(aside.with_name(aside.name + suffix))
    except OSError as error:
        raise ConfigError(f"DATABASE_URL: {file} cannot be renamed: {error.strerror}; move it by hand") from error
    return aside


def _open_read_only(file: Path) -> sqlite3.Connection:
    """Open a file without creating anything and without applying its log."""
    return sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)


def _damage(connection: sqlite3.Connection) -> str | None:
    deadline = time.monotonic() + CHECK_TIME_S
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
    try:
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        return None
    finally:
        connection.set_progress_handler(None, 0)
    return None if found == "ok" else f"is damaged: {' '.join(str(found).split())}"


def _foreign_or_missing_tables(connection: sqlite3.Connection) -> str | None:
    query = "select name from sqlite_master where type = 'table' and name not like 'sqlite_%' order by name"
    names = [name for (name,) in connection.execute(query)]
    if names and schema_version.name not in names:
        return f"belongs to another program: it has the tables {', '.join(names[:5])}"
    if not names or connection.execute("select max(version) from schema_version").fetchone() != (SCHEMA_VERSION,):
        return None
    missing = sorted(TABLES.difference(names))
    return f"is damaged: it lacks the tables {', '.join(missing)}" if missing else None
