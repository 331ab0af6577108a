"""SQLite: its connections, and the integrity of its file.

The integrity functions check whether a file is this agent's and intact, and rename one that is not. No file is ever
overwritten.
"""

import secrets
import sqlite3
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Final

from codex_workspace.common.errors import ConfigError
from codex_workspace.common.files import rename_with_side_files
from codex_workspace.storage.database import Connection
from codex_workspace.storage.engine import Failure
from codex_workspace.storage.schema import SCHEMA_VERSION, TABLES, version_of

BUSY_TIMEOUT_S: Final = 10.0

MAX_LOG_BYTES: Final = 16 << 20
"""The size to which SQLite truncates its write-ahead log after a burst."""

CHECK_TIME_S: Final = 0.5
"""How long pages are checked at the start; SQLite checks a few hundred MB in this time."""

_DAMAGED: Final = "the database is damaged; stop the agent and run `python -m codex_workspace doctor`"
_REASONS: Final = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_IOERR: "the disk fails",
    sqlite3.SQLITE_READONLY: "the database is read-only",
    sqlite3.SQLITE_CANTOPEN: "the database cannot be opened",
    sqlite3.SQLITE_BUSY: "another program has locked the database",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
}

_MAGIC: Final = b"SQLite format 3\0"


@dataclass(frozen=True, slots=True)
class SqliteEngine:
    """A SQLite file in WAL mode."""

    file: Path
    is_shared: ClassVar = False
    errors: ClassVar = (sqlite3.Error,)
    types: ClassVar = {"blob": "BLOB", "serial": "INTEGER"}
    table_names: ClassVar = "select name from sqlite_master where type = 'table'"

    @property
    def name(self) -> str:
        """The file's path."""
        return str(self.file)

    def connect(self) -> Connection:
        """Open a connection whose commits are flushed to the disk."""
        opened = self._open(BUSY_TIMEOUT_S)
        # FULL: a power failure loses no commit; each commit flushes the disk.
        for pragma in ("journal_mode=WAL", "synchronous=FULL", f"journal_size_limit={MAX_LOG_BYTES}"):
            opened.execute(f"PRAGMA {pragma}")
        return _connection(opened)

    def connect_for_lookups(self) -> Connection:
        """Open a connection that never waits: in WAL mode, no writer keeps a reader from reading."""
        opened = self._open(0.0)
        opened.execute("PRAGMA query_only=ON")
        return _connection(opened)

    def connect_for_writing(self) -> Connection:
        """Open a connection; other agents are locked out by a lock file, see `launching.lock_state`."""
        return self.connect()

    def claim(self, connection: Connection) -> None:
        """Do nothing: the kernel does not lose the lock of a file."""

    def holder(self) -> None:
        """Return None: see `connect_for_writing`."""

    def judge(self, error: Exception) -> Failure:
        """Tell what an error means, by SQLite's code."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        # The agent's own tables can only be missing if the file was overwritten.
        reason = _DAMAGED if str(error).startswith("no such table") else _REASONS.get(code)
        return Failure(reason, is_damaged=reason == _DAMAGED)

    def _open(self, timeout_s: float) -> sqlite3.Connection:
        return sqlite3.connect(self.file, timeout_s, isolation_level=None, check_same_thread=False)


def _connection(opened: sqlite3.Connection) -> Connection:
    """Use a connection; a transaction excludes other writers from its start."""
    return Connection(opened.execute, opened.close, "begin immediate")


def mark(file: Path) -> bytes | None:
    """Write a number into a file that its earlier copies do not have; return its bytes, None if it cannot be written.

    While another process reads the database, the bytes may stay in the log at first.
    """
    number = secrets.randbits(31)
    with suppress(sqlite3.Error), closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA user_version={number}")
        connection.execute("PRAGMA wal_checkpoint")
        return number.to_bytes(4, "big")
    return None


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
    """Return the schema version of an intact file; see `version_of`."""
    with closing(_connection(_open_read_only(file))) as connection:
        return version_of(connection, SqliteEngine.table_names)


def set_aside(file: Path) -> Path:
    """Rename a file that is damaged or another program's, with its side files; return its new name.

    Raises:
        ConfigError: the file is intact, or it cannot be renamed.
    """
    if integrity_problem(file) is None:
        raise ConfigError(f"DATABASE_URL: {file} is intact, so it was not renamed")
    aside = file.with_name(f"{file.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
    try:
        rename_with_side_files(file, aside)
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
    if names and "schema_version" not in names:
        return f"belongs to another program: it has the tables {', '.join(names[:5])}"
    if not names or connection.execute("select max(version) from schema_version").fetchone() != (SCHEMA_VERSION,):
        return None
    missing = sorted(TABLES.difference(names))
    return f"is damaged: it lacks the tables {', '.join(missing)}" if missing else None
