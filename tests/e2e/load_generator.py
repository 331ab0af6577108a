"""Many A2A clients in a separate process, so that they do not wait for the scripted model in the test's process.

    python -m tests.e2e.load_generator URL PID CLIENTS EVERY_S TEXT

Each client sends one message; a new client starts every `EVERY_S` seconds. Every fifth message uses a shared context,
each of the others its own. The messages alternate between the four `METHODS`. The program prints one `CallResult` in
JSON for each message. `PID` is the agent's process ID.
"""

import json
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import anyio
import httpx

METHODS: Final = ("SendMessage", "SendStreamingMessage", "message/send", "message/stream")
TICK_S: Final = 0.005


@dataclass(frozen=True)
class CallResult:
    """The response to one call, and its duration.

    stolen_s: seconds in which this process or the agent's main thread was ready to run but had no CPU.
    """

    method: str
    message_id: str
    status: int
    retry_after: str | None
    body: str
    seconds: float
    stolen_s: float

    @property
    def completed(self) -> bool:
        """Whether the body contains a completed task, in A2A 1.0 or 0.3."""
        return "TASK_STATE_COMPLETED" in self.body or '"state":"completed"' in self.body


class StolenTime:
    """The time in which a busy machine gave no CPU to this process's event loop and to the agent's main thread.

    The latter is the time the thread waited for a CPU, as counted by the kernel in ns; a kernel without this count
    contributes nothing.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._agents = Path(f"/proc/{pid}/schedstat")
        self._own_s = 0.0

    def total_s(self) -> float:
        """Return the sum, in seconds."""
        waited_for_cpu_s = int(self._agents.read_text().split()[1]) / 1e9 if self._agents.exists() else 0.0
        return self._own_s + waited_for_cpu_s

    async def watch(self) -> None:
        """Measure the delays of this process's event loop until cancelled."""
        while True:
            before = time.monotonic()
            await anyio.sleep(TICK_S)
            self._own_s += max(0.0, time.monotonic() - before - 2 * TICK_S)


def call(method: str, text: str, context_id: str, message_id: str = "") -> dict[str, object]:
    """Return a JSON-RPC call of A2A 1.0 or 0.3, depending on the method."""
    message: dict[str, object] = {"messageId": message_id or str(uuid.uuid4()), "contextId": context_id}
    if "/" in method:
        message |= {"kind": "message", "role": "user", "parts": [{"kind": "text", "text": text}]}
    else:
        message |= {"role": "ROLE_USER", "parts": [{"text": text}]}
    return {"jsonrpc": "2.0", "id": message["messageId"], "method": method, "params": {"message": message}}


async def ask(http: httpx.AsyncClient, body: dict[str, object], stolen: StolenTime | None = None) -> CallResult:
    """Send a call and return its complete response."""
    stolen = stolen or StolenTime()
    method = str(body["method"])
    start, stolen_s = time.monotonic(), stolen.total_s()
    answer = await http.post("/", json=body, headers={} if "/" in method else {"A2A-Version": "1.0"})
    seconds = time.monotonic() - start
    # A delay that is still in progress is counted at the next tick.
    await anyio.sleep(2 * TICK_S)
    retry_after = answer.headers.get("retry-after")
    stolen_s = stolen.total_s() - stolen_s
    return CallResult(method, str(body["id"]), answer.status_code, retry_after, answer.text, seconds, stolen_s)


def unlimited_client(url: str) -> httpx.AsyncClient:
    """Return a client without a connection limit."""
    return httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None))


async def generate_load(url: str, pid: int, clients: int, every_s: float, text: str) -> None:
    """Run the clients and print their results."""
    stolen = StolenTime(pid)

    async def client(number: int) -> None:
        context_id = "crowded" if number % 5 == 0 else f"context-{number}"
        result = await ask(http, call(METHODS[number % 4], text, context_id), stolen)
        sys.stdout.write(json.dumps(asdict(result)) + "\n")

    async with unlimited_client(url) as http, anyio.create_task_group() as monitor:
        monitor.start_soon(stolen.watch)
        async with anyio.create_task_group() as tasks:
            for number in range(clients):
                tasks.start_soon(client, number)
                await anyio.sleep(every_s)
        monitor.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(generate_load, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
