"""Logging: one line per record, as text or JSON, with secrets redacted.

`log_context` adds the IDs of a task, context, thread, turn and trace to every line that is logged in its block.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Literal, TypeAlias

IdName: TypeAlias = Literal["task", "context", "thread", "turn", "trace"]

_PLAIN: Final = re.compile(r"[\w.:/-]{1,64}", re.ASCII)
"""IDs that a text line shows unquoted; clients choose some of the IDs."""

_LINE_BREAKS: Final = str.maketrans({"\n": "\\n", "\r": "\\r"})
"""Escapes for messages with several lines, which must not look like several records."""

_QUIET: Final = ("httpx", "httpcore", "aiosqlite", "asyncio", "sse_starlette", "uvicorn", "a2a")
"""Libraries of which only warnings and errors are logged."""

_INVALID_REQUESTS: Final = ("Failed to validate base JSON-RPC request", "Failed to parse request params")


_ids: ContextVar[Mapping[IdName, str] | None] = ContextVar("ids", default=None)


@contextmanager
def log_context(ids: Mapping[IdName, str]) -> Iterator[None]:
    """Add these IDs, and those of the enclosing blocks, to every line logged in the block and its tasks."""
    token = _ids.set({**(_ids.get() or {}), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


def set_up_logging(*, as_json: bool, level: str, scrub: Callable[[str], str]) -> None:
    """Send the process's log to stderr, at `level` (a level name of the logging module)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(scrub) if as_json else _Text(scrub))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    handler.addFilter(_is_no_invalid_request)
    handler.addFilter(_with_ids)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level)))


def _is_no_invalid_request(record: logging.LogRecord) -> bool:
    """Drop the SDK's tracebacks of invalid requests: the client gets the error, and could flood the log."""
    if record.exc_info and isinstance(record.exc_info[1], (UnicodeDecodeError, RecursionError)):
        # A body that is not UTF-8, or is nested too deeply.
        return not record.name.startswith("a2a.server.routes")
    return not (isinstance(record.msg, str) and record.msg.startswith(_INVALID_REQUESTS))


def _with_ids(record: logging.LogRecord) -> bool:
    """Add the IDs to a record; the handler runs in the context that logs the line."""
    record.ids = _ids.get() or {}
    return True


def _ids_of(record: logging.LogRecord) -> Mapping[IdName, str]:
    ids: Mapping[IdName, str] = getattr(record, "ids", {})
    return ids


class _Text(logging.Formatter):
    """Text lines: time, level, logger, message, and the IDs as `name=id`."""

    def __init__(self, scrub: Callable[[str], str]) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
        self._scrub = scrub

    def format(self, record: logging.LogRecord) -> str:
        return self._scrub(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the message as one line; a traceback may follow it."""
        # Redacted first: a secret with line breaks would not be recognized afterwards.
        line = self._scrub(super().formatMessage(record)).translate(_LINE_BREAKS)
        return " ".join([line, *(f"{name}={_plain(i)}" for name, i in _ids_of(record).items())])


def _plain(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def json_line(level: str, logger: str, message: str) -> str:
    """Return a JSON log line, for use before logging is set up; `message` must not contain secrets."""
    record = logging.LogRecord(logger, logging.getLevelNamesMapping()[level.upper()], "", 0, message, None, None)
    return _Json(lambda text: text).format(record)


class _Json(logging.Formatter):
    """JSON lines: time (RFC 3339, UTC), level, logger, message, IDs and traceback."""

    def __init__(self, scrub: Callable[[str], str]) -> None:
        super().__init__()
        self._scrub = scrub

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, str] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._scrub(record.getMessage()),
            **{name: self._scrub(each) for name, each in _ids_of(record).items()},
        }
        if record.exc_info:
            line["traceback"] = self._scrub(self.formatException(record.exc_info))
        # Redacted first: JSON escapes quotes and backslashes of a secret.
        return json.dumps(line, ensure_ascii=False)
