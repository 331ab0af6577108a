"""JSON-RPC messages as newline-delimited JSON: splits, decodes and encodes lines, without I/O.

`Mailbox` holds the unread messages of one thread: the connection adds them, the turn receives them.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import anyio

from codex_workspace.common.errors import CodexGone
from codex_workspace.common.values import JsonObject, JsonValue

MAX_LINE_BYTES: Final = 64 * 1024 * 1024
"""Longer lines are skipped. Codex sends 3 MB for a thread that is read back; control characters take six times their
size in JSON."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A line of `bytes` bytes, without its newline, that exceeded the limit."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """The result of our request `id`."""

    id: int | str
    value: JsonValue


@dataclass(frozen=True, slots=True)
class Failure:
    """The error of our request `id`; `code` is 0 if codex sent none."""

    id: int | str
    code: int
    message: str


@dataclass(frozen=True, slots=True)
class Notification:
    """A notification of codex."""

    method: str
    params: JsonObject


@dataclass(slots=True)
class Request:
    """A request of codex; the response's id must have the same JSON type as `id`.

    `result` is valid when `answered` is set; None means the default response.
    """

    id: int | str
    method: str
    params: JsonObject
    result: JsonValue = field(default=None, compare=False)
    answered: anyio.Event = field(default_factory=anyio.Event, compare=False)

    def answer(self, result: JsonValue) -> None:
        """Set the result; a second one is ignored."""
        if not self.answered.is_set():
            self.result = result
            self.answered.set()


Message: TypeAlias = Result | Failure | Notification | Request


class InvalidMessage(ValueError):
    """A line is not a message."""


class LineSplitter:
    """Splits a byte stream into lines, in linear time.

    Only b"\\n" ends a line, because text may contain other line separators, such as U+2028.
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes: Final = max_line_bytes
        self._unfinished = bytearray()
        self._dropped_bytes = 0

    def feed(self, data: bytes) -> list[bytes | Skipped]:
        """Return the lines that `data` completes, without their newlines; a line that is too long as `Skipped`."""
        first, *others = data.split(b"\n")
        if not others:
            self._keep(first)
            return []
        *whole, rest = others
        lines = [self._end_line(first)]
        lines += [Skipped(len(line)) if len(line) > self._max_line_bytes else line for line in whole]
        self._keep(rest)
        return lines

    def finish(self) -> list[bytes | Skipped]:
        """Return the incomplete last line, if there is one; the splitter is empty afterwards."""
        return [self._end_line(b"")] if self._unfinished or self._dropped_bytes else []

    def _keep(self, piece: bytes) -> None:
        if self._dropped_bytes:
            self._dropped_bytes += len(piece)
        elif len(self._unfinished) + len(piece) > self._max_line_bytes:
            self._dropped_bytes = len(self._unfinished) + len(piece)
            self._unfinished = bytearray()
        else:
            self._unfinished += piece

    def _end_line(self, piece: bytes) -> bytes | Skipped:
        self._keep(piece)
        dropped, self._dropped_bytes = self._dropped_bytes, 0
        line, self._unfinished = self._unfinished, bytearray()
        return Skipped(dropped) if dropped else bytes(line)


_read = json.JSONDecoder().decode
_write = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def decode(line: bytes) -> Message:
    """Return the message in a line.

    A message with a method comes from codex, even if it repeats an id of this side: both sides number their requests.

    Raises:
        InvalidMessage: the line is not a message.
    """
    try:
        message: JsonValue = _read(line.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise InvalidMessage("not an object")
    given, method, params = message.get("id"), message.get("method"), message.get("params")
    id_ = given if isinstance(given, int | str) and not isinstance(given, bool) else None
    if isinstance(method, str) and (params is None or isinstance(params, dict)):
        if "id" not in message:
            return Notification(method, params or {})
        if id_ is not None:
            return Request(id_, method, params or {})
    elif method is None and id_ is not None:
        match message:
            case {"error": {"code": int(code), "message": str(text)}}:
                return Failure(id_, code, text)
            case {"result": value}:
                return Result(id_, value)
    raise InvalidMessage("neither a notification, nor a request, nor a response")


def encode(message: JsonObject) -> bytes:
    """Return the line of a message, in valid UTF-8: codex ignores a line with an escaped lone surrogate, and exits on
    invalid UTF-8.

    Raises:
        ValueError: a number is not finite.
    """
    text = _write(message)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return safe_text(text).encode() + b"\n"


def safe_text(text: str) -> str:
    """Return valid Unicode: join surrogate pairs, and replace lone surrogates by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


MAX_UNREAD_BYTES: Final = 256 * 1024 * 1024
"""A thread with more unread text is given up. The connection never waits for the reader of a thread, because responses
and other threads share its pipe; so the limit is here. It is several times codex's longest line."""


class Mailbox:
    """The unread notifications and requests of one thread, in order.

    Its reader can leave the pieces of a text that has begun unread for a while. Quiet messages are read with the next
    one; every other message ends the reader's wait.
    """

    def __init__(self, max_unread_bytes: int = MAX_UNREAD_BYTES) -> None:
        self.has_received = False
        self._max_unread_bytes = max_unread_bytes
        self._unread: list[Notification | Request] = []
        self._requests: list[Request] = []
        self._unread_bytes = 0
        self._error: CodexGone | None = None
        self._woken = False
        self._begun: set[str] = set()
        self._has_news = False
        self._changed = anyio.Event()
        self._wait = anyio.CancelScope()
        self._text_by = -math.inf

    def put(
        self, message: Notification | Request, size: int, piece_of: str | None = None, *, is_quiet: bool = False
    ) -> None:
        """Add a message of `size` bytes, a piece of the text `piece_of`; beyond the limit the mailbox fails instead."""
        if isinstance(message, Request):
            self._requests.append(message)
        if self._error is not None:
            return
        self.has_received = True
        self._unread_bytes += size
        if self._unread_bytes > self._max_unread_bytes:
            self.fail(CodexGone(f"codex sent more than {self._max_unread_bytes} bytes that were not read"))
            return
        self._unread.append(message)
        if is_quiet:
            return
        if piece_of not in self._begun or self._text_by == -math.inf:
            self._has_news = True
            self._changed.set()
        elif self._wait.deadline > self._text_by:
            self._wait.deadline = self._text_by
        if piece_of is not None:
            self._begun.add(piece_of)

    def close(self) -> None:
        """Give the default response to all open requests."""
        for message in self._requests:
            message.answer(None)

    def fail(self, error: CodexGone) -> None:
        """Make `receive` raise `error` after all earlier messages were received."""
        self._error = self._error or error
        self._changed.set()

    def wake(self) -> None:
        """Make a waiting `receive` return, with no messages if there are none."""
        self._woken = True
        self._changed.set()

    async def receive(self, by: float = math.inf, text_by: float = -math.inf) -> list[Notification | Request]:
        """Wait for messages and return all that are unread; none after `wake`, or at the time `by`.

        Further pieces of a text end the wait at the time `text_by`.

        Raises:
            CodexGone: the connection has failed, and all earlier messages were received.
        """
        self._text_by = text_by
        if not self._has_news and not self._woken and self._error is None:
            self._changed = anyio.Event()
            with anyio.CancelScope(deadline=min(by, text_by) if self._unread else by) as self._wait:
                await self._changed.wait()
        messages, self._unread, self._unread_bytes, self._has_news = self._unread, [], 0, False
        if not messages and not self._woken and self._error is not None:
            raise CodexGone(self._error.sentence, self._error.tail)
        self._woken = False
        return messages


class InvalidField(ValueError):
    """A required field is missing or has another type."""


def text(fields: JsonObject, key: str) -> str:
    """Return a field that must be a string."""
    value = fields.get(key)
    if isinstance(value, str):
        return value
    raise InvalidField(key)


def text_or_none(fields: JsonObject, key: str) -> str | None:
    """Return a field that is a string, or None."""
    value = fields.get(key)
    return value if isinstance(value, str) else None


def number(fields: JsonObject, key: str) -> int:
    """Return a field that must be a whole number."""
    value = number_or_none(fields, key)
    if value is None:
        raise InvalidField(key)
    return value


def number_or_none(fields: JsonObject, key: str) -> int | None:
    """Return a field that is a whole number, or None."""
    value = fields.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def nested(fields: JsonObject, key: str) -> JsonObject:
    """Return a field that must be an object."""
    value = fields.get(key)
    if isinstance(value, dict):
        return value
    raise InvalidField(key)


def nested_or_empty(fields: JsonObject, key: str) -> JsonObject:
    """Return a field that is an object, or an empty one."""
    value = fields.get(key)
    return value if isinstance(value, dict) else {}


def objects(fields: JsonObject, key: str) -> list[JsonObject]:
    """Return the objects in an array field; empty if it is no array."""
    return [value for value in _array(fields, key) if isinstance(value, dict)]


def texts(fields: JsonObject, key: str) -> tuple[str, ...]:
    """Return the strings in an array field; empty if it is no array."""
    return tuple(value for value in _array(fields, key) if isinstance(value, str))


def _array(fields: JsonObject, key: str) -> list[JsonValue]:
    value = fields.get(key)
    return value if isinstance(value, list) else []
