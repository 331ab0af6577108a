"""The agent under a foreign host: made-up ids, redelivery, questions and late answers."""

import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.context import ServerCallContext
from a2a.server.events import Event, EventQueue
from a2a.types import (
    Artifact,
    Message,
    Part,
    Role,
    SendMessageRequest,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from a2a.utils.errors import InternalError, InvalidParamsError

from codex_workspace.common.a2a_terms import AuthenticatedUser
from codex_workspace.config.settings import OPERATOR
from codex_workspace.platform import host_adapter
from codex_workspace.platform.deadline_reply import STILL_WORKING
from codex_workspace.platform.dispatcher import NO_ANSWER, Dispatcher
from codex_workspace.platform.host_adapter import (
    MAX_REPORT_CHARS,
    NOTHING_NEW,
    WAKE_UP_MESSAGE,
    DelegationResults,
    NewResults,
    RuntimeHostAdapter,
    open_host_adapter,
)
from codex_workspace.storage.outbox import OutboxState
from codex_workspace.storage.store import Store, open_store


class Worker(AgentExecutor):
    """Says what it hears, in which context; "wait" waits for `go`, "ask" at the end asks, "fail" fails."""

    def __init__(self) -> None:
        self.go = anyio.Event()
        self.heard: list[tuple[str, str]] = []

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        text, context_id = context.get_user_input(), str(context.context_id)
        self.heard.append((text, context_id))
        if context.current_task is None:
            status = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
            await event_queue.enqueue_event(Task(id=context.task_id, context_id=context_id, status=status))
            await event_queue.enqueue_event(status_of(context, TaskState.TASK_STATE_WORKING))
        if "wait" in text:
            await self.go.wait()
        if text.endswith("ask"):
            await event_queue.enqueue_event(status_of(context, TaskState.TASK_STATE_INPUT_REQUIRED, "Which one?"))
            return
        if text.endswith("fail"):
            await event_queue.enqueue_event(status_of(context, TaskState.TASK_STATE_FAILED, "It is broken."))
            return
        parts = [] if text == "silence" else [Part(text=f"You said: {text}")]
        if parts:
            await event_queue.enqueue_event(artifact_of(context, "answer", parts))
        if text == "file":
            file = Part(raw=b"1", filename="one.txt", media_type="text/plain")
            await event_queue.enqueue_event(artifact_of(context, "file-1", [file]))
        await event_queue.enqueue_event(status_of(context, TaskState.TASK_STATE_COMPLETED))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        await event_queue.enqueue_event(status_of(context, TaskState.TASK_STATE_CANCELED, "Canceled."))


def status_of(context: RequestContext, state: TaskState, text: str = "") -> TaskStatusUpdateEvent:
    status = TaskStatus(state=state)
    status.timestamp.GetCurrentTime()
    if text:
        said = Message(role=Role.ROLE_AGENT, message_id=str(uuid.uuid4()), parts=[Part(text=text)])
        status.message.CopyFrom(said)
    return TaskStatusUpdateEvent(task_id=context.task_id, context_id=context.context_id, status=status)


def artifact_of(context: RequestContext, artifact_id: str, parts: list[Part]) -> TaskArtifactUpdateEvent:
    artifact = Artifact(artifact_id=artifact_id, parts=parts)
    return TaskArtifactUpdateEvent(
        task_id=context.task_id, context_id=context.context_id, artifact=artifact, last_chunk=True
    )


class Read(EventQueue):
    """Records what the host gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def enqueue_event(self, event: Event) -> None:
        await anyio.lowlevel.checkpoint()
        self.events.append(event)


class FakeDispatcher(Dispatcher):
    """Records deferred messages."""

    def __init__(self) -> None:
        self.deferred: list[tuple[str, str]] = []

    async def state(self, message: Message, owner: str) -> OutboxState | None:
        await anyio.lowlevel.checkpoint()
        return OutboxState.RECEIVED if (message.message_id, owner) in self.deferred else None

    async def defer(self, message: Message, owner: str) -> None:
        await anyio.lowlevel.checkpoint()
        self.deferred.append((message.message_id, owner))

    async def absorb(self, message: Message, owner: str) -> None:
        await self.defer(message, owner)

    def is_asking(self, task_id: str) -> bool:
        del task_id
        return False


@dataclass(frozen=True)
class Host:
    """A host that makes up ids of task and context, as the SDK's does."""

    executor: RuntimeHostAdapter
    worker: Worker
    store: Store

    async def send(self, text: str, message_id: str = "", context_id: str = "", task_id: str = "") -> Message:
        message = Message(
            role=Role.ROLE_USER,
            message_id=message_id or str(uuid.uuid4()),
            parts=[Part(text=text)],
            context_id=context_id or str(uuid.uuid4()),
            task_id=task_id or str(uuid.uuid4()),
        )
        context = RequestContext(ServerCallContext(), SendMessageRequest(message=message))
        read = Read()
        await self.executor.execute(context, read)
        (answer,) = read.events
        assert isinstance(answer, Message)
        return answer

    async def state_of(self, task_id: str) -> TaskState:
        task = await self.store.tasks.get(task_id, ServerCallContext(user=AuthenticatedUser(OPERATOR)))
        assert task is not None
        return task.status.state

    async def said(self, text: str, message_id: str = "", context_id: str = "") -> str:
        answer = await self.send(text, message_id, context_id)
        return answer.parts[0].text


@asynccontextmanager
async def host(
    folder: Path, *, one_main_context: bool = True, late: FakeDispatcher | None = None, heartbeat: object = None
) -> AsyncIterator[Host]:
    worker = Worker()
    results = DelegationResults(folder / "results", folder / "told")
    async with (
        open_store(f"sqlite:///{folder / 'store.sqlite3'}") as store,
        open_host_adapter(
            worker,
            store,
            None,
            results,
            heartbeat=heartbeat,
            one_main_context=one_main_context,
        ) as executor,
    ):
        executor.replies.late, executor.replies.deadline_s = late, 0.05
        yield Host(executor, worker, store)


async def test_made_up_contexts_belong_to_the_main_context(tmp_path: Path) -> None:
    async with host(tmp_path) as own:
        first, second = await own.send("one"), await own.send("two")
        main = await own.store.main_context(OPERATOR)
        assert [context for _, context in own.worker.heard] == [main, main]
        assert (first.context_id, second.context_id) == (main, main)


async def test_a_known_context_is_continued(tmp_path: Path) -> None:
    async with host(tmp_path) as own:
        other = str(uuid.uuid4())
        await own.store.context_thread(OPERATOR, other).save("thread-2")
        await own.said("one", context_id=other)
        await own.said("two", context_id="release-7")
        assert [context for _, context in own.worker.heard] == [other, "release-7"]


async def test_with_conversations_per_context_each_context_is_separate(tmp_path: Path) -> None:
    async with host(tmp_path, one_main_context=False) as own:
        for text in ("one", "two"):
            await own.said(text)
        assert len({context for _, context in own.worker.heard}) == 2


async def test_a_repeated_message_joins_and_gets_the_same_answer(tmp_path: Path) -> None:
    async with host(tmp_path) as own:
        answers: list[Message] = []

        async def send() -> None:
            answers.append(await own.send("wait", "m-1"))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(send)
            while not own.worker.heard:
                await anyio.sleep(0.01)
            own.worker.go.set()
        await send()
        assert len({answer.SerializeToString(deterministic=True) for answer in answers}) == 1
        assert len(own.worker.heard) == 1
        with pytest.raises(InvalidParamsError, match="m-1"):
            await own.send("another", "m-1")


async def test_a_message_of_an_earlier_process_is_resumed_and_its_sender_gets_the_answer(tmp_path: Path) -> None:
    async with host(tmp_path) as own:
        with anyio.move_on_after(0.3):
            await own.send("wait", "m-1")
        assert own.worker.heard
    async with host(tmp_path) as own:
        while not own.worker.heard:
            await anyio.sleep(0.01)
        own.worker.go.set()
        assert await own.said("wait", "m-1") == "You said: wait"
        assert len(own.worker.heard) == 1


@pytest.mark.parametrize(("text", "expected"), [("fail", "It is broken."), ("wait and fail", "It is broken.")])
async def test_a_failure_is_an_error(tmp_path: Path, text: str, expected: str) -> None:
    async with host(tmp_path) as own:
        own.worker.go.set()
        with pytest.raises(InternalError, match=expected):
            await own.send(text)


async def test_an_answer_always_has_text_followed_by_files(tmp_path: Path) -> None:
    async with host(tmp_path) as own:
        assert await own.said("silence") == NO_ANSWER
        text, file = (await own.send("file")).parts
        assert (text.text, file.filename) == ("You said: file", "one.txt")


async def test_a_question_is_a_reply_and_the_next_message_answers_it(tmp_path: Path) -> None:
    async with host(tmp_path) as own:
        assert await own.said("ask") == "Which one?"
        assert await own.said("the first") == "You said: the first"
        assert await own.said("and now?") == "You said: and now?"
        assert await own.store.deliveries.unfinished() == []


async def test_a_cancel_reaches_the_task(tmp_path: Path) -> None:
    async with host(tmp_path) as own, anyio.create_task_group() as tasks:

        async def send() -> None:
            with pytest.raises(InternalError, match="Canceled"):
                await own.send("wait", "m-1", task_id="host-1")

        tasks.start_soon(send)
        while not own.worker.heard:
            await anyio.sleep(0.01)
        message = Message(task_id="host-1", context_id="c", message_id="x")
        request = SendMessageRequest(message=message)
        context = RequestContext(ServerCallContext(), request, task_id="host-1", context_id="c")
        await own.executor.cancel(context, Read())


async def test_an_answer_after_the_deadline_is_deferred(tmp_path: Path) -> None:
    late = FakeDispatcher()
    async with host(tmp_path, late=late) as own:
        first, again = await own.send("wait", "m-1"), await own.send("wait", "m-1")
        assert first.parts[0].text == STILL_WORKING
        assert first == again
        assert late.deferred == [("m-1", OPERATOR)]
        own.worker.go.set()
        own.executor.replies.deadline_s = 5
        # The answer is sent separately, and only there.
        assert await own.said("wait", "m-1") == STILL_WORKING
        assert len(own.worker.heard) == 1
        assert await own.said("quick") == "You said: quick"


async def test_a_late_question_is_answered_by_the_next_message(tmp_path: Path) -> None:
    async with host(tmp_path, late=FakeDispatcher()) as own:
        told = await own.send("wait and ask", "m-1")
        assert told.parts[0].text == STILL_WORKING
        task_id = told.message_id.removesuffix("-at-work")
        own.worker.go.set()
        with anyio.fail_after(5):
            while await own.state_of(task_id) != TaskState.TASK_STATE_INPUT_REQUIRED:
                await anyio.sleep(0.01)
        # The answer to the first message covers this one.
        for _ in range(2):
            assert await own.said("the first", "m-2") == STILL_WORKING
        with anyio.fail_after(5):
            while await own.state_of(task_id) != TaskState.TASK_STATE_COMPLETED:
                await anyio.sleep(0.01)
        assert [text for text, _ in own.worker.heard] == ["wait and ask", "the first"]
        assert len({context for _, context in own.worker.heard}) == 1


async def test_a_snapshots_thread_is_resumed_only_without_a_stored_one(tmp_path: Path) -> None:
    async with host(tmp_path) as own:
        own.executor.restore("thread-1")
        await own.said("hello")
        memory = own.store.context_thread(OPERATOR, await own.store.main_context(OPERATOR))
        assert await memory.load() == "thread-1"
        assert own.executor.thread_id == "thread-1"
        own.executor.restore("thread-2")
        await own.said("hello")
        assert await memory.load() == "thread-1"


async def test_a_wake_up_for_known_results_starts_no_task(tmp_path: Path) -> None:
    echo = {"delegation_id": "row-1", "source_id": "w-1", "status": "completed", "response_preview": "look at it"}
    woken = f"{WAKE_UP_MESSAGE}. Review them and take appropriate action:"
    async with host(tmp_path) as own:
        await own.said("look at it")
        (tmp_path / "results").write_text(json.dumps(echo) + "\n")
        assert await own.said(woken) == NOTHING_NEW
        assert len(own.worker.heard) == 1
        # The same words without anything that was known, or with something new, are a message as any other.
        assert (await own.said(woken)).startswith("You said: ")
        (tmp_path / "results").write_text(json.dumps(echo) + "\n" + json.dumps({"delegation_id": "d-2"}) + "\n")
        assert "d-2" in await own.said(woken)


@dataclass
class Heartbeat:
    active_tasks: int = 0
    current_task: str = ""


async def test_the_heartbeat_shows_the_message_without_the_added_results(tmp_path: Path) -> None:
    (tmp_path / "results").write_text('{"delegation_id": "d-1", "status": "completed"}\n')
    heartbeat = Heartbeat()
    async with host(tmp_path, heartbeat=heartbeat) as own:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(own.send, "wait for it")
            while not own.worker.heard:
                await anyio.sleep(0.01)
            await anyio.wait_all_tasks_blocked()
            assert "d-1" in own.worker.heard[0][0]
            assert (heartbeat.active_tasks, heartbeat.current_task) == (1, "wait for it")
            own.worker.go.set()
        await anyio.wait_all_tasks_blocked()
        assert heartbeat.active_tasks == 0


# --- `host_adapter`: results of delegations reach the model once, also if the runtime reports them again


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


@pytest.fixture
def begin(tmp_path: Path, file: Path) -> Callable[[], DelegationResults]:
    """Begins a process."""
    return lambda: DelegationResults(file, tmp_path / "told")


def leave(file: Path, *records: object) -> None:
    with file.open("a") as opened:
        opened.writelines(f"{json.dumps(record)}\n" for record in records)


def result(number: int, answer: str = "done", **more: object) -> dict[str, object]:
    own = {"delegation_id": f"d-{number}", "target_id": "w-2", "status": "completed", "summary": "", "error": ""}
    return own | {"response_preview": answer, "timestamp": 1.0} | more


def test_without_a_file_there_is_nothing_new(begin: Callable[[], DelegationResults]) -> None:
    news = begin().take()
    assert (news.text, news.is_replay) == ("", False)


def test_a_result_is_reported_in_full_and_quoted(begin: Callable[[], DelegationResults], file: Path) -> None:
    leave(file, result(1, "\n".join("a" * 500)))
    first, *told, last = begin().take().text.splitlines()
    assert told == ["Delegation d-1 to w-2: completed", *"a" * 500]
    number = first.removeprefix("--- ").partition(":")[0]
    assert last == f"--- {number}: end of the peers' results"


def test_an_unreported_result_is_new_in_the_next_process(begin: Callable[[], DelegationResults], file: Path) -> None:
    leave(file, result(1))
    assert "d-1" in begin().take().text
    results = begin()
    news = results.take()
    assert "d-1" in news.text
    results.mark_reported(news)
    leave(file, result(1, timestamp=2.0))
    again = begin().take()
    assert (again.text, again.is_replay) == ("", True)


def test_a_result_between_taking_and_reporting_is_kept(begin: Callable[[], DelegationResults], file: Path) -> None:
    results = begin()
    leave(file, result(1))
    news = results.take()
    leave(file, result(2))
    results.mark_reported(news)
    assert "d-2" in results.take().text


def test_a_rejected_message_loses_no_result(begin: Callable[[], DelegationResults], file: Path) -> None:
    results = begin()
    leave(file, result(1))
    assert "d-1" in results.take().text
    assert "d-1" in results.take().text


def test_another_status_of_the_same_delegation_is_new(begin: Callable[[], DelegationResults], file: Path) -> None:
    results = begin()
    leave(file, result(1, status="failed", error="no"))
    results.mark_reported(results.take())
    leave(file, result(1))
    assert "completed" in results.take().text


def test_only_records_of_messages_are_recognized_by_their_text(
    begin: Callable[[], DelegationResults], file: Path
) -> None:
    begin().record_message("done")
    results = begin()
    leave(file, result(1, source_id="w-1"), result(2))
    news = results.take()
    assert news.is_replay
    assert ("d-1" in news.text, "d-2" in news.text) == (False, True)


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b"7", b"\xff\xfe", b"", b'{"delegation_id": 7, "response_preview": null}', b"[" * 100_000]
)
def test_invalid_lines_are_skipped(begin: Callable[[], DelegationResults], file: Path, line: bytes) -> None:
    file.write_bytes(line + b"\n" + json.dumps(result(1)).encode() + b"\n")
    assert "d-1" in begin().take().text


def test_an_invalid_digest_file_is_ignored(tmp_path: Path, file: Path) -> None:
    (tmp_path / "told").write_bytes(b"\xff\n" * 100)
    leave(file, result(1))
    assert DelegationResults(file, tmp_path / "told").take().text


def test_long_results_are_cut_with_a_note(begin: Callable[[], DelegationResults], file: Path) -> None:
    leave(file, *(result(number, "x" * 4096) for number in range(50)))
    text = begin().take().text
    assert len(text) < MAX_REPORT_CHARS + 300
    assert "characters left out" in text


def test_a_result_is_known_after_thousands_of_messages(begin: Callable[[], DelegationResults], file: Path) -> None:
    results = begin()
    leave(file, result(1))
    results.mark_reported(results.take())
    results.mark_reported(NewResults("", digests=tuple(f"{number:032}" for number in range(3000))))
    leave(file, result(1, timestamp=2.0))
    assert begin().take().text == ""


def test_a_known_digest_is_not_written_again(begin: Callable[[], DelegationResults], tmp_path: Path) -> None:
    results = begin()
    results.record_message("hello")
    (tmp_path / "told").unlink()
    results.record_message("hello")
    results.mark_reported(results.take())
    assert not (tmp_path / "told").exists()


def test_the_digests_are_limited_to_the_newest(
    begin: Callable[[], DelegationResults], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_adapter, "MAX_DIGESTS", 10)
    results = begin()
    for number in range(11):
        results.record_message(f"message {number}")
    assert len((tmp_path / "told").read_text().splitlines()) == 10
    leave(file, result(1, "message 10", source_id="w-1"))
    assert begin().take().text == ""


def test_an_unwritable_digest_file_stops_no_message(tmp_path: Path, file: Path) -> None:
    results = DelegationResults(file, tmp_path / "missing" / "told")
    leave(file, result(1))
    results.mark_reported(results.take())
    leave(file, result(1))
    assert results.take().is_replay
