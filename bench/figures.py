"""Measured values, aims and the report, as plain functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, assert_never

START: Final = "<!-- made by `make bench` -->"
END: Final = "<!-- end of what `make bench` makes -->"
"""The document's lines around the table."""

BUSY_LOAD: Final = 1.0
"""With a higher load average before the run, other programs take part in the figures."""

HEADS: Final = ("measurement", "agent", "floor", "bare", "agent / bare", "floor / bare", "aim", "")


class Unit(StrEnum):
    """The unit of a row's values; a MB is a million bytes."""

    MS = "ms"
    MB = "MB"
    COUNT = ""


@dataclass(frozen=True, slots=True)
class AtMostTimes:
    """Our median may be at most this many times the bare driver's."""

    times: float


@dataclass(frozen=True, slots=True)
class AtMost:
    """Our median may be at most this, in the row's unit."""

    bound: float


@dataclass(frozen=True, slots=True)
class All:
    """Our smallest value must reach this."""

    bound: float


Aim = AtMostTimes | AtMost | All


@dataclass(frozen=True, slots=True)
class Row:
    """The values of one measurement, one per round and side; a row without an aim is informational."""

    label: str
    ours: Sequence[float]
    floor: Sequence[float] = ()
    bare: Sequence[float] = ()
    unit: Unit = Unit.MS
    aim: Aim | None = None

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None if there is no aim or no value to compare with."""
        match self.aim:
            case None:
                return None
            case AtMostTimes(times=times):
                ratio = times_bare(self.ours, self.bare)
                return None if ratio is None else ratio <= times
            case AtMost(bound=bound):
                return median(self.ours) <= bound
            case All(bound=bound):
                return min(self.ours) >= bound
            case _:
                assert_never(self.aim)


def median(values: Sequence[float]) -> float:
    """Return the middle value, or the mean of the two in the middle."""
    return percentile(values, 50)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that `percent` per cent of `values` do not exceed, interpolated between neighbours.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low, share = math.floor(rank), rank % 1
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * share


def times_bare(values: Sequence[float], bare: Sequence[float]) -> float | None:
    """Return the ratio of the medians; None if one is missing or the bare driver's is not above zero."""
    return median(values) / median(bare) if values and bare and median(bare) > 0 else None


def render(rows: Sequence[Row]) -> str:
    """Return the rows as an aligned Markdown table: medians, and quartiles where there are several values."""
    lines = [HEADS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADS))]
    text = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rule = " | ".join("-" * max(3, width) for width in widths)
    return "\n".join(f"| {line} |" for line in (text[0], rule, *text[1:]))


def summary(rows: Sequence[Row]) -> str:
    """Return the number of met aims, and one line for each missed one."""
    judged = [row for row in rows if row.met is not None]
    missed = [row for row in judged if not row.met]
    lines = [f"missed: {row.label}: {_value(row.ours, row.unit)}{_beside(row)}, aim {_aim(row)}" for row in missed]
    return "\n".join([f"{len(judged) - len(missed)} of {len(judged)} aims met", *lines])


def warning(load: float) -> str:
    """Return a warning if the machine was not quiet before the run, else nothing."""
    if load <= BUSY_LOAD:
        return ""
    return f"WARNING: load average {load:.2f} before the run: other programs are busy, so these figures are NOT VALID."


def written(document: str, report: str) -> str:
    """Return the document with the report between its two marks.

    Raises:
        ValueError: the marks are not there.
    """
    before, start, rest = document.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the document needs the lines {START} and {END}")
    return f"{before}{START}\n\n{report}\n\n{END}{after}"


def _cells(row: Row) -> tuple[str, ...]:
    values = (_value(values, row.unit) for values in (row.ours, row.floor, row.bare))
    verdict = {True: "met", False: "**missed**", None: ""}[row.met]
    return (row.label, *values, _ratio(row.ours, row), _ratio(row.floor, row), _aim(row), verdict)


def _ratio(values: Sequence[float], row: Row) -> str:
    ratio = times_bare(values, row.bare)
    return "" if ratio is None or row.unit is Unit.COUNT else f"{ratio:.2f}"


def _beside(row: Row) -> str:
    ratio = _ratio(row.ours, row)
    return f", {ratio} times the bare driver's" if ratio else ""


def _aim(row: Row) -> str:
    match row.aim:
        case None:
            return ""
        case AtMostTimes(times=times):
            return f"at most {times:g} times"
        case AtMost(bound=bound):
            return f"at most {bound:g} {row.unit}".rstrip()
        case All(bound=bound):
            return f"all {bound:g}"
        case _:
            assert_never(row.aim)


def _value(values: Sequence[float], unit: Unit) -> str:
    """Return the median with its unit and, of several values, the quartiles; of counts the smallest."""
    if not values:
        return ""
    if unit is Unit.COUNT:
        return f"{min(values):.0f}"
    # Differences of a few milliseconds count where a value is small.
    digits = 0 if unit is Unit.MS and median(values) >= 1000 else 1
    middle, low, high = (f"{percentile(values, percent):.{digits}f}" for percent in (50, 25, 75))
    return f"{middle} {unit}" if len(values) == 1 else f"{middle} {unit} ({low} to {high})"
