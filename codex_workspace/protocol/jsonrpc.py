"""Codex's lines as values and back: JSON-RPC over newline-delimited JSON, without any reading or writing.

What the notifications mean is left to `events`, the pipe to the connection. Shapes: recordings 0.72 to 0.169.
"""

import json
from dataclasses import dataclass
from typing import Final, TypeAlias

from codex_workspace.common.values import JsonObject, JsonValue

MAX_LINE_BYTES: Final = 64 * 1024 * 1024
"""Longer lines are skipped. Codex 0.72 sends 40 MB in one line for a command that prints 20 MB, later codexes 3 MB for
a thread read back, and control characters take up to six times their size in JSON."""


EXCERPT_CHARS: Final = 200
"""So much of a line that was not understood is kept: enough to recognise it in a log."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A line of `bytes` bytes (without its newline) was longer than allowed and is gone."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to our request `id`."""

    id: int | str
    value: JsonValue


@dataclass(frozen=True, slots=True)
class Failure:
    """The refusal of our request `id`; `code` is JSON-RPC's (0 where codex sent none)."""

    id: int | str
    code: int
    message: str
    data: JsonValue = None


@dataclass(frozen=True, slots=True)
class Notification:
    """Something codex says without expecting an answer."""

    method: str
    params: JsonObject


@dataclass(frozen=True, slots=True)
class Request:
    """Something codex wants answered; the answer's id must have the same JSON type as `id`."""

    id: int | str
    method: str
    params: JsonObject


@dataclass(frozen=True, slots=True)
class InvalidLine:
    """A line that is no message: why, and its first 200 characters."""

    reason: str
    excerpt: str


Message: TypeAlias = Result | Failure | Notification | Request | InvalidLine


class LineSplitter:
    """Makes lines of a stream of bytes that arrives in pieces of any size.

    Only b"\\n" ends a line: text may contain other line separators, such as U+2028. Time is linear in the bytes fed.
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes: Final = max_line_bytes
        self._unfinished = bytearray()
        self._dropped_bytes = 0

    def feed(self, data: bytes) -> list[bytes | Skipped]:
        """Return the lines that `data` finishes, without their newlines.

        One that is too long is reported once, at its end.
        """
        first, *finished = data.split(b"\n")
        if not finished:
            self._keep(first)
            return []
        rest = finished.pop()
        lines: list[bytes | Skipped] = [self._end_line(first)]
        if len(data) > self._max_line_bytes:
            lines += [self._checked(line) for line in finished]
        else:
            lines += finished
        self._keep(rest)
        return lines

    def finish(self) -> list[bytes | Skipped]:
        """Return what came after the last newline, if anything; the splitter is empty afterwards."""
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
        if not self._unfinished and not self._dropped_bytes:
            return self._checked(piece)
        self._keep(piece)
        dropped, self._dropped_bytes = self._dropped_bytes, 0
        if dropped:
            return Skipped(dropped)
        line, self._unfinished = bytes(self._unfinished), bytearray()
        return line

    def _checked(self, line: bytes) -> bytes | Skipped:
        return line if len(line) <= self._max_line_bytes else Skipped(len(line))


_parse = json.JSONDecoder().decode
_write = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def decode(line: bytes) -> Message:
    """Return the message in a line; never raises.

    A message with a method is codex's own, even where its id is one of ours: the two sides number separately.
    """
    try:
        message = _parse(line.decode())
    except (ValueError, RecursionError) as error:
        return _invalid(f"not JSON: {error}", line)
    if type(message) is not dict:
        return _invalid("not an object", line)
    method = message.get("method")
    if method is None:
        return _decode_answer(message, line)
    params = message.get("params")
    if params is None:
        params = {}
    if type(method) is not str or type(params) is not dict:
        return _invalid("the method is no string or the params are no object", line)
    if "id" not in message:
        return Notification(method, params)
    id_ = message["id"]
    if type(id_) is not int and type(id_) is not str:
        return _invalid("the id is neither a whole number nor a string", line)
    return Request(id_, method, params)


def _decode_answer(message: JsonObject, line: bytes) -> Message:
    id_ = message.get("id")
    if isinstance(id_, bool) or not isinstance(id_, int | str):
        return _invalid("neither a method nor the id of a request", line)
    error = message.get("error")
    if error is not None:
        return _decode_error(id_, error)
    if "result" in message:
        return Result(id_, message["result"])
    return _invalid("neither a method nor a result nor an error", line)


def _decode_error(id_: int | str, error: JsonValue) -> Failure:
    """Return the refusal; one of an odd shape ends the request too, with the whole error as its data."""
    if isinstance(error, dict):
        code, message = error.get("code"), error.get("message")
        if isinstance(code, int) and isinstance(message, str):
            return Failure(id_, code, message, error.get("data"))
    return Failure(id_, 0, "codex refused, and did not say why in a known way", error)


def _invalid(reason: str, line: bytes) -> InvalidLine:
    # A character has at most four bytes.
    return InvalidLine(reason, line[: 4 * EXCERPT_CHARS].decode("utf-8", "replace")[:EXCERPT_CHARS])


def encode_request(id: int | str, method: str, params: JsonObject) -> bytes:
    """Return the line of a request. `params` is sent even when empty: codex refuses a request without.

    This and the other encoders write one line with its newline, in valid UTF-8: codex drops a line with an escaped lone
    surrogate without an answer, and takes invalid UTF-8 for the end of its input (all versions).

    Raises:
        ValueError: a number is not finite, which JSON cannot say.
    """
    return _line({"id": id, "method": method, "params": params})


def encode_notification(method: str, params: JsonObject | None = None) -> bytes:
    """Return the line of a notification; without `params` it has none."""
    return _line({"method": method} if params is None else {"method": method, "params": params})


def encode_result(id: int | str, value: JsonValue) -> bytes:
    """Return the line that answers codex's request `id`."""
    return _line({"id": id, "result": value})


def encode_error(id: int | str, code: int, message: str) -> bytes:
    """Return the line that refuses codex's request `id`."""
    return _line({"id": id, "error": {"code": code, "message": message}})


def _line(message: JsonObject) -> bytes:
    text = _write(message)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return safe_text(text).encode() + b"\n"


def safe_text(text: str) -> str:
    """Return `text` as valid Unicode: surrogate pairs are joined, lone surrogates become U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
