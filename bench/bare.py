"""The baseline: a minimal driver of codex, in its own process so that its CPU time and memory can be measured.

    python bench/bare.py INITIALIZE_PARAMS THREAD_PARAMS CODEX app-server …

Both params are JSON. Each line on stdin is a batch, `{conversation: [text, …], …}`: conversations run in parallel, the
texts of one run in order on its thread, which later batches reuse. Each line on stdout is a batch's outcome,
`{"wall_s": s, "turns": [{"first_s": s, "whole_s": s, "text": t}, …]}`; the first line, `{}`, means that codex has
answered `initialize`. It stores nothing, validates nothing and handles no failures: it is for the benchmark only.
"""

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codex_workspace.common.values import JsonObject

MAX_LINE_BYTES = 1 << 26


class Turn:
    """A running turn: its text so far, and the time of the first piece."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.first_at: float | None = None
        self.ended = asyncio.get_running_loop().create_future()


class Bare:
    """A codex and its running turns."""

    def __init__(self, codex: asyncio.subprocess.Process, thread_params: "JsonObject") -> None:
        assert codex.stdin is not None
        assert codex.stdout is not None
        self._stdin, self._stdout = codex.stdin, codex.stdout
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
            elif method == "turn/completed":
                self._turns[message["params"]["threadId"]].ended.set_result(None)

    async def call(self, method: str, params: "JsonObject") -> "JsonObject":
        """Send a request and return its result."""
        self._number += 1
        answer: asyncio.Future[JsonObject] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = answer
        self._stdin.write(json.dumps({"id": self._number, "method": method, "params": params}).encode() + b"\n")
        await self._stdin.drain()
        return await answer

    async def batch(self, conversations: dict[str, list[str]]) -> "JsonObject":
        """Run the conversations in parallel and return the outcome."""
        start = time.perf_counter()
        results = await asyncio.gather(*(self._run_all(name, texts) for name, texts in conversations.items()))
        return {"wall_s": time.perf_counter() - start, "turns": [turn for result in results for turn in result]}

    async def _run_all(self, conversation: str, texts: list[str]) -> list["JsonObject"]:
        return [await self._turn(conversation, text) for text in texts]

    async def _turn(self, conversation: str, text: str) -> "JsonObject":
        start = time.perf_counter()
        if conversation not in self._threads:
            thread = (await self.call("thread/start", self._thread_params))["thread"]
            assert isinstance(thread, dict)
            self._threads[conversation] = str(thread["id"])
        thread_id = self._threads[conversation]
        turn = self._turns[thread_id] = Turn()
        await self.call("turn/start", {"threadId": thread_id, "input": [{"type": "text", "text": text}]})
        await turn.ended
        whole_s = time.perf_counter() - start
        first_s = None if turn.first_at is None else turn.first_at - start
        return {"first_s": first_s, "whole_s": whole_s, "text": "".join(turn.pieces)}


async def drive(initialize: "JsonObject", thread_params: "JsonObject", command: list[str]) -> None:
    """Start codex and run the batches one after another until stdin ends."""
    pipe = asyncio.subprocess.PIPE
    codex = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, limit=MAX_LINE_BYTES
    )
    bare = Bare(codex, thread_params)
    reading = asyncio.create_task(bare.read())
    await bare.call("initialize", initialize)
    bare._stdin.write(b'{"method":"initialized"}\n')
    print("{}", flush=True)
    batches = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(batches), sys.stdin)
    async for line in batches:
        print(json.dumps(await bare.batch(json.loads(line))), flush=True)
    bare._stdin.close()
    await reading
    await codex.wait()


if __name__ == "__main__":
    asyncio.run(drive(json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]))
