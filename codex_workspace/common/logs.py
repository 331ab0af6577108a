"""How the log is written: one line a record, for people or as JSON, with every known secret taken out.

A line says what work it is of: `log_context` puts the ids of a task, its context, codex's thread and turn, and the
trace under every line that is written in its block, whichever module writes it.
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
"""What of an id a line for people can show as it is; clients make up some of them."""

_LINE_BREAKS: Final = str.maketrans({"\n": "\\n", "\r": "\\r"})
"""What others say may have several lines, and none of them may look like a record of its own."""

_QUIET: Final = ("httpx", "httpcore", "aiosqlite", "asyncio", "sse_starlette", "uvicorn", "a2a")
"""Libraries whose ordinary talk is of no use to an operator: from them, warnings and worse."""


_PEERS_MISTAKES: Final = ("Failed to validate base JSON-RPC request", "Failed to parse request params")


_ids: ContextVar[Mapping[IdName, str] | None] = ContextVar("ids", default=None)


@contextmanager
def log_context(ids: Mapping[IdName, str]) -> Iterator[None]:
    """Put these ids, and those of the blocks around, under every line that is logged in the block and its tasks."""
    token = _ids.set({**(_ids.get() or {}), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


def set_up_logging(*, as_json: bool, level: str, scrub: Callable[[str], str]) -> None:
    """Send the whole process's log to stderr, at `level` (a name of the logging module's)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(scrub) if as_json else _Text(scrub))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    handler.addFilter(_without_peers_mistakes)
    handler.addFilter(_with_ids)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level)))


def _without_peers_mistakes(record: logging.LogRecord) -> bool:
    """Leave out the tracebacks of requests that make no sense: their sender is told, and can send a lot of them."""
    if record.exc_info and isinstance(record.exc_info[1], (UnicodeDecodeError, RecursionError)):
        # A body that is no UTF-8, or is nested without end.
        return not record.name.startswith("a2a.server.routes")
    return not (isinstance(record.msg, str) and record.msg.startswith(_PEERS_MISTAKES))


def _with_ids(record: logging.LogRecord) -> bool:
    """Give a record what it is of; the handler is called where the line is written, so in its context."""
    record.ids = _ids.get() or {}
    return True


def _ids_of(record: logging.LogRecord) -> Mapping[IdName, str]:
    ids: Mapping[IdName, str] = getattr(record, "ids", {})
    return ids


class _Text(logging.Formatter):
    """For people: time, level, logger, message, then what the line is of as `name=id`."""

    def __init__(self, scrub: Callable[[str], str]) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
        self._scrub = scrub

    def format(self, record: logging.LogRecord) -> str:
        return self._scrub(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the one line of the message, which a traceback may follow."""
        # Scrubbed before: a secret of several lines would not be known any more.
        said = self._scrub(super().formatMessage(record)).translate(_LINE_BREAKS)
        return " ".join([said, *(f"{name}={_plain(i)}" for name, i in _ids_of(record).items())])


def _plain(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def json_line(level: str, logger: str, message: str) -> str:
    """Return one line of the log for machines, for when there is no log yet or any more; `message` holds no secret."""
    record = logging.LogRecord(logger, logging.getLevelNamesMapping()[level.upper()], "", 0, message, None, None)
    return _Json(lambda text: text).format(record)


class _Json(logging.Formatter):
    """For machines: time (RFC 3339, UTC), level, logger, message, ids and, where there is one, the traceback."""

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
        # Scrubbed before: JSON writes a quote or a backslash in a secret in another way.
        return json.dumps(line, ensure_ascii=False)
