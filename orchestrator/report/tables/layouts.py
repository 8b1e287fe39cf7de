"""Layouts of tables: classes that turn cells into a grid of typed entries.

The keys of a row are the axes that vary, so that a reader can tell its cell from the others. The
modules of tables say which layout shows which measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from orchestrator.analysis.axes import (
    Row,
    axis_texts,
    has_value,
    key_axes,
    ordered_values,
    sorted_positions,
)
from orchestrator.analysis.results import Results
from orchestrator.report.tables.formatters import Value, missing
from orchestrator.report.tables.table import (
    MISSING,
    Entry,
    Heading,
    Rows,
    TableGrid,
    axis_entries,
    quantity,
)

Columns = tuple[tuple[str | Heading, Value], ...]  # titles, and how each value is made
# Titles, and functions that compare a row with its baseline.
Comparisons = tuple[tuple[str, Callable[[Row, Row], Entry]], ...]

PHASE = "phase"  # title of the column that names phases
_LENGTH = "context_length"


class _ColumnLists(dict[str, list[Any]]):
    """The columns of a frame as lists."""

    def __init__(self, cells: pd.DataFrame) -> None:
        self.names = dict.fromkeys(cells)
        self._cells = cells

    def __missing__(self, name: str) -> list[Any]:
        # A table uses a few of several hundred columns, and `to_dict("records")` converts all.
        self[name] = self._cells[name].tolist()
        return self[name]


class _FrameRow(Mapping[str, Any]):
    """One row of a frame as a mapping of column names to values."""

    __slots__ = ("_columns", "_index")

    def __init__(self, columns: _ColumnLists, index: int) -> None:
        self._columns = columns
        self._index = index

    def __getitem__(self, name: str) -> Any:
        return self._columns[name][self._index]

    # The methods of Mapping would look up the value, and catch the KeyError of a missing column.
    def get(self, name: str, default: Any = None) -> Any:
        return self._columns[name][self._index] if name in self._columns.names else default

    def __contains__(self, name: object) -> bool:
        return name in self._columns.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.names)

    def __len__(self) -> int:
        return len(self._columns.names)


def each(cells: pd.DataFrame) -> Iterator[Row]:
    """Return the rows of a frame as mappings, like `to_dict("records")` but converted lazily."""
    return each_sorted(cells, [])


def each_sorted(cells: pd.DataFrame, axes: list[str]) -> Iterator[Row]:
    """Return the rows of a frame in the order of the values of these axes."""
    columns = _ColumnLists(cells)
    return (_FrameRow(columns, index) for index in sorted_positions(cells, axes))


def groups(cells: pd.DataFrame, axes: list[str], then: Sequence[str] = ()) -> list[list[Row]]:
    """Return the rows that agree in all axes, each group sorted by the axes `then`."""
    # One frame per group, as `DataFrame.groupby` makes it, takes about 100 times as long.
    members: dict[tuple[str, ...], list[Row]] = {}
    for row in each_sorted(cells, [*axes, *then]):
        members.setdefault(tuple(axis_texts(row, axes)), []).append(row)
    return list(members.values())


def each_cell(results: Results) -> Iterator[Row]:
    """Return the cells in the order of the axes that are keys."""
    return each_sorted(results.cells, key_axes(results))


def grid_of(
    results: Results,
    keys: Sequence[str],
    titles: Iterable[str | Heading],
    found: Iterable[tuple[Row, Iterable[Entry]]],
    compared: str = "",
) -> TableGrid:
    """Return a grid of rows, each of a cell. keys: the first entries, behind the cell's axes."""
    axes = key_axes(results)
    rows = [[*axis_entries(cell, axes), *entries] for cell, entries in found]
    return TableGrid([*axes, *keys], list(map(_heading, titles)), rows, compared)


def _heading(title: str | Heading) -> Heading:
    return title if isinstance(title, Heading) else Heading(title)


@dataclass(frozen=True)
class CellRows:
    """One row per cell."""

    columns: Columns

    def __call__(self, results: Results) -> TableGrid:
        titles, formatters = zip(*self.columns, strict=True)
        found = ((row, shown_by(formatters, row)) for row in each_cell(results))
        return grid_of(results, (), titles, found)


@dataclass(frozen=True)
class PhaseRows:
    """One row per cell and phase, for the phases that have a value in one of `known_by`.

    A cell without such a phase has one row that shows its status.

    phases: names of phases as in the columns, and as readers see them.
    columns: titles, and functions from a phase to a formatter.
    known_by: templates of columns; {} stands for the phase.
    title: title of the column of phases.
    """

    phases: tuple[tuple[str, str], ...]
    columns: tuple[tuple[str, Callable[[str], Value]], ...]
    known_by: tuple[str, ...] = ("{}_ms_median",)
    title: str = PHASE

    def __call__(self, results: Results) -> TableGrid:
        titles, makers = zip(*self.columns, strict=True)
        formatters = {phase: [make(phase) for make in makers] for phase, _ in self.phases}
        found = []
        for row in each_cell(results):
            phases = [phase for phase in self.phases if self._is_known(row, phase[0])]
            for phase, name in phases:
                found.append((row, [Entry(name), *shown_by(formatters[phase], row)]))
            if not phases:
                found.append((row, [MISSING, *[missing(row)] * len(titles)]))
        return grid_of(results, [self.title], titles, found, self.title)

    def _is_known(self, row: Row, phase: str) -> bool:
        return any(has_value(row, column.format(phase)) for column in self.known_by)


@dataclass(frozen=True)
class CompareColumns:
    """One row per combination of the other axes; one group of columns per value of `axes`.

    With several axes, each combination of their values that occurs counts as one value. The first
    value is the baseline, unless `baseline` names it.

    value, extra: shown for each value. against: comparisons with the baseline.
    """

    axes: tuple[str, ...]
    value: tuple[str, Value]
    against: Comparisons = ()
    extra: Columns = ()
    baseline: str = ""

    @property
    def _formatters(self) -> list[Value]:
        return [show for _, show in self.extra]

    def __call__(self, results: Results) -> TableGrid:
        axes = key_axes(results, without=self.axes)
        in_order = each_sorted(results.cells, list(self.axes))
        values = list(dict.fromkeys(self._value(row) for row in in_order))
        rows: Rows = []
        for group in groups(results.cells, axes):
            by_value = {self._value(row): row for row in group}
            # With a named baseline, other values stand for themselves.
            if len(by_value) < 2 and (not self.baseline or self.baseline in by_value):
                continue
            baseline = by_value.get(self.baseline or values[0])
            entries = axis_entries(group[0], axes)
            for value in values:
                entries += self._entries(by_value.get(value), baseline)
            rows.append(entries)
        titles = [self.value[0], *(title for title, _ in (*self.against, *self.extra))]
        headings = [Heading(str(title), value) for value in values for title in titles]
        return TableGrid(axes, headings, rows)

    def _value(self, row: Row) -> str:
        return " ".join(str(row[axis]) for axis in self.axes)

    def _entries(self, row: Row | None, baseline: Row | None) -> list[Entry]:
        if row is None:
            return [MISSING] * (1 + len(self.against) + len(self.extra))
        compared = [MISSING] * len(self.against)
        if baseline and row is not baseline:
            compared = [compare(row, baseline) for _, compare in self.against]
        return [self.value[1](row), *compared, *shown_by(self._formatters, row)]


class Baseline(NamedTuple):
    """A comparison with the cell that has a value of the first axis and agrees in all others.

    axes: the axis, and others that may differ. Without such a cell, the precision may differ too.
    """

    title: str
    axes: tuple[str, ...]
    value: str
    compare: Callable[[Row, Row], Entry]


@dataclass(frozen=True)
class CompareRows:
    """One row per cell, compared with other rows of the table. Columns come before and after."""

    before: Columns
    against: tuple[Baseline, ...]
    after: Columns

    def __call__(self, results: Results) -> TableGrid:
        axes = key_axes(results)
        cells = list(each_sorted(results.cells, axes))
        columns = list(self.before)
        compared = ""
        for against in self.against:
            if against.axes[0] in axes:
                compared = compared or against.axes[0]
                columns.append((against.title, _compared(against, cells, axes)))
        titles, formatters = zip(*columns, *self.after, strict=True)
        # The same objects: a row that is its own baseline has no interval.
        found = ((row, shown_by(formatters, row)) for row in cells)
        return grid_of(results, (), titles, found, compared)


def _compared(against: Baseline, cells: Sequence[Row], axes: list[str]) -> Value:
    """Return a formatter of the comparison of a row with its baseline among the cells."""
    strict = [axis for axis in axes if axis not in against.axes]
    loose = [axis for axis in strict if axis != "precision"]
    by_settings: dict[tuple[str, ...], Row] = {}
    for row in cells:
        if row[against.axes[0]] == against.value:
            for others in (strict, loose):
                by_settings.setdefault((str(others), *axis_texts(row, others)), row)

    def show(row: Row) -> Entry:
        for others in (strict, loose):
            key = (str(others), *axis_texts(row, others))
            if key in by_settings:
                return against.compare(row, by_settings[key])
        return MISSING

    return show


@dataclass(frozen=True)
class ContextColumns:
    """One row per combination of the other axes, and one column per context length."""

    value: Value

    def __call__(self, results: Results) -> TableGrid:
        axes = key_axes(results, without=(_LENGTH,))
        lengths = ordered_values(_LENGTH, results.cells[_LENGTH])
        rows: Rows = []
        for group in groups(results.cells, axes):
            entries = {row[_LENGTH]: self.value(row) for row in group}
            in_order = [entries.get(length, MISSING) for length in lengths]
            rows.append([*axis_entries(group[0], axes), *in_order])
        return TableGrid(axes, list(map(Heading, map(str, lengths))), rows)


@dataclass(frozen=True)
class ScalingExponents:
    """Growth of columns with the context length: the value, and its exponent since the row above.

    The local exponent of y along x is log(y2 / y1) / log(x2 / x1).

    columns: title, column and formatter.
    """

    columns: tuple[tuple[str, str, Value], ...]
    extra: Value
    extra_title: str

    def __call__(self, results: Results) -> TableGrid:
        axes = key_axes(results, without=(_LENGTH,))
        rows: Rows = []
        for group in groups(results.cells, axes, (_LENGTH,)):
            if len(group) < 2:
                continue
            for row, previous in zip(group, [None, *group], strict=False):
                entries = axis_entries(row, [*axes, _LENGTH])
                for _, column, show in self.columns:
                    entries += [show(row), self._exponent(row, previous, column)]
                rows.append([*entries, self.extra(row)])
        headings = []
        for title, _, _ in self.columns:
            headings += [Heading(title), Heading(f"exponent of {title}")]
        headings.append(Heading(self.extra_title))
        return TableGrid([*axes, _LENGTH], headings, rows, _LENGTH)

    def _exponent(self, row: Row, previous: Row | None, column: str) -> Entry:
        if previous is None or not (has_value(row, column) and has_value(previous, column)):
            return MISSING
        ends = (previous[column], row[column])
        if min(ends) <= 0 or math.inf in ends:
            return MISSING
        growth = math.log(row[column]) - math.log(previous[column])
        return quantity(growth / math.log(row[_LENGTH] / previous[_LENGTH]), ".2f")


def shown_by(formatters: Iterable[Value], row: Row) -> list[Entry]:
    """Return the entry that each formatter makes of a row."""
    return [show(row) for show in formatters]
