"""Databases of the first release, taken to today's schema, and those that are not to be touched."""

import asyncio
import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from a2a.types import TaskState
from sqlalchemy import create_engine, event

from codex_workspace.common.errors import ConfigError
from codex_workspace.storage.migrations import NEWEST, STEPS, TABLES, back_up, backup_of, migrate
from codex_workspace.storage.store import open_store
from tests.unit.storage.test_store import ME

VERSION_1 = """
CREATE TABLE tasks (
    id VARCHAR(36) NOT NULL, context_id VARCHAR(36) NOT NULL, kind VARCHAR(16) NOT NULL, owner VARCHAR(255),
    last_updated DATETIME, status JSON NOT NULL, artifacts JSON, history JSON, protocol_version VARCHAR(16),
    metadata JSON, PRIMARY KEY (id)
);
CREATE INDEX ix_tasks_id ON tasks (id);
CREATE INDEX idx_tasks_owner_last_updated ON tasks (owner, last_updated);
CREATE TABLE contexts (
    owner VARCHAR(255) NOT NULL, context_id VARCHAR(36) NOT NULL, thread_id VARCHAR(64), created_at FLOAT NOT NULL,
    PRIMARY KEY (owner, context_id)
);
CREATE TABLE main_contexts (owner VARCHAR(255) NOT NULL, context_id VARCHAR(36) NOT NULL, PRIMARY KEY (owner));
INSERT INTO tasks VALUES (
    'task-1', 'context-1', 'task', 'me', '2025-11-01 10:00:00.000000', '{"state": "TASK_STATE_COMPLETED"}',
    '[{"artifactId": "answer", "parts": [{"text": "Forty-two."}]}]', '[]', '1.0', NULL
);
INSERT INTO contexts VALUES ('me', 'context-1', 'thread-1', 1762000000.0);
INSERT INTO main_contexts VALUES ('me', 'context-1');
"""
"""What the first release made, with a row in each table."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database of version 1, as a process that was killed leaves it: its rows are in the log."""
    file = tmp_path / "store.sqlite3"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("pragma journal_mode=wal")
        connection.executescript(VERSION_1)
    return file


def rows(file: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(file)) as connection:
        return list(connection.execute(query))


def tables(file: Path) -> set[object]:
    return {name for (name,) in rows(file, "select name from sqlite_master where type = 'table'")}


def url(file: Path) -> str:
    return f"sqlite+aiosqlite:///{file}"


async def assert_rows_are_kept(file: Path) -> None:
    async with open_store(url(file)) as store:
        assert await store.main_context("me") == "context-1"
        assert await store.context_thread("me", "context-1").load() == "thread-1"
        task = await store.tasks.get("task-1", ME)
        assert task is not None
        assert task.status.state == TaskState.TASK_STATE_COMPLETED
        assert task.artifacts[0].parts[0].text == "Forty-two."
        assert await store.deliveries.unfinished() == []


def test_the_table_of_steps_is_whole() -> None:
    assert list(STEPS) == list(range(1, NEWEST + 1))
    assert TABLES.keys() <= STEPS.keys()


async def test_a_database_of_version_1_is_migrated_and_what_it_was_is_kept(file: Path) -> None:
    before = "\n".join(str(line) for line in dump(file))
    await assert_rows_are_kept(file)
    assert rows(file, "select version from schema_version") == [(NEWEST,)]
    assert tables(file) == {name for names in TABLES.values() for name in names}
    copy = backup_of(file, 1)
    assert copy.name == "store.sqlite3.v1.bak"
    assert copy.stat().st_mode & 0o777 == 0o600
    assert "\n".join(str(line) for line in dump(copy)) == before


def dump(file: Path) -> list[str]:
    with closing(sqlite3.connect(file)) as connection:
        return list(connection.iterdump())


async def test_a_database_of_version_2_gets_the_tables_of_push(file: Path) -> None:
    await assert_rows_are_kept(file)
    backup_of(file, 1).unlink()
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript("drop table push_due; drop table push_notification_configs;")
        connection.execute("update schema_version set version = 2")
        connection.commit()
    before = dump(file)
    await assert_rows_are_kept(file)
    assert rows(file, "select version from schema_version order by 1") == [(2,), (NEWEST,)]
    assert tables(file) >= set(TABLES[3])
    assert dump(backup_of(file, 2)) == before


async def test_a_database_of_version_4_gets_the_column_of_instructions(file: Path) -> None:
    await assert_rows_are_kept(file)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("alter table contexts drop column instructions")
        connection.execute("update schema_version set version = 4")
        connection.commit()
    before = dump(file)
    await assert_rows_are_kept(file)
    assert rows(file, "select version from schema_version order by 1") == [(4,), (NEWEST,)]
    assert rows(file, "select context_id, instructions from contexts") == [("context-1", None)]
    assert dump(backup_of(file, 4)) == before


async def test_a_second_start_changes_nothing(file: Path) -> None:
    await assert_rows_are_kept(file)
    copy, once = backup_of(file, 1), dump(file)
    made = copy.stat().st_mtime_ns
    await assert_rows_are_kept(file)
    assert dump(file) == once
    assert copy.stat().st_mtime_ns == made
    assert not backup_of(file, NEWEST).exists()


async def test_a_new_database_is_of_the_newest_version_and_has_no_copy(tmp_path: Path) -> None:
    file = tmp_path / "new.sqlite3"
    async with open_store(url(file)):
        pass
    assert rows(file, "select version from schema_version") == [(NEWEST,)]
    assert [name for name in os.listdir(tmp_path) if "bak" in name] == []


async def test_a_new_and_a_migrated_database_are_the_same(file: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.sqlite3"
    for each in (file, new):
        async with open_store(url(each)):
            pass
    query = "select m.name, p.name, p.type, p.pk from sqlite_master m, pragma_table_info(m.name) p order by 1, 2"
    assert rows(file, query) == rows(new, query)


async def test_a_newer_schema_is_refused_and_left_alone(file: Path) -> None:
    await assert_rows_are_kept(file)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("insert into schema_version values (?, 0)", (NEWEST + 1,))
        connection.commit()
    once = dump(file)
    with pytest.raises(ConfigError) as refused:
        async with open_store(url(file)):
            pytest.fail("it is open")
    assert f"has schema version {NEWEST + 1}, and this agent knows versions up to {NEWEST}" in str(refused.value)
    assert "run the newer agent again" in str(refused.value)
    assert "put back the copy" not in str(refused.value)
    back_up(file, NEWEST)
    with pytest.raises(ConfigError, match=rf"put back the copy .*v{NEWEST}\.bak"):
        async with open_store(url(file)):
            pytest.fail("it is open")
    assert dump(file) == once


def migration_ends(file: Path, step: int) -> bool:
    """Migrate in a process that is killed at its n-th step; False where it was."""
    pid = os.fork()
    if pid == 0:
        engine = create_engine(f"sqlite:///{file}")
        event.listen(engine, "after_cursor_execute", dies_at(step))
        with engine.begin() as connection:
            connection.exec_driver_sql("pragma synchronous=full")
            migrate(connection)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def dies_at(step: int) -> Callable[..., None]:
    left = [step]

    def strike(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        if statement.split()[0] in ("CREATE", "ALTER", "INSERT"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return strike


@pytest.mark.parametrize("version", [0, 1])
def test_a_migration_that_is_killed_at_any_step_is_done_by_the_next_start(
    file: Path, tmp_path: Path, version: int
) -> None:
    for step in range(1, 30):
        attempt = tmp_path / f"{step}.sqlite3"
        if version:
            attempt.write_bytes(file.read_bytes())
        if migration_ends(attempt, step):
            assert step > 4
            return
        # All or nothing.
        assert tables(attempt) == set(TABLES[1] if version else ())
        asyncio.run(assert_rows_are_kept(attempt) if version else assert_it_opens(attempt))
        assert rows(attempt, "select version from schema_version") == [(NEWEST,)]
    pytest.fail("there is no end to its steps")


async def assert_it_opens(file: Path) -> None:
    async with open_store(url(file)) as store:
        assert await store.main_context("me")


async def test_a_copy_that_cannot_be_made_stops_the_start_before_anything_is_changed(file: Path) -> None:
    backup_of(file, 1).mkdir()
    once = dump(file)
    with pytest.raises(ConfigError, match=r"cannot be copied to .*v1\.bak"):
        async with open_store(url(file)):
            pytest.fail("it is open")
    assert dump(file) == once
    assert not list(file.parent.glob("*.new"))


def test_what_a_killed_copy_left_is_no_obstacle(file: Path) -> None:
    left = Path(f"{backup_of(file, 1)}.new")
    left.write_bytes(b"half of it")
    asyncio.run(assert_rows_are_kept(file))
    assert not left.exists()
    assert rows(backup_of(file, 1), "select thread_id from contexts") == [("thread-1",)]
