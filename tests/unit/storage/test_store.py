"""What outlives the process, in real SQLite files."""

import asyncio
import math
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest
from a2a.auth.user import User
from a2a.server.context import ServerCallContext
from a2a.server.tasks import DatabaseTaskStore
from a2a.types import Artifact, ListTasksRequest, Part, Task, TaskState, TaskStatus
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import create_async_engine

from codex_workspace.common.errors import ConfigError
from codex_workspace.storage.store import SAVE_INTERVAL_S, DebouncedTaskStore, Store, open_store

SUBMITTED, WORKING = TaskState.TASK_STATE_SUBMITTED, TaskState.TASK_STATE_WORKING
COMPLETED, CANCELED = TaskState.TASK_STATE_COMPLETED, TaskState.TASK_STATE_CANCELED


class Caller(User):
    """Somebody with a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def is_authenticated(self) -> bool:
        return True

    @property
    def user_name(self) -> str:
        return self._name


def by(name: str) -> ServerCallContext:
    return ServerCallContext(user=Caller(name))


ME = by("me")


def task_of(state: TaskState, text: str = "", task_id: str = "task-1") -> Task:
    artifacts = [Artifact(artifact_id="answer", parts=[Part(text=text)])] if text else []
    return Task(id=task_id, context_id="context-1", status=TaskStatus(state=state), artifacts=artifacts)


def text_of(task: Task | None) -> str:
    assert task is not None
    return "".join(part.text for artifact in task.artifacts for part in artifact.parts)


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite+aiosqlite:///{folder / 'store.sqlite3'}") as store:
        yield store


def on_disk(folder: Path, query: str) -> list[tuple[object, ...]]:
    """Return what another reader of the file sees."""
    with closing(sqlite3.connect(folder / "store.sqlite3")) as connection:
        return list(connection.execute(query))


def states_on_disk(folder: Path) -> dict[object, object]:
    rows = on_disk(folder, "select id, json_extract(status, '$.state') from tasks")
    return {task_id: state for task_id, state in rows}  # noqa: C416


@contextmanager
def written() -> Iterator[list[str]]:
    """Collect the statements that write."""
    statements: list[str] = []

    def note(_conn: object, _cursor: object, statement: str, *_rest: object) -> None:
        if statement.split()[0] in ("INSERT", "UPDATE", "DELETE"):
            statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(Engine, "before_cursor_execute", note)


# --- Contexts ---


async def test_a_contexts_thread_is_visible_to_its_owner_only(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        mine = store.context_thread("me", "context-1")
        assert await mine.load() is None
        await mine.save("thread-1")
        assert await mine.load() == "thread-1"
        assert await store.context_thread("you", "context-1").load() is None
        assert await store.context_thread("me", "context-2").load() is None
        await mine.save("thread-2")
        assert await mine.load() == "thread-2"
        assert on_disk(tmp_path, "select owner, context_id, thread_id from contexts") == [
            ("me", "context-1", "thread-2")
        ]


async def test_a_threads_instructions_are_stored_with_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        mine = store.context_thread("me", "context-1")
        assert await mine.instructions() is None
        await mine.save("thread-1", "a" * 64)
        await store.context_thread("you", "context-1").save("thread-2")
    async with opened(tmp_path) as store:
        assert await store.context_thread("me", "context-1").instructions() == "a" * 64
        assert await store.context_thread("you", "context-1").instructions() is None
        await store.context_thread("me", "context-1").save("thread-1")
        assert await store.context_thread("me", "context-1").instructions() is None


async def test_a_thread_is_known_to_the_next_process(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.context_thread("me", "context-1").save("thread-1")
        main = await store.main_context("me")
    async with opened(tmp_path) as store:
        assert await store.context_thread("me", "context-1").load() == "thread-1"
        assert await store.main_context("me") == main


async def test_every_owner_has_one_main_context_under_concurrency(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        mine = await asyncio.gather(*(store.main_context("me") for _ in range(10)))
        assert len(set(mine)) == 1
        assert len(mine[0]) == 36
        assert await store.main_context("you") != mine[0]


async def test_two_processes_agree_on_the_main_context(tmp_path: Path) -> None:
    async with opened(tmp_path) as one, opened(tmp_path) as two:
        asked = [store.main_context("me") for _ in range(5) for store in (one, two)]
        assert len(set(await asyncio.gather(*asked))) == 1


# --- Tasks ---


async def test_a_streamed_answer_costs_a_few_writes(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        with written() as statements:
            await store.tasks.save(task_of(SUBMITTED), ME)
            for length in range(1, 501):
                await store.tasks.save(task_of(WORKING, "x" * length), ME)
                assert len(text_of(await store.tasks.get("task-1", ME))) == length
            await store.tasks.save(task_of(COMPLETED, "whole"), ME)
        assert len(statements) <= 2 + 5 / SAVE_INTERVAL_S
        assert text_of(await store.tasks.get("task-1", ME)) == "whole"
        assert states_on_disk(tmp_path) == {"task-1": "TASK_STATE_COMPLETED"}


async def saved_as_it_grows(folder: Path, interval_s: float) -> list[tuple[str, str]]:
    """Save a task that grows; return what a reader of the task and one of the file see after each save."""
    async with opened(folder):
        engine = create_async_engine(f"sqlite+aiosqlite:///{folder / 'store.sqlite3'}")
    tasks, seen = DebouncedTaskStore(DatabaseTaskStore(engine, create_table=False), interval_s), []
    try:
        await tasks.save(task_of(SUBMITTED), ME)
        for text in ("a", "ab", "abc"):
            await tasks.save(task_of(WORKING, text), ME)
            written = "select json_extract(artifacts, '$[0].parts[0].text') from tasks"
            seen.append((text_of(await tasks.get("task-1", ME)), str(on_disk(folder, written)[0][0])))
    finally:
        await engine.dispose()
    return seen


async def test_a_task_that_works_for_long_is_written_now_and_then(tmp_path: Path) -> None:
    # The first of a working task was written as submitted a moment ago.
    assert await saved_as_it_grows(tmp_path, interval_s=0) == [("a", "None"), ("ab", "ab"), ("abc", "abc")]


async def test_growing_tasks_are_not_written_within_the_interval(tmp_path: Path) -> None:
    assert await saved_as_it_grows(tmp_path, interval_s=math.inf) == [("a", "None"), ("ab", "None"), ("abc", "None")]


@pytest.mark.parametrize("state", [COMPLETED, CANCELED, TaskState.TASK_STATE_FAILED, TaskState.TASK_STATE_REJECTED])
async def test_a_change_of_state_is_on_disk_at_once(tmp_path: Path, state: TaskState) -> None:
    async with opened(tmp_path) as store:
        await store.tasks.save(task_of(SUBMITTED), ME)
        assert states_on_disk(tmp_path) == {"task-1": "TASK_STATE_SUBMITTED"}
        await store.tasks.save(task_of(WORKING), ME)
        await store.tasks.save(task_of(state, "end"), ME)
        assert states_on_disk(tmp_path) == {"task-1": TaskState.Name(state)}


async def test_a_new_id_is_no_task_until_one_is_saved_under_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for state in (SUBMITTED, WORKING):
            task_id = store.tasks.new_ids.make()
            assert await store.tasks.get(task_id, ME) is None
            await store.tasks.save(task_of(state, task_id=task_id), ME)
            assert await store.tasks.get(task_id, ME) is not None
            assert states_on_disk(tmp_path)[task_id] == TaskState.Name(state)


async def test_get_returns_a_copy(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.tasks.save(task_of(SUBMITTED), ME)
        await store.tasks.save(task_of(WORKING, "mine"), ME)
        copy = await store.tasks.get("task-1", ME)
        assert copy is not None
        copy.status.state = CANCELED
        again = await store.tasks.get("task-1", ME)
        assert again is not None
        assert again.status.state == WORKING


async def test_a_task_is_visible_to_its_owner_only(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for state in (SUBMITTED, WORKING, COMPLETED):
            await store.tasks.save(task_of(state), ME)
            assert await store.tasks.get("task-1", by("you")) is None
            assert len((await store.tasks.list(ListTasksRequest(), by("you"))).tasks) == 0
            assert len((await store.tasks.list(ListTasksRequest(), ME)).tasks) == 1


async def test_a_list_shows_the_newest(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.tasks.save(task_of(SUBMITTED), ME)
        await store.tasks.save(task_of(WORKING, "a"), ME)
        await store.tasks.save(task_of(WORKING, "ab"), ME)
        listed = await store.tasks.list(ListTasksRequest(include_artifacts=True), ME)
        assert [text_of(task) for task in listed.tasks] == ["ab"]


async def test_a_list_does_not_undo_an_end(tmp_path: Path) -> None:
    """A list writes what waits while tasks end beside it."""
    async with opened(tmp_path) as store:
        ids = [f"task-{number}" for number in range(20)]
        for task_id in ids:
            await store.tasks.save(task_of(SUBMITTED, task_id=task_id), ME)
            await store.tasks.save(task_of(WORKING, "half", task_id), ME)
        endings = [store.tasks.save(task_of(COMPLETED, "whole", task_id), ME) for task_id in reversed(ids)]
        await asyncio.gather(store.tasks.list(ListTasksRequest(), ME), *endings)
        assert set(states_on_disk(tmp_path).values()) == {"TASK_STATE_COMPLETED"}
        assert {text_of(await store.tasks.get(task_id, ME)) for task_id in ids} == {"whole"}


async def test_closing_writes_pending_tasks(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.tasks.save(task_of(SUBMITTED), ME)
        await store.tasks.save(task_of(WORKING, "so far"), ME)
    assert states_on_disk(tmp_path) == {"task-1": "TASK_STATE_WORKING"}
    async with opened(tmp_path) as store:
        assert text_of(await store.tasks.get("task-1", ME)) == "so far"


async def test_a_deleted_task_is_not_found(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.tasks.save(task_of(SUBMITTED), ME)
        await store.tasks.save(task_of(WORKING), ME)
        await store.tasks.delete("task-1", ME)
        assert await store.tasks.get("task-1", ME) is None
        assert states_on_disk(tmp_path) == {}


async def test_tasks_of_an_earlier_process_fail_with_a_reason(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for task_id, states in {
            "submitted": [SUBMITTED],
            "working": [SUBMITTED, WORKING],
            "completed": [SUBMITTED, WORKING, COMPLETED],
            "canceled": [SUBMITTED, CANCELED],
        }.items():
            for state in states:
                await store.tasks.save(task_of(state, f"of {task_id}", task_id), ME)
    async with opened(tmp_path) as store:
        assert await store.fail_unfinished("The agent stopped.") == 2
        for task_id in ("submitted", "working"):
            task = await store.tasks.get(task_id, ME)
            assert task is not None
            assert task.status.state == TaskState.TASK_STATE_FAILED
            assert task.status.message.parts[0].text == "The agent stopped."
            assert task.status.HasField("timestamp")
            assert text_of(task) == f"of {task_id}"
        assert states_on_disk(tmp_path)["completed"] == "TASK_STATE_COMPLETED"
        assert states_on_disk(tmp_path)["canceled"] == "TASK_STATE_CANCELED"
        assert await store.fail_unfinished("The agent stopped.") == 0


# --- The file ---


async def test_the_file_is_in_wal_mode(tmp_path: Path) -> None:
    async with opened(tmp_path):
        assert on_disk(tmp_path, "pragma journal_mode") == [("wal",)]


@pytest.mark.parametrize("content", [b"this is no database" * 100, None])
async def test_a_database_that_cannot_be_opened_is_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "file"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(
        ConfigError, match=rf"DATABASE_URL: {file} (is not a SQLite database|cannot be read: Is a directory)"
    ):
        async with open_store(f"sqlite+aiosqlite:///{file}"):
            pytest.fail("it is open")
