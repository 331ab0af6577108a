"""Codex's own record as it is shown: in pages, bounded, and without secrets."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from codex_workspace.codex.transcript import (
    MAX_ANSWER_BYTES,
    MAX_LINE_BYTES,
    MAX_LINES,
    MAX_TEXT_CHARS,
    TranscriptReader,
)
from codex_workspace.common.redact import Redactor

THREAD = "01a1fd95-a248-7f12-a73e-5061c94d0e83"
SECRET = 'sk-"quoted" ü-0123456789'


@dataclass
class Record:
    """The record of one thread, what shows it, and the thread that is looked for."""

    root: Path
    thread: str | None = THREAD

    def __post_init__(self) -> None:
        self.file = self.root / "sessions" / "2026" / "11" / "21" / f"rollout-2026-11-21T10-00-00-{THREAD}.jsonl"
        self.file.parent.mkdir(parents=True)
        self.file.touch()
        self.transcripts = TranscriptReader(self.root, self.newest, Redactor([SECRET]))

    async def newest(self, _context_id: str | None) -> str | None:
        return self.thread

    def write(self, *lines: object, end: str = "\n") -> None:
        with self.file.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(line, ensure_ascii=False) + end for line in lines)

    async def look(self, since: int = 0, limit: int = 100) -> tuple[list[object], int, bool]:
        told = await self.transcripts.lines(since, limit)
        lines, cursor, has_more = told["lines"], told["cursor"], told["more"]
        assert isinstance(lines, list)
        assert isinstance(cursor, int)
        assert isinstance(has_more, bool)
        return list(lines), cursor, has_more


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path)


async def test_pages_are_contiguous(record: Record) -> None:
    record.write(*({"n": n} for n in range(7)))
    assert await record.look(0, 3) == ([{"n": 0}, {"n": 1}, {"n": 2}], 3, True)
    assert await record.look(3, 3) == ([{"n": 3}, {"n": 4}, {"n": 5}], 6, True)
    assert await record.look(6, 3) == ([{"n": 6}], 7, False)
    assert await record.look(7, 3) == ([], 7, False)
    record.write({"n": 7})
    assert await record.look(7, 3) == ([{"n": 7}], 8, False)
    assert await record.look(3, 1) == ([{"n": 3}], 4, True)
    assert await record.look(0, 8) == ([{"n": n} for n in range(8)], 8, False)


async def test_a_foreign_cursor_returns_the_end(record: Record) -> None:
    record.write({"n": 0}, {"n": 1})
    assert await record.look(500) == ([], 2, False)


async def test_a_line_that_codex_is_still_writing_waits(record: Record) -> None:
    record.write({"n": 0})
    record.write({"n": 1}, end="")
    assert await record.look() == ([{"n": 0}], 1, False)
    record.file.write_bytes(record.file.read_bytes() + b"\n")
    assert await record.look(1) == ([{"n": 1}], 2, False)


async def test_a_record_that_was_cut_is_read_anew(record: Record) -> None:
    record.write({"n": 0}, {"n": 1})
    assert await record.look() == ([{"n": 0}, {"n": 1}], 2, False)
    record.file.write_text("")
    record.write({"m": 0})
    assert await record.look(2) == ([], 1, False)


async def test_secrets_are_redacted_in_any_quoting(record: Record) -> None:
    record.write({"text": f"it is {SECRET}.", SECRET: [json.dumps({"key": SECRET})], "depth": {"a": [[SECRET]]}})
    ((line,), _, _) = await record.look()
    assert line == {"text": "it is ***.", "***": ['{"key": "***"}'], "depth": {"a": [["***"]]}}


async def test_a_secret_at_the_cut_does_not_show_in_part(record: Record) -> None:
    record.write("x" * (MAX_TEXT_CHARS - 3) + SECRET)
    ((text,), _, _) = await record.look()
    assert text == "x" * (MAX_TEXT_CHARS - 3) + "***"


async def test_long_texts_and_lines_are_cut_and_say_so(record: Record) -> None:
    record.write({"text": "x" * (MAX_TEXT_CHARS + 5)}, {"image": "y" * MAX_LINE_BYTES})
    (long, longer), _, _ = await record.look()
    assert long == {"text": "x" * MAX_TEXT_CHARS + "… (5 characters left out)"}
    assert longer == {"type": "omitted", "bytes": MAX_LINE_BYTES + len('{"image": ""}\n')}


async def test_a_page_is_bounded_whatever_limit_is_requested(record: Record) -> None:
    record.write(*(["x" * MAX_TEXT_CHARS] * 20 for _ in range(40)))
    lines, cursor, has_more = await record.look(0, 40)
    assert len(json.dumps(lines)) <= MAX_ANSWER_BYTES + 21 * MAX_TEXT_CHARS
    assert (cursor, has_more) == (len(lines), True)
    record.file.write_text("1\n" * (MAX_LINES + 1))
    assert await record.look(0, MAX_LINES + 1) == ([1] * MAX_LINES, MAX_LINES, True)


@pytest.mark.parametrize("raw", [b"no json", b"\xff\xfe", b"[" * 200_000, b""])
async def test_an_unreadable_line_is_reported(record: Record, raw: bytes) -> None:
    record.file.write_bytes(raw + b'\n{"n": 1}\n')
    lines, cursor, _ = await record.look()
    assert (lines, cursor) == ([{"type": "unreadable", "bytes": len(raw) + 1}, {"n": 1}], 2)


@pytest.mark.parametrize("name", [None, "01a1fd95-0000-7f12-a73e-5061c94d0e83", "../../*", "*", ""])
async def test_a_thread_without_a_record_is_empty(record: Record, name: str | None) -> None:
    record.thread = name
    told = await record.transcripts.lines(3)
    assert told == {
        "runtime": "codex",
        "supported": True,
        "lines": [],
        "cursor": 3,
        "more": False,
        "source": None,
    }
