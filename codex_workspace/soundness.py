"""Whether a SQLite file is the store's and whole, and how to move one away that is not. Nothing is ever replaced."""

import sqlite3
import stat
import time
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from codex_workspace.errors import ConfigError
from codex_workspace.migrations import NEWEST, TABLES, version_of

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


def require_sound(file: Path) -> None:
    """Let a file pass that the store can be opened on, one that is not there yet included.

    Raises:
        ConfigError: it is damaged, or another program's.
    """
    wrong = what_is_wrong(file)
    if wrong is not None:
        raise ConfigError(
            f"DATABASE_URL: {file} {wrong}; it is left as it is: put a copy of the right one in its place, or move it "
            "away with `python -m codex_workspace doctor --set-aside` and begin anew"
        )


def what_is_wrong(file: Path) -> str | None:
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
    if what_is_wrong(file) is None:
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
