"""A client in another process, which reads calls from stdin and writes results to stdout, as lines of JSON.

    → {"id": 1, "do": "send" | "stream" | "subscribe" | "get" | "cancel" | "list",
       "with": request, task id, or (to list) context id}
    ← {"id": 1, "event": task or update}   any number of them
    ← {"id": 1, "end": true}               or {"id": 1, "error": "the client's exception"}

The process ends when its stdin does.
"""

import json
import os
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
from a2a.types import SendMessageRequest, StreamResponse, Task
from anyio.abc import ByteReceiveStream, ByteSendStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from tests.support.waiting import HANG_S

Json = dict[str, object]

MAX_LINE_BYTES = 1 << 24


class RemoteError(Exception):
    """An exception of the other process's client."""


@dataclass(frozen=True, slots=True)
class Wire:
    """Conversion of requests and events."""

    request: Callable[[SendMessageRequest], Json]
    event: Callable[[Json], StreamResponse]


@dataclass(slots=True)
class RemoteClient:
    """A client in another process; several calls may be in progress at once."""

    _wire: Wire
    _stdin: ByteSendStream
    _stdout: BufferedByteReceiveStream
    _calls: int = 0
    _unread: defaultdict[int, deque[Json]] = field(default_factory=lambda: defaultdict(deque))
    _reading: anyio.Lock = field(default_factory=anyio.Lock)

    def send(self, request: SendMessageRequest, *, streaming: bool = False) -> AsyncIterator[StreamResponse]:
        return self._call("stream" if streaming else "send", self._wire.request(request))

    def subscribe(self, task_id: str) -> AsyncIterator[StreamResponse]:
        return self._call("subscribe", task_id)

    async def get(self, task_id: str) -> Task:
        return await self._task("get", task_id)

    async def cancel(self, task_id: str) -> Task:
        return await self._task("cancel", task_id)

    async def list(self, context_id: str) -> Sequence[Task]:
        return [event.task async for event in self._call("list", context_id)]

    async def _task(self, what: str, task_id: str) -> Task:
        [event] = [event async for event in self._call(what, task_id)]
        return event.task

    async def _call(self, what: str, about: Json | str) -> AsyncIterator[StreamResponse]:
        number = self._calls = self._calls + 1
        await self._stdin.send(json.dumps({"id": number, "do": what, "with": about}).encode() + b"\n")
        while True:
            match await self._next(number):
                case {"event": dict(event)}:
                    yield self._wire.event(event)
                case {"end": True}:
                    return
                case {"error": str(words)}:
                    raise RemoteError(words)
                case other:
                    raise AssertionError(f"unexpected line {other}")

    async def _next(self, number: int) -> Json:
        """Return the call's next line; a waiting call also reads the lines of others."""
        while not self._unread[number]:
            async with self._reading:
                if not self._unread[number]:
                    line = json.loads(await self._stdout.receive_until(b"\n", MAX_LINE_BYTES))
                    self._unread[line["id"]].append(line)
        return self._unread[number].popleft()


@asynccontextmanager
async def remote_client(
    command: Sequence[str], environment: Mapping[str, str], wire: Wire
) -> AsyncIterator[RemoteClient]:
    """Run a client while the block is open."""
    async with await anyio.open_process(command, env=os.environ | dict(environment), stderr=None) as process:
        stdin, stdout = _pipes(process)
        yield RemoteClient(wire, stdin, BufferedByteReceiveStream(stdout))
        await stdin.aclose()
        with anyio.fail_after(HANG_S):
            await process.wait()


def _pipes(process: Process) -> tuple[ByteSendStream, ByteReceiveStream]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout
