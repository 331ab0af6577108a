"""The measured sides: the bare driver, and servers as a client sees them. All run the same turns."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import psutil
from anyio.abc import ByteSendStream
from anyio.streams.buffered import BufferedByteReceiveStream

from bench.bare import MAX_LINE_BYTES
from bench.http import Connection, decode, encode

Method = Literal["SendMessage", "SendStreamingMessage"]
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class Timed:
    """A turn's answer, and the seconds from the start of its batch to its first text and its end.

    `first_s` is None if the answer arrived in one piece.
    """

    text: str
    first_s: float | None
    whole_s: float


class Side(Protocol):
    """One way to run turns in codex; `pid` is the process that is measured."""

    @property
    def pid(self) -> int: ...

    async def run(self, texts: Mapping[str, str]) -> list[Timed]:
        """Run one turn in each conversation at the same time; a known name continues its conversation."""


@dataclass(frozen=True, slots=True)
class BareSide:
    """The bare driver's process; it measures the times itself, so that reporting them is not included."""

    pid: int
    batches: ByteSendStream
    outcomes: BufferedByteReceiveStream

    async def ready(self) -> None:
        """Wait until codex has started."""
        await self.outcomes.receive_until(b"\n", MAX_LINE_BYTES)

    async def run(self, texts: Mapping[str, str]) -> list[Timed]:
        """Run the turns."""
        await self.batches.send(json.dumps(dict(texts)).encode() + b"\n")
        outcome = json.loads(await self.outcomes.receive_until(b"\n", MAX_LINE_BYTES))
        return [Timed(text, first_s, whole_s) for first_s, whole_s, text in outcome.values()]


@dataclass(frozen=True, slots=True)
class HttpSide:
    """A server on a port of this machine. Connections are opened before the clock starts, and kept."""

    pid: int
    port: int
    method: Method = "SendStreamingMessage"
    connections: dict[str, Connection] = field(default_factory=dict)

    async def run(self, texts: Mapping[str, str]) -> list[Timed]:
        """Run the turns; the conversations' names are context IDs."""
        for name in texts:
            if name not in self.connections or not self.connections[name].open:
                loop = asyncio.get_running_loop()
                _, self.connections[name] = await loop.create_connection(Connection, "127.0.0.1", self.port)
        requests = {name: encode(self.port, self.method, text, name) for name, text in texts.items()}
        start = time.perf_counter()
        responses = await asyncio.gather(*(self.connections[name].send(data) for name, data in requests.items()))
        turns = []
        for name, response in zip(texts, responses, strict=True):
            at = self.connections[name]
            first_s = None if at.first_at is None else at.first_at - start
            turns.append(Timed(decode(response), first_s, at.whole_at - start))
        return turns

    def close(self) -> None:
        """Close the connections."""
        for connection in self.connections.values():
            connection.close()


def cpu_s(side: Side) -> float:
    """Return the CPU time that the side's process has used, without its children's, to the nanosecond."""
    # This is the clock's number as clock_getcpuclockid(3) returns it: /proc counts in steps of 10 ms only.
    return time.clock_gettime((~side.pid << 3) | 2)


def rss_mb(side: Side) -> float:
    """Return the resident memory of the side's process in MB."""
    return float(psutil.Process(side.pid).memory_info().rss / MEGABYTE)
