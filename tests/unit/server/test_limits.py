"""Clients that stop reading, over real sockets; and limits of rate and number, in virtual time."""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import pytest
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.types import Artifact, Part, Task, TaskArtifactUpdateEvent, TaskState, TaskStatus, TaskStatusUpdateEvent
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.server.app import ServerOptions, build_app, serving
from codex_workspace.server.limits import BURST_S, MAX_TOKENS, ConcurrencyLimiter, LimitExceeded, RateLimiter, is_huge
from codex_workspace.server.sockets import bind
from codex_workspace.storage.store import open_store
from tests.e2e.load_generator import call

PATIENCE_S = 0.3
PIECES = 40
PIECE = "0123456789" * 10_000
WHOLE = PIECES * len(PIECE)
SMALL_BUFFER = 1 << 16


class Talker(AgentExecutor):
    """Says `PIECES` pieces once it may, and ends once it may."""

    def __init__(self) -> None:
        self.begun, self.talk, self.end = anyio.Event(), anyio.Event(), anyio.Event()

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        task_id, context_id = context.task_id, context.context_id
        working = TaskStatus(state=TaskState.TASK_STATE_WORKING)
        await event_queue.enqueue_event(Task(id=task_id, context_id=context_id, status=working))
        self.begun.set()
        await self.talk.wait()
        for number in range(PIECES):
            artifact = Artifact(artifact_id="answer", parts=[Part(text=PIECE)])
            update = TaskArtifactUpdateEvent(
                task_id=task_id, context_id=context_id, artifact=artifact, append=number > 0
            )
            await event_queue.enqueue_event(update)
            await anyio.sleep(0.005)
        await self.end.wait()
        done = TaskStatus(state=TaskState.TASK_STATE_COMPLETED)
        await event_queue.enqueue_event(TaskStatusUpdateEvent(task_id=task_id, context_id=context_id, status=done))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        raise NotImplementedError


@dataclass(slots=True)
class Scene:
    """A server that talks a lot."""

    url: str
    http: httpx.AsyncClient
    talker: Talker

    async def stream(self, method: str, params: object) -> AsyncIterator[dict[str, object]]:
        """Yield the events of a streaming call."""
        async with self.http.stream("POST", "/", json=body(method, params), headers=NEW) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    yield json.loads(line[6:])["result"]

    async def call(self, method: str, params: object) -> str:
        """Return what a call is answered."""
        return (await self.http.post("/", json=body(method, params), headers=NEW)).text

    def stalled(self, method: str, task_id: str) -> socket.socket:
        """Call a method on the task and return the socket, which is not read."""
        host, port = self.url.removeprefix("http://").strip("/").split(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        content = json.dumps(body(method, {"id": task_id})).encode()
        lines = ["POST / HTTP/1.1", "Host: localhost", "A2A-Version: 1.0", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
        sock.sendall(head.encode() + content)
        return sock


NEW = {"A2A-Version": "1.0"}
MESSAGE = call("SendStreamingMessage", "talk", "context")["params"]


def body(method: str, params: object) -> dict[str, object]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


@asynccontextmanager
async def scene(folder: Path, patience_s: float = PATIENCE_S) -> AsyncIterator[Scene]:
    talker = Talker()

    async def ready() -> str | None:
        return None

    with bind("127.0.0.1", 0) as listener:
        # What the kernel takes is not ours to hold; the less it takes, the sooner a reader is seen to be slow.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        options = ServerOptions("talker", "Talks.", "1.0", url)
        async with (
            open_store(f"sqlite:///{folder / 'store.sqlite3'}") as store,
            build_app(options, talker, store, ready) as app,
            serving(app.asgi, listener, patience_s),
            httpx.AsyncClient(base_url=url, timeout=5) as http,
        ):
            yield Scene(url, http, talker)


async def drained(sock: socket.socket) -> int:
    """Read what is left until the other side has ended the connection; return how much that was."""
    sock.setblocking(False)
    got = 0
    with suppress(ConnectionResetError):
        while True:
            try:
                data = sock.recv(1 << 16)
            except BlockingIOError:
                await anyio.sleep(0.005)
                continue
            if not data:
                break
            got += len(data)
    return got


async def test_a_stalled_reader_is_disconnected_without_affecting_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as talk:
        result: list[str] = []

        async def read() -> None:
            stream = talk.stream("SendStreamingMessage", MESSAGE)
            # One by one: the others look on.
            while event := await anext(stream, None):
                result.append(json.dumps(event))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            while not result:
                await anyio.sleep(0.005)
            task_id = json.loads(result[0])["task"]["id"]
            with talk.stalled("SubscribeToTask", task_id) as stalled:
                await anyio.sleep(0.05)
                talk.talker.talk.set()
                with anyio.fail_after(3):
                    while "".join(result).count(PIECE) < PIECES:
                        await anyio.sleep(0.005)
                while "closing the connection of client" not in caplog.text:
                    await anyio.sleep(0.005)
                assert await drained(stalled) < WHOLE / 2
            again = talk.stream("SubscribeToTask", {"id": task_id})
            assert json.dumps(await anext(again)).count(PIECE) == PIECES, "the task so far"
            talk.talker.end.set()
            assert "TASK_STATE_COMPLETED" in [json.dumps(event) async for event in again][-1]
        assert "TASK_STATE_COMPLETED" in result[-1]
        assert (await talk.call("GetTask", {"id": task_id})).count(PIECE) == PIECES


async def test_a_slow_reader_is_not_disconnected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    patience_s = 3.0
    async with scene(tmp_path, patience_s) as talk:
        talk.talker.talk.set()
        talk.talker.end.set()
        began, pieces = anyio.current_time(), 0
        async for event in talk.stream("SendStreamingMessage", MESSAGE):
            pieces += json.dumps(event).count(PIECE)
            await anyio.sleep(patience_s / PIECES)
        assert pieces == PIECES
        assert anyio.current_time() - began > patience_s
        assert "closing the connection" not in caplog.text


async def test_an_unread_response_does_not_keep_its_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as talk:
        talk.talker.talk.set()
        talk.talker.end.set()
        task_id = json.loads(await talk.call("SendMessage", MESSAGE))["result"]["task"]["id"]
        with talk.stalled("GetTask", task_id) as stalled:
            while "closing the connection of client" not in caplog.text:
                await anyio.sleep(0.005)
            assert await drained(stalled) < WHOLE / 2


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_let_through_and_then_the_rate() -> None:
    clock = Clock()
    rates = RateLimiter(60, clock)
    assert [rates.take("ada") for _ in range(int(BURST_S))] == [0] * int(BURST_S)
    assert rates.take("ada") == 1
    assert rates.take("bob") == 0, "everybody has their own"
    clock.now += 1
    assert [rates.take("ada"), rates.take("ada")] == [0, 1]


def test_a_retry_after_the_given_time_is_accepted() -> None:
    clock = Clock()
    rates = RateLimiter(1, clock)
    assert rates.take("ada") == 0
    wait_s = rates.take("ada")
    assert wait_s == 60
    clock.now += wait_s
    assert rates.take("ada") == 0


@given(st.integers(1, 6000), st.lists(st.floats(0, 5), max_size=200))
def test_no_more_are_let_in_than_may(per_minute: int, pauses: list[float]) -> None:
    clock = Clock()
    rates = RateLimiter(per_minute, clock)
    let_in = 0
    for pause in pauses:
        clock.now += pause
        let_in += rates.take("ada") == 0
    assert let_in <= max(1, per_minute / 60 * BURST_S) + per_minute / 60 * sum(pauses) + 1e-6


def test_places_are_counted_by_one_and_by_all_and_given_back() -> None:
    places = ConcurrencyLimiter(per_principal=1, total=2)
    with places.hold("ada", "streams"):
        with (
            pytest.raises(LimitExceeded, match="you have 1 open streams; at most 1 are allowed"),
            places.hold("ada", "streams"),
        ):
            pass
        with (
            places.hold("bob", "streams"),
            pytest.raises(LimitExceeded, match=r"the limit of 2 open streams is reached"),
            places.hold("cy", "streams"),
        ):
            pass
        assert places.count == 1
    assert places.count == 0
    with places.hold("ada", "streams"):
        assert places.count == 1


def test_json_with_too_many_values_is_recognized_outside_of_texts() -> None:
    assert not is_huge(b"[" + b"1," * (MAX_TOKENS - 1) + b"1]")
    assert is_huge(b"[" + b"1," * MAX_TOKENS + b"1]")
    assert is_huge(b"[" + b"{}," * MAX_TOKENS + b"1]")
    text = json.dumps(['a "quoted", [long] {text},' * MAX_TOKENS, "\\"])
    assert not is_huge(text.encode())
