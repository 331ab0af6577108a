"""`host_adapter`: results of delegations reach the model once, also if the runtime reports them again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from codex_workspace.platform.host_adapter import MAX_DIGESTS, MAX_REPORT_CHARS, DelegationResults


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


@pytest.fixture
def begin(tmp_path: Path, file: Path) -> Callable[[], DelegationResults]:
    """Begins a process."""
    return lambda: DelegationResults(file, tmp_path / "told")


def leave(file: Path, *records: object) -> None:
    with file.open("a") as opened:
        opened.writelines(f"{json.dumps(record)}\n" for record in records)


def result(number: int, answer: str = "done", **more: object) -> dict[str, object]:
    own = {"delegation_id": f"d-{number}", "target_id": "w-2", "status": "completed", "summary": "", "error": ""}
    return own | {"response_preview": answer, "timestamp": 1.0} | more


def test_without_a_file_there_is_nothing_new(begin: Callable[[], DelegationResults]) -> None:
    news = begin().take()
    assert (news.text, news.is_replay) == ("", False)


def test_a_result_is_reported_in_full_and_quoted(begin: Callable[[], DelegationResults], file: Path) -> None:
    leave(file, result(1, "\n".join("a" * 500)))
    first, *told, last = begin().take().text.splitlines()
    assert told == ["Delegation d-1 to w-2: completed", *"a" * 500]
    number = first.removeprefix("--- ").partition(":")[0]
    assert last == f"--- {number}: end of the peers' answers"


def test_an_unreported_result_is_new_in_the_next_process(begin: Callable[[], DelegationResults], file: Path) -> None:
    leave(file, result(1))
    assert "d-1" in begin().take().text
    results = begin()
    news = results.take()
    assert "d-1" in news.text
    results.mark_reported(news)
    leave(file, result(1, timestamp=2.0))
    again = begin().take()
    assert (again.text, again.is_replay) == ("", True)


def test_a_result_between_taking_and_reporting_is_kept(begin: Callable[[], DelegationResults], file: Path) -> None:
    results = begin()
    leave(file, result(1))
    news = results.take()
    leave(file, result(2))
    results.mark_reported(news)
    assert "d-2" in results.take().text


def test_a_rejected_message_loses_no_result(begin: Callable[[], DelegationResults], file: Path) -> None:
    results = begin()
    leave(file, result(1))
    assert "d-1" in results.take().text
    assert "d-1" in results.take().text


def test_another_status_of_the_same_delegation_is_new(begin: Callable[[], DelegationResults], file: Path) -> None:
    results = begin()
    leave(file, result(1, status="failed", error="no"))
    results.mark_reported(results.take())
    leave(file, result(1))
    assert "completed" in results.take().text


def test_only_records_of_messages_are_recognized_by_their_text(
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
def test_invalid_lines_are_skipped(begin: Callable[[], DelegationResults], file: Path, line: bytes) -> None:
    file.write_bytes(line + b"\n" + json.dumps(result(1)).encode() + b"\n")
    assert "d-1" in begin().take().text


def test_an_invalid_digest_file_is_ignored(tmp_path: Path, file: Path) -> None:
    (tmp_path / "told").write_bytes(b"\xff\n" * 100)
    leave(file, result(1))
    assert DelegationResults(file, tmp_path / "told").take().text


def test_long_results_are_cut_with_a_note(begin: Callable[[], DelegationResults], file: Path) -> None:
    leave(file, *(result(number, "x" * 4096) for number in range(50)))
    text = begin().take().text
    assert len(text) < MAX_REPORT_CHARS + 300
    assert "characters left out" in text


def test_the_digests_are_limited_to_the_newest(
    begin: Callable[[], DelegationResults], file: Path, tmp_path: Path
) -> None:
    results = begin()
    for number in range(MAX_DIGESTS + 1):
        results.record_message(f"message {number}")
    assert len((tmp_path / "told").read_text().splitlines()) == MAX_DIGESTS
    leave(file, result(1, f"message {MAX_DIGESTS}", source_id="w-1"))
    assert begin().take().text == ""


def test_an_unwritable_digest_file_stops_no_message(tmp_path: Path, file: Path) -> None:
    results = DelegationResults(file, tmp_path / "missing" / "told")
    leave(file, result(1))
    results.mark_reported(results.take())
    leave(file, result(1))
    assert results.take().is_replay
