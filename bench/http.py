"""An HTTP client that costs next to nothing: it shares the cores with what is measured.

It only looks for the first text and for the response's end while the clock runs. `decode` reads the rest afterwards.
"""

import asyncio
import json
import re
import time
import uuid
from typing import TYPE_CHECKING, Final

from a2a.types import StreamResponse, TaskState
from google.protobuf.json_format import ParseDict

from tests.e2e.client import Seen

if TYPE_CHECKING:
    from codex_workspace.common.values import JsonObject

HEAD_END: Final = b"\r\n\r\n"
LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
TEXT: Final = re.compile(rb'"artifactUpdate".*?"text": *"[^"]')
"""The first text of a stream: an update of an artifact, with text in it. Status notices have other names."""

LONGEST_EVENT: Final = 1 << 16


class Connection(asyncio.Protocol):
    """A connection that is kept open, with one request at a time. Times are those of `time.perf_counter`."""

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.whole_at = 0.0
        self.open = False
        self._received = bytearray()
        self._length: int | None = None
        self._answered: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self.open = False
        if self._answered and not self._answered.done():
            self._answered.set_exception(exc or ConnectionError("the server closed the connection"))

    async def send(self, request: bytes) -> bytes:
        """Send a request, wait for the response, and return it with its head."""
        assert self._transport is not None
        self.first_at, self._length = None, None
        self._received.clear()
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answered

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._received += data
        if self.first_at is None and TEXT.search(self._received, max(0, len(self._received) - LONGEST_EVENT)):
            self.first_at = time.perf_counter()
        if self._answered and self._is_whole():
            self.whole_at = time.perf_counter()
            self._answered.set_result(bytes(self._received))

    def _is_whole(self) -> bool:
        """Whether the response has ended: with its last chunk, or after the bytes that its head names."""
        if self._length is None:
            end = self._received.find(HEAD_END)
            if end < 0:
                return False
            found = LENGTH.search(self._received, 0, end)
            self._length = end + len(HEAD_END) + int(found[1]) if found else -1
        return self._received.endswith(LAST_CHUNK) if self._length < 0 else len(self._received) >= self._length


def encode(port: int, method: str, text: str, context_id: str) -> bytes:
    """Return the HTTP request that sends `text` by `SendMessage` or `SendStreamingMessage`."""
    message: JsonObject = {
        "role": "ROLE_USER",
        "messageId": str(uuid.uuid4()),
        "contextId": context_id,
        "parts": [{"text": text}],
    }
    call = {"jsonrpc": "2.0", "id": message["messageId"], "method": method, "params": {"message": message}}
    body = json.dumps(call).encode()
    head = (
        f"POST / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nA2A-Version: 1.0\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def decode(response: bytes) -> str:
    """Return the answer in a response.

    Raises:
        RuntimeError: the task did not complete, so its times are not comparable.
    """
    head, _, body = response.partition(HEAD_END)
    if not head.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"refused: {response[:1000]!r}")
    seen = Seen()
    if LENGTH.search(head):
        seen.take(_event(body))
    else:
        for line in _dechunked(body).splitlines():
            if line.startswith(b"data:"):
                seen.take(_event(line.removeprefix(b"data:")))
    if seen.state != TaskState.TASK_STATE_COMPLETED:
        raise RuntimeError(f"a task ended as {TaskState.Name(seen.state)}: {seen.sentence}")
    return seen.answer


def _dechunked(body: bytes) -> bytes:
    """Return a body without HTTP's frames."""
    chunks: list[bytes] = []
    start = 0
    while (line_end := body.find(b"\r\n", start)) > start:
        chunk_end = line_end + 2 + int(body[start:line_end], 16)
        chunks.append(body[line_end + 2 : chunk_end])
        start = chunk_end + 2
    return b"".join(chunks)


def _event(data: bytes) -> StreamResponse:
    return ParseDict(json.loads(data)["result"], StreamResponse())
