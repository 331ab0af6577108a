"""What peers have answered to delegated work: told once, whoever tells it again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from codex_workspace.platform.delegation_results import MAX_DIGESTS, MAX_REPORT_CHARS, DelegationResults


def nothing() -> str:
    return ""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


@pytest.fixture
def begin(tmp_path: Path, file: Path) -> Callable[[], DelegationResults]:
    """Begins a process."""
    return lambda: DelegationResults(file, tmp_path / "told", nothing)


def leave(file: Path, *records: object) -> None:
    with file.open("a") as opened:
        opened.writelines(f"{json.dumps(record)}\n" for record in records)


def result(number: int, answer: str = "done", **more: object) -> dict[str, object]:
    own = {"delegation_id": f"d-{number}", "target_id": "w-2", "status": "completed", "summary": "", "error": ""}
    return own | {"response_preview": answer, "timestamp": 1.0} | more


def test_nothing_is_nothing_and_no_replay(begin: Callable[[], DelegationResults]) -> None:
    news = begin().take()
    assert (news.text, news.is_replay) == ("", False)


def test_a_result_is_told_whole_and_marked(begin: Callable[[], DelegationResults], file: Path) -> None:
    leave(file, result(1, "\n".join("a" * 500)))
    first, *told, last = begin().take().text.splitlines()
    assert told == ["Delegation d-1 to w-2: completed", *"a" * 500]
    number = first.removeprefix("--- ").partition(":")[0]
    assert last == f"--- {number}: end of the peers' answers"


def test_what_was_not_told_is_new_in_the_next_process(begin: Callable[[], DelegationResults], file: Path) -> None:
    leave(file, result(1))
    assert "d-1" in begin().take().text
    results = begin()
    news = results.take()
    assert "d-1" in news.text
    results.mark_reported(news)
    leave(file, result(1, timestamp=2.0))
    again = begin().take()
    assert (again.text, again.is_replay) == ("", True)


def test_what_comes_between_taking_and_telling_is_kept(begin: Callable[[], DelegationResults], file: Path) -> None:
    results = begin()
    leave(file, result(1))
    news = results.take()
    leave(file, result(2))
    results.mark_reported(news)
    assert "d-2" in results.take().text


def test_a_refused_message_takes_nothing_with_it(begin: Callable[[], DelegationResults], file: Path) -> None:
    results = begin()
    leave(file, result(1))
    assert "d-1" in results.take().text
    assert "d-1" in results.take().text


def test_another_end_of_the_same_delegation_is_new(begin: Callable[[], DelegationResults], file: Path) -> None:
    results = begin()
    leave(file, result(1, status="failed", error="no"))
    results.mark_reported(results.take())
    leave(file, result(1))
    assert "completed" in results.take().text


def test_only_what_the_runtime_made_of_a_message_is_known_by_its_text(
    begin: Callable[[], DelegationResults], file: Path
) -> None:
    begin().record_message("done")
    results = begin()
    leave(file, result(1, source_id="w-1"), result(2))
    news = results.take()
    assert news.is_replay
    assert ("d-1" in news.text, "d-2" in news.text) == (False, True)


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b"7", b"\xff\xfe", b"", b'{"delegation_id": 7, "response_preview": null}', b"[" * 100_000]
)
def test_lines_of_something_else_do_no_harm(begin: Callable[[], DelegationResults], file: Path, line: bytes) -> None:
    file.write_bytes(line + b"\n" + json.dumps(result(1)).encode() + b"\n")
    assert "d-1" in begin().take().text


def test_a_record_of_something_else_is_no_record(tmp_path: Path, file: Path) -> None:
    (tmp_path / "told").write_bytes(b"\xff\n" * 100)
    leave(file, result(1))
    assert DelegationResults(file, tmp_path / "told", nothing).take().text


def test_much_is_cut_and_says_so(begin: Callable[[], DelegationResults], file: Path) -> None:
    leave(file, *(result(number, "x" * 4096) for number in range(50)))
    text = begin().take().text
    assert len(text) < MAX_REPORT_CHARS + 300
    assert "characters left out" in text


def test_what_is_known_is_bounded_and_the_newest_stays(
    begin: Callable[[], DelegationResults], file: Path, tmp_path: Path
) -> None:
    results = begin()
    for number in range(MAX_DIGESTS + 1):
        results.record_message(f"message {number}")
    assert len((tmp_path / "told").read_text().splitlines()) == MAX_DIGESTS // 2
    leave(file, result(1, f"message {MAX_DIGESTS}", source_id="w-1"))
    assert begin().take().text == ""


def test_a_record_that_cannot_be_written_stops_nobody(tmp_path: Path, file: Path) -> None:
    results = DelegationResults(file, tmp_path / "missing" / "told", nothing)
    leave(file, result(1))
    results.mark_reported(results.take())
    leave(file, result(1))
    assert results.take().is_replay


def test_without_a_file_the_runtime_is_asked_and_nothing_is_lost(tmp_path: Path) -> None:
    answers = ["- [completed] it", ""]
    results = DelegationResults(None, tmp_path / "told", lambda: answers.pop(0))
    assert "- [completed] it" in results.take().text
    news = results.take()
    assert "- [completed] it" in news.text
    results.mark_reported(news)
    answers.append("")
    assert results.take().text == ""
