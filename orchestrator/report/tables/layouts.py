"""Layouts of tables: classes that turn cells into a grid of typed entries.

The keys of a row are the axes that vary, so that a reader can tell its cell from the others. The
modules of tables say which layout shows which measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import (
    Row,
    axis_texts,
    has_value,
    key_axes,
    ordered_values,
    sort_cells,
)
from orchestrator.analysis.results import Results
from orchestrator.report.tables.entries import MISSING, Entry, axis_entries, quantity
from orchestrator.report.tables.formatters import Value, missing
from orchestrator.report.tables.table import Heading, Rows, TableGrid

Columns = tuple[tuple[str, Value], ...]  # titles, and how each value is made
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
    columns = _ColumnLists(cells)
    return (_FrameRow(columns, index) for index in range(len(cells)))


def each_sorted(cells: pd.DataFrame, axes: list[str]) -> Iterator[Row]:
    """Return the rows of a frame in the order of the values of these axes."""
    return each(sort_cells(cells, axes))


def groups(cells: pd.DataFrame, axes: list[str], then: Sequence[str] = ()) -> list[list[Row]]:
    """Return the rows that agree in all axes, each group sorted by the axes `then`."""
    # One frame per group, as `DataFrame.groupby` makes it, takes about 100 times as long.
    members: dict[tuple[str, ...], list[Row]] = {}
    for row in each_sorted(cells, [*axes, *then]):
        members.setdefault(tuple(axis_texts(row, axes)), []).append(row)
    return list(members.values())


@dataclass(frozen=True)
class CellRows:
    """One row per cell."""

    columns: Columns

    def lay_out(self, results: Results) -> TableGrid:
        axes = key_axes(results)
        rows: Rows = []
        for row in each_sorted(results.cells, axes):
            rows.append([*axis_entries(row, axes), *_values(row, self.columns)])
        return TableGrid(axes, _headings(self.columns), rows)


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

    def lay_out(self, results: Results) -> TableGrid:
        axes = key_axes(results)
        formatters: dict[str, list[Value]] = {}
        for phase, _ in self.phases:
            formatters[phase] = [formatter(phase) for _, formatter in self.columns]
        rows: Rows = []
        for row in each_sorted(results.cells, axes):
            keys = axis_entries(row, axes)
            phases = [phase for phase in self.phases if self._is_known(row, phase[0])]
            for phase, name in phases:
                rows.append([*keys, Entry(name), *(show(row) for show in formatters[phase])])
            if not phases:
                rows.append([*keys, MISSING, *[missing(row)] * len(self.columns)])
        return TableGrid([*axes, self.title], _headings(self.columns), rows, self.title)

    def _is_known(self, row: Row, phase: str) -> bool:
        return any(has_value(row, column.format(phase)) for column in self.known_by)


@dataclass(frozen=True)
class CompareColumns:
    """One row per combination of the other axes; one group of columns per value of `axes`.

    With several axes, each combination of their values that occurs counts as one value. The first
    value is the baseline.

    columns: shown for each value.
    against: comparisons with the baseline, shown for each value but the baseline.
    extra: shown for each value but the baseline.
    """

    axes: tuple[str, ...]
    columns: Columns
    against: Comparisons = ()
    extra: Columns = ()

    def lay_out(self, results: Results) -> TableGrid:
        axes = key_axes(results, without=self.axes)
        in_order = each_sorted(results.cells, list(self.axes))
        values = list(dict.fromkeys(self._value(row) for row in in_order))
        rows: Rows = []
        for group in groups(results.cells, axes):
            by_value = {self._value(row): row for row in group}
            if len(by_value) < 2:
                continue
            entries = axis_entries(group[0], axes)
            for value in values:
                entries += self._entries(by_value.get(value))
                if value != values[0]:
                    entries += self._compared(by_value.get(value), by_value.get(values[0]))
            rows.append(entries)
        return TableGrid(axes, list(self._headings(values)), rows)

    def _value(self, row: Row) -> str:
        return " ".join(str(row[axis]) for axis in self.axes)

    def _headings(self, values: Sequence[str]) -> Iterator[Heading]:
        for value in values:
            compared = () if value == values[0] else (*self.against, *self.extra)
            for title, _ in (*self.columns, *compared):
                yield Heading(title, value)

    def _entries(self, row: Row | None) -> list[Entry]:
        return _values(row, self.columns) if row else [MISSING] * len(self.columns)

    def _compared(self, row: Row | None, baseline: Row | None) -> list[Entry]:
        if row is None:
            return [MISSING] * len((*self.against, *self.extra))
        return [*_comparisons(row, baseline, self.against), *_values(row, self.extra)]


@dataclass(frozen=True)
class CompareRows:
    """One row per cell. Cells that differ in `axis` alone follow each other and are compared.

    baseline: the value of the axis with which the others are compared. Without a cell of this
    value nothing is compared.
    """

    axis: str
    baseline: str
    columns: Columns
    against: Comparisons

    def lay_out(self, results: Results) -> TableGrid:
        others = key_axes(results, without=(self.axis,))
        rows: Rows = []
        for members in groups(results.cells, others, (self.axis,)):
            if len(members) < 2:
                continue
            baseline = next((row for row in members if row[self.axis] == self.baseline), None)
            for row in members:
                values = _values(row, self.columns)
                compared = _comparisons(row, baseline, self.against)
                rows.append([*axis_entries(row, [*others, self.axis]), *values, *compared])
        headings = _headings((*self.columns, *self.against))
        return TableGrid([*others, self.axis], headings, rows, self.axis)


@dataclass(frozen=True)
class ContextColumns:
    """One row per combination of the other axes, and one column per context length."""

    value: Value

    def lay_out(self, results: Results) -> TableGrid:
        axes = key_axes(results, without=(_LENGTH,))
        lengths = ordered_values(_LENGTH, results.cells[_LENGTH])
        rows: Rows = []
        for group in groups(results.cells, axes):
            entries = {row[_LENGTH]: self.value(row) for row in group}
            in_order = [entries.get(length, MISSING) for length in lengths]
            rows.append([*axis_entries(group[0], axes), *in_order])
        return TableGrid(axes, [Heading(str(length)) for length in lengths], rows)


@dataclass(frozen=True)
class ScalingExponents:
    """Growth of columns with the context length: the value, and its exponent since the row above.

    The local exponent of y along x is log(y2 / y1) / log(x2 / x1).

    columns: title, column and formatter.
    """

    columns: tuple[tuple[str, str, Value], ...]
    extra: Columns = ()

    def lay_out(self, results: Results) -> TableGrid:
        axes = key_axes(results, without=(_LENGTH,))
        rows: Rows = []
        for group in groups(results.cells, axes, (_LENGTH,)):
            if len(group) < 2:
                continue
            for row, previous in zip(group, [None, *group], strict=False):
                entries = axis_entries(row, [*axes, _LENGTH])
                for _, column, show in self.columns:
                    entries += [show(row), self._exponent(row, previous, column)]
                rows.append([*entries, *_values(row, self.extra)])
        headings = []
        for title, _, _ in self.columns:
            headings += [Heading(title), Heading(f"exponent of {title}")]
        return TableGrid([*axes, _LENGTH], [*headings, *_headings(self.extra)], rows, _LENGTH)

    def _exponent(self, row: Row, previous: Row | None, column: str) -> Entry:
        if previous is None or not (has_value(row, column) and has_value(previous, column)):
            return MISSING
        ends = (previous[column], row[column])
        if not all(0 < end < math.inf for end in ends):
            return MISSING
        growth = math.log(row[column]) - math.log(previous[column])
        return quantity(growth / math.log(row[_LENGTH] / previous[_LENGTH]), ".2f")


def _headings(columns: Sequence[tuple[str, object]]) -> list[Heading]:
    return [Heading(title) for title, _ in columns]


def _values(row: Row, columns: Columns) -> list[Entry]:
    return [show(row) for _, show in columns]


def _comparisons(row: Row, baseline: Row | None, against: Comparisons) -> list[Entry]:
    return [compare(row, baseline) if baseline else MISSING for _, compare in against]
