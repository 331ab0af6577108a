"""The benchmark: its statistics and tables, and one run of the smallest sizes with everything real."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.__main__ import run
from bench.figures import (
    Aim,
    AtLeast,
    AtMostMore,
    AtMostTimes,
    Below,
    Row,
    Table,
    Unit,
    median,
    percentile,
    render,
    summary,
)
from bench.measure import SMALLEST

values = st.lists(st.floats(min_value=0, max_value=1e6), min_size=1)


@pytest.mark.parametrize(
    ("given_values", "percent", "expected"),
    [([3.0, 1.0, 2.0], 50, 2.0), ([1.0, 2.0], 50, 1.5), ([7.0], 90, 7.0), ([1.0, 2.0, 3.0], 100, 3.0)],
)
def test_percentiles_have_the_documented_values(given_values: list[float], percent: float, expected: float) -> None:
    assert percentile(given_values, percent) == expected


@given(values)
def test_percentiles_lie_between_the_extremes_and_in_order(sample: list[float]) -> None:
    assert min(sample) <= median(sample) <= percentile(sample, 90) * (1 + 1e-9)
    assert percentile(sample, 90) <= max(sample) * (1 + 1e-9)


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        median([])


@pytest.mark.parametrize(
    ("aim", "ours", "bare", "met"),
    [
        (None, 9.0, 1.0, None),
        (AtMostMore(8), 18.0, 10.0, True),
        (AtMostMore(8), 18.1, 10.0, False),
        (AtMostMore(8), 18.1, None, None),
        (AtMostTimes(4), 40.0, 10.0, True),
        (AtMostTimes(4), 40.1, 10.0, False),
        (AtMostTimes(4), 40.0, 0.0, None),
        (Below(80), 79.9, None, True),
        (Below(80), 80.0, 20.0, False),
        (AtLeast(16), 16.0, None, True),
        (AtLeast(16), 15.0, None, False),
    ],
)
def test_an_aim_is_judged_only_if_it_was_measured(
    aim: Aim | None, ours: float, bare: float | None, met: bool | None
) -> None:
    assert Row("row", ours, bare, aim=aim).met is met


TABLE = Table(
    "Title",
    "how",
    [
        Row("turn", 55.54, 41.6, aim=AtMostMore(8)),
        Row("whole", 16, 16, Unit.COUNT, AtLeast(16)),
        Row("memory", 81.7, None, Unit.MB, Below(80)),
        Row("other", 1.5, 0.0),
    ],
)


def test_a_table_is_plain_aligned_text() -> None:
    assert render(TABLE).splitlines() == [
        "Title",
        "  how",
        "             ours     bare  difference  ratio  aim",
        "  turn    55.5 ms  41.6 ms    +13.9 ms  1.34x  at most +8.0 ms  MISSED",
        "  whole        16       16          +0  1.00x  all 16           met",
        "  memory  81.7 MB                              under 80 MB      MISSED",
        "  other    1.5 ms   0.0 ms     +1.5 ms",
    ]


def test_the_summary_counts_what_was_judged_and_names_what_was_missed() -> None:
    assert summary([TABLE]).splitlines() == [
        "1 of 3 aims met",
        "missed: turn, 55.5 ms, bare 41.6 ms, aim at most +8.0 ms",
        "missed: memory, 81.7 MB, aim under 80 MB",
    ]


@pytest.mark.alone
async def test_the_smallest_run_measures_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    tables = await run(SMALLEST)
    assert [table.title for table in tables] == [
        "Warm turn",
        "The same without the a2a-sdk's client",
        "Burst",
        "Parallel contexts",
        "Streams at a model's speed",
        "Memory",
        "The backends",
        "Cold start",
    ]
    whole = [row for table in tables for row in table.rows if row.unit is Unit.COUNT]
    assert [(row.ours, row.bare) for row in whole] == [(SMALLEST.streams, SMALLEST.streams)] * 2
    assert all(row.ours > 0 for table in tables for row in table.rows if row.label != "burst: CPU, mean")
    assert "aims met" in capsys.readouterr().out
