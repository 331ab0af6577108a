"""The schema's versions: which one a database has, and the steps to the newest.

Version 1 is the tables of the first release, which wrote no version down; from version 2 on it stands in
`schema_version`. All steps of a start are one transaction. A step brings about what is missing and passes over what is
there already, so that a table which an earlier step makes may have today's columns.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Final

from a2a.server.models import TaskModel
from sqlalchemy import Column, Connection, Float, Integer, Table, func, insert, inspect, select, text

from codex_workspace.common.errors import ConfigError
from codex_workspace.storage.schema import tables

Step = Callable[[Connection], None]

versions: Final = Table(
    "schema_version",
    tables,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("reached_at", Float, nullable=False),
)
"""One row for each version that the database has had; the highest is the one it has."""

TABLES: Final[Mapping[int, tuple[str, ...]]] = {
    1: ("tasks", "contexts", "main_contexts"),
    2: ("schema_version", "deliveries", "write_probe"),
    3: ("push_notification_configs", "push_due"),
    4: ("cut_off_tasks", "push_to_old_clients"),
    6: ("memories",),
    7: ("platform_mail", "platform_cursor"),
}
"""The tables that each version has brought; version 5 brought a column."""

_OF_THE_SDK: Final = frozenset({"tasks", "push_notification_configs"})


def _make_tables(version: int) -> Step:
    def step(connection: Connection) -> None:
        for name in TABLES[version]:
            _table(name).create(connection, checkfirst=True)

    return step


def _add_instructions(connection: Connection) -> None:
    if "instructions" not in {column["name"] for column in inspect(connection).get_columns("contexts")}:
        connection.execute(text("ALTER TABLE contexts ADD COLUMN instructions VARCHAR(64)"))


STEPS: Final[Mapping[int, Step]] = dict(
    sorted(({version: _make_tables(version) for version in TABLES} | {5: _add_instructions}).items())
)
"""What leads to each version from the one before; 0 is an empty database."""

NEWEST: Final = max(STEPS)


def version_of(connection: Connection) -> int:
    """Return the version of a database's schema, 0 where it has none of our tables."""
    there = set(inspect(connection).get_table_names())
    if versions.name in there:
        found = connection.execute(select(func.max(versions.c.version))).scalar_one_or_none()
        return 1 if found is None else int(found)
    return 1 if there & set(TABLES[1]) else 0


def migrate(connection: Connection) -> None:
    """Take the steps to the newest version, in the caller's transaction."""
    if connection.dialect.name == "sqlite":
        # Python's driver begins a transaction ahead of rows only, not of tables; and nobody else may migrate meanwhile.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    before = version_of(connection)
    for version in range(before + 1, NEWEST + 1):
        STEPS[version](connection)
    if before < NEWEST:
        connection.execute(insert(versions).values(version=NEWEST, reached_at=time.time()))


def refuse_newer(version: int, database: str, file: Path | None) -> None:
    """Let every version pass that this program knows.

    Raises:
        ConfigError: the schema is newer.
    """
    if version <= NEWEST:
        return
    copy = f", or put back the copy {backup_of(file, NEWEST)}" if file and backup_of(file, NEWEST).exists() else ""
    raise ConfigError(
        f"DATABASE_URL: the database {database} has schema version {version}, and this agent knows versions up to "
        f"{NEWEST}; run the newer agent again{copy}"
    )


def backup_of(file: Path, version: int) -> Path:
    """Return where the copy of a SQLite file goes before it leaves `version`."""
    return file.with_name(f"{file.name}.v{version}.bak")


def back_up(file: Path, version: int) -> Path:
    """Copy a SQLite file as it is now, its log included; return where. The copy is whole or not there.

    Raises:
        ConfigError: it cannot be made.
    """
    copy = backup_of(file, version)
    unfinished = copy.with_name(f"{copy.name}.new")
    try:
        unfinished.unlink(missing_ok=True)
        os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("VACUUM INTO ?", (str(unfinished),))
        _write_through(unfinished)
        unfinished.replace(copy)
        _write_through(file.parent)
    except (sqlite3.Error, OSError) as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(
            f"DATABASE_URL: {file} cannot be copied to {copy}, which is done before its schema is changed: {error}; "
            "make room, or give this user the right to write there"
        ) from error
    return copy


def _write_through(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _table(name: str) -> Table:
    return TaskModel.metadata.tables[name] if name in _OF_THE_SDK else tables.tables[name]
