"""Damaged databases are reported, a full disk loses nothing, and retention uses the time that tasks are stored with.

Covers `storage.sqlite` and `storage.database`.
"""

import asyncio
import os
import random
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

import anyio
import pytest
from a2a.types import ListTasksRequest, Message, Part, Role, SendMessageRequest, Task

from codex_workspace.common.errors import ConfigError, StoreUnavailable
from codex_workspace.storage.database import PROBE_INTERVAL_S
from codex_workspace.storage.deliveries import DeliveryKey, DeliveryState, message_digest
from codex_workspace.storage.schema import SCHEMA_VERSION
from codex_workspace.storage.sqlite import file_version, integrity_problem, require_intact, set_aside
from codex_workspace.storage.store import Store, open_database, open_store
from tests.e2e.small_disk import small_disk
from tests.support.waiting import eventually
from tests.unit.storage.test_store import COMPLETED, ME, SUBMITTED, WORKING, task_of, text_of


def url(file: Path) -> str:
    return f"sqlite:///{file}"


@pytest.fixture
async def file(tmp_path: Path) -> Path:
    """A valid database with a hundred rows."""
    file = tmp_path / "workspace.sqlite3"
    async with open_store(url(file)) as store:
        for number in range(100):
            await store.context_thread("me", f"context-{number}").save("thread-" + "x" * 50)
    return file


def rows(file: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(file)) as connection:
        return list(connection.execute(query))


# --- Damage ---


def truncate_file(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def write_noise(file: Path) -> None:
    file.write_bytes(random.Random(7).randbytes(20_000))


def write_noise_after_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100] + random.Random(7).randbytes(file.stat().st_size - 100))


def overwrite_a_page(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[4096 * 8 : 4096 * 9] = random.Random(7).randbytes(4096)
    file.write_bytes(content)


def write_zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def truncate_to_nothing(file: Path) -> None:
    os.truncate(file, 0)


def make_another_programs(file: Path) -> None:
    file.unlink()
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript("create table songs (title text); create table albums (name text)")


def make_another_programs_tasks(file: Path) -> None:
    file.unlink()
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript("create table tasks (id integer, title text, done integer)")


def drop_a_table(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("drop table deliveries")


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (truncate_file, "is damaged: "),
    (write_noise, "is not a SQLite database"),
    (write_noise_after_the_header, "is damaged: "),
    (overwrite_a_page, "is damaged: "),
    (write_zeros, "is not a SQLite database"),
    (make_another_programs, "belongs to another program: it has the tables albums, songs"),
    (make_another_programs_tasks, "belongs to another program: it has the tables tasks"),
    (drop_a_table, "is damaged: it lacks the tables deliveries"),
]


def content_of(file: Path) -> bytes:
    return file.read_bytes()


@pytest.mark.parametrize(("damage", "problem"), DAMAGES, ids=lambda value: getattr(value, "__name__", ""))
async def test_a_foreign_file_is_reported_and_left_unchanged(
    file: Path, damage: Callable[[Path], None], problem: str
) -> None:
    damage(file)
    before = content_of(file)
    with pytest.raises(ConfigError) as raised:
        async with open_store(url(file)):
            pytest.fail("it is open")
    assert str(raised.value).startswith(f"DATABASE_URL: {file} {problem}")
    assert "`python -m codex_workspace doctor --set-aside`" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert content_of(file) == before


@pytest.mark.parametrize(("damage", "problem"), DAMAGES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_foreign_file_is_set_aside_on_request(file: Path, damage: Callable[[Path], None], problem: str) -> None:
    damage(file)
    before = file.read_bytes()
    for suffix in ("-wal", "-shm"):
        file.with_name(file.name + suffix).write_bytes(suffix.encode())
    if "SQLite" not in problem:
        # SQLite itself must not read an invalid write-ahead log.
        for suffix in ("-wal", "-shm"):
            file.with_name(file.name + suffix).write_bytes(b"")
    aside = set_aside(file)
    assert aside.name.startswith("workspace.sqlite3.damaged-2")
    assert aside.read_bytes() == before
    assert not [name for name in os.listdir(file.parent) if name.startswith("workspace.sqlite3-")]
    assert aside.with_name(f"{aside.name}-wal").exists()
    assert integrity_problem(file) is None


async def test_a_valid_file_is_not_set_aside(file: Path) -> None:
    with pytest.raises(ConfigError, match="is intact, so it was not renamed"):
        set_aside(file)
    async with open_store(url(file)) as store:
        # Also while it is open and some rows are only in the write-ahead log.
        await store.context_thread("me", "new").save("thread")
        with pytest.raises(ConfigError, match="is intact, so it was not renamed"):
            set_aside(file)
        assert file_version(file) == SCHEMA_VERSION


def test_two_files_set_aside_in_one_second_get_different_names(file: Path) -> None:
    write_noise(file)
    first = set_aside(file)
    file.write_bytes(b"nonsense" * 100)
    second = set_aside(file)
    assert first != second
    assert second.read_bytes() == b"nonsense" * 100


@pytest.mark.parametrize("exists", [False, True])
def test_a_missing_and_an_empty_file_start_a_new_database(tmp_path: Path, *, exists: bool) -> None:
    file = tmp_path / "new.sqlite3"
    if exists:
        file.touch()
    require_intact(file)
    assert list(tmp_path.iterdir()) == ([file] if exists else [])


async def test_the_check_changes_nothing(file: Path) -> None:
    async with open_store(url(file)) as store:
        await store.context_thread("me", "new").save("thread")
        before = {path: path.read_bytes() for path in file.parent.iterdir() if not path.name.endswith("-shm")}
        require_intact(file)
        assert file_version(file) == SCHEMA_VERSION
        assert {path: path.read_bytes() for path in before} == before


# --- A full disk ---


def request_of(message_id: str, text: str) -> SendMessageRequest:
    message = Message(role=Role.ROLE_USER, message_id=message_id, parts=[Part(text=text)])
    return SendMessageRequest(message=message)


async def accept(store: Store, message_id: str, text: str = "Hello", task_id: str = "task-1") -> DeliveryKey:
    key, request = DeliveryKey("me", message_id), request_of(message_id, text)
    assert await store.deliveries.accept(key, request, message_digest(request), task_id, "context-1") is not None
    return key


@asynccontextmanager
async def store_on_a_small_disk(folder: Path) -> AsyncIterator[tuple[Store, Path]]:
    """Yield a store, and the file that makes its disk full while it exists."""
    full = folder / "full"
    with small_disk(full):
        async with open_store(url(folder / "small.sqlite3")) as store:
            yield store, full
    assert rows(folder / "small.sqlite3", "pragma integrity_check") == [("ok",)]


LARGE_TEXT = "x" * 500_000


async def test_a_message_that_does_not_fit_is_rejected_and_not_stored(tmp_path: Path) -> None:
    async with store_on_a_small_disk(tmp_path) as (store, full):
        await accept(store, "before")
        assert await store.write_problem() is None
        full.touch()
        with pytest.raises(
            StoreUnavailable, match=r"the disk is full\); the request was not accepted, send it again later"
        ):
            await accept(store, "during", LARGE_TEXT)
        assert await store.write_problem() == "the disk is full"
        request = request_of("during", LARGE_TEXT)
        assert await store.deliveries.find(DeliveryKey("me", "during"), message_digest(request)) is None
        assert len(await store.deliveries.unfinished()) == 1
        # A full disk is probed at intervals only.
        full.unlink()
        assert await store.write_problem() == "the disk is full"

        async def is_writable() -> bool:
            return await store.write_problem() is None

        await eventually(is_writable)
        await accept(store, "during", LARGE_TEXT)
    assert rows(tmp_path / "small.sqlite3", "select message_id from deliveries order by 1") == [
        ("before",),
        ("during",),
    ]


async def test_what_fits_is_stored_beside_what_does_not(tmp_path: Path) -> None:
    async with store_on_a_small_disk(tmp_path) as (store, full):
        await accept(store, "before")
        full.touch()
        large, small = await asyncio.gather(
            accept(store, "large", LARGE_TEXT, "task-2"), accept(store, "small", "x", "task-3"), return_exceptions=True
        )
        assert isinstance(large, StoreUnavailable)
        assert small == DeliveryKey("me", "small")


async def test_a_deferred_write_waits_for_disk_space(tmp_path: Path) -> None:
    full = tmp_path / "full"
    with small_disk(full):
        async with open_database(url(tmp_path / "small.sqlite3")) as database:
            full.touch()
            database.write_later(lambda rows: rows.change("insert into write_probe values (7, ?)", bytes(500_000)))
            await database.flush()
            assert rows(tmp_path / "small.sqlite3", "select id from write_probe") == []
            full.unlink()
            await eventually(lambda: rows(tmp_path / "small.sqlite3", "select id from write_probe") == [(7,)])


async def test_a_full_disk_is_probed_periodically(tmp_path: Path) -> None:
    async with store_on_a_small_disk(tmp_path) as (store, full):
        full.touch()
        with pytest.raises(StoreUnavailable):
            await accept(store, "during", LARGE_TEXT)
        await anyio.sleep(PROBE_INTERVAL_S + 0.1)
        assert await store.write_problem() == "the disk is full"
        full.unlink()
        assert await store.write_problem() == "the disk is full"


async def test_the_answer_of_an_accepted_message_waits_for_disk_space(tmp_path: Path) -> None:
    async with store_on_a_small_disk(tmp_path) as (store, full):
        key = await accept(store, "first")
        await store.tasks.save(task_of(SUBMITTED), ME)
        await store.deliveries.mark_started(key, "thread-1", "turn-1")
        await store.tasks.save(task_of(WORKING), ME)
        full.touch()

        async def end() -> None:
            await store.deliveries.mark_answered(key, b"x" * 500_000)
            await store.tasks.save(task_of(COMPLETED, LARGE_TEXT), ME)
            await store.tasks.flush()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end)
            await anyio.sleep(0.3)
            assert (await state_of(store, "first")) == DeliveryState.STARTED
            assert (await status_of(store)) == WORKING
            full.unlink()
        assert (await state_of(store, "first")) == DeliveryState.ACKNOWLEDGED
        assert (await status_of(store)) == COMPLETED


async def state_of(store: Store, message_id: str) -> DeliveryState:
    found = await store.deliveries.find(DeliveryKey("me", message_id), message_digest(request_of(message_id, "Hello")))
    assert found is not None
    return found.state


async def status_of(store: Store) -> int:
    task: Task | None = await store.tasks.get("task-1", ME)
    assert task is not None
    return task.status.state


async def test_a_growing_answer_is_readable_while_the_disk_is_full(tmp_path: Path) -> None:
    async with store_on_a_small_disk(tmp_path) as (store, full):
        await store.tasks.save(task_of(SUBMITTED), ME)
        await store.tasks.save(task_of(WORKING), ME)
        full.touch()
        await store.tasks.save(task_of(WORKING, LARGE_TEXT), ME)
        with pytest.raises(StoreUnavailable):
            await store.tasks.flush()
        assert await store.write_problem() == "the disk is full"
        listed = await store.tasks.list(ListTasksRequest(), ME)
        assert [task.id for task in listed.tasks] == ["task-1"]
        assert text_of(await store.tasks.get("task-1", ME)) == LARGE_TEXT
        full.unlink()
    # Closing the store writes the pending changes.
    assert rows(tmp_path / "small.sqlite3", "select length(body) > 500000 from tasks") == [(1,)]


async def test_a_full_disk_does_not_delay_a_stop(tmp_path: Path) -> None:
    async with store_on_a_small_disk(tmp_path) as (store, full):
        await store.tasks.save(task_of(SUBMITTED), ME)
        await store.tasks.save(task_of(WORKING, LARGE_TEXT), ME)
        await store.tasks.save(task_of(WORKING, LARGE_TEXT + LARGE_TEXT), ME)
        full.touch()
    assert rows(tmp_path / "small.sqlite3", "select state from tasks") == [("TASK_STATE_SUBMITTED",)]


# --- Files that are lost or overwritten while the agent runs ---

GONE = "the database was deleted, moved or replaced; restore it and restart the agent"
OVERWRITTEN = "the database was overwritten; stop the agent, restore a backup and start the agent"
DAMAGED = "the database is damaged; stop the agent and run `python -m codex_workspace doctor`"


def delete(file: Path) -> None:
    file.unlink()


def replace_by_a_copy(file: Path) -> None:
    copy = file.with_name("copy")
    copy.write_bytes(file.read_bytes())
    copy.replace(file)


@pytest.mark.parametrize("lose", [delete, replace_by_a_copy])
async def test_nothing_is_written_to_a_lost_file(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    file, kept = tmp_path / "lost.sqlite3", tmp_path / "kept"
    async with open_store(url(file)) as store:
        await accept(store, "first")
        assert await store.write_problem() is None
        os.link(file, kept)
        lose(file)
        assert await store.write_problem() == GONE
        with pytest.raises(StoreUnavailable, match=f"{GONE}.; the request was not accepted, send it again later"):
            await accept(store, "second")
        # What is stored can be read, and nothing was created in the file's place.
        assert await state_of(store, "first") == DeliveryState.ACCEPTED
        assert file.exists() == (lose is replace_by_a_copy)
        kept.replace(file)
        await eventually(partial(is_writable, store))
        await accept(store, "second")
    assert rows(file, "select message_id from deliveries") == [("first",), ("second",)]


async def is_writable(store: Store) -> bool:
    return await store.write_problem() is None


async def test_nothing_is_written_while_a_watched_folder_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home, moved = tmp_path / "home", tmp_path / "moved"
    home.mkdir()
    async with open_store(url(tmp_path / "own.sqlite3"), watched={"CODEX_HOME": home}) as store:
        key = await accept(store, "first")
        home.rename(moved)
        problem = "CODEX_HOME was deleted, moved or replaced; restore it and restart the agent"
        with pytest.raises(StoreUnavailable, match=problem):
            await accept(store, "second")
        async with anyio.create_task_group() as tasks:
            # The end of an accepted message waits.
            tasks.start_soon(store.deliveries.mark_answered, key, b"the end")
            for _ in range(10):
                assert await store.write_problem() == problem
            assert await state_of(store, "first") == DeliveryState.ACCEPTED
            moved.rename(home)
        assert await state_of(store, "first") == DeliveryState.ANSWERED
    assert [record.levelname for record in caplog.records if problem in record.getMessage()] == ["ERROR"]


def overwrite_with_another_database(file: Path) -> None:
    other = file.with_name("other")
    make_another_programs(make_file(other))
    file.write_bytes(other.read_bytes())


def make_file(file: Path) -> Path:
    file.touch()
    return file


def overwrite_with_an_earlier_copy(file: Path) -> None:
    file.write_bytes(file.with_name("backup").read_bytes())


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize(
    "overwrite",
    [write_noise, write_zeros, truncate_to_nothing, overwrite_with_another_database, overwrite_with_an_earlier_copy],
)
async def test_nothing_is_written_to_an_overwritten_file(
    file: Path, overwrite: Callable[[Path], None], *, looks: bool
) -> None:
    shutil.copy(file, file.with_name("backup"))
    async with open_store(url(file)) as store:
        await accept(store, "first")
        overwrite(file)
        if looks:
            assert await store.write_problem() == OVERWRITTEN
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="the database was overwritten; stop the agent, restore a"):
                await accept(store, "second")
        assert await store.write_problem() == OVERWRITTEN


@pytest.mark.parametrize("overwrite", [write_noise, overwrite_with_another_database])
async def test_noise_is_noticed_also_if_a_reader_keeps_the_mark_out_of_the_file(
    file: Path, overwrite: Callable[[Path], None]
) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as reader:
        reader.execute("begin")
        assert reader.execute("select * from deliveries").fetchall() == []
        async with open_store(url(file)) as store:
            await accept(store, "first")
            reader.execute("commit")
            reader.execute("pragma wal_checkpoint")
            assert await store.write_problem() is None
            overwrite(file)
            assert await store.write_problem() == DAMAGED
            with pytest.raises(StoreUnavailable, match="the database is damaged; stop the agent and run"):
                await accept(store, "second")


async def test_the_mark_is_part_of_no_row(file: Path) -> None:
    """Two starts, with writes that fill the log, keep everything."""
    for name in ("first", "second"):
        async with open_store(url(file)) as store:
            await accept(store, name)
            assert await store.write_problem() is None
    assert rows(file, "select message_id from deliveries") == [("first",), ("second",)]


# --- Old tasks ---


async def test_the_agents_own_timestamps_are_used(file: Path) -> None:
    """Retention compares the time that the task store writes: another unit or time zone would remove new tasks."""
    async with open_store(url(file)) as store:
        task = task_of(COMPLETED)
        task.status.timestamp.GetCurrentTime()
        await store.tasks.save(task, ME)
        await store.tasks.flush()
        assert await store.retention(0.02, 10).prune() == 0
        assert await store.retention(0, 10).prune() == 1
