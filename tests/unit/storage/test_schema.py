"""The schema is created in one transaction, and databases of other versions are rejected and left as they are."""

import asyncio
import os
import signal
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from codex_workspace.common.errors import ConfigError
from codex_workspace.storage.database import Connection, Cursor, Value
from codex_workspace.storage.schema import SCHEMA_VERSION, TABLES, create_schema
from codex_workspace.storage.sqlite import SqliteEngine
from codex_workspace.storage.store import open_store


def rows(file: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(file)) as connection:
        return list(connection.execute(query))


def tables(file: Path) -> set[object]:
    return {name for (name,) in rows(file, "select name from sqlite_master where type = 'table'")}


def dump(file: Path) -> list[str]:
    with closing(sqlite3.connect(file)) as connection:
        return list(connection.iterdump())


async def open_and_close(file: Path) -> None:
    async with open_store(f"sqlite:///{file}") as store:
        assert await store.main_context("me")


@pytest.fixture
async def file(tmp_path: Path) -> Path:
    file = tmp_path / "store.sqlite3"
    await open_and_close(file)
    return file


def test_a_new_database_has_all_tables_and_the_version(file: Path) -> None:
    assert rows(file, "select version from schema_version") == [(SCHEMA_VERSION,)] == [(2,)]
    assert tables(file) == TABLES


async def test_a_second_start_changes_nothing(file: Path) -> None:
    before = dump(file)
    await open_and_close(file)
    assert dump(file) == before


async def assert_rejected(file: Path, found: str) -> None:
    before = dump(file)
    with pytest.raises(ConfigError) as rejected:
        await open_and_close(file)
    sentence = str(rejected.value)
    assert sentence.startswith("DATABASE_URL: the database ")
    assert f"has {found}, and this agent supports only version {SCHEMA_VERSION}" in sentence
    assert "set DATABASE_URL to another database" in sentence
    assert dump(file) == before


async def test_a_newer_schema_is_rejected_unchanged(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("insert into schema_version values (?, 0)", (SCHEMA_VERSION + 1,))
    await assert_rejected(file, f"schema version {SCHEMA_VERSION + 1}")


async def test_tables_without_a_version_are_rejected_unchanged(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("delete from schema_version")
    await assert_rejected(file, "an unknown schema")


def creation_completes(file: Path, step: int) -> bool:
    """Create the schema in a process that is killed after its n-th statement; return False if it was killed."""
    pid = os.fork()
    if pid == 0:
        connection = DyingConnection(sqlite3.connect(file, isolation_level=None), step)
        connection.begin()
        create_schema(connection, SqliteEngine.types)
        connection.run("commit")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class DyingConnection(Connection):
    """Kills its process after a number of statements."""

    def __init__(self, opened: sqlite3.Connection, steps: int) -> None:
        super().__init__(opened.execute, opened.close)
        self._left = steps

    def run(self, sql: str, values: Sequence[Value] = ()) -> Cursor:
        cursor = super().run(sql, values)
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return cursor


def test_a_creation_that_is_killed_at_any_step_is_repeated_by_the_next_start(tmp_path: Path) -> None:
    for step in range(1, 60):
        attempt = tmp_path / f"{step}.sqlite3"
        if creation_completes(attempt, step):
            assert step > 4
            return
        # All or nothing; the last step is the commit.
        assert tables(attempt) in (set(), TABLES)
        asyncio.run(open_and_close(attempt))
        assert rows(attempt, "select version from schema_version") == [(SCHEMA_VERSION,)]
    pytest.fail("the creation has no end")
