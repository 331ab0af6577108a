"""Tests what is read from the file of a session whose process has ended."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from codex_workspace.backends.codex_exec.history import (
    new_turn_id,
    offset_in,
    session_file,
    session_size,
    session_tokens,
    turn_outcome,
)
from codex_workspace.protocol.codex_events import MessageCompleted, TokenUsage, TurnCompleted, TurnError
from codex_workspace.runtimes.backend import TurnRecord

SESSION = "01a1fe46-9a98-7c30-b39a-166cc5c53530"


def begun() -> dict[str, object]:
    return {"type": "event_msg", "payload": {"type": "task_started"}}


def said(text: str) -> dict[str, object]:
    content = [{"type": "input_text", "text": text}]
    return {"type": "response_item", "payload": {"type": "message", "role": "user", "content": content}}


def ended(answer: str | None, **more: object) -> dict[str, object]:
    return {"type": "event_msg", "payload": {"type": "task_complete", "last_agent_message": answer, **more}}


def written(folder: Path, lines: Sequence[object]) -> Path:
    file = folder / "sessions" / "2026" / f"rollout-2026-{SESSION}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    return file


BEFORE = (begun(), said("hello"), ended("an answer to the message before"))
CONTEXT = said("<environment_context>of the machine</environment_context>")
COMPLETED = TurnCompleted("completed", None, MessageCompleted("recorded", "hi", None))


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([], TurnRecord.MISSING),
        ([begun(), CONTEXT], TurnRecord.MISSING),
        ([begun(), CONTEXT, said("hello")], TurnRecord.INTERRUPTED),
        ([begun(), said("hello"), ended("hi")], COMPLETED),
        ([begun(), said("New instructions.\n\nhello\n"), ended("hi")], COMPLETED),
        ([begun(), said("hello"), ended(None)], TurnRecord.INTERRUPTED),
        (
            [begun(), said("hello"), ended(None, error={"message": "the model is gone"})],
            TurnCompleted("failed", TurnError("the model is gone", "other", None, None), None),
        ),
        ([begun(), said("hello"), begun(), said("go on"), ended("hi")], COMPLETED),
        ([begun(), said("hello"), ended("no"), begun(), said("go on")], TurnRecord.INTERRUPTED),
        ([begun(), said("hello"), '{"type": "event_msg", "payload": {"type": "task_compl'], TurnRecord.INTERRUPTED),
        (["nonsense", "[1]", '"user"', "9" * 5000, begun(), said("something else"), ended("hi")], TurnRecord.MISSING),
    ],
)
def test_only_lines_after_the_offset_count(tmp_path: Path, lines: Sequence[object], found: object) -> None:
    written(tmp_path, BEFORE)
    place = session_size(tmp_path, SESSION)
    file = written(tmp_path, [*BEFORE, *lines])
    assert turn_outcome(file, place, ("hello", "go on")) == found


def test_the_last_token_count_is_returned(tmp_path: Path) -> None:
    def told(given: int) -> dict[str, object]:
        info = {"total_token_usage": {"input_tokens": given, "cached_input_tokens": 1, "output_tokens": 2}}
        return {"type": "event_msg", "payload": {"type": "token_count", "info": info}}

    assert session_tokens(tmp_path, SESSION) is None
    written(tmp_path, BEFORE)
    assert session_tokens(tmp_path, SESSION) is None
    nothing = {"type": "event_msg", "payload": {"type": "token_count", "info": None}}
    written(tmp_path, [*BEFORE, told(10), told(30), nothing, said('"token_count"')])
    assert session_tokens(tmp_path, SESSION) == TokenUsage(32, 30, 1, 2, 0)


def test_a_turn_id_contains_its_offset(tmp_path: Path) -> None:
    assert offset_in(new_turn_id(1234)) == 1234
    assert len(new_turn_id(10**17)) <= 64
    assert offset_in("01945678-9a98-7c30-b39a-166cc5c53530") is None
    assert offset_in(f"exec-{'9' * 30}-x") is None
    assert session_size(tmp_path, SESSION) == 0
    assert session_file(tmp_path, "../" * 3) is None
    assert turn_outcome(tmp_path / "nowhere", 0, ("hello",)) is TurnRecord.MISSING
