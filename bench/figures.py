"""Measured values, targets and tables, as plain functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never


class Unit(StrEnum):
    """The unit of a row's values; a MB is a million bytes."""

    MS = "ms"
    MB = "MB"
    COUNT = ""


@dataclass(frozen=True, slots=True)
class AtMostMore:
    """Our value may exceed bare by at most this, in the row's unit."""

    margin: float


@dataclass(frozen=True, slots=True)
class AtMostTimes:
    """Our value may be at most this many times bare."""

    times: float


@dataclass(frozen=True, slots=True)
class Below:
    """Our value must be below this, independently of bare."""

    bound: float


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Our value must reach this, independently of bare."""

    bound: float


Aim = AtMostMore | AtMostTimes | Below | AtLeast


@dataclass(frozen=True, slots=True)
class Row:
    """Our value and the bare driver's, None if it has none; a row without a target is informational."""

    label: str
    ours: float
    bare: float | None
    unit: Unit = Unit.MS
    aim: Aim | None = None

    @property
    def difference(self) -> float | None:
        """Our value minus bare."""
        return None if self.bare is None else self.ours - self.bare

    @property
    def ratio(self) -> float | None:
        """Our value divided by bare; None if bare is zero."""
        return self.ours / self.bare if self.bare else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is no target or no value to compare with."""
        match self.aim:
            case None:
                return None
            case AtMostMore(margin=margin):
                return None if self.difference is None else self.difference <= margin
            case AtMostTimes(times=times):
                return None if self.ratio is None else self.ratio <= times
            case Below(bound=bound):
                return self.ours < bound
            case AtLeast(bound=bound):
                return self.ours >= bound
            case _:
                assert_never(self.aim)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one measurement; `note` describes it."""

    title: str
    note: str
    rows: Sequence[Row]


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


HEADS = ("", "ours", "bare", "difference", "ratio", "aim", "")


def render(table: Table) -> str:
    """Return the table as plain text, numbers aligned on the right."""
    lines = [HEADS, *(_cells(row) for row in table.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADS))]
    text = ["  ".join(_aligned(line, widths)).rstrip() for line in lines]
    return "\n".join([table.title, f"  {table.note}", *(f"  {line}" for line in text)])


def summary(tables: Sequence[Table]) -> str:
    """Return the number of met targets, and one line for each missed one."""
    judged = [row for table in tables for row in table.rows if row.met is not None]
    missed = [row for row in judged if not row.met]
    lines = [f"missed: {row.label}, {_figures(row)}, aim {_aim(row)}" for row in missed]
    return "\n".join([f"{len(judged) - len(missed)} of {len(judged)} aims met", *lines])


def _figures(row: Row) -> str:
    ours = _number(row.ours, row.unit)
    return ours if row.bare is None else f"{ours}, bare {_number(row.bare, row.unit)}"


def _cells(row: Row) -> tuple[str, ...]:
    verdict = {True: "met", False: "MISSED", None: ""}[row.met]
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
    difference = "" if row.difference is None else _number(row.difference, row.unit, sign="+")
    bare = "" if row.bare is None else _number(row.bare, row.unit)
    return (row.label, _number(row.ours, row.unit), bare, difference, ratio, _aim(row), verdict)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *numbers, aim, verdict = (
        cell.rjust(width) if 0 < column < 5 else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return [first, *numbers, aim, verdict]


def _aim(row: Row) -> str:
    match row.aim:
        case None:
            return ""
        case AtMostMore(margin=margin):
            return f"at most {_number(margin, row.unit, sign='+')}"
        case AtMostTimes(times=times):
            return f"at most {times:g}x"
        case Below(bound=bound):
            return f"under {bound:g} {row.unit}".rstrip()
        case AtLeast(bound=bound):
            return f"all {bound:g} {row.unit}".rstrip()
        case _:
            assert_never(row.aim)


def _number(value: float, unit: Unit, sign: str = "") -> str:
    """Return a value with its unit: one decimal, none for counts."""
    match unit:
        case Unit.COUNT:
            return f"{value:{sign}.0f}"
        case Unit.MS | Unit.MB:
            return f"{value:{sign}.1f} {unit}"
        case _:
            assert_never(unit)
