"""An A2A peer: the real client of a2a-sdk 1.3, and what it has seen of a task."""

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
from codex_workspace.tasks.outcomes import USAGE
from tests.support.waiting import HANG_S


def script(*steps: dict[str, object], text: str = "") -> str:
    """Return a message that tells the scripted model what to do."""
    return f"{text}@script {json.dumps(list(steps))}"


@dataclass
class Seen:
    """What a client has received of one task, by the rules of A2A: artifacts are replaced or appended to."""

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
        """The kinds of the notes that came on the way."""
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
        assert self.state not in TERMINAL, "something came after the terminal status"
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
    """Talks to one agent, over one streaming and one blocking client."""

    streaming: Client
    blocking: Client

    async def stream(self, text: str, context_id: str = "") -> AsyncIterator[StreamResponse]:
        """Send a message and yield the events as they come."""
        async for event in self.streaming.send_message(request(text, context_id)):
            yield event

    async def ask(self, text: str, context_id: str = "") -> Seen:
        """Send a message, streaming, and return what came in all."""
        seen = Seen()
        async for event in self.streaming.send_message(request(text, context_id)):
            seen.take(event)
        return seen

    async def ask_blocking(self, text: str, context_id: str = "") -> Seen:
        """Send a message, blocking, and return the task."""
        seen = Seen()
        async for event in self.blocking.send_message(request(text, context_id)):
            seen.take(event)
        return seen

    async def begin(self, text: str, context_id: str = "") -> Seen:
        """Send a message and return at once with the task's beginning."""
        sent = request(text, context_id)
        sent.configuration.CopyFrom(SendMessageConfiguration(return_immediately=True))
        seen = Seen()
        async for event in self.blocking.send_message(sent):
            seen.take(event)
        return seen

    async def answer(self, asked: Seen, *parts: Part, streaming: bool = False) -> Seen:
        """Answer what a task has asked, and return what comes of it: the task's end, or its next question."""
        said = Message(role=Role.ROLE_USER, message_id=str(uuid.uuid4()), task_id=asked.task_id, parts=parts)
        seen = Seen(asked.task_id, asked.context_id, asked.state, artifacts=dict(asked.artifacts))
        async for event in (self.streaming if streaming else self.blocking).send_message(
            SendMessageRequest(message=said)
        ):
            seen.take(event)
        return seen

    async def history(self, task_id: str) -> str:
        """Return the texts of a task's history, its status included."""
        task = await self.blocking.get_task(GetTaskRequest(id=task_id))
        return "\n".join(part.text for message in [*task.history, task.status.message] for part in message.parts)

    async def get(self, task_id: str) -> Seen:
        """Return the task as the agent keeps it."""
        return Seen().take_task(await self.blocking.get_task(GetTaskRequest(id=task_id)))

    async def finished(self, task_id: str, within_s: float = HANG_S) -> Seen:
        """Poll a task until it ends, as a client without streams does."""
        with anyio.fail_after(within_s):
            while (seen := await self.get(task_id)).state not in TERMINAL:
                await anyio.sleep(0.02)
        return seen

    async def cancel(self, task_id: str) -> Seen:
        """Cancel a task and return it."""
        return Seen().take_task(await self.blocking.cancel_task(CancelTaskRequest(id=task_id)))


def plain(metadata: object) -> dict[str, str]:
    """Return a metadata value's words, those of inner objects under dotted names."""
    assert isinstance(metadata, Struct)
    found: dict[str, str] = {}
    for name, value in MessageToDict(metadata).items():
        inner = value if isinstance(value, dict) else {}
        found |= {f"{name}.{key}": str(word) for key, word in inner.items()} or {name: str(value)}
    return found


def tokens(seen: Seen) -> dict[str, float]:
    """Return the token counts of a task; the thread's under `thread.…`."""
    return {name: float(number) for name, number in plain(seen.metadata[USAGE]).items()}


def request(text: str, context_id: str = "") -> SendMessageRequest:
    """Return a request to send `text`, in a context or in none."""
    message = Message(role=Role.ROLE_USER, message_id=str(uuid.uuid4()), context_id=context_id, parts=[Part(text=text)])
    return SendMessageRequest(message=message)


@asynccontextmanager
async def peer(url: str, token: str | None = None) -> AsyncIterator[Peer]:
    """Find the agent by its card and connect to it."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(timeout=120, headers=headers) as http:
        clients = [
            await ClientFactory(ClientConfig(streaming=streaming, httpx_client=http)).create_from_url(url)
            for streaming in (True, False)
        ]
        yield Peer(*clients)
