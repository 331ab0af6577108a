"""The benchmark: its statistics, report and HTTP client, and one run of one round with everything real."""

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.__main__ import main, run
from bench.figures import (
    END,
    START,
    Aim,
    All,
    AtMost,
    AtMostTimes,
    Row,
    Unit,
    median,
    percentile,
    render,
    summary,
    warning,
    written,
)
from bench.http import Connection, decode
from bench.measure import GROUPS
from bench.sides import HttpSide, cpu_s

values = st.lists(st.floats(min_value=0, max_value=1e6), min_size=1)


@pytest.mark.parametrize(
    ("given_values", "percent", "expected"),
    [
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0], 50, 1.5),
        ([1.0, 2.0, 3.0, 4.0], 25, 1.75),
        ([7.0], 75, 7.0),
        ([1.0, 2.0, 3.0], 100, 3.0),
    ],
)
def test_percentiles_have_the_documented_values(given_values: list[float], percent: float, expected: float) -> None:
    assert percentile(given_values, percent) == expected


@given(values)
def test_percentiles_lie_between_the_extremes_and_in_order(sample: list[float]) -> None:
    assert min(sample) <= median(sample) <= percentile(sample, 75) * (1 + 1e-9)
    assert percentile(sample, 75) <= max(sample) * (1 + 1e-9)


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        median([])


@pytest.mark.parametrize(
    ("aim", "ours", "bare", "met"),
    [
        (None, [9.0], [1.0], None),
        (AtMostTimes(4), [40.0], [10.0], True),
        (AtMostTimes(4), [40.1], [10.0], False),
        (AtMostTimes(4), [1.0, 40.0, 900.0], [2.0, 10.0, 11.0], True),
        (AtMostTimes(4), [40.0], [0.0], None),
        (AtMostTimes(4), [40.0], [], None),
        (AtMost(80), [80.0], [], True),
        (AtMost(80), [80.1], [], False),
        (All(16), [16.0, 16.0], [], True),
        (All(16), [16.0, 15.0], [], False),
    ],
)
def test_an_aim_is_judged_only_if_it_was_measured(
    aim: Aim | None, ours: list[float], bare: list[float], met: bool | None
) -> None:
    assert Row("row", ours, bare=bare, aim=aim).met is met


ROWS = [
    Row("turn", [55.54, 50.0, 60.0], [45.0], [40.0, 39.0, 44.0], aim=AtMostTimes(1.15)),
    Row("wall", [2345.6], bare=[2300.0], aim=AtMostTimes(1.1)),
    Row("whole", [16, 16], [15, 16], [16, 16], Unit.COUNT, All(16)),
    Row("memory", [81.7], unit=Unit.MB, aim=AtMost(80)),
    Row("other", [1.5]),
]


def test_a_table_shows_medians_quartiles_and_ratios() -> None:
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in render(ROWS).splitlines()[2:]] == [
        [
            "turn",
            "55.5 ms (52.8 to 57.8)",
            "45.0 ms",
            "40.0 ms (39.5 to 42.0)",
            "1.39",
            "1.12",
            "at most 1.15 times",
            "**missed**",
        ],
        ["wall", "2346 ms", "", "2300 ms", "1.02", "", "at most 1.1 times", "met"],
        ["whole", "16", "15", "16", "", "", "all 16", "met"],
        ["memory", "81.7 MB", "", "", "", "", "at most 80 MB", "**missed**"],
        ["other", "1.5 ms", "", "", "", "", "", ""],
    ]


def test_a_table_is_aligned_markdown() -> None:
    head, rule, *lines = render(ROWS).splitlines()
    assert head.startswith("| measurement | agent ")
    assert set(rule) == {"|", "-", " "}
    assert {len(line) for line in lines} == {len(head)} == {len(rule)}


def test_the_summary_counts_what_was_judged_and_names_what_was_missed() -> None:
    assert summary(ROWS).splitlines() == [
        "2 of 4 aims met",
        "missed: turn: 55.5 ms (52.8 to 57.8), 1.39 times the bare driver's, aim at most 1.15 times",
        "missed: memory: 81.7 MB, aim at most 80 MB",
    ]


def test_a_busy_machine_gives_a_warning() -> None:
    assert warning(0.99) == ""
    assert "load average 1.01 before the run" in warning(1.01)


def test_a_report_replaces_the_earlier_one_and_nothing_else() -> None:
    document = f"# Title\n\n{START}\n\nold\n\n{END}\n\nrest\n"
    new = written(document, "new")
    assert new == f"# Title\n\n{START}\n\nnew\n\n{END}\n\nrest\n"
    assert written(new, "old") == document


@pytest.mark.parametrize("document", ["", START, END, f"{END}\n{START}"])
def test_a_document_without_marks_is_refused(document: str) -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        written(document, "new")


STATUS = (
    b'data: {"result": {"statusUpdate": {"taskId": "t", "contextId": "c", "status": {"state": "TASK_STATE_WORKING",'
    b' "message": {"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": "thinking"}]}}}}}\r\n\r\n'
)
UPDATE = (
    b'data: {"result": {"artifactUpdate": {"taskId": "t", "contextId": "c", "append": true,'
    b' "artifact": {"artifactId": "answer", "parts": [{"text": "%s"}]}}}}\r\n\r\n'
)
COMPLETED = (
    b'data: {"result": {"statusUpdate": {"taskId": "t", "contextId": "c",'
    b' "status": {"state": "TASK_STATE_COMPLETED"}}}}\r\n\r\n'
)


def chunked(*events: bytes) -> list[bytes]:
    """Return the pieces of a response that streams the events."""
    frames = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
    return [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *frames, b"0\r\n\r\n"]


def test_the_first_text_is_not_a_status_notice_and_not_an_empty_piece() -> None:
    connection = Connection()
    first = []
    for piece in chunked(STATUS, UPDATE % b"", UPDATE % b"Hel", UPDATE % b"lo", COMPLETED):
        connection.data_received(piece)
        first.append(connection.first_at is not None)
    assert first == [False, False, False, True, True, True, True]


@given(st.integers(min_value=1, max_value=200))
def test_the_first_text_is_found_however_the_bytes_arrive(size: int) -> None:
    connection = Connection()
    stream = b"".join(chunked(STATUS, UPDATE % b"Hello", COMPLETED))
    for start in range(0, len(stream), size):
        connection.data_received(stream[start : start + size])
    assert connection.first_at is not None


def test_a_stream_and_a_whole_response_are_decoded() -> None:
    assert decode(b"".join(chunked(STATUS, UPDATE % b"Hel", UPDATE % b"lo", COMPLETED))) == "Hello"
    body = (
        b'{"result": {"task": {"id": "t", "contextId": "c", "status": {"state": "TASK_STATE_COMPLETED"},'
        b' "artifacts": [{"artifactId": "answer", "parts": [{"text": "Hello"}]}]}}}'
    )
    assert decode(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)) == "Hello"


def test_a_task_that_did_not_complete_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ended as TASK_STATE_WORKING: thinking"):
        decode(b"".join(chunked(STATUS)))
    with pytest.raises(RuntimeError, match=r"refused: .*503"):
        decode(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")


def test_the_cpu_time_of_a_process_is_exact() -> None:
    before, measured, after = time.process_time(), cpu_s(HttpSide(os.getpid(), port=0)), time.process_time()
    assert before <= measured <= after


@pytest.mark.parametrize("rows", ["warm,cold", ""])
def test_unknown_rows_are_refused(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--rows", rows])
    assert "no such rows" in capsys.readouterr().err


@pytest.mark.alone
async def test_one_round_measures_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    # The hundred streams differ from the sixteen in their number only, and take the longest.
    rows, codex = await run([name for name in GROUPS if name != "streams100"], rounds=1)
    assert [row.label for row in rows if row.aim is not None] == [
        "warm turn, blocking",
        "CPU of a warm turn, blocking",
        "warm turn, streaming",
        "first text",
        "CPU of a warm turn, streaming",
        "burst of 5,000 deltas",
        "CPU of a burst of 5,000 deltas",
        "16 live streams: whole",
        "16 live streams: slowest first text",
        "16 live streams: wall",
        "start to ready",
        "idle memory",
        "memory of 50 further contexts",
    ]
    assert [(row.ours, row.floor, row.bare) for row in rows if row.unit is Unit.COUNT] == [([16],) * 3]
    assert all(min(row.ours) > 0 for row in rows if row.unit is Unit.MS)
    assert codex.startswith("codex-cli ")
    assert "\nexec\n| measurement " in capsys.readouterr().out
