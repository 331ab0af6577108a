"""The scripted executor for the official conformance kit: the prefix of a message ID selects its behavior.

    python -m codex_workspace serve --executor tests.conformance.sut:executor

The prefixes are those of the kit's scenarios; docs/conformance.md contains the whole command line.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import anyio
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.tasks import TaskUpdater
from a2a.types import Message, Part, Role, Task, TaskState, TaskStatus
from google.protobuf.struct_pb2 import Struct, Value

LONG_S: Final = 4.0
"""Twice the time that the kit waits for a stream."""

DATA: Final = Struct()
DATA.update({"key": "value", "count": 42})

Play = Callable[[TaskUpdater], Awaitable[None]]


class Script(AgentExecutor):
    """Runs the scene for a message ID."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Run one scene; all but bare messages start with a task."""
        message, task = context.message, context.current_task
        assert message is not None
        assert context.task_id is not None
        if message.message_id.startswith("tck-message-response"):
            await event_queue.enqueue_event(_bare_answer(message))
            return
        context_id = task.context_id if task is not None else context.context_id
        assert context_id is not None
        if task is None:
            opened = Task(
                id=context.task_id,
                context_id=context_id,
                status=TaskStatus(state=TaskState.TASK_STATE_SUBMITTED),
                history=[message],
            )
            await event_queue.enqueue_event(opened)
        updater = TaskUpdater(event_queue, context.task_id, context_id)
        await _scene(message.message_id)(updater)

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Cancel the task."""
        task = context.current_task
        assert task is not None
        await TaskUpdater(event_queue, task.id, task.context_id).cancel()


def executor() -> AgentExecutor:
    """Return the executor."""
    return Script()


def _bare_answer(message: Message) -> Message:
    return Message(
        message_id=f"answer-{message.message_id}",
        context_id=message.context_id,
        role=Role.ROLE_AGENT,
        parts=[Part(text="Direct message response")],
    )


def _scene(message_id: str) -> Play:
    return next((play for prefix, play in SCENES.items() if message_id.startswith(prefix)), _complete)


async def _complete(updater: TaskUpdater) -> None:
    await updater.complete(updater.new_agent_message([Part(text="Hello from TCK")]))


async def _ask(updater: TaskUpdater) -> None:
    await updater.requires_input(updater.new_agent_message([Part(text="What next?")]))


async def _reject(updater: TaskUpdater) -> None:
    await updater.reject(updater.new_agent_message([Part(text="rejected")]))


def _artifact(part: Part) -> Play:
    async def play(updater: TaskUpdater) -> None:
        await updater.add_artifact([part])
        await updater.complete()

    return play


def _streamed(part: Part | None) -> Play:
    async def play(updater: TaskUpdater) -> None:
        await updater.start_work()
        if part is not None:
            await updater.add_artifact([part])
        await updater.complete()

    return play


async def _in_chunks(updater: TaskUpdater) -> None:
    await updater.start_work()
    await updater.add_artifact([Part(text="chunk-1 ")], artifact_id="chunked", append=False, last_chunk=False)
    await updater.add_artifact([Part(text="chunk-2")], artifact_id="chunked", append=True, last_chunk=True)
    await updater.complete()


async def _take_long(updater: TaskUpdater) -> None:
    await updater.start_work()
    await anyio.sleep(LONG_S)
    await updater.complete()


FILE: Final = Part(raw=b"Generated file content", filename="output.txt", media_type="text/plain")
LINK: Final = Part(url="https://example.com/output.txt", filename="output.txt", media_type="text/plain")

SCENES: Final[Mapping[str, Play]] = {
    "tck-artifact-text": _artifact(Part(text="Generated text content")),
    "tck-artifact-file-url": _artifact(LINK),
    "tck-artifact-file": _artifact(FILE),
    "tck-artifact-data": _artifact(Part(data=Value(struct_value=DATA))),
    "tck-input-required": _ask,
    "tck-reject-task": _reject,
    "tck-stream-001": _streamed(Part(text="Stream hello from TCK")),
    "tck-stream-002": _complete,
    "tck-stream-003": _streamed(Part(text="Stream task lifecycle")),
    "tck-stream-ordering-001": _streamed(Part(text="Ordered output")),
    "tck-stream-artifact-text": _streamed(Part(text="Streamed text content")),
    "tck-stream-artifact-file": _streamed(FILE),
    "tck-stream-artifact-chunked": _in_chunks,
    "test-resubscribe-message-id": _take_long,
}
"""Of two prefixes with a common beginning, the longer one comes first."""
