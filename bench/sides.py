"""The measured sides: our agent as seen by a peer, and the bare driver. Both run the same conversations."""

import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import anyio
import httpx
from a2a.types import StreamResponse, TaskState
from anyio.abc import ByteSendStream
from anyio.streams.buffered import BufferedByteReceiveStream
from google.protobuf.json_format import ParseDict

from codex_workspace.common.values import JsonObject
from codex_workspace.runtimes import Runtime
from codex_workspace.runtimes.events import Done, Text
from codex_workspace.runtimes.launch import RunOptions
from tests.e2e.client import Peer, Seen

MAX_LINE_BYTES: Final = 1 << 26
HEADERS: Final = {"A2A-Version": "1.0"}


@dataclass(frozen=True, slots=True)
class Timed:
    """A turn's answer, and the seconds until its first text and its end.

    `first_s` is None if the answer arrives in one piece.
    """

    text: str
    first_s: float | None
    whole_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The turns of concurrent conversations, and their total duration in seconds."""

    wall_s: float
    turns: Sequence[Timed]


class Side(Protocol):
    """One way to run turns in codex."""

    async def run(self, conversations: Mapping[str, Sequence[str]]) -> Outcome:
        """Run conversations concurrently, the texts of each in order; a known name continues its conversation."""


Send = Callable[[str, str], Awaitable[Timed]]
"""Sends a text in a context and waits for the complete answer."""


@dataclass(frozen=True, slots=True)
class OurSide:
    """Our agent, with one way to send messages."""

    send: Send

    async def run(self, conversations: Mapping[str, Sequence[str]]) -> Outcome:
        """Run the conversations; their names are context IDs."""
        return await _run_all(self.send, conversations)


async def _run_all(send: Send, conversations: Mapping[str, Sequence[str]]) -> Outcome:
    """Run the conversations concurrently, the texts of each in order; `send` receives text and name."""
    turns: list[Timed] = []

    async def one(name: str, texts: Sequence[str]) -> None:
        turns.extend([await send(text, name) for text in texts])

    start = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for name, texts in conversations.items():
            tasks.start_soon(one, name, texts)
    return Outcome(time.perf_counter() - start, turns)


def sdk_streaming(peer: Peer) -> Send:
    """Send with the SDK's streaming client."""

    async def send(text: str, context_id: str) -> Timed:
        task, first_s, start = Seen(), None, time.perf_counter()
        async for event in peer.stream(text, context_id):
            task.take(event)
            if first_s is None and task.answer:
                first_s = time.perf_counter() - start
        return Timed(_answer(task), first_s, time.perf_counter() - start)

    return send


def sdk_blocking(peer: Peer) -> Send:
    """Send with the SDK's blocking client."""

    async def send(text: str, context_id: str) -> Timed:
        start = time.perf_counter()
        task = await peer.ask_blocking(text, context_id)
        return Timed(_answer(task), None, time.perf_counter() - start)

    return send


def plain_streaming(http: httpx.AsyncClient, url: str) -> Send:
    """Send with a plain HTTP client that reads the event stream, and parse the events afterwards."""

    async def send(text: str, context_id: str) -> Timed:
        task, first_s, start = Seen(), None, time.perf_counter()
        lines: list[str] = []
        async with http.stream(
            "POST", url, json=_call("SendStreamingMessage", text, context_id), headers=HEADERS
        ) as response:
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    lines.append(line)
                    if first_s is None and '"artifactUpdate"' in line:
                        first_s = time.perf_counter() - start
        whole_s = time.perf_counter() - start
        for line in lines:
            task.take(_event(json.loads(line.removeprefix("data:"))["result"]))
        return Timed(_answer(task), first_s, whole_s)

    return send


def plain_blocking(http: httpx.AsyncClient, url: str) -> Send:
    """Send with a plain HTTP client, and parse the response afterwards."""

    async def send(text: str, context_id: str) -> Timed:
        start = time.perf_counter()
        response = await http.post(url, json=_call("SendMessage", text, context_id), headers=HEADERS)
        whole_s = time.perf_counter() - start
        return Timed(_answer(Seen().take(_event(response.json()["result"]))), None, whole_s)

    return send


@dataclass(frozen=True, slots=True)
class BareSide:
    """The bare driver's process; it measures the times itself, so that reporting them is not included."""

    batches: ByteSendStream
    outcomes: BufferedByteReceiveStream

    async def ready(self) -> None:
        """Wait until codex has started."""
        await self._outcome()

    async def run(self, conversations: Mapping[str, Sequence[str]]) -> Outcome:
        """Run the conversations; one batch at a time."""
        batch = {name: list(texts) for name, texts in conversations.items()}
        await self.batches.send(json.dumps(batch).encode() + b"\n")
        outcome = await self._outcome()
        turns = [Timed(turn["text"], turn["first_s"], turn["whole_s"]) for turn in outcome["turns"]]
        return Outcome(outcome["wall_s"], turns)

    async def _outcome(self) -> dict[str, Any]:
        line = await self.outcomes.receive_until(b"\n", MAX_LINE_BYTES)
        outcome: dict[str, Any] = json.loads(line)
        return outcome


@dataclass(frozen=True, slots=True)
class RuntimeSide:
    """A runtime in this process, without A2A; `sessions` are the session IDs by conversation."""

    runtime: Runtime
    sessions: dict[str, str] = field(default_factory=dict)

    async def run(self, conversations: Mapping[str, Sequence[str]]) -> Outcome:
        """Run the conversations; existing ones are resumed."""
        return await _run_all(self._turn, conversations)

    async def _turn(self, text: str, name: str) -> Timed:
        start, first_s = time.perf_counter(), None
        async with self.runtime.run(text, RunOptions(resume=self.sessions.get(name))) as run:
            async for event in run:
                match event:
                    case Text() if first_s is None:
                        first_s = time.perf_counter() - start
                    case Done(text=answer, session_id=str(session_id), stop_reason="completed"):
                        self.sessions[name] = session_id
                        return Timed(answer, first_s, time.perf_counter() - start)
                    case Done():
                        raise RuntimeError(f"a run ended as {event.stop_reason}: {event.error}")
        raise RuntimeError("a run had no end")


def _call(method: str, text: str, context_id: str) -> JsonObject:
    message: JsonObject = {
        "role": "ROLE_USER",
        "messageId": str(uuid.uuid4()),
        "contextId": context_id,
        "parts": [{"text": text}],
    }
    return {"jsonrpc": "2.0", "id": message["messageId"], "method": method, "params": {"message": message}}


def _event(result: JsonObject) -> StreamResponse:
    return ParseDict(result, StreamResponse())


def _answer(task: Seen) -> str:
    """Return the answer of a task.

    Raises:
        RuntimeError: the task did not complete, so its times are not comparable.
    """
    if task.state != TaskState.TASK_STATE_COMPLETED:
        raise RuntimeError(f"a task ended as {TaskState.Name(task.state)}: {task.sentence}")
    return task.answer
