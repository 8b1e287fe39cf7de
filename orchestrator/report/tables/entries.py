"""Entries of tables: typed values, which each format of a report writes in its own way."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from orchestrator.analysis.axes import NOTHING, Row, axis_text, is_null
from orchestrator.report.text.numbers import HOST_MARK, format_ms, format_number

# After a ratio of times whose intervals overlap, so that the difference may be chance.
NOISE_MARK = "~"


class Entry(NamedTuple):
    """A value of a table: a number, a flag (a bool), a text, a status or nothing.

    text: what a reader sees of the value itself, without unit.
    number: the value in `unit`; None for a text, a status and nothing.
    spread: what a reader sees behind the text, such as ` ± 0.1` or ` [1.2, 1.4]`.
    low, high: ends of the 95 % interval. deviation: the sample standard deviation.
    is_cpu_bound: None if the value is no time of steps and no ratio of such times.
    status: the status of a failed cell, where `text` stands in for a number.
    """

    text: str
    number: float | None = None
    unit: str = ""
    spread: str = ""
    low: float | None = None
    high: float | None = None
    deviation: float | None = None
    is_cpu_bound: bool | None = None
    is_within_noise: bool = False
    status: str = ""

    def __str__(self) -> str:
        noise_mark = NOISE_MARK if self.is_within_noise else ""
        cpu_mark = HOST_MARK if self.is_cpu_bound else ""
        return f"{self.text}{self.spread}{noise_mark}{cpu_mark}"

    @property
    def is_missing(self) -> bool:
        # Without a value, a prediction may follow it.
        return self.text == NOTHING and not self.spread


MISSING = Entry(NOTHING)


def quantity(value: float, form: str, unit: str = "") -> Entry:
    """Return an entry of a number, written with the format `form`."""
    return Entry(format_number(value, form), value, unit)


def milliseconds(ms: float | None) -> Entry:
    """Return an entry of milliseconds; the missing one for null."""
    return MISSING if ms is None or is_null(ms) else Entry(format_ms(ms), ms, "ms")


def quotient(numerator: float, denominator: float, form: str = ".2f") -> Entry:
    """Return an entry of a ratio, missing if the divisor is not above 0 or it is not finite."""
    if not denominator > 0 or not math.isfinite(numerator / denominator):
        return MISSING
    return quantity(numerator / denominator, form)


def axis_entries(row: Row, axes: list[str]) -> list[Entry]:
    """Return the entry of each axis of a row."""
    return [axis_entry(row[axis]) for axis in axes]


# The same values stand in many rows of many tables.
@lru_cache(maxsize=4096, typed=True)
def axis_entry(value: object) -> Entry:
    """Return the entry of one value of an axis."""
    if is_null(value):
        return MISSING
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return Entry(axis_text(value), float(value) if is_number else None)  # type: ignore[arg-type]


def shorten(text: str, longest: int) -> str:
    """Return a text of at most `longest` characters; an ellipsis shows that it was cut."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
