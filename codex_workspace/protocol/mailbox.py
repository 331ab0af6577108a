"""The unread messages of one thread: the connection adds them, the turn receives them."""

from dataclasses import dataclass, field
from typing import Final

import anyio

from codex_workspace.common.errors import CodexGone
from codex_workspace.common.values import JsonValue
from codex_workspace.protocol.jsonrpc import Notification, Request

MAX_UNREAD_BYTES: Final = 256 * 1024 * 1024
"""A thread with more unread text is given up. The connection never waits for the reader of a thread, because responses
and other threads share its pipe; so the limit is here. It is several times codex's longest line."""


@dataclass(eq=False, slots=True)
class ServerRequest:
    """A request of codex and its result; None means the default response."""

    request: Request
    result: JsonValue = None
    answered: anyio.Event = field(default_factory=anyio.Event)

    def answer(self, result: JsonValue) -> None:
        """Set the result; a second one is ignored."""
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
        self._error: CodexGone | None = None
        self._woken = False
        self._changed = anyio.Event()

    def put(self, message: Notification | ServerRequest, size: int) -> None:
        """Add a message whose line had `size` bytes; beyond the limit the mailbox fails instead."""
        if self._error is not None:
            return
        self.has_received = True
        self._unread_bytes += size
        if self._unread_bytes > self._max_unread_bytes:
            self.fail(CodexGone(f"codex sent more than {self._max_unread_bytes} bytes that were not read"))
            return
        self._unread.append(message)
        self._changed.set()

    def put_request(self, request: Request, size: int) -> ServerRequest:
        """Add a request whose line had `size` bytes; if the mailbox has failed, it gets the default response."""
        message = ServerRequest(request)
        if self._error is not None:
            message.answer(None)
        else:
            self._open = [*(each for each in self._open if not each.answered.is_set()), message]
            self.put(message, size)
        return message

    def close(self) -> None:
        """Give the default response to all open requests."""
        for message in self._open:
            message.answer(None)

    def fail(self, error: CodexGone) -> None:
        """Make `receive` raise `error` after all earlier messages were received."""
        self._error = self._error or error
        self._changed.set()

    def wake(self) -> None:
        """Make a waiting `receive` return, with no messages if there are none."""
        self._woken = True
        self._changed.set()

    async def receive(self) -> list[Notification | ServerRequest]:
        """Wait for messages and return all that are unread; none after `wake`.

        Raises:
            CodexGone: the connection has failed, and all earlier messages were received.
        """
        if not self._unread and not self._woken and self._error is None:
            self._changed = anyio.Event()
            await self._changed.wait()
        messages, self._unread, self._unread_bytes = self._unread, [], 0
        if not messages and not self._woken and self._error is not None:
            raise CodexGone(self._error.sentence, self._error.tail)
        self._woken = False
        return messages
