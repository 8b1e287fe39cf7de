"""Layouts of tables: classes that turn cells into a header and rows of text.

The first columns of a row are the axes that vary, so that a reader can tell its cell from the
others. The modules of tables say which layout shows which columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pandas as pd

from orchestrator.analysis.axes import (
    NOTHING,
    Row,
    axis_texts,
    has_value,
    key_axes,
    ordered_values,
    sort_cells,
)
from orchestrator.analysis.results import Results
from orchestrator.report.tables.formatters import Value, missing_text

Header = list[str]
Rows = list[list[str]]
Columns = tuple[tuple[str, Value], ...]  # titles, and how each value is written
# Titles, and functions that compare a row with its baseline.
Comparisons = tuple[tuple[str, Callable[[Row, Row], str]], ...]

PHASE = "phase"  # title of the column that names phases
_LENGTH = "context_length"


class Layout(Protocol):
    """Turns cells into the header and the rows of a table."""

    def lay_out(self, results: Results) -> tuple[Header, Rows]: ...


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

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results)
        rows: Rows = []
        for row in each_sorted(results.cells, axes):
            rows.append([*axis_texts(row, axes), *_values(row, self.columns)])
        return [*axes, *_titles(self.columns)], rows


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

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results)
        formatters: dict[str, list[Value]] = {}
        for phase, _ in self.phases:
            formatters[phase] = [formatter(phase) for _, formatter in self.columns]
        rows: Rows = []
        for row in each_sorted(results.cells, axes):
            texts = axis_texts(row, axes)
            phases = [phase for phase in self.phases if self._is_known(row, phase[0])]
            for phase, name in phases:
                rows.append([*texts, name, *(show(row) for show in formatters[phase])])
            if not phases:
                rows.append([*texts, NOTHING, *[missing_text(row)] * len(self.columns)])
        return [*axes, self.title, *(title for title, _ in self.columns)], rows

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

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results, without=self.axes)
        in_order = each_sorted(results.cells, list(self.axes))
        values = list(dict.fromkeys(self._value(row) for row in in_order))
        rows: Rows = []
        for group in groups(results.cells, axes):
            by_value = {self._value(row): row for row in group}
            if len(by_value) < 2:
                continue
            texts = axis_texts(group[0], axes)
            for value in values:
                texts += self._texts(by_value.get(value))
                if value != values[0]:
                    texts += self._compared(by_value.get(value), by_value.get(values[0]))
            rows.append(texts)
        return [*axes, *self._header(values)], rows

    def _value(self, row: Row) -> str:
        return " ".join(str(row[axis]) for axis in self.axes)

    def _header(self, values: Sequence[str]) -> Iterator[str]:
        for value in values:
            compared = () if value == values[0] else (*self.against, *self.extra)
            for title, _ in (*self.columns, *compared):
                yield f"{value} {title}".strip()

    def _texts(self, row: Row | None) -> list[str]:
        return _values(row, self.columns) if row else [NOTHING] * len(self.columns)

    def _compared(self, row: Row | None, baseline: Row | None) -> list[str]:
        if row is None:
            return [NOTHING] * len((*self.against, *self.extra))
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

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        others = key_axes(results, without=(self.axis,))
        rows: Rows = []
        for members in groups(results.cells, others, (self.axis,)):
            if len(members) < 2:
                continue
            baseline = next((row for row in members if row[self.axis] == self.baseline), None)
            for row in members:
                values = _values(row, self.columns)
                compared = _comparisons(row, baseline, self.against)
                rows.append([*axis_texts(row, [*others, self.axis]), *values, *compared])
        return [*others, self.axis, *_titles(self.columns), *_titles(self.against)], rows


@dataclass(frozen=True)
class Matrix:
    """One row per combination of the other axes, and one column per context length."""

    value: Value

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results, without=(_LENGTH,))
        lengths = ordered_values(_LENGTH, results.cells[_LENGTH])
        rows: Rows = []
        for group in groups(results.cells, axes):
            texts = {row[_LENGTH]: self.value(row) for row in group}
            in_order = [texts.get(length, NOTHING) for length in lengths]
            rows.append([*axis_texts(group[0], axes), *in_order])
        return [*axes, *map(str, lengths)], rows


@dataclass(frozen=True)
class ScalingExponents:
    """Growth of columns with the context length: the value, and its exponent since the row above.

    The local exponent of y along x is log(y2 / y1) / log(x2 / x1).

    columns: title, column and formatter.
    """

    columns: tuple[tuple[str, str, Value], ...]
    extra: Columns = ()

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results, without=(_LENGTH,))
        rows: Rows = []
        for group in groups(results.cells, axes, (_LENGTH,)):
            if len(group) < 2:
                continue
            for row, previous in zip(group, [None, *group], strict=False):
                texts = axis_texts(row, [*axes, _LENGTH])
                for _, column, show in self.columns:
                    texts += [show(row), self._exponent(row, previous, column)]
                rows.append([*texts, *_values(row, self.extra)])
        header = [*axes, _LENGTH]
        for title, _, _ in self.columns:
            header += [title, f"exponent of {title}"]
        return [*header, *_titles(self.extra)], rows

    def _exponent(self, row: Row, previous: Row | None, column: str) -> str:
        if previous is None or not (has_value(row, column) and has_value(previous, column)):
            return NOTHING
        ends = (previous[column], row[column])
        if not all(0 < end < math.inf for end in ends):
            return NOTHING
        growth = math.log(row[column]) - math.log(previous[column])
        return f"{growth / math.log(row[_LENGTH] / previous[_LENGTH]):.2f}"


def _titles(columns: Sequence[tuple[str, object]]) -> list[str]:
    return [title for title, _ in columns]


def _values(row: Row, columns: Columns) -> list[str]:
    return [show(row) for _, show in columns]


def _comparisons(row: Row, baseline: Row | None, against: Comparisons) -> list[str]:
    return [compare(row, baseline) if baseline else NOTHING for _, compare in against]
