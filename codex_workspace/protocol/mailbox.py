"""What codex said and asked of one thread and nobody has read yet: filled by the connection, read by the turn."""

from dataclasses import dataclass, field
from typing import Final

import anyio

from codex_workspace.common.errors import CodexGone
from codex_workspace.common.values import JsonValue
from codex_workspace.protocol.jsonrpc import Notification, Request

MAX_UNREAD_BYTES: Final = 256 * 1024 * 1024
"""Beyond this much unread text a thread is given up. Reading codex's pipe never waits for a thread's reader, because
answers and other threads come through the same pipe; so the bound is here. It is several of codex's largest lines."""


@dataclass(eq=False, slots=True)
class ServerRequest:
    """A request of codex's, and what it will be answered; None lets the plain refusal of its kind go out."""

    request: Request
    result: JsonValue = None
    answered: anyio.Event = field(default_factory=anyio.Event)

    def answer(self, result: JsonValue) -> None:
        """Give the answer; a second one is not heard."""
        if not self.answered.is_set():
            self.result = result
            self.answered.set()


class Mailbox:
    """The unread notifications and requests of one thread, in order."""

    def __init__(self, max_unread_bytes: int = MAX_UNREAD_BYTES) -> None:
        self.has_received = False
        self._max_unread_bytes = max_unread_bytes
        self._unread: list[Notification | ServerRequest] = []
        self._open: list[ServerRequest] = []
        self._unread_bytes = 0
        self._end: CodexGone | None = None
        self._woken = False
        self._changed = anyio.Event()

    def put(self, notification: Notification, size: int) -> None:
        """Add a notification whose line had `size` bytes; one too many ends the mailbox instead."""
        self._add(notification, size)

    def put_request(self, request: Request, size: int) -> ServerRequest:
        """Add a request whose line had `size` bytes; where nobody can hear it any more it is settled at once."""
        asking = ServerRequest(request)
        if self._end is not None:
            asking.answer(None)
        else:
            self._open = [each for each in self._open if not each.answered.is_set()]
            self._open.append(asking)
            self._add(asking, size)
        return asking

    def close(self) -> None:
        """Take note that nobody reads any more: what was asked is left to the plain refusal."""
        for asking in self._open:
            asking.answer(None)

    def _add(self, said: Notification | ServerRequest, size: int) -> None:
        if self._end is not None:
            return
        self.has_received = True
        self._unread_bytes += size
        if self._unread_bytes > self._max_unread_bytes:
            self.fail(CodexGone(f"codex sent more than {self._max_unread_bytes} bytes that nobody read"))
            return
        self._unread.append(said)
        self._changed.set()

    def fail(self, error: CodexGone) -> None:
        """Let `receive` raise `error` once all that came before it was taken."""
        self._end = self._end or error
        self._changed.set()

    def wake(self) -> None:
        """Let a waiting `receive` return, if need be with nothing."""
        self._woken = True
        self._changed.set()

    async def receive(self) -> list[Notification | ServerRequest]:
        """Wait for something and return all that is unread (nothing after `wake`).

        Raises:
            CodexGone: the connection is closed and all that came before was taken.
        """
        if not self._unread and not self._woken and self._end is None:
            self._changed = anyio.Event()
            await self._changed.wait()
        taken, self._unread, self._unread_bytes = self._unread, [], 0
        if not taken and not self._woken and self._end is not None:
            raise CodexGone(self._end.sentence, self._end.tail)
        self._woken = False
        return taken
