"""Codex's index of its threads: SQLite files in CODEX_HOME that name each thread's file by its absolute path.

Codex resumes a thread only by its index, and makes a new index of the files in `sessions` if there is none.
"""

import logging
import os
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from codex_workspace.common.errors import ConfigError
from codex_workspace.common.files import rename_with_side_files

logger = logging.getLogger(__name__)

FOLDERS: Final = {"sessions", "archived_sessions"}
"""The folders in CODEX_HOME with threads: sessions/2026/01/31/rollout-….jsonl, archived_sessions/rollout-….jsonl."""

REBUILD_TIMEOUT_S: Final = 600.0
"""How long codex may take to start without its index: it reads all threads first, 1.5 ms each."""


def rename_moved_index(codex_home: Path) -> bool:
    """Rename an index that names files elsewhere which are in this folder; return whether one was renamed.

    It was moved, or restored from a backup. Call this with the folder locked, while the agent's own codex is not
    running.

    Raises:
        ConfigError: another codex, which agents' locks do not keep out, uses the index, or it cannot be renamed.
    """
    moved = {index: path for index in codex_home.glob("state_*.sqlite") if (path := _first_moved(index, codex_home))}
    for index, path in moved.items():
        if _is_in_use(index):
            raise ConfigError(
                f"CODEX_HOME: {index} names {path}, which was moved, and another codex uses this index; stop that codex"
            )
        new = index.with_name(f"{index.name}.moved-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
        try:
            rename_with_side_files(index, new)
        except OSError as error:
            raise ConfigError(
                f"CODEX_HOME: {index} cannot be renamed: {error.strerror}; make the folder writable for this user"
            ) from error
        logger.warning("codex's index names %s, which is now in CODEX_HOME; renamed the index to %s", path, new.name)
    return bool(moved)


def _first_moved(index: Path, codex_home: Path) -> str | None:
    """Return a path elsewhere that an index has for a file of this folder; None also for an index of another form."""
    # Imported only if there is an index: it takes 5 ms.
    import sqlite3

    own = f"{codex_home.resolve()}/"
    elsewhere = "select rollout_path from threads where substr(rollout_path, 1, ?) <> ?"
    try:
        with closing(sqlite3.connect(f"{index.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            found = connection.execute(elsewhere, (len(own), own))
            return next((path for (path,) in found if isinstance(path, str) and _is_moved(path, codex_home)), None)
    except sqlite3.Error as error:
        logger.debug("cannot read codex's index %s: %s", index, error)
        return None


def _is_in_use(index: Path) -> bool:
    """Return whether another process has the index open: also an idle codex holds SQLite's shared lock."""
    import sqlite3

    with closing(sqlite3.connect(index, timeout=0, isolation_level=None)) as connection:
        try:
            connection.execute("pragma locking_mode=exclusive")
            connection.execute("begin exclusive")
        except sqlite3.Error as error:
            return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
    return False


def _is_moved(recorded: str, codex_home: Path) -> bool:
    parts = Path(recorded).parts
    first = next((at for at in reversed(range(len(parts))) if parts[at] in FOLDERS), 0)
    here = codex_home.joinpath(*parts[first:])
    # Unlike those of `Path`, these functions raise no error for a path that this user cannot read.
    return os.path.isfile(here) and not (os.path.exists(recorded) and os.path.samefile(recorded, here))
