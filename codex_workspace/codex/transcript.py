"""What codex does at the moment, line by line: its own record of the thread that was last at work, in the platform's
shape. Every line is bounded, and scrubbed of secrets.
"""

import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.common.values import THREAD_ID_PATTERN, JsonObject, JsonValue

RUNTIME: Final = "codex"

LINES: Final = 100
MAX_LINES: Final = 1000
"""What one answer holds where nothing is asked for, and at the most; the platform's own numbers."""

MAX_ANSWER_BYTES: Final = 2 << 20
"""An answer that has come to this ends with the line that it is at."""

MAX_LINE_BYTES: Final = 4 << 20
"""A longer line is told of and not shown: images stand in the record as text."""

MAX_TEXT_CHARS: Final = 10_000
"""Of each text in a line."""

BOOKMARKS: Final = 64
"""Places of cursors that are remembered, so that whoever polls has only the new lines read."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where line `line` (from 0) of a file begins."""

    file: Path
    line: int


@dataclass(slots=True)
class TranscriptReader:
    """The records of one codex.

    Args:
        codex_home: codex's own folder.
        newest_thread: gives the thread that was last at work, of everybody's or of one context.
        scrub: takes secrets out of a text.
    """

    codex_home: Path
    newest_thread: Callable[[str | None], Awaitable[str | None]]
    scrub: Callable[[str], str]
    _offsets: OrderedDict[_Place, int] = field(default_factory=OrderedDict)

    async def lines(self, since: int = 0, limit: int = LINES, context_id: str | None = None) -> JsonObject:
        """Return the lines after the first `since` ones, at most `limit` (and `MAX_LINES`).

        `{runtime, supported, lines, cursor, more, source}`: `cursor` is the next call's `since`, `more` tells whether
        there are lines behind it, `source` is the file. Another thread at work is another `source`.
        """
        thread_id = await self.newest_thread(context_id)
        file = None if thread_id is None else await anyio.to_thread.run_sync(self._file_of, thread_id)
        if file is None:
            return answer(since=since)
        lines, cursor, has_more = await anyio.to_thread.run_sync(self._read, file, since, min(limit, MAX_LINES))
        return answer(lines, cursor, has_more=has_more, source=str(file))

    def _file_of(self, thread_id: str) -> Path | None:
        if not THREAD_ID_PATTERN.fullmatch(thread_id):
            return None
        return next(self.codex_home.glob(f"sessions/**/rollout-*{thread_id}.jsonl"), None)

    def _read(self, file: Path, since: int, limit: int) -> tuple[list[JsonValue], int, bool]:
        """Return the lines, the number of the next one, and whether it is there."""
        lines: list[JsonValue] = []
        room = MAX_ANSWER_BYTES
        with file.open("rb") as record:
            line = self._go_to(_Place(file, since), record.seek)
            while raw := record.readline():
                if not raw.endswith(b"\n"):
                    # Codex is still writing it.
                    return self._at(file, line, record.tell() - len(raw), lines, has_more=False)
                if line >= since:
                    if len(lines) == limit or room <= 0:
                        return self._at(file, line, record.tell() - len(raw), lines, has_more=True)
                    shown = self._shown(raw)
                    room -= len(json.dumps(shown))
                    lines.append(shown)
                line += 1
            return self._at(file, line, record.tell(), lines, has_more=False)

    def _go_to(self, place: _Place, seek: Callable[[int], int]) -> int:
        """Go to where a line begins, or to the file's beginning; return the number of the line that is there."""
        offset = self._offsets.get(place)
        if offset is None or place.file.stat().st_size < offset:
            return 0
        seek(offset)
        return place.line

    def _at(
        self, file: Path, line: int, offset: int, lines: list[JsonValue], *, has_more: bool
    ) -> tuple[list[JsonValue], int, bool]:
        self._offsets[_Place(file, line)] = offset
        if len(self._offsets) > BOOKMARKS:
            self._offsets.popitem(last=False)
        return lines, line, has_more

    def _shown(self, raw: bytes) -> JsonValue:
        if len(raw) > MAX_LINE_BYTES:
            return {"type": "omitted", "bytes": len(raw)}
        try:
            return self._clean(json.loads(raw))
        except (ValueError, RecursionError):
            return {"type": "unreadable", "bytes": len(raw)}

    def _clean(self, value: JsonValue) -> JsonValue:
        match value:
            case str():
                text = self.scrub(value)
                left_out = len(text) - MAX_TEXT_CHARS
                return text if left_out <= 0 else f"{text[:MAX_TEXT_CHARS]}… ({left_out} characters left out)"
            case list():
                return [self._clean(each) for each in value]
            case dict():
                return {self.scrub(name): self._clean(each) for name, each in value.items()}
            case _:
                return value


def answer(
    lines: list[JsonValue] | None = None,
    since: int = 0,
    *,
    has_more: bool = False,
    source: str | None = None,
    is_supported: bool = True,
) -> JsonObject:
    """Return what the platform expects; without arguments, that there is nothing yet."""
    return {
        "runtime": RUNTIME,
        "supported": is_supported,
        "lines": lines or [],
        "cursor": since,
        "more": has_more,
        "source": source,
    }
