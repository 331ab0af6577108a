"""What outlives the process, in databases of both kinds.

Covers `storage.contexts` and `storage.tasks`.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

import pytest
from a2a.auth.user import User
from a2a.server.context import ServerCallContext
from a2a.types import Artifact, ListTasksRequest, Message, Part, SendMessageRequest, Task, TaskState, TaskStatus
from a2a.utils.errors import InvalidParamsError

from codex_workspace.common.database_url import sqlite_url
from codex_workspace.common.errors import ConfigError
from codex_workspace.storage.database import DELAY_S
from codex_workspace.storage.deliveries import Deliveries, DeliveryKey, message_digest
from codex_workspace.storage.store import Store, engine_of, open_database, open_store
from codex_workspace.storage.tasks import TaskStore, join_text
from tests.support.waiting import eventually

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
async def opened(url: str) -> AsyncIterator[Store]:
    async with open_store(url) as store:
        yield store


def execute(url: str, statement: str) -> None:
    """Change the database from outside."""
    with closing(engine_of(url).connect()) as connection:
        connection.change(statement)


def on_disk(url: str, query: str) -> list[tuple[object, ...]]:
    """Return what another reader of the database sees."""
    with closing(engine_of(url).connect()) as connection:
        return connection.all(lambda *columns: columns, query)


def states_on_disk(url: str) -> dict[object, object]:
    rows = on_disk(url, "select id, state from tasks")
    return {task_id: state for task_id, state in rows}  # noqa: C416


# --- Contexts ---


async def test_a_contexts_thread_is_visible_to_its_owner_only(url: str) -> None:
    async with opened(url) as store:
        mine = store.context_thread("me", "context-1")
        assert await mine.load() is None
        await mine.save("thread-1")
        assert await mine.load() == "thread-1"
        assert await store.context_thread("you", "context-1").load() is None
        assert await store.context_thread("me", "context-2").load() is None
        await mine.save("thread-2")
        assert await mine.load() == "thread-2"
        assert on_disk(url, "select owner, context_id, thread_id from contexts") == [("me", "context-1", "thread-2")]


async def test_a_threads_instructions_are_stored_with_it(url: str) -> None:
    async with opened(url) as store:
        mine = store.context_thread("me", "context-1")
        assert await mine.instructions() is None
        await mine.save("thread-1", "a" * 64)
        await store.context_thread("you", "context-1").save("thread-2")
    async with opened(url) as store:
        assert await store.context_thread("me", "context-1").instructions() == "a" * 64
        assert await store.context_thread("you", "context-1").instructions() is None
        await store.context_thread("me", "context-1").save("thread-1")
        assert await store.context_thread("me", "context-1").instructions() is None


async def test_a_thread_is_known_to_the_next_process(url: str) -> None:
    async with opened(url) as store:
        await store.context_thread("me", "context-1").save("thread-1")
        main = await store.main_context("me")
    async with opened(url) as store:
        assert await store.context_thread("me", "context-1").load() == "thread-1"
        assert await store.main_context("me") == main


async def test_every_owner_has_one_main_context_under_concurrency(url: str) -> None:
    async with opened(url) as store:
        mine = await asyncio.gather(*(store.main_context("me") for _ in range(10)))
        assert len(set(mine)) == 1
        assert len(mine[0]) == 36
        assert await store.main_context("you") != mine[0]


async def test_messages_at_once_get_the_same_main_context(url: str) -> None:
    async with opened(url) as store:
        assert len(set(await asyncio.gather(*(store.main_context("me") for _ in range(10))))) == 1


# --- Tasks ---


async def test_a_streamed_answer_costs_a_few_writes(url: str, committed: list[int]) -> None:
    async with opened(url) as store:
        await store.tasks.save(task_of(SUBMITTED), ME)
        for length in range(1, 501):
            await store.tasks.save(task_of(WORKING, "x" * length), ME)
            assert len(text_of(await store.tasks.get("task-1", ME))) == length
        await store.tasks.save(task_of(COMPLETED, "whole"), ME)
        assert len(committed) <= 2 + 5 / DELAY_S
        assert text_of(await store.tasks.get("task-1", ME)) == "whole"
        assert states_on_disk(url) == {"task-1": "TASK_STATE_COMPLETED"}


async def test_a_growing_answer_stays_one_part(url: str) -> None:
    async with opened(url) as store:
        task = task_of(WORKING, "x")
        for _ in range(50):
            task.artifacts[0].parts.append(Part(text="y"))
            await store.tasks.save(task, ME)
        found = await store.tasks.get("task-1", ME)
        assert found is not None
        assert [part.text for part in found.artifacts[0].parts] == ["x" + "y" * 50]


def test_only_neighbouring_parts_of_plain_text_are_joined() -> None:
    named, table = Part(text="c", filename="c.txt"), Part(url="https://example.com/table")
    artifact = Artifact(parts=[Part(text="a"), Part(text="b"), named, Part(text="d"), table, Part(text="e")])
    join_text(artifact)
    assert list(artifact.parts) == [Part(text="ab"), named, Part(text="d"), table, Part(text="e")]


@pytest.mark.parametrize(("delay_s", "texts"), [(0.01, ["a", "ab", "abc"]), (math.inf, ["", "", ""])])
async def test_a_growing_task_is_written_after_the_delay(url: str, delay_s: float, texts: list[str]) -> None:
    async with open_database(url) as database:
        tasks = TaskStore(database, Deliveries(database), delay_s)
        await tasks.save(task_of(SUBMITTED), ME)
        for text, stored in zip(("a", "ab", "abc"), texts, strict=True):
            await tasks.save(task_of(WORKING, text), ME)
            assert text_of(await tasks.get("task-1", ME)) == text
            await eventually(partial(is_on_disk, url, stored))
        assert text_on_disk(url) == texts[-1]


def is_on_disk(url: str, text: str) -> bool:
    return text_on_disk(url) == text


def text_on_disk(url: str) -> str:
    [(body,)] = on_disk(url, "select body from tasks")
    assert isinstance(body, bytes)
    return text_of(Task.FromString(body))


async def accepted(store: Store) -> DeliveryKey:
    """Accept a message whose task is `task-1`."""
    key, request = DeliveryKey("me", "message-1"), SendMessageRequest(message=Message(message_id="message-1"))
    await store.deliveries.accept(key, request, message_digest(request), "task-1", "context-1")
    return key


async def test_an_answered_message_costs_two_commits(url: str, committed: list[int]) -> None:
    """The rest can be computed again from the message and from the end that its delivery holds."""
    async with opened(url) as store:
        key = await accepted(store)
        for state in (SUBMITTED, WORKING):
            await store.tasks.save(task_of(state), ME)
        await store.deliveries.mark_answered(key, b"the end")
        await store.tasks.save(task_of(COMPLETED, "whole"), ME)
        assert committed == [1, 1]
        assert states_on_disk(url) == {}
        assert text_of(await store.tasks.get("task-1", ME)) == "whole"
        await store.tasks.flush()
        assert states_on_disk(url) == {"task-1": "TASK_STATE_COMPLETED"}
        assert on_disk(url, "select state from deliveries") == [("acknowledged",)]
        assert text_of(await store.tasks.get("task-1", ME)) == "whole"


@pytest.mark.parametrize("state", [COMPLETED, CANCELED, TaskState.TASK_STATE_INPUT_REQUIRED])
async def test_what_no_delivery_holds_is_on_disk_before_it_is_told(url: str, state: TaskState) -> None:
    async with opened(url) as store:
        await accepted(store)
        await store.tasks.save(task_of(SUBMITTED), ME)
        await store.tasks.save(task_of(state), ME)
        assert states_on_disk(url) == {"task-1": TaskState.Name(state)}


async def test_a_file_is_on_disk_before_it_is_told(url: str) -> None:
    async with opened(url) as store:
        await accepted(store)
        task = task_of(WORKING, "half")
        await store.tasks.save(task, ME)
        assert on_disk(url, "select id from tasks") == []
        task.artifacts.append(Artifact(artifact_id="file-1", parts=[Part(raw=b"data")]))
        await store.tasks.save(task, ME)
        [(body,)] = on_disk(url, "select body from tasks")
        assert isinstance(body, bytes)
        assert Task.FromString(body) == task


async def test_a_state_is_shown_once_it_is_stored(url: str) -> None:
    """The SDK changes its task before it saves it."""
    async with opened(url) as store:
        task = task_of(WORKING)
        await store.tasks.save(task, ME)
        task.status.state = TaskState.TASK_STATE_INPUT_REQUIRED
        saving = asyncio.create_task(store.tasks.save(task, ME))
        await asyncio.sleep(0)
        before = await store.tasks.get("task-1", ME)
        assert before is not None
        assert before.status.state == WORKING
        await store.tasks.settled("task-1")
        asking = await store.tasks.get("task-1", ME)
        assert asking is not None
        assert asking.status.state == TaskState.TASK_STATE_INPUT_REQUIRED
        assert states_on_disk(url) == {"task-1": "TASK_STATE_INPUT_REQUIRED"}
        await saving


async def test_a_save_whose_caller_is_cancelled_is_shown(url: str) -> None:
    async with opened(url) as store:
        task = task_of(WORKING)
        await store.tasks.save(task, ME)
        task.status.state = CANCELED
        saving = asyncio.create_task(store.tasks.save(task, ME))
        await asyncio.sleep(0)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        shown, listed = await store.tasks.get("task-1", ME), await store.tasks.list(ListTasksRequest(), ME)
        assert [each.status.state for each in (*listed.tasks, shown) if each is not None] == [CANCELED, CANCELED]


async def test_a_list_is_paged_counted_and_filtered(url: str) -> None:
    async with opened(url) as store:
        for number in range(25):
            task = task_of(COMPLETED if number % 2 else SUBMITTED, task_id=f"task-{number:02}")
            task.context_id = f"context-{number % 5}"
            task.status.timestamp.FromSeconds(number // 3)
            await store.tasks.save(task, ME)
        seen, token = [], ""
        while True:
            page = await store.tasks.list(ListTasksRequest(page_size=10, page_token=token), ME)
            assert page.total_size == 25
            seen += [task.id for task in page.tasks]
            token = page.next_page_token
            if not token:
                break
        assert seen == [f"task-{number:02}" for number in reversed(range(25))]
        ended = ListTasksRequest(status=COMPLETED, context_id="context-1")
        ended.status_timestamp_after.FromSeconds(3)
        page = await store.tasks.list(ended, ME)
        assert [task.id for task in page.tasks] == ["task-21", "task-11"]
        assert page.total_size == 2
        for year, count in (("0001", 25), ("9999", 0)):
            far = ListTasksRequest()
            far.status_timestamp_after.FromJsonString(f"{year}-01-01T00:00:00Z")
            assert (await store.tasks.list(far, ME)).total_size == count
        with pytest.raises(InvalidParamsError, match="pageToken: must be the nextPageToken of an earlier response"):
            await store.tasks.list(ListTasksRequest(page_token="no token"), ME)


@pytest.mark.parametrize("state", [COMPLETED, CANCELED, TaskState.TASK_STATE_FAILED, TaskState.TASK_STATE_REJECTED])
async def test_a_change_of_state_is_on_disk_at_once(url: str, state: TaskState) -> None:
    async with opened(url) as store:
        await store.tasks.save(task_of(SUBMITTED), ME)
        assert states_on_disk(url) == {"task-1": "TASK_STATE_SUBMITTED"}
        await store.tasks.save(task_of(WORKING), ME)
        await store.tasks.save(task_of(state, "end"), ME)
        assert states_on_disk(url) == {"task-1": TaskState.Name(state)}


async def test_a_new_id_is_no_task_until_one_is_saved_under_it(url: str) -> None:
    async with opened(url) as store:
        for state in (SUBMITTED, WORKING):
            task_id = store.tasks.make_id()
            assert await store.tasks.get(task_id, ME) is None
            await store.tasks.save(task_of(state, task_id=task_id), ME)
            assert await store.tasks.get(task_id, ME) is not None
            assert states_on_disk(url)[task_id] == TaskState.Name(state)


async def test_get_returns_a_copy(url: str) -> None:
    async with opened(url) as store:
        await store.tasks.save(task_of(SUBMITTED), ME)
        await store.tasks.save(task_of(WORKING, "mine"), ME)
        copy = await store.tasks.get("task-1", ME)
        assert copy is not None
        copy.status.state = CANCELED
        again = await store.tasks.get("task-1", ME)
        assert again is not None
        assert again.status.state == WORKING


async def test_a_task_is_visible_to_its_owner_only(url: str) -> None:
    async with opened(url) as store:
        for state in (SUBMITTED, WORKING, COMPLETED):
            await store.tasks.save(task_of(state), ME)
            assert await store.tasks.get("task-1", by("you")) is None
            assert len((await store.tasks.list(ListTasksRequest(), by("you"))).tasks) == 0
            assert len((await store.tasks.list(ListTasksRequest(), ME)).tasks) == 1


async def test_a_list_shows_the_newest(url: str) -> None:
    async with opened(url) as store:
        await store.tasks.save(task_of(SUBMITTED), ME)
        await store.tasks.save(task_of(WORKING, "a"), ME)
        await store.tasks.save(task_of(WORKING, "ab"), ME)
        listed = await store.tasks.list(ListTasksRequest(include_artifacts=True), ME)
        assert [text_of(task) for task in listed.tasks] == ["ab"]


async def test_a_list_does_not_undo_an_end(url: str) -> None:
    """A list writes what waits while tasks end beside it."""
    async with opened(url) as store:
        ids = [f"task-{number}" for number in range(20)]
        for task_id in ids:
            await store.tasks.save(task_of(SUBMITTED, task_id=task_id), ME)
            await store.tasks.save(task_of(WORKING, "half", task_id), ME)
        endings = [store.tasks.save(task_of(COMPLETED, "whole", task_id), ME) for task_id in reversed(ids)]
        await asyncio.gather(store.tasks.list(ListTasksRequest(), ME), *endings)
        assert set(states_on_disk(url).values()) == {"TASK_STATE_COMPLETED"}
        assert {text_of(await store.tasks.get(task_id, ME)) for task_id in ids} == {"whole"}


async def test_closing_writes_pending_tasks(url: str) -> None:
    async with opened(url) as store:
        await store.tasks.save(task_of(SUBMITTED), ME)
        await store.tasks.save(task_of(WORKING, "so far"), ME)
    assert states_on_disk(url) == {"task-1": "TASK_STATE_WORKING"}
    async with opened(url) as store:
        assert text_of(await store.tasks.get("task-1", ME)) == "so far"


async def test_a_deleted_task_is_not_found(url: str) -> None:
    async with opened(url) as store:
        await store.tasks.save(task_of(SUBMITTED), ME)
        await store.tasks.save(task_of(WORKING), ME)
        await store.tasks.delete("task-1", ME)
        assert await store.tasks.get("task-1", ME) is None
        assert states_on_disk(url) == {}


async def test_tasks_of_an_earlier_process_fail_with_a_reason(url: str) -> None:
    async with opened(url) as store:
        for task_id, states in {
            "submitted": [SUBMITTED],
            "working": [SUBMITTED, WORKING],
            "completed": [SUBMITTED, WORKING, COMPLETED],
            "canceled": [SUBMITTED, CANCELED],
        }.items():
            for state in states:
                await store.tasks.save(task_of(state, f"of {task_id}", task_id), ME)
    async with opened(url) as store:
        assert await store.tasks.fail_unfinished("The agent stopped.") == 2
        for task_id in ("submitted", "working"):
            task = await store.tasks.get(task_id, ME)
            assert task is not None
            assert task.status.state == TaskState.TASK_STATE_FAILED
            assert task.status.message.parts[0].text == "The agent stopped."
            assert task.status.HasField("timestamp")
            assert text_of(task) == f"of {task_id}"
        assert states_on_disk(url)["completed"] == "TASK_STATE_COMPLETED"
        assert states_on_disk(url)["canceled"] == "TASK_STATE_CANCELED"
        assert await store.tasks.fail_unfinished("The agent stopped.") == 0


# --- The file ---


async def test_the_file_is_in_wal_mode(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "store.sqlite3")
    async with opened(url):
        assert on_disk(url, "pragma journal_mode") == [("wal",)]


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
        async with open_store(f"sqlite:///{file}"):
            pytest.fail("it is open")
