"""The shapes a table can have. Each turns cells into a header and rows of text; `tables` says which and of what."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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

PHASE = "phase"  # the title of the column


class Layout(Protocol):
    def lay_out(self, results: Results) -> tuple[Header, Rows]: ...


class _Columns(dict[str, list[Any]]):
    """The columns of a frame as lists, each made when it is first asked for: a table wants a few of hundreds."""

    def __init__(self, cells: pd.DataFrame) -> None:
        self.names = dict.fromkeys(cells)
        self._cells = cells

    def __missing__(self, name: str) -> list[Any]:
        self[name] = self._cells[name].tolist()
        return self[name]


class _Record(Mapping[str, Any]):
    """A row of a frame, by the names of the columns."""

    __slots__ = ("_columns", "_place")

    def __init__(self, columns: _Columns, place: int) -> None:
        self._columns = columns
        self._place = place

    def __getitem__(self, name: str) -> Any:
        return self._columns[name][self._place]

    def get(self, name: str, default: Any = None) -> Any:
        return self._columns[name][self._place] if name in self._columns.names else default

    def __contains__(self, name: object) -> bool:
        return name in self._columns.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.names)

    def __len__(self) -> int:
        return len(self._columns.names)


def each(cells: pd.DataFrame) -> Iterator[Row]:
    """As the records of `to_dict`, but only what is asked for is made."""
    columns = _Columns(cells)
    return (_Record(columns, place) for place in range(len(cells)))


@dataclass(frozen=True)
class CellRows:
    """One row a cell. always: axes that are shown also where they do not vary."""

    columns: tuple[tuple[str, Value], ...]
    always: tuple[str, ...] = ()

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = list(
            dict.fromkeys(
                [*key_axes(results), *(axis for axis in self.always if axis in results.axes)]
            )
        )
        cells = sort_cells(results.cells, axes)
        rows = [
            [*axis_texts(row, axes), *(value(row) for _, value in self.columns)]
            for row in each(cells)
        ]
        return [*axes, *(title for title, _ in self.columns)], rows


@dataclass(frozen=True)
class PhaseRows:
    """One row a cell and phase, for the phases of which one of the columns `known_by` is known; where none is, one that says how
    the cell ended.

    title: of the column that names the phases, where they are something else.
    """

    phases: tuple[tuple[str, str], ...]  # as in the names of the columns, and for people
    columns: tuple[tuple[str, Callable[[str], Value]], ...]
    known_by: tuple[str, ...] = ("{}_ms_median",)
    title: str = PHASE

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results)
        known_by = {
            phase: [column.format(phase) for column in self.known_by] for phase, _ in self.phases
        }
        values = {phase: [value(phase) for _, value in self.columns] for phase in known_by}
        rows: Rows = []
        for row in each(sort_cells(results.cells, axes)):
            texts = axis_texts(row, axes)
            phases = [
                phase
                for phase in self.phases
                if any(has_value(row, column) for column in known_by[phase[0]])
            ]
            for phase, name in phases:
                rows.append([*texts, name, *(value(row) for value in values[phase])])
            if not phases:
                rows.append([*texts, NOTHING, *[missing_text(row)] * len(self.columns)])
        return [*axes, self.title, *(title for title, _ in self.columns)], rows


Comparison = Callable[[Row, Row], str]  # a row held against its baseline


@dataclass(frozen=True)
class CompareColumns:
    """One row a combination of the other axes, one group of columns a value of `axes`, compared with its baseline.

    axes: several are taken together: each combination that occurs is a value, the first of them the baseline. columns:
    what is shown for each value; against: what compares it with the baseline, shown for all but that; extra: shown for
    all but the baseline.
    """

    axes: tuple[str, ...]
    columns: tuple[tuple[str, Value], ...]
    against: tuple[tuple[str, Comparison], ...] = ()
    extra: tuple[tuple[str, Value], ...] = ()

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results, without=self.axes)
        values = self._values(results.cells)
        header = [*axes, *(title for value in values for title in self._titles(value, values[0]))]
        rows: Rows = []
        for group in groups(sort_cells(results.cells, axes), axes):
            by_value = {self._value(row): row for row in group}
            if len(by_value) < 2:
                continue
            baseline = by_value.get(values[0])
            texts = [
                text
                for value in values
                for text in self._texts(by_value.get(value), baseline, value == values[0])
            ]
            rows.append([*axis_texts(next(iter(by_value.values())), axes), *texts])
        return header, rows

    def _value(self, row: Row) -> str:
        return " ".join(str(row[axis]) for axis in self.axes)

    def _values(self, cells: pd.DataFrame) -> list[str]:
        return list(
            dict.fromkeys(self._value(row) for row in each(sort_cells(cells, list(self.axes))))
        )

    def _titles(self, value: str, baseline: str) -> Iterator[str]:
        compared = () if value == baseline else (*self.against, *self.extra)
        for title, _ in (*self.columns, *compared):
            yield f"{value} {title}".strip()

    def _texts(self, row: Row | None, baseline: Row | None, is_baseline: bool) -> Iterator[str]:
        for _, show in self.columns:
            yield show(row) if row else NOTHING
        if is_baseline:
            return
        for _, compare in self.against:
            yield compare(row, baseline) if row and baseline else NOTHING
        for _, show in self.extra:
            yield show(row) if row else NOTHING


@dataclass(frozen=True)
class CompareRows:
    """One row a cell, those that differ in `axes` alone below each other, each compared with the baseline among them.

    baseline: the value of the first axis that the others are compared with; without it nothing is compared.
    """

    axes: tuple[str, ...]
    baseline: str
    columns: tuple[tuple[str, Value], ...]
    against: tuple[tuple[str, Comparison], ...] = ()

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        others = key_axes(results, without=self.axes)
        present = [axis for axis in self.axes if axis in results.cells]
        rungs = [axis for axis in present if results.cells[axis].nunique(dropna=False) > 1]
        rows: Rows = []
        for members in groups(sort_cells(results.cells, [*others, *present]), others):
            if len(members) < 2:
                continue
            baseline = next((row for row in members if row[self.axes[0]] == self.baseline), None)
            for row in members:
                compared = [
                    compare(row, baseline) if baseline else NOTHING for _, compare in self.against
                ]
                rows.append(
                    [
                        *axis_texts(row, [*others, *rungs]),
                        *(show(row) for _, show in self.columns),
                        *compared,
                    ]
                )
        titles = [title for title, _ in (*self.columns, *self.against)]
        return [*others, *rungs, *titles], rows


@dataclass(frozen=True)
class Matrix:
    """Sizes and the other axes down, context length across."""

    value: Value
    across: str = "context_length"

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results, without=(self.across,))
        values = ordered_values(self.across, results.cells[self.across])
        rows: Rows = []
        for group in groups(sort_cells(results.cells, axes), axes):
            by_value = {row[self.across]: row for row in group}
            texts = [
                self.value(by_value[value]) if value in by_value else NOTHING for value in values
            ]
            rows.append([*axis_texts(next(iter(by_value.values())), axes), *texts])
        return [*axes, *(str(value) for value in values)], rows


@dataclass(frozen=True)
class ScalingExponents:
    """How columns grow along an axis: the value, and the local exponent log(y2/y1) / log(x2/x1) from the row above."""

    along: str
    columns: tuple[tuple[str, str, Value], ...]  # title, column, how to print it
    extra: tuple[tuple[str, Value], ...] = ()

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results, without=(self.along,))
        rows: Rows = []
        for group in groups(sort_cells(results.cells, [*axes, self.along]), axes):
            previous: Row | None = None
            if len(group) < 2:
                continue
            for row in group:
                texts = [
                    t
                    for _, column, show in self.columns
                    for t in (show(row), self._exponent(row, previous, column))
                ]
                texts += [show(row) for _, show in self.extra]
                rows.append([*axis_texts(row, axes), str(row[self.along]), *texts])
                previous = row
        titles = [title for name, _, _ in self.columns for title in (name, f"exponent of {name}")]
        return [*axes, self.along, *titles, *(title for title, _ in self.extra)], rows

    def _exponent(self, row: Row, previous: Row | None, column: str) -> str:
        if previous is None or not (has_value(row, column) and has_value(previous, column)):
            return NOTHING
        growth = math.log(row[column] / previous[column])
        return f"{growth / math.log(row[self.along] / previous[self.along]):.2f}"


def groups(cells: pd.DataFrame, axes: list[str]) -> Iterator[list[Row]]:
    """The rows that agree in all axes, in the order of the first of each. As rows: a frame a group is a hundred times slower."""
    agreeing: dict[tuple[str, ...], list[Row]] = {}
    for row in each(cells):
        agreeing.setdefault(tuple(axis_texts(row, axes)), []).append(row)
    yield from agreeing.values()
