"""A message's way through the executor, to a codex in memory and back, on a clock that jumps.

Covers `executor`, `tasks.answering`, `tasks.asking` and `tasks.replies`.
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
from codex_workspace.codex.recovery import RecoveryPolicy
from codex_workspace.codex.thread import CodexThread, ThreadOptions
from codex_workspace.codex.turn import TurnLimits
from codex_workspace.common.errors import CodexCannotStart
from codex_workspace.common.redact import Redactor
from codex_workspace.common.values import JsonObject
from codex_workspace.executor import CodexAppServerExecutor
from codex_workspace.runtimes.backend import ThreadRegistry
from codex_workspace.tasks.replies import FAILURE, USAGE
from codex_workspace.tasks.request import RequestReader
from tests.support.memory_codex import MemoryCodex, in_virtual_time, memory_codex
from tests.support.memory_deliveries import MemoryDeliveries

OPTIONS = ThreadOptions(Path("/w"), "gpt", "gateway", "workspace-write", "never")
SECRET = "sk-very-secret"
T = TaskState


class NoMemory:
    """A context that has no thread yet."""

    async def load(self) -> str | None:
        return None

    async def instructions(self) -> str | None:
        return None

    async def save(self, thread_id: str, instructions: str | None = None) -> None:
        pass


class Sent(EventQueue):
    """What the executor sent, in order."""

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
        """One Task first, one terminal status last."""
        assert [isinstance(event, Task) for event in self.events] == [True] + [False] * (len(self.events) - 1)
        terminal = [state not in (T.TASK_STATE_SUBMITTED, T.TASK_STATE_WORKING) for state in self.states]
        assert terminal == [False] * (len(terminal) - 1) + [True]
        assert not isinstance(self.events[-1], TaskArtifactUpdateEvent)


def message(text: str, context_id: str = "context-1") -> RequestContext:
    said = Message(role=Role.ROLE_USER, message_id="m", context_id=context_id, parts=[Part(text=text)])
    return RequestContext(ServerCallContext(user=UnauthenticatedUser()), SendMessageRequest(message=said))


@dataclass(slots=True)
class Scene:
    """An executor, and the codex behind it."""

    executor: CodexAppServerExecutor
    codex: MemoryCodex
    threads: int = 0
    sent: Sent = field(default_factory=Sent)

    async def start(self, turn_id: str = "turn-1", *, thread: bool = True) -> None:
        if thread:
            started: JsonObject = {"thread": {"id": "thread-1"}, "sandbox": {"type": "workspaceWrite"}}
            await self.codex.answer("thread/start", started)
        await self.codex.answer("turn/start", {"turn": {"id": turn_id}})
        await self.codex.tell("turn/started", threadId="thread-1", turn={"id": turn_id})

    async def delta(self, text: str) -> None:
        ids: JsonObject = {"threadId": "thread-1", "turnId": "turn-1"}
        await self.codex.tell("item/agentMessage/delta", **ids, itemId="m", delta=text)

    async def complete(
        self, turn_id: str = "turn-1", status: str = "completed", error: JsonObject | None = None
    ) -> None:
        turn: JsonObject = {"id": turn_id, "status": status, "items": [], "error": error}
        await self.codex.tell("turn/completed", threadId="thread-1", turn=turn)

    async def obey(self) -> None:
        await self.codex.answer("turn/interrupt", {})
        await self.codex.answer("thread/backgroundTerminals/clean", {})
        await self.complete(status="interrupted")


@asynccontextmanager
async def scene(policy: RecoveryPolicy = RecoveryPolicy.FAIL) -> AsyncIterator[Scene]:
    async with memory_codex() as codex:

        @asynccontextmanager
        async def connect() -> AsyncIterator[Connection]:
            await anyio.lowlevel.checkpoint()
            yield codex.connection

        def make(_owner: str, _context_id: str) -> CodexThread:
            return CodexThread(connect, NoMemory(), OPTIONS, TurnLimits())

        async with anyio.create_task_group() as tasks:
            orders, deliveries, scrub = RequestReader(Path("/w")), MemoryDeliveries(), Redactor([SECRET])
            executor = CodexAppServerExecutor(tasks, ThreadRegistry(make), deliveries, orders, policy, scrub)
            yield Scene(executor, codex)
            tasks.cancel_scope.cancel()


@in_virtual_time
async def test_an_answer_is_one_task_that_streams_and_completes() -> None:
    async with scene() as now:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(now.executor.execute, message("hello"), now.sent)
            await now.start()
            for piece in ("Hel", "lo, ", "you"):
                await now.delta(piece)
                await anyio.sleep(0.3)
            usage: JsonObject = {"total": {"totalTokens": 7}, "last": {"totalTokens": 7}}
            ids: JsonObject = {"threadId": "thread-1", "turnId": "turn-1"}
            await now.codex.tell("thread/tokenUsage/updated", **ids, tokenUsage=usage)
            assert now.executor.running == 1
            assert now.sent.answer == "Hello, you"
            await now.complete()
        now.sent.assert_well_formed()
        assert now.sent.states == [T.TASK_STATE_SUBMITTED, T.TASK_STATE_WORKING, T.TASK_STATE_COMPLETED]
        assert now.sent.answer == "Hello, you"
        counted = now.sent.metadata[USAGE]
        assert isinstance(counted, dict)
        assert counted["totalTokens"] == 7
        assert now.executor.running == 0
        opened = now.sent.events[0]
        assert isinstance(opened, Task)
        assert opened.history[0].parts[0].text == "hello"


@in_virtual_time
async def test_a_burst_is_sent_ten_times_a_second() -> None:
    async with scene() as now:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(now.executor.execute, message("hello"), now.sent)
            await now.start()
            for _ in range(200):
                await now.delta("x")
                await anyio.sleep(0.01)
            await now.complete()
        updates = [event for event in now.sent.events if isinstance(event, TaskArtifactUpdateEvent)]
        assert 20 <= len(updates) <= 22
        assert now.sent.answer == "x" * 200


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_message_is_rejected_without_a_turn(text: str) -> None:
    @in_virtual_time
    async def test() -> None:
        async with scene() as now:
            await now.executor.execute(message(text), now.sent)
            now.sent.assert_well_formed()
            assert now.sent.states[-1] == T.TASK_STATE_REJECTED
            assert "no text" in now.sent.sentence
            assert now.sent.metadata == {FAILURE: {"code": "inputRefused"}}

    test()


@in_virtual_time
async def test_a_failed_turn_is_a_failed_task_with_a_safe_sentence() -> None:
    async with scene() as now:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(now.executor.execute, message("hello"), now.sent)
            await now.start()
            await now.delta("half")
            status: JsonObject = {"httpConnectionFailed": {"httpStatusCode": 429}}
            await now.complete(status="failed", error={"message": "http://gw/ said no", "codexErrorInfo": status})
        now.sent.assert_well_formed()
        assert now.sent.states[-1] == T.TASK_STATE_FAILED
        assert "limits the rate (HTTP 429)" in now.sent.sentence
        assert now.sent.metadata[FAILURE] == {"code": "httpConnectionFailed", "httpStatus": 429.0}
        assert now.sent.answer == "half"


@in_virtual_time
async def test_a_secret_in_codexs_error_is_redacted() -> None:
    async with scene() as now:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(now.executor.execute, message("hello"), now.sent)
            await now.start()
            await now.complete(status="failed", error={"message": f"wrong key {SECRET}", "codexErrorInfo": "other"})
        assert now.sent.sentence == "The turn failed: wrong key ***"


@in_virtual_time
async def test_codexs_death_fails_the_task_and_keeps_its_text() -> None:
    async with scene() as now:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(now.executor.execute, message("hello"), now.sent)
            await now.start()
            await now.delta("half")
            await now.codex.exit()
        now.sent.assert_well_formed()
        assert now.sent.states[-1] == T.TASK_STATE_FAILED
        assert now.sent.sentence == "codex ended with exit code 0"
        assert now.sent.metadata == {FAILURE: {"code": "CodexGone"}}
        assert now.sent.answer == "half"


@pytest.mark.parametrize(
    ("error", "sentence", "code"),
    [
        (CodexCannotStart("codex cannot start", f"tail with {SECRET}"), "codex cannot start", "CodexCannotStart"),
        (KeyError(SECRET), "Internal error; see the agent's log.", "internal"),
    ],
)
def test_no_error_escapes_or_leaks_details(error: Exception, sentence: str, code: str) -> None:
    @in_virtual_time
    async def test() -> None:
        def connect() -> AbstractAsyncContextManager[Connection]:
            raise error

        def make(_owner: str, _context_id: str) -> CodexThread:
            return CodexThread(connect, NoMemory(), OPTIONS, TurnLimits())

        sent = Sent()
        async with anyio.create_task_group() as tasks:
            orders = RequestReader(Path("/w"))
            executor = CodexAppServerExecutor(tasks, ThreadRegistry(make), MemoryDeliveries(), orders)
            await executor.execute(message("hello"), sent)
        sent.assert_well_formed()
        assert (sent.states[-1], sent.sentence) == (T.TASK_STATE_FAILED, sentence)
        assert sent.metadata == {FAILURE: {"code": code}}

    test()


@in_virtual_time
async def test_a_canceled_task_is_reported_once_its_turn_has_stopped() -> None:
    async with scene() as now:
        context = message("hello")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(now.executor.execute, context, now.sent)
            await now.start()
            await now.delta("half")
            await anyio.sleep(1)
            tasks.start_soon(now.obey)
            canceling = Sent()
            await now.executor.cancel(context, canceling)
            assert now.sent.states[-1] == T.TASK_STATE_CANCELED
            assert canceling.events == []
        now.sent.assert_well_formed()
        assert now.sent.answer == "half"

        again = Sent()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(now.executor.execute, message("again"), again)
            await now.start("turn-2", thread=False)
            await now.complete("turn-2")
        assert again.states[-1] == T.TASK_STATE_COMPLETED


@in_virtual_time
async def test_a_queued_task_is_canceled_without_a_turn() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:
        tasks.start_soon(now.executor.execute, message("first"), now.sent)
        await now.start()
        second, sent = message("second"), Sent()
        tasks.start_soon(now.executor.execute, second, sent)
        await anyio.sleep(1)
        await now.executor.cancel(second, Sent())
        sent.assert_well_formed()
        assert sent.states == [T.TASK_STATE_SUBMITTED, T.TASK_STATE_CANCELED]
        await now.complete()
        await anyio.sleep(1)
        assert now.sent.states[-1] == T.TASK_STATE_COMPLETED
        assert not now.codex.unread


@in_virtual_time
async def test_a_starting_task_is_canceled_as_soon_as_possible() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:
        context = message("hello")
        tasks.start_soon(now.executor.execute, context, now.sent)
        started: JsonObject = {"thread": {"id": "thread-1"}, "sandbox": {"type": "workspaceWrite"}}
        await now.codex.answer("thread/start", started)
        request = await now.codex.read("turn/start")
        tasks.start_soon(now.executor.cancel, context, Sent())
        await anyio.sleep(1)
        await now.codex.reply(request, {"turn": {"id": "turn-1"}})
        await now.codex.tell("turn/started", threadId="thread-1", turn={"id": "turn-1"})
        await now.obey()
        await anyio.sleep(1)
        now.sent.assert_well_formed()
        assert now.sent.states[-1] == T.TASK_STATE_CANCELED


@in_virtual_time
async def test_a_task_that_is_not_running_is_canceled_with_a_message() -> None:
    async with scene() as now:
        await now.executor.cancel(message("hello"), now.sent)
        assert now.sent.states == [T.TASK_STATE_CANCELED]


@in_virtual_time
async def test_draining_waits_for_running_turns() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:
        tasks.start_soon(now.executor.execute, message("hello"), now.sent)
        await now.start()
        began = anyio.current_time()
        tasks.start_soon(now.executor.drain, 3.0)
        await anyio.sleep(2)
        late = Sent()
        await now.executor.execute(message("too late"), late)
        late.assert_well_formed()
        assert late.states[-1] == T.TASK_STATE_REJECTED
        await now.complete()
        await anyio.sleep(0.5)
        assert now.sent.states[-1] == T.TASK_STATE_COMPLETED
        assert anyio.current_time() - began < 3


@in_virtual_time
async def test_draining_stops_turns_after_the_grace_period() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:
        waiting = Sent()
        tasks.start_soon(now.executor.execute, message("hello"), now.sent)
        await now.start()
        await now.delta("half")
        tasks.start_soon(now.executor.execute, message("next"), waiting)
        tasks.start_soon(now.obey)
        await anyio.sleep(1)
        began = anyio.current_time()
        await now.executor.drain(3.0)
        assert anyio.current_time() - began == pytest.approx(3, abs=0.5)
        for sent in (now.sent, waiting):
            sent.assert_well_formed()
            assert sent.states[-1] == T.TASK_STATE_FAILED
            assert sent.metadata[FAILURE] == {"code": "agentStopped"}
            assert "stopped" in sent.sentence
        assert now.sent.answer == "half"
        assert now.executor.running == 0


@in_virtual_time
async def test_draining_keeps_turns_that_the_next_process_resumes() -> None:
    async with scene(RecoveryPolicy.RESUME) as now, anyio.create_task_group() as tasks:
        waiting, late = Sent(), Sent()
        tasks.start_soon(now.executor.execute, message("hello"), now.sent)
        await now.start()
        await now.delta("half")
        tasks.start_soon(now.executor.execute, message("next"), waiting)
        tasks.start_soon(now.obey)
        await anyio.sleep(1)
        await now.executor.drain(3.0)
        await now.executor.execute(message("too late"), late)
        for sent in (now.sent, waiting, late):
            assert set(sent.states) <= {T.TASK_STATE_SUBMITTED, T.TASK_STATE_WORKING}
        assert now.executor.running == 0


@in_virtual_time
async def test_an_idle_executor_drains_at_once() -> None:
    async with scene() as now:
        began = anyio.current_time()
        await now.executor.drain(3.0)
        assert anyio.current_time() == began


@in_virtual_time
async def test_contexts_run_concurrently() -> None:
    async with scene() as now, anyio.create_task_group() as tasks:
        sent = [Sent(), Sent()]
        for number, each in enumerate(sent):
            tasks.start_soon(now.executor.execute, message("hello", f"context-{number}"), each)
        requests = [await now.codex.read("thread/start") for _ in sent]
        for number, request in enumerate(requests):
            thread: JsonObject = {"thread": {"id": f"thread-{number}"}, "sandbox": {"type": "workspaceWrite"}}
            await now.codex.reply(request, thread)
        for request in [await now.codex.read("turn/start") for _ in sent]:
            await now.codex.reply(request, {"turn": {"id": "turn-1"}})
        for number in (1, 0):
            turn: JsonObject = {"id": "turn-1", "status": "completed", "items": []}
            await now.codex.tell("turn/completed", threadId=f"thread-{number}", turn=turn)
        await anyio.sleep(1)
        assert [each.states[-1] for each in sent] == [T.TASK_STATE_COMPLETED] * 2
