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
RowComparison = Callable[[Row, Row], str]  # of a row with its baseline
Comparisons = tuple[tuple[str, RowComparison], ...]

PHASE = "phase"  # title of the column that names phases


class Layout(Protocol):
    """Turns cells into the header and the rows of a table."""

    def lay_out(self, results: Results) -> tuple[Header, Rows]: ...


class _ColumnLists(dict[str, list[Any]]):
    """The columns of a frame as lists. A list is made when it is first used.

    A table uses a few of several hundred columns, and `to_dict("records")` would convert all.
    """

    def __init__(self, cells: pd.DataFrame) -> None:
        self.names = dict.fromkeys(cells)
        self._cells = cells

    def __missing__(self, name: str) -> list[Any]:
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


def groups(cells: pd.DataFrame, axes: list[str]) -> Iterator[list[Row]]:
    """Yield the rows that agree in all axes, in the order of the first row of each group.

    One frame per group, as `DataFrame.groupby` makes it, takes about 100 times as long.
    """
    members: dict[tuple[str, ...], list[Row]] = {}
    for row in each(cells):
        members.setdefault(tuple(axis_texts(row, axes)), []).append(row)
    yield from members.values()


@dataclass(frozen=True)
class CellRows:
    """One row per cell. `always`: axes that are shown even if they do not vary."""

    columns: Columns
    always: tuple[str, ...] = ()

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        always = [axis for axis in self.always if axis in results.axes]
        axes = list(dict.fromkeys([*key_axes(results), *always]))
        rows: Rows = []
        for row in each(sort_cells(results.cells, axes)):
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
        columns = {phase: self._columns_of(phase) for phase, _ in self.phases}
        rows: Rows = []
        for row in each(sort_cells(results.cells, axes)):
            texts = axis_texts(row, axes)
            phases = [phase for phase in self.phases if self._is_known(row, phase[0])]
            for phase, name in phases:
                rows.append([*texts, name, *_values(row, columns[phase])])
            if not phases:
                rows.append([*texts, NOTHING, *[missing_text(row)] * len(self.columns)])
        return [*axes, self.title, *(title for title, _ in self.columns)], rows

    def _columns_of(self, phase: str) -> Columns:
        return tuple((title, formatter(phase)) for title, formatter in self.columns)

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
        sorted_by_value = sort_cells(results.cells, list(self.axes))
        values = list(dict.fromkeys(self._value(row) for row in each(sorted_by_value)))
        rows: Rows = []
        for group in groups(sort_cells(results.cells, axes), axes):
            by_value = {self._value(row): row for row in group}
            if len(by_value) < 2:
                continue
            texts = axis_texts(next(iter(by_value.values())), axes)
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
        return [show(row) if row else NOTHING for _, show in self.columns]

    def _compared(self, row: Row | None, baseline: Row | None) -> list[str]:
        texts = []
        for _, compare in self.against:
            texts.append(compare(row, baseline) if row and baseline else NOTHING)
        for _, show in self.extra:
            texts.append(show(row) if row else NOTHING)
        return texts


@dataclass(frozen=True)
class CompareRows:
    """One row per cell. Cells that differ in `axes` alone follow each other and are compared.

    baseline: the value of the first axis with which the others are compared. Without a cell of this
    value nothing is compared.
    """

    axes: tuple[str, ...]
    baseline: str
    columns: Columns
    against: Comparisons = ()

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        others = key_axes(results, without=self.axes)
        present = [axis for axis in self.axes if axis in results.cells]
        varying = [axis for axis in present if results.cells[axis].nunique(dropna=False) > 1]
        shown_axes = [*others, *varying]
        rows: Rows = []
        for members in groups(sort_cells(results.cells, [*others, *present]), others):
            if len(members) < 2:
                continue
            baseline = self._baseline_among(members)
            for row in members:
                values = _values(row, self.columns)
                rows.append([*axis_texts(row, shown_axes), *values, *self._compared(row, baseline)])
        compared_titles = [title for title, _ in self.against]
        return [*shown_axes, *_titles(self.columns), *compared_titles], rows

    def _baseline_among(self, rows: list[Row]) -> Row | None:
        return next((row for row in rows if row[self.axes[0]] == self.baseline), None)

    def _compared(self, row: Row, baseline: Row | None) -> list[str]:
        return [compare(row, baseline) if baseline else NOTHING for _, compare in self.against]


@dataclass(frozen=True)
class Matrix:
    """One row per combination of the other axes, and one column per value of the axis `across`."""

    value: Value
    across: str = "context_length"

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results, without=(self.across,))
        values = ordered_values(self.across, results.cells[self.across])
        rows: Rows = []
        for group in groups(sort_cells(results.cells, axes), axes):
            by_value = {row[self.across]: row for row in group}
            texts = axis_texts(next(iter(by_value.values())), axes)
            for value in values:
                texts.append(self.value(by_value[value]) if value in by_value else NOTHING)
            rows.append(texts)
        return [*axes, *(str(value) for value in values)], rows


@dataclass(frozen=True)
class ScalingExponents:
    """How columns grow along an axis: the value, and its exponent since the row above.

    The local exponent of y along x is log(y2 / y1) / log(x2 / x1).

    columns: title, column and formatter.
    """

    along: str
    columns: tuple[tuple[str, str, Value], ...]
    extra: Columns = ()

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results, without=(self.along,))
        rows: Rows = []
        for group in groups(sort_cells(results.cells, [*axes, self.along]), axes):
            if len(group) < 2:
                continue
            for row, previous in zip(group, [None, *group], strict=False):
                texts = axis_texts(row, axes)
                texts.append(str(row[self.along]))
                for _, column, show in self.columns:
                    texts += [show(row), self._exponent(row, previous, column)]
                rows.append([*texts, *_values(row, self.extra)])
        header = [*axes, self.along]
        for title, _, _ in self.columns:
            header += [title, f"exponent of {title}"]
        return [*header, *_titles(self.extra)], rows

    def _exponent(self, row: Row, previous: Row | None, column: str) -> str:
        if previous is None or not (has_value(row, column) and has_value(previous, column)):
            return NOTHING
        growth = math.log(row[column] / previous[column])
        return f"{growth / math.log(row[self.along] / previous[self.along]):.2f}"


def _titles(columns: Columns) -> list[str]:
    return [title for title, _ in columns]


def _values(row: Row, columns: Columns) -> list[str]:
    return [show(row) for _, show in columns]
