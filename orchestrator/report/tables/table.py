"""Tables: typed entries, which each format writes in its own way, and which cells a table shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

from orchestrator.analysis.axes import NOTHING, Row, axis_text, is_null
from orchestrator.analysis.results import Results
from orchestrator.common.errors import ConfigError
from orchestrator.common.suggestions import suggestion
from orchestrator.report.tables.cell_filters import CellFilter
from orchestrator.report.text.numbers import format_ms, format_number, marks


class Entry(NamedTuple):
    """A value of a table: a number, a flag (a bool), a text, a status or nothing.

    text: what a reader sees of the value itself, without unit.
    full: the value in files, where `text` is a shortened name.
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
    full: str = ""

    def __str__(self) -> str:
        return f"{self.text}{self.spread}{self.marks}"

    @property
    def marks(self) -> str:
        """The marks behind the value."""
        return marks(self.is_cpu_bound, self.is_within_noise)

    @property
    def is_missing(self) -> bool:
        # Without a value, a prediction may follow it.
        return self.text == NOTHING and not self.spread


MISSING = Entry(NOTHING)


def quantity(value: float | None, form: str, unit: str = "") -> Entry:
    """Return an entry of a number, written with the format `form`; the missing one for null."""
    if value is None or is_null(value):
        return MISSING
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


_SETTINGS = (
    # Three ways to name a model; `size` is a key of every table.
    "model", "d_model", "d_ff", "num_layers", "num_heads",
    "precision", "compile", "pass", "attention", "batch_size",
)  # fmt: skip
NOTES = "note"  # title of the column with the numbers of notes
Rows = list[list[Entry]]


class Heading(NamedTuple):
    """The heading of a measure. group: the compared value that it belongs to, such as `bf16`."""

    title: str
    group: str = ""

    def __str__(self) -> str:
        return f"{self.group} {self.title}".strip()


class TableGrid(NamedTuple):
    """Keys, which tell rows apart, measures, and the rows with an entry for each of both.

    compared: the key whose values a reader compares, so that no view is of one value. notes: of
    rows, which refer to them in the column NOTES by number, starting at 1. label: the measure that
    names the rows, such as the names of kernels, which every view shows.
    """

    keys: list[str]
    measures: list[Heading]
    rows: Rows
    compared: str = ""
    notes: tuple[str, ...] = ()
    label: str = ""


TableLayout = Callable[[Results], TableGrid]  # turns cells into the grid of a table


@dataclass(frozen=True)
class Table:
    """A table of the report. It is left out if no cell passes its filter.

    read: how to read the table, for its caption. column_notes: sentences that follow it if a column
    is shown whose title begins with their pattern. layout: its first measures are the most important.
    is_default: shown by `sweep report` and on the page without being asked for.
    """

    name: str
    title: str
    read: str
    layout: TableLayout
    cells: CellFilter = lambda cells: cells
    is_default: bool = False
    column_notes: Mapping[str, str] = field(default_factory=dict)

    def choose(self, results: Results) -> Results:
        """Return the results of the cells that pass the filter."""
        return replace(results, cells=self.cells(results.cells))

    def lay_out(self, chosen: Results) -> TableGrid:
        """Return the grid without rows and columns in which no measure has a value."""
        if chosen.cells.empty:
            return TableGrid([], [], [])
        # Of 1,028 published rows of times, 425 were of cells whose memory alone was measured.
        grid = _without_empty(self.layout(chosen))
        has_values = {heading.title for heading in grid.measures} - {NOTES}
        return grid if has_values else TableGrid([], [], [])

    def settings(self, chosen: Results) -> dict[str, str]:
        """Return the axes that readers look for and that have one value in all cells."""
        cells, settings = chosen.cells, {}
        for axis in _SETTINGS:
            values = list(cells[axis].unique()) if axis in cells else []
            if len(values) == 1 and not is_null(values[0]):
                settings[axis] = axis_text(values[0])
        return settings


def notes_of(notes: Sequence[str], text: str) -> list[str]:
    """Return the sentences that a row refers to by their numbers, such as `1, 3`."""
    return [] if text == NOTHING else [notes[int(number) - 1] for number in text.split(", ")]


def columns_of(rows: Rows, count: int) -> list[Sequence[Entry]]:
    """Return the first columns of a table, which are empty without rows."""
    columns: list[Sequence[Entry]] = list(zip(*rows, strict=True))
    return columns[:count] if rows else [()] * count


def is_empty(entries: Sequence[Entry]) -> bool:
    return all(entry.is_missing for entry in entries)


def _without_empty(grid: TableGrid) -> TableGrid:
    """Drop the rows without a measure, and then the empty columns."""
    rows = [row for row in grid.rows if not is_empty(row[len(grid.keys) :])]
    return without_empty_columns(grid._replace(rows=rows))


def without_empty_columns(grid: TableGrid) -> TableGrid:
    """Drop the columns that are empty in every row, such as the allocator's peaks on a CPU."""
    count = len(grid.keys)
    columns = columns_of(grid.rows, count + len(grid.measures))
    is_shown = [not is_empty(entries) for entries in columns]
    keys = list(compress(grid.keys, is_shown))
    measures = list(compress(grid.measures, is_shown[count:]))
    rows = [list(compress(row, is_shown)) for row in grid.rows]
    return grid._replace(keys=keys, measures=measures, rows=rows)


@dataclass(frozen=True, eq=False)
class RenderedTable:
    """A table with all its rows. settings: values of axes that all of its cells share."""

    table: Table
    grid: TableGrid
    provenance: str
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def header(self) -> list[str]:
        return [*self.grid.keys, *map(str, self.grid.measures)]

    @property
    def rows(self) -> Rows:
        return self.grid.rows


def with_columns(page: RenderedTable, names: Sequence[str]) -> RenderedTable:
    """Return a table with the measures of these titles only, without rows that have none of them.

    A name is the title of a measure, with or without the compared value in front of it. Raise
    ConfigError for another name.
    """
    headings = page.grid.measures
    known = {text: None for one in headings for text in (one.title, str(one))}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--columns {name}: the table {page.table.name} has no such column",
                suggestion(name, known) or f"It has: {', '.join(known)}",
            )
    is_shown = [one.title in names or str(one) in names for one in headings]
    count = len(page.grid.keys)
    rows = [[*row[:count], *compress(row[count:], is_shown)] for row in page.rows]
    grid = page.grid._replace(measures=list(compress(headings, is_shown)), rows=rows)
    return replace(page, grid=_without_empty(grid))
