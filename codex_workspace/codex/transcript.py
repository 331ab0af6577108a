"""The transcript of the most recent thread, in the platform's shape: the lines of its rollout, bounded and redacted."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.common.values import THREAD_ID_PATTERN, JsonObject, JsonValue

RUNTIME: Final = "codex"

LINES: Final = 100
MAX_LINES: Final = 1000
"""The default and the maximum number of lines of a page; the platform's numbers."""

MAX_ANSWER_BYTES: Final = 2 << 20
"""A page ends with the line that reaches this size."""

MAX_LINE_BYTES: Final = 4 << 20
"""A longer line is replaced by its size; images are in the rollout as text."""

MAX_TEXT_CHARS: Final = 10_000
"""The maximum length of each text in a line."""


@dataclass(slots=True)
class TranscriptReader:
    """Reads the rollouts of one codex.

    Args:
        codex_home: codex's folder.
        newest_thread: returns the most recent thread, of all contexts or of one.
        scrub: redacts a text.
    """

    codex_home: Path
    newest_thread: Callable[[str | None], Awaitable[str | None]]
    scrub: Callable[[str], str]

    async def lines(self, since: int = 0, limit: int = LINES, context_id: str | None = None) -> JsonObject:
        """Return the lines after the first `since` ones, at most `limit` (and `MAX_LINES`).

        The result is `{runtime, supported, lines, cursor, more, source}`: `cursor` is `since` of the next call, `more`
        whether there are further lines, `source` the file, which changes with the thread.
        """
        thread_id = await self.newest_thread(context_id)
        file = None if thread_id is None else await anyio.to_thread.run_sync(self._file_of, thread_id)
        if file is None:
            return transcript_page(since=since)
        lines, cursor, has_more = await anyio.to_thread.run_sync(self._read, file, since, min(limit, MAX_LINES))
        return transcript_page(lines, cursor, has_more=has_more, source=str(file))

    def _file_of(self, thread_id: str) -> Path | None:
        if not THREAD_ID_PATTERN.fullmatch(thread_id):
            return None
        return next(self.codex_home.glob(f"sessions/**/rollout-*{thread_id}.jsonl"), None)

    def _read(self, file: Path, since: int, limit: int) -> tuple[list[JsonValue], int, bool]:
        """Return the lines, the number of the next one, and whether it exists."""
        lines: list[JsonValue] = []
        room = MAX_ANSWER_BYTES
        number = 0
        with file.open("rb") as rollout:
            while (raw := rollout.readline()).endswith(b"\n"):
                if number >= since:
                    if len(lines) == limit or room <= 0:
                        return lines, number, True
                    shown = self._shown(raw)
                    room -= len(json.dumps(shown))
                    lines.append(shown)
                number += 1
        return lines, number, False

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


def transcript_page(
    lines: list[JsonValue] | None = None, since: int = 0, *, has_more: bool = False, source: str | None = None
) -> JsonObject:
    """Return a page in the platform's shape; without arguments, an empty one."""
    return {
        "runtime": RUNTIME,
        "supported": True,
        "lines": lines or [],
        "cursor": since,
        "more": has_more,
        "source": source,
    }
