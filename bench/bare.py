"""The baseline: a minimal driver of codex, in its own process so that its CPU time and memory can be measured.

    python bench/bare.py INITIALIZE_PARAMS THREAD_PARAMS CODEX app-server …

Both params are JSON. Each line on stdin is a batch, `{conversation: text, …}`: its turns run at the same time, each on
the thread of its conversation, which later batches reuse. Each line on stdout is a batch's outcome,
`{conversation: [first_s, whole_s, text], …}`, in seconds since the batch was read; the first line, `{}`, means that
codex has answered `initialize`. It stores nothing, validates nothing and handles no failures: it is for the benchmark
only.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codex_workspace.common.values import JsonObject

MAX_LINE_BYTES = 1 << 26


class Turn:
    """A running turn: its text so far, and when the first piece arrived. `changed` is set by each piece and the end."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.first_at: float | None = None
        self.changed = asyncio.Event()
        self.ended = asyncio.get_running_loop().create_future()


class Codex:
    """A codex, its threads by conversation, and its running turns by thread."""

    def __init__(self, process: asyncio.subprocess.Process, thread_params: "JsonObject") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._thread_params = thread_params
        self._number = 0
        self._waiting: dict[int, asyncio.Future[JsonObject]] = {}
        self._turns: dict[str, Turn] = {}
        self._threads: dict[str, str] = {}

    async def read(self) -> None:
        """Process codex's messages until it exits."""
        async for line in self._stdout:
            message = json.loads(line)
            method = message.get("method")
            if method is None:
                self._waiting.pop(message["id"]).set_result(message["result"])
            elif method == "item/agentMessage/delta":
                params = message["params"]
                turn = self._turns[params["threadId"]]
                if turn.first_at is None:
                    turn.first_at = time.perf_counter()
                turn.pieces.append(params["delta"])
                turn.changed.set()
            elif method == "turn/completed":
                turn = self._turns[message["params"]["threadId"]]
                turn.ended.set_result(None)
                turn.changed.set()

    def send(self, message: "JsonObject") -> None:
        """Send a message."""
        self._stdin.write(json.dumps(message).encode() + b"\n")

    async def call(self, method: str, params: "JsonObject") -> "JsonObject":
        """Send a request and return its result."""
        self._number += 1
        answer: asyncio.Future[JsonObject] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = answer
        self.send({"id": self._number, "method": method, "params": params})
        return await answer

    async def start_turn(self, conversation: str, text: str) -> Turn:
        """Start a turn, and the conversation's thread if it has none; return the turn when codex has accepted it."""
        if conversation not in self._threads:
            thread = (await self.call("thread/start", self._thread_params))["thread"]
            assert isinstance(thread, dict)
            self._threads[conversation] = str(thread["id"])
        thread_id = self._threads[conversation]
        turn = self._turns[thread_id] = Turn()
        await self.call("turn/start", {"threadId": thread_id, "input": [{"type": "text", "text": text}]})
        return turn

    def close(self) -> None:
        """Close codex's stdin, so that it exits."""
        self._stdin.close()


@asynccontextmanager
async def open_codex(initialize: "JsonObject", thread_params: "JsonObject", command: list[str]) -> AsyncIterator[Codex]:
    """Run codex while the block is open; it has answered `initialize` then."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, limit=MAX_LINE_BYTES
    )
    codex = Codex(process, thread_params)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(codex.read())
        await codex.call("initialize", initialize)
        codex.send({"method": "initialized"})
        yield codex
        codex.close()
    await process.wait()


async def _batch(codex: Codex, texts: dict[str, str]) -> dict[str, tuple[float | None, float, str]]:
    """Run the turns at the same time and return their outcomes."""
    start = time.perf_counter()

    async def one(conversation: str, text: str) -> tuple[float | None, float, str]:
        turn = await codex.start_turn(conversation, text)
        await turn.ended
        whole_s = time.perf_counter() - start
        return None if turn.first_at is None else turn.first_at - start, whole_s, "".join(turn.pieces)

    outcomes = await asyncio.gather(*(one(conversation, text) for conversation, text in texts.items()))
    return dict(zip(texts, outcomes, strict=True))


async def drive(initialize: "JsonObject", thread_params: "JsonObject", command: list[str]) -> None:
    """Start codex and run the batches one after another until stdin ends."""
    async with open_codex(initialize, thread_params, command) as codex:
        print("{}", flush=True)
        batches = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(batches), sys.stdin)
        async for line in batches:
            print(json.dumps(await _batch(codex, json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(drive(json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]))
