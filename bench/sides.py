"""Who is measured: our agent as a peer sees it, and the bare driver. Both are told whole conversations, alike."""

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
    """A turn's answer, when its first text came and when all was there, in seconds from its sending.

    `first_s` is None where the answer comes in one piece.
    """

    text: str
    first_s: float | None
    whole_s: float


@dataclass(frozen=True, slots=True)
class Talk:
    """What came of conversations that ran in parallel, and how long they took together, in seconds."""

    wall_s: float
    turns: Sequence[Timed]


class Side(Protocol):
    """One way to have codex answer."""

    async def talk(self, conversations: Mapping[str, Sequence[str]]) -> Talk:
        """Run conversations in parallel, the texts of one in order; a name goes on with the conversation so named."""


Send = Callable[[str, str], Awaitable[Timed]]
"""Sends a text in a context, and waits for the whole answer."""


@dataclass(frozen=True, slots=True)
class OurSide:
    """Our agent, by one way of sending."""

    send: Send

    async def talk(self, conversations: Mapping[str, Sequence[str]]) -> Talk:
        """Run the conversations; their names are the context ids."""
        return await _talk(self.send, conversations)


async def _talk(send: Send, conversations: Mapping[str, Sequence[str]]) -> Talk:
    """Run the conversations side by side, the texts of each one after the other; `send` is told text and name."""
    turns: list[Timed] = []

    async def one(name: str, texts: Sequence[str]) -> None:
        turns.extend([await send(text, name) for text in texts])

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for name, texts in conversations.items():
            tasks.start_soon(one, name, texts)
    return Talk(time.perf_counter() - began, turns)


def sdk_streaming(peer: Peer) -> Send:
    """Send with the SDK's client, streaming."""

    async def send(text: str, context_id: str) -> Timed:
        seen, first_s, began = Seen(), None, time.perf_counter()
        async for event in peer.stream(text, context_id):
            seen.take(event)
            if first_s is None and seen.answer:
                first_s = time.perf_counter() - began
        return Timed(_answer(seen), first_s, time.perf_counter() - began)

    return send


def sdk_blocking(peer: Peer) -> Send:
    """Send with the SDK's client, and wait for the whole task."""

    async def send(text: str, context_id: str) -> Timed:
        began = time.perf_counter()
        seen = await peer.ask_blocking(text, context_id)
        return Timed(_answer(seen), None, time.perf_counter() - began)

    return send


def plain_streaming(http: httpx.AsyncClient, url: str) -> Send:
    """Send with a plain HTTP client that reads the event stream's lines, and looks into them when all is over."""

    async def send(text: str, context_id: str) -> Timed:
        seen, first_s, began = Seen(), None, time.perf_counter()
        lines: list[str] = []
        async with http.stream(
            "POST", url, json=_call("SendStreamingMessage", text, context_id), headers=HEADERS
        ) as response:
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    lines.append(line)
                    if first_s is None and '"artifactUpdate"' in line:
                        first_s = time.perf_counter() - began
        whole_s = time.perf_counter() - began
        for line in lines:
            seen.take(_event(json.loads(line.removeprefix("data:"))["result"]))
        return Timed(_answer(seen), first_s, whole_s)

    return send


def plain_blocking(http: httpx.AsyncClient, url: str) -> Send:
    """Send with a plain HTTP client, and look into the answer when it is there."""

    async def send(text: str, context_id: str) -> Timed:
        began = time.perf_counter()
        response = await http.post(url, json=_call("SendMessage", text, context_id), headers=HEADERS)
        whole_s = time.perf_counter() - began
        return Timed(_answer(Seen().take(_event(response.json()["result"]))), None, whole_s)

    return send


@dataclass(frozen=True, slots=True)
class BareSide:
    """The bare driver in its process; the times are its own, so that telling us about them costs it nothing."""

    batches: ByteSendStream
    outcomes: BufferedByteReceiveStream

    async def ready(self) -> None:
        """Wait until its codex has answered."""
        await self._outcome()

    async def talk(self, conversations: Mapping[str, Sequence[str]]) -> Talk:
        """Run the conversations; one batch at a time."""
        batch = {name: list(texts) for name, texts in conversations.items()}
        await self.batches.send(json.dumps(batch).encode() + b"\n")
        outcome = await self._outcome()
        turns = [Timed(turn["text"], turn["first_s"], turn["whole_s"]) for turn in outcome["turns"]]
        return Talk(outcome["wall_s"], turns)

    async def _outcome(self) -> dict[str, Any]:
        line = await self.outcomes.receive_until(b"\n", MAX_LINE_BYTES)
        outcome: dict[str, Any] = json.loads(line)
        return outcome


@dataclass(frozen=True, slots=True)
class RuntimeSide:
    """A runtime of ours without A2A, in this process; `sessions` are those of the conversations by their names."""

    runtime: Runtime
    sessions: dict[str, str] = field(default_factory=dict)

    async def talk(self, conversations: Mapping[str, Sequence[str]]) -> Talk:
        """Run the conversations; one that has begun is resumed."""
        return await _talk(self._turn, conversations)

    async def _turn(self, text: str, name: str) -> Timed:
        began, first_s = time.perf_counter(), None
        async with self.runtime.run(text, RunOptions(resume=self.sessions.get(name))) as run:
            async for event in run:
                match event:
                    case Text() if first_s is None:
                        first_s = time.perf_counter() - began
                    case Done(text=answer, session_id=str(session_id), stop_reason="completed"):
                        self.sessions[name] = session_id
                        return Timed(answer, first_s, time.perf_counter() - began)
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


def _answer(seen: Seen) -> str:
    """Return the answer of a task.

    Raises:
        RuntimeError: the task did not complete; its times say nothing.
    """
    if seen.state != TaskState.TASK_STATE_COMPLETED:
        raise RuntimeError(f"a task ended as {TaskState.Name(seen.state)}: {seen.sentence}")
    return seen.answer
