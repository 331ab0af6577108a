"""Messages through the executor to a codex in memory, in virtual time.

Covers `executor`, `tasks.answering`, `tasks.approval_answers` and `tasks.replies`.

Covers `executor` and `tasks.answering`.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
from a2a.auth.user import UnauthenticatedUser
from a2a.server.agent_execution import RequestContext
from a2a.server.context import ServerCallContext
from a2a.server.events import EventQueue
from a2a.server.events.event_queue import Event
from a2a.types import Message, Part, Role, SendMessageRequest, Task, TaskArtifactUpdateEvent, TaskState
from google.protobuf.json_format import MessageToDict

from codex_workspace.app_server import Connection
from codex_workspace.codex.thread import CodexThread, ThreadOptions
from codex_workspace.codex.turn import TurnLimits
from codex_workspace.common.errors import CodexCannotStart
from codex_workspace.common.redact import Redactor
from codex_workspace.common.values import JsonObject
from codex_workspace.executor import CodexAppServerExecutor
from codex_workspace.runtimes.backend import RecoveryPolicy, ThreadRegistry
from codex_workspace.tasks.replies import FAILURE, USAGE
from codex_workspace.tasks.request import RequestReader
from tests.support.memory_codex import MemoryCodex, in_virtual_time, memory_codex
from tests.support.memory_deliveries import MemoryDeliveries

OPTIONS = ThreadOptions(Path("/w"), "gpt", "gateway", "workspace-write", "never")
SECRET = "sk-very-secret"
State = TaskState


class EmptyMemory:
    """A memory without a stored thread."""

    async def load(self) -> str | None:
        return None

    async def instructions(self) -> str | None:
        return None

    async def save(self, thread_id: str, instructions: str | None = None) -> None:
        pass


class RecordingQueue(EventQueue):
    """The events that the executor sent, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def enqueue_event(self, event: Event) -> None:
        await anyio.lowlevel.checkpoint()
        self.events.append(event)

    @property
    def states(self) -> list[TaskState]:
        return [event.status.state for event in self.events if not isinstance(event, TaskArtifactUpdateEvent | Message)]

    @property
    def sentence(self) -> str:
        last = self.events[-1]
        assert not isinstance(last, TaskArtifactUpdateEvent | Message)
        return last.status.message.parts[0].text if last.status.message.parts else ""

    @property
    def metadata(self) -> JsonObject:
        last = self.events[-1]
        assert not isinstance(last, Task)
        return dict(MessageToDict(last.metadata))

    @property
    def answer(self) -> str:
        text = ""
        for event in self.events:
            if isinstance(event, TaskArtifactUpdateEvent) and event.artifact.artifact_id == "answer":
                piece = "".join(part.text for part in event.artifact.parts)
                text = text + piece if event.append else piece
        return text

    def assert_well_formed(self) -> None:
        """Check that the first event is the only task, and the last one the only terminal status."""
        assert [isinstance(event, Task) for event in self.events] == [True] + [False] * (len(self.events) - 1)
        terminal = [state not in (State.TASK_STATE_SUBMITTED, State.TASK_STATE_WORKING) for state in self.states]
        assert terminal == [False] * (len(terminal) - 1) + [True]
        assert not isinstance(self.events[-1], TaskArtifactUpdateEvent)


def message(text: str, context_id: str = "context-1") -> RequestContext:
    content = Message(role=Role.ROLE_USER, message_id="m", context_id=context_id, parts=[Part(text=text)])
    return RequestContext(ServerCallContext(user=UnauthenticatedUser()), SendMessageRequest(message=content))


@dataclass(slots=True)
class ExecutorSetup:
    """An executor with a codex in memory."""

    executor: CodexAppServerExecutor
    codex: MemoryCodex
    threads: int = 0
    sent: RecordingQueue = field(default_factory=RecordingQueue)

    async def start(self, turn_id: str = "turn-1", *, thread: bool = True) -> None:
        if thread:
            started: JsonObject = {"thread": {"id": "thread-1"}, "sandbox": {"type": "workspaceWrite"}}
            await self.codex.answer("thread/start", started)
        await self.codex.answer("turn/start", {"turn": {"id": turn_id}})
        await self.codex.tell("turn/started", threadId="thread-1", turn={"id": turn_id})

    async def delta(self, text: str) -> None:
        ids: JsonObject = {"threadId": "thread-1", "turnId": "turn-1"}
        await self.codex.tell("item/agentMessage/delta", **ids, itemId="m", delta=text)

    async def begin_answer(self) -> None:
        item: JsonObject = {"type": "agentMessage", "id": "m", "text": "", "phase": "final_answer"}
        await self.codex.tell("item/started", threadId="thread-1", turnId="turn-1", item=item)

    async def complete(
        self, turn_id: str = "turn-1", status: str = "completed", error: JsonObject | None = None
    ) -> None:
        turn: JsonObject = {"id": turn_id, "status": status, "items": [], "error": error}
        await self.codex.tell("turn/completed", threadId="thread-1", turn=turn)

    async def handle_interrupt(self) -> None:
        await self.codex.answer("turn/interrupt", {})
        await self.codex.answer("thread/backgroundTerminals/clean", {})
        await self.complete(status="interrupted")


@asynccontextmanager
async def open_executor(policy: RecoveryPolicy = RecoveryPolicy.FAIL) -> AsyncIterator[ExecutorSetup]:
    async with memory_codex() as codex:

        @asynccontextmanager
        async def connect() -> AsyncIterator[Connection]:
            await anyio.lowlevel.checkpoint()
            yield codex.connection

        def create_thread(_owner: str, _context_id: str) -> CodexThread:
            return CodexThread(connect, EmptyMemory(), OPTIONS, TurnLimits())

        async with anyio.create_task_group() as tasks:
            reader, deliveries, redactor = RequestReader(Path("/w")), MemoryDeliveries(), Redactor([SECRET])
            executor = CodexAppServerExecutor(
                tasks, ThreadRegistry(create_thread), deliveries, reader, policy, redactor
            )
            yield ExecutorSetup(executor, codex)
            tasks.cancel_scope.cancel()


@in_virtual_time
async def test_an_answer_is_one_task_that_streams_and_completes() -> None:
    async with open_executor() as setup:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(setup.executor.execute, message("hello"), setup.sent)
            await setup.start()
            await setup.begin_answer()
            for piece in ("Hel", "lo, ", "you"):
                await setup.delta(piece)
                await anyio.sleep(0.3)
            usage: JsonObject = {"total": {"totalTokens": 7}, "last": {"totalTokens": 7}}
            ids: JsonObject = {"threadId": "thread-1", "turnId": "turn-1"}
            await setup.codex.tell("thread/tokenUsage/updated", **ids, tokenUsage=usage)
            assert setup.executor.running == 1
            assert setup.sent.answer == "Hello, you"
            await setup.complete()
        setup.sent.assert_well_formed()
        assert setup.sent.states == [State.TASK_STATE_SUBMITTED, State.TASK_STATE_WORKING, State.TASK_STATE_COMPLETED]
        assert setup.sent.answer == "Hello, you"
        counted = setup.sent.metadata[USAGE]
        assert isinstance(counted, dict)
        assert counted["totalTokens"] == 7
        assert setup.executor.running == 0
        opened = setup.sent.events[0]
        assert isinstance(opened, Task)
        assert opened.history[0].parts[0].text == "hello"


@in_virtual_time
async def test_a_burst_is_sent_ten_times_a_second() -> None:
    async with open_executor() as setup:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(setup.executor.execute, message("hello"), setup.sent)
            await setup.start()
            await setup.begin_answer()
            for _ in range(200):
                await setup.delta("x")
                await anyio.sleep(0.01)
            await setup.complete()
        updates = [event for event in setup.sent.events if isinstance(event, TaskArtifactUpdateEvent)]
        assert 20 <= len(updates) <= 22
        assert setup.sent.answer == "x" * 200


@pytest.mark.parametrize("text", ["", "  \n"])
@in_virtual_time
async def test_an_empty_message_is_rejected_without_a_turn(text: str) -> None:
    async with open_executor() as setup:
        await setup.executor.execute(message(text), setup.sent)
        setup.sent.assert_well_formed()
        assert setup.sent.states[-1] == State.TASK_STATE_REJECTED
        assert "no text" in setup.sent.sentence
        assert setup.sent.metadata == {FAILURE: {"code": "inputRefused"}}


@in_virtual_time
async def test_a_failed_turn_is_a_failed_task_with_a_safe_sentence() -> None:
    async with open_executor() as setup:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(setup.executor.execute, message("hello"), setup.sent)
            await setup.start()
            await setup.delta("half")
            status: JsonObject = {"httpConnectionFailed": {"httpStatusCode": 429}}
            await setup.complete(status="failed", error={"message": "http://gw/ said no", "codexErrorInfo": status})
        setup.sent.assert_well_formed()
        assert setup.sent.states[-1] == State.TASK_STATE_FAILED
        assert "rate limit is reached (HTTP 429)" in setup.sent.sentence
        assert setup.sent.metadata[FAILURE] == {"code": "httpConnectionFailed", "httpStatus": 429.0}
        assert setup.sent.answer == "half"


@in_virtual_time
async def test_a_secret_in_codexs_error_is_redacted() -> None:
    async with open_executor() as setup:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(setup.executor.execute, message("hello"), setup.sent)
            await setup.start()
            await setup.complete(status="failed", error={"message": f"wrong key {SECRET}", "codexErrorInfo": "other"})
        assert setup.sent.sentence == "The turn failed: wrong key ***"


@in_virtual_time
async def test_codexs_death_fails_the_task_and_keeps_its_text() -> None:
    async with open_executor() as setup:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(setup.executor.execute, message("hello"), setup.sent)
            await setup.start()
            await setup.delta("half")
            await setup.codex.exit()
        setup.sent.assert_well_formed()
        assert setup.sent.states[-1] == State.TASK_STATE_FAILED
        assert setup.sent.sentence == "codex ended with exit code 0"
        assert setup.sent.metadata == {FAILURE: {"code": "CodexGone"}}
        assert setup.sent.answer == "half"


@pytest.mark.parametrize(
    ("error", "sentence", "code"),
    [
        (CodexCannotStart("codex cannot start", f"tail with {SECRET}"), "codex cannot start", "CodexCannotStart"),
        (KeyError(SECRET), "Internal error; see the agent's log.", "internal"),
    ],
)
@in_virtual_time
async def test_no_error_escapes_or_leaks_details(error: Exception, sentence: str, code: str) -> None:
    def connect() -> AbstractAsyncContextManager[Connection]:
        raise error

    def create_thread(_owner: str, _context_id: str) -> CodexThread:
        return CodexThread(connect, EmptyMemory(), OPTIONS, TurnLimits())

    sent = RecordingQueue()
    async with anyio.create_task_group() as tasks:
        reader = RequestReader(Path("/w"))
        executor = CodexAppServerExecutor(tasks, ThreadRegistry(create_thread), MemoryDeliveries(), reader)
        await executor.execute(message("hello"), sent)
    sent.assert_well_formed()
    assert (sent.states[-1], sent.sentence) == (State.TASK_STATE_FAILED, sentence)
    assert sent.metadata == {FAILURE: {"code": code}}


@in_virtual_time
async def test_a_canceled_task_is_reported_once_its_turn_has_stopped() -> None:
    async with open_executor() as setup:
        context = message("hello")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(setup.executor.execute, context, setup.sent)
            await setup.start()
            await setup.delta("half")
            await anyio.sleep(1)
            tasks.start_soon(setup.handle_interrupt)
            canceling = RecordingQueue()
            await setup.executor.cancel(context, canceling)
            assert setup.sent.states[-1] == State.TASK_STATE_CANCELED
            assert canceling.events == []
        setup.sent.assert_well_formed()
        assert setup.sent.answer == "half"

        again = RecordingQueue()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(setup.executor.execute, message("again"), again)
            await setup.start("turn-2", thread=False)
            await setup.complete("turn-2")
        assert again.states[-1] == State.TASK_STATE_COMPLETED


@in_virtual_time
async def test_a_queued_task_is_canceled_without_a_turn() -> None:
    async with open_executor() as setup, anyio.create_task_group() as tasks:
        tasks.start_soon(setup.executor.execute, message("first"), setup.sent)
        await setup.start()
        second, sent = message("second"), RecordingQueue()
        tasks.start_soon(setup.executor.execute, second, sent)
        await anyio.sleep(1)
        await setup.executor.cancel(second, RecordingQueue())
        sent.assert_well_formed()
        assert sent.states == [State.TASK_STATE_SUBMITTED, State.TASK_STATE_CANCELED]
        await setup.complete()
        await anyio.sleep(1)
        assert setup.sent.states[-1] == State.TASK_STATE_COMPLETED
        assert not setup.codex.unread


@in_virtual_time
async def test_a_starting_task_is_canceled_as_soon_as_possible() -> None:
    async with open_executor() as setup, anyio.create_task_group() as tasks:
        context = message("hello")
        tasks.start_soon(setup.executor.execute, context, setup.sent)
        started: JsonObject = {"thread": {"id": "thread-1"}, "sandbox": {"type": "workspaceWrite"}}
        await setup.codex.answer("thread/start", started)
        request = await setup.codex.read("turn/start")
        tasks.start_soon(setup.executor.cancel, context, RecordingQueue())
        await anyio.sleep(1)
        await setup.codex.reply(request, {"turn": {"id": "turn-1"}})
        await setup.codex.tell("turn/started", threadId="thread-1", turn={"id": "turn-1"})
        await setup.handle_interrupt()
        await anyio.sleep(1)
        setup.sent.assert_well_formed()
        assert setup.sent.states[-1] == State.TASK_STATE_CANCELED


@in_virtual_time
async def test_a_task_that_is_not_running_is_canceled_with_a_message() -> None:
    async with open_executor() as setup:
        await setup.executor.cancel(message("hello"), setup.sent)
        assert setup.sent.states == [State.TASK_STATE_CANCELED]


@in_virtual_time
async def test_draining_waits_for_running_turns() -> None:
    async with open_executor() as setup, anyio.create_task_group() as tasks:
        tasks.start_soon(setup.executor.execute, message("hello"), setup.sent)
        await setup.start()
        start = anyio.current_time()
        tasks.start_soon(setup.executor.drain, 3.0)
        await anyio.sleep(2)
        late = RecordingQueue()
        await setup.executor.execute(message("too late"), late)
        late.assert_well_formed()
        assert late.states[-1] == State.TASK_STATE_REJECTED
        await setup.complete()
        await anyio.sleep(0.5)
        assert setup.sent.states[-1] == State.TASK_STATE_COMPLETED
        assert anyio.current_time() - start < 3


@in_virtual_time
async def test_draining_stops_turns_after_the_grace_period() -> None:
    async with open_executor() as setup, anyio.create_task_group() as tasks:
        waiting = RecordingQueue()
        tasks.start_soon(setup.executor.execute, message("hello"), setup.sent)
        await setup.start()
        await setup.delta("half")
        tasks.start_soon(setup.executor.execute, message("next"), waiting)
        tasks.start_soon(setup.handle_interrupt)
        await anyio.sleep(1)
        start = anyio.current_time()
        await setup.executor.drain(3.0)
        assert anyio.current_time() - start == pytest.approx(3, abs=0.5)
        for sent in (setup.sent, waiting):
            sent.assert_well_formed()
            assert sent.states[-1] == State.TASK_STATE_FAILED
            assert sent.metadata[FAILURE] == {"code": "agentStopped"}
            assert "stopped" in sent.sentence
        assert setup.sent.answer == "half"
        assert setup.executor.running == 0


@in_virtual_time
async def test_draining_keeps_turns_that_the_next_process_resumes() -> None:
    async with open_executor(RecoveryPolicy.RESUME) as setup, anyio.create_task_group() as tasks:
        waiting, late = RecordingQueue(), RecordingQueue()
        tasks.start_soon(setup.executor.execute, message("hello"), setup.sent)
        await setup.start()
        await setup.delta("half")
        tasks.start_soon(setup.executor.execute, message("next"), waiting)
        tasks.start_soon(setup.handle_interrupt)
        await anyio.sleep(1)
        await setup.executor.drain(3.0)
        await setup.executor.execute(message("too late"), late)
        for sent in (setup.sent, waiting, late):
            assert set(sent.states) <= {State.TASK_STATE_SUBMITTED, State.TASK_STATE_WORKING}
        assert setup.executor.running == 0


@in_virtual_time
async def test_an_idle_executor_drains_at_once() -> None:
    async with open_executor() as setup:
        start = anyio.current_time()
        await setup.executor.drain(3.0)
        assert anyio.current_time() == start


@in_virtual_time
async def test_contexts_run_concurrently() -> None:
    async with open_executor() as setup, anyio.create_task_group() as tasks:
        sent = [RecordingQueue(), RecordingQueue()]
        for number, each in enumerate(sent):
            tasks.start_soon(setup.executor.execute, message("hello", f"context-{number}"), each)
        requests = [await setup.codex.read("thread/start") for _ in sent]
        for number, request in enumerate(requests):
            thread: JsonObject = {"thread": {"id": f"thread-{number}"}, "sandbox": {"type": "workspaceWrite"}}
            await setup.codex.reply(request, thread)
        for request in [await setup.codex.read("turn/start") for _ in sent]:
            await setup.codex.reply(request, {"turn": {"id": "turn-1"}})
        for number in (1, 0):
            turn: JsonObject = {"id": "turn-1", "status": "completed", "items": []}
            await setup.codex.tell("turn/completed", threadId=f"thread-{number}", turn=turn)
        await anyio.sleep(1)
        assert [each.states[-1] for each in sent] == [State.TASK_STATE_COMPLETED] * 2
