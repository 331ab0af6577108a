"""An A2A peer: the client of a2a-sdk 1.3, and the state of a task as this client received it."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import httpx
from a2a.client import Client, ClientConfig, ClientFactory
from a2a.types import (
    CancelTaskRequest,
    GetTaskRequest,
    Message,
    Part,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    StreamResponse,
    Task,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from codex_workspace.common.a2a_terms import TERMINAL
from codex_workspace.tasks.replies import USAGE
from tests.support.waiting import HANG_S, eventually


def script(*steps: dict[str, object], text: str = "") -> str:
    """Return a message that tells the scripted model what to do."""
    return f"{text}@script {json.dumps(list(steps))}"


@dataclass
class Seen:
    """The received state of one task, by A2A's rules: artifacts are replaced or appended to."""

    task_id: str = ""
    context_id: str = ""
    state: int = TaskState.TASK_STATE_UNSPECIFIED
    sentence: str = ""
    artifacts: dict[str, str] = field(default_factory=dict)
    question: dict[str, object] = field(default_factory=dict)
    notes: list[TaskStatusUpdateEvent] = field(default_factory=list)
    metadata: dict[str, object] = field(default_factory=dict)
    answer_updates: list[float] = field(default_factory=list)
    tasks: int = 0
    terminals: int = 0
    final_chunks: int = 0

    @property
    def answer(self) -> str:
        return self.artifacts.get("answer", "")

    def kinds(self) -> list[str]:
        """The kinds of the received progress notes."""
        return [str(note.status.message.metadata["kind"]) for note in self.notes]

    def take(self, event: StreamResponse) -> "Seen":
        """Apply one event."""
        match event.WhichOneof("payload"):
            case "task":
                self.tasks += 1
                self.take_task(event.task)
            case "status_update":
                self._status(event.status_update)
            case "artifact_update":
                update = event.artifact_update
                text = "".join(part.text for part in update.artifact.parts)
                known = self.artifacts.get(update.artifact.artifact_id, "") if update.append else ""
                self.artifacts[update.artifact.artifact_id] = known + text
                if update.artifact.artifact_id == "answer":
                    self.answer_updates.append(time.monotonic())
                    self.final_chunks += update.last_chunk
            case other:
                raise AssertionError(f"unexpected event {other}")
        return self

    def take_task(self, task: Task) -> "Seen":
        """Apply a whole task."""
        self.task_id, self.context_id, self.state = task.id, task.context_id, task.status.state
        self.sentence = "".join(part.text for part in task.status.message.parts)
        for artifact in task.artifacts:
            self.artifacts[artifact.artifact_id] = "".join(part.text for part in artifact.parts)
        self.metadata = dict(task.metadata)
        self._asked(task.status)
        return self

    def _asked(self, status: TaskStatus) -> None:
        self.question = {}
        if status.state == TaskState.TASK_STATE_INPUT_REQUIRED:
            (data,) = [part.data for part in status.message.parts if part.HasField("data")]
            self.question = MessageToDict(data)

    def _status(self, update: TaskStatusUpdateEvent) -> None:
        assert self.state not in TERMINAL, "an event followed the terminal status"
        self.state = update.status.state
        self.sentence = "".join(part.text for part in update.status.message.parts)
        self._asked(update.status)
        if update.status.state in TERMINAL:
            self.terminals += 1
            self.metadata |= dict(update.metadata)
        elif update.status.HasField("message") and not self.question:
            self.notes.append(update)


@dataclass(frozen=True)
class Peer:
    """One streaming and one blocking client of an agent."""

    streaming: Client
    blocking: Client

    async def stream(self, text: str, context_id: str = "") -> AsyncIterator[StreamResponse]:
        """Send a message and yield its events."""
        async for event in self.streaming.send_message(request(text, context_id)):
            yield event

    async def ask(self, text: str, context_id: str = "") -> Seen:
        """Send a message with the streaming client and return the final state."""
        seen = Seen()
        async for event in self.streaming.send_message(request(text, context_id)):
            seen.take(event)
        return seen

    async def ask_blocking(self, text: str, context_id: str = "") -> Seen:
        """Send a message with the blocking client and return the task."""
        seen = Seen()
        async for event in self.blocking.send_message(request(text, context_id)):
            seen.take(event)
        return seen

    async def begin(self, text: str, context_id: str = "") -> Seen:
        """Send a message without waiting and return the new task."""
        sent = request(text, context_id)
        sent.configuration.CopyFrom(SendMessageConfiguration(return_immediately=True))
        seen = Seen()
        async for event in self.blocking.send_message(sent):
            seen.take(event)
        return seen

    async def answer(self, asked: Seen, *parts: Part, streaming: bool = False) -> Seen:
        """Answer a task's question and return the task's end or its next question."""
        message = Message(role=Role.ROLE_USER, message_id=str(uuid.uuid4()), task_id=asked.task_id, parts=parts)
        seen = Seen(asked.task_id, asked.context_id, asked.state, artifacts=dict(asked.artifacts))
        async for event in (self.streaming if streaming else self.blocking).send_message(
            SendMessageRequest(message=message)
        ):
            seen.take(event)
        return seen

    async def history(self, task_id: str) -> str:
        """Return the texts of a task's history, its status included."""
        task = await self.blocking.get_task(GetTaskRequest(id=task_id))
        return "\n".join(part.text for message in [*task.history, task.status.message] for part in message.parts)

    async def get(self, task_id: str) -> Seen:
        """Return the task as the agent stores it."""
        return Seen().take_task(await self.blocking.get_task(GetTaskRequest(id=task_id)))

    async def finished(self, task_id: str, within_s: float = HANG_S) -> Seen:
        """Poll a task until it ends, without a stream."""

        async def end() -> Seen | None:
            seen = await self.get(task_id)
            return seen if seen.state in TERMINAL else None

        with anyio.fail_after(within_s):
            return await eventually(end)

    async def cancel(self, task_id: str) -> Seen:
        """Cancel a task and return it."""
        return Seen().take_task(await self.blocking.cancel_task(CancelTaskRequest(id=task_id)))


def plain(metadata: object) -> dict[str, str]:
    """Return a metadata value as strings; keys of inner objects are joined by dots."""
    assert isinstance(metadata, Struct)
    found: dict[str, str] = {}
    for name, value in MessageToDict(metadata).items():
        inner = value if isinstance(value, dict) else {}
        found |= {f"{name}.{key}": str(word) for key, word in inner.items()} or {name: str(value)}
    return found


def tokens(seen: Seen) -> dict[str, float]:
    """Return a task's token counts; those of the thread have the prefix `thread.`."""
    return {name: float(number) for name, number in plain(seen.metadata[USAGE]).items()}


def request(text: str, context_id: str = "") -> SendMessageRequest:
    """Return a request that sends `text`, in the given context or without one."""
    message = Message(role=Role.ROLE_USER, message_id=str(uuid.uuid4()), context_id=context_id, parts=[Part(text=text)])
    return SendMessageRequest(message=message)


@asynccontextmanager
async def peer(url: str, token: str | None = None) -> AsyncIterator[Peer]:
    """Connect to the agent described by the card at `url`."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(timeout=120, headers=headers) as http:
        clients = [
            await ClientFactory(ClientConfig(streaming=streaming, httpx_client=http)).create_from_url(url)
            for streaming in (True, False)
        ]
        yield Peer(*clients)
