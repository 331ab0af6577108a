"""Whether the database takes what is written: heard from its errors, and found out by writing.

An error that says that nothing can be written now becomes `StoreUnavailable`, for every user of the engine.

Whether a SQLite file is the store's and whole, and how to move one away that is not. Nothing is ever replaced.
"""

import logging
import sqlite3
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import closing
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import anyio
from sqlalchemy import Column, Integer, LargeBinary, Table, create_engine, delete, event, insert
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from codex_workspace.common.errors import ConfigError, StoreUnavailable
from codex_workspace.storage.migrations import NEWEST, TABLES, version_of
from codex_workspace.storage.schema import tables

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S: Final = 3.0
"""While something is wrong, whoever asks has a row written at most this often."""

PROBE_BYTES: Final = 1 << 18
"""Room for a few messages, not only for the next bytes of a page that is there already."""

TRY_AGAIN_S: Final = 1.0

_REASONS: Final = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_IOERR: "the disk fails",
    sqlite3.SQLITE_READONLY: "the database cannot be written",
    sqlite3.SQLITE_CANTOPEN: "the database cannot be opened",
    sqlite3.SQLITE_BUSY: "another program holds the database",
}
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_probe = Table(
    "write_probe",
    tables,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("filler", LargeBinary, nullable=False),
)

P = ParamSpec("P")
T = TypeVar("T")


class WriteHealth:
    """What is wrong with an engine's database, from its first error until something can be written again."""

    def __init__(self, engine: AsyncEngine, *others: AsyncEngine) -> None:
        """Hear the errors of the engine that is written to, and of the `others` on the same database."""
        self._engine = engine
        self._reason: str | None = None
        self._lasting = False
        self._probe_at = 0.0
        for each in (engine, *others):
            event.listen(each.sync_engine, "handle_error", self._hear)

    async def problem(self) -> str | None:
        """Return what is wrong; None where nothing is known to be, or is no more."""
        now = time.monotonic()
        if self._reason is not None and not self._lasting and now >= self._probe_at:
            self._probe_at = now + PROBE_INTERVAL_S
            await self._try()
        return self._reason

    async def _try(self) -> None:
        try:
            async with self._engine.begin() as connection:
                await connection.execute(delete(_probe))
                await connection.execute(insert(_probe).values(id=1, filler=bytes(PROBE_BYTES)))
            # Room is shown by a commit only: what is rolled back never reaches the disk.
            async with self._engine.begin() as connection:
                await connection.execute(delete(_probe))
        except (StoreUnavailable, SQLAlchemyError, OSError) as error:
            logger.debug("the database still takes nothing: %s", error)
        else:
            logger.warning("the database takes what is written again (%s before)", self._reason)
            self._reason = None

    def _hear(self, context: ExceptionContext) -> None:
        if not isinstance(context.original_exception, Exception):
            # A caller that was cancelled says nothing of the database.
            return
        code = getattr(context.original_exception, "sqlite_errorcode", 0) & 0xFF
        if code in _DAMAGED:
            self._lasting = True
            self._note("the database is damaged; see `python -m codex_workspace doctor`", context)
            return
        reason = _REASONS.get(code) or _reason_of_a_server(context)
        if reason is not None:
            self._note(reason, context)
            raise StoreUnavailable(
                f"The agent cannot write down anything now ({reason}); nothing was accepted, send it again later."
            ) from context.original_exception

    def _note(self, reason: str, context: ExceptionContext) -> None:
        if self._reason is None:
            logger.error("%s: %s", reason, context.original_exception)
            self._probe_at = time.monotonic() + PROBE_INTERVAL_S
        self._reason = reason


def _reason_of_a_server(context: ExceptionContext) -> str | None:
    if context.is_disconnect:
        return "the database is out of reach"
    # SQL's class 53 is "insufficient resources": disk, memory, connections.
    return "the disk is full" if str(getattr(context.original_exception, "sqlstate", "")).startswith("53") else None


def retry_until_stored(write: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[object, object, T]]:
    """Have a write tried again until the database takes it: for what follows from a message that was accepted."""

    @wraps(write)
    async def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            try:
                return await write(*args, **kwargs)
            except StoreUnavailable:
                await anyio.sleep(TRY_AGAIN_S)

    return waiting


CHECK_TIME_S: Final = 0.5
"""How long pages are looked at: SQLite checks a few hundred MB in this time, and a start should not take longer."""

SIDE_FILES: Final = ("-wal", "-shm", "-journal")

_MAGIC: Final = b"SQLite format 3\0"

_OURS: Final[Mapping[str, frozenset[str]]] = {
    "tasks": frozenset({"id", "context_id", "owner", "status"}),
    "contexts": frozenset({"owner", "context_id", "thread_id"}),
    "main_contexts": frozenset({"owner", "context_id"}),
    "schema_version": frozenset({"version"}),
}
"""What tells our tables from another program's of the same name."""


def sqlite_file(url: str) -> Path | None:
    """Return the file of a SQLite database's URL; None for one in memory, and for another kind of database."""
    parsed = make_url(url)
    name = parsed.database
    if parsed.get_backend_name() != "sqlite" or not name or name == ":memory:" or name.startswith("file:"):
        return None
    return Path(name)


def require_intact(file: Path) -> None:
    """Let a file pass that the store can be opened on, one that is not there yet included.

    Raises:
        ConfigError: it is damaged, or another program's.
    """
    wrong = integrity_problem(file)
    if wrong is not None:
        raise ConfigError(
            f"DATABASE_URL: {file} {wrong}; it is left as it is: put a copy of the right one in its place, or move it "
            "away with `python -m codex_workspace doctor --set-aside` and begin anew"
        )


def integrity_problem(file: Path) -> str | None:
    """Return what is wrong with a SQLite file, as the rest of a sentence that begins with its name; None = nothing.

    Raises:
        ConfigError: it cannot be read, which says nothing of what it is.
    """
    try:
        kind = _kind(file)
        if kind is not None or not file.exists() or file.stat().st_size == 0:
            return kind
        if not _has_magic(file):
            return "is no SQLite database"
        with closing(_opened(file)) as connection:
            return _damage(connection) or _strangeness(connection)
    except OSError as error:
        raise ConfigError(
            f"DATABASE_URL: {file} cannot be read: {error.strerror}; give this user the right to read and write it"
        ) from error
    except sqlite3.OperationalError as error:
        # Rights, locks and room: not the file's content.
        raise ConfigError(f"DATABASE_URL: {file} cannot be opened: {error}; check its folder and rights") from error
    except sqlite3.DatabaseError as error:
        return f"is damaged: {error}"


def file_version(file: Path) -> int:
    """Return the schema version of a sound SQLite file, 0 where it has no tables."""
    engine = create_engine("sqlite://", creator=lambda: _opened(file))
    try:
        with engine.connect() as connection:
            return version_of(connection)
    finally:
        engine.dispose()


def set_aside(file: Path) -> Path:
    """Rename a file that is damaged or another program's, with its side files; return its new name.

    Raises:
        ConfigError: nothing is wrong with it, or it cannot be renamed.
    """
    if integrity_problem(file) is None:
        raise ConfigError(f"DATABASE_URL: nothing is wrong with {file}, so it is not set aside")
    aside = _free_name(file)
    try:
        # The main file last: cut short in between, it is still found wrong, and the rest follows the next time.
        for suffix in (*SIDE_FILES, ""):
            source = file.with_name(file.name + suffix)
            if source.exists():
                source.rename(aside.with_name(aside.name + suffix))
    except OSError as error:
        raise ConfigError(f"DATABASE_URL: {file} cannot be renamed: {error.strerror}; move it by hand") from error
    return aside


def _opened(file: Path) -> sqlite3.Connection:
    """Open a file to read: nothing is made, nothing is taken over from its log."""
    return sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)


def _kind(file: Path) -> str | None:
    if not file.exists():
        return None
    mode = file.stat().st_mode
    if stat.S_ISDIR(mode):
        return "is a folder, not a database"
    return None if stat.S_ISREG(mode) else "is not a regular file"


def _has_magic(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(_MAGIC)) == _MAGIC


def _damage(connection: sqlite3.Connection) -> str | None:
    by = time.monotonic() + CHECK_TIME_S
    connection.set_progress_handler(lambda: time.monotonic() > by, 10_000)
    try:
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        return None
    finally:
        connection.set_progress_handler(None, 0)
    return None if found == "ok" else f"is damaged: {' '.join(str(found).split())}"


def _strangeness(connection: sqlite3.Connection) -> str | None:
    tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
    there = {name: _columns(connection, name) for name in tables if not name.startswith("sqlite_")}
    strangers = sorted(name for name, columns in there.items() if not columns >= _OURS.get(name, frozenset()))
    if there and (strangers or not there.keys() & _OURS.keys()):
        return f"is another program's database: it has the tables {', '.join(sorted(there)[:5])}"
    missing = sorted(_promised(connection, there) - there.keys())
    return f"is damaged: it lacks the tables {', '.join(missing)}" if missing else None


def _columns(connection: sqlite3.Connection, table: str) -> frozenset[str]:
    return frozenset(name for (name,) in connection.execute("select name from pragma_table_info(?)", (table,)))


def _promised(connection: sqlite3.Connection, there: Mapping[str, frozenset[str]]) -> set[str]:
    """Return the tables that a database of its version has."""
    if "schema_version" not in there:
        return set()
    (version,) = connection.execute("select max(version) from schema_version").fetchone()
    if version is None or version > NEWEST:
        return set()
    return {name for each, names in TABLES.items() if each <= version for name in names}


def _free_name(file: Path) -> Path:
    stem = f"{file.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    names = (file.with_name(stem if number == 1 else f"{stem}-{number}") for number in range(1, 1000))
    return next(name for name in names if not name.exists())
