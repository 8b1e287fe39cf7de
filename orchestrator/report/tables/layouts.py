"""Layouts of tables: functions and classes that turn cells into a grid of typed entries.

The keys of a row are the axes that vary, so that a reader can tell its cell from the others. The
modules of tables say which layout shows which measures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from orchestrator.analysis.axes import Row, axis_texts, each, has_value, key_axes
from orchestrator.analysis.results import Results
from orchestrator.report.tables.formatters import Value, missing
from orchestrator.report.tables.table import (
    MISSING,
    Entry,
    Heading,
    Rows,
    TableGrid,
    TableLayout,
    axis_entries,
)

Column = tuple[str, Value]  # the title, and how each value is made
Entries = Mapping[str, Entry]  # of a row, by title
# Titles, and functions that compare a row with its baseline.
Comparisons = tuple[tuple[str, Callable[[Row, Row], Entry]], ...]


def groups(cells: pd.DataFrame, axes: list[str], then: Sequence[str] = ()) -> list[list[Row]]:
    """Return the rows that agree in all axes, each group sorted by the axes `then`."""
    # One frame per group, as `DataFrame.groupby` makes it, takes about 100 times as long.
    members: dict[tuple[str, ...], list[Row]] = {}
    for row in each(cells, [*axes, *then]):
        members.setdefault(tuple(axis_texts(row, axes)), []).append(row)
    return list(members.values())


def each_cell(results: Results) -> Iterator[Row]:
    """Return the cells in the order of the axes that are keys."""
    return each(results.cells, key_axes(results))


def grid_of(
    axes: list[str],
    found: Iterable[tuple[Row, Entries]],
    keys: Sequence[str] = (),
    compared: str = "",
) -> TableGrid:
    """Return a grid of rows, each of a cell with its entries. keys: entries behind the axes.

    Raise ValueError if the rows do not have the same entries.
    """
    names: dict[str, Entry] = {}
    rows = []
    for cell, entries in found:
        names = names or {**dict.fromkeys(keys, MISSING), **entries}
        if entries.keys() != names.keys():
            raise ValueError(f"two rows differ in {sorted(entries.keys() ^ names.keys())}")
        rows.append([*axis_entries(cell, axes), *map(entries.__getitem__, names)])
    titles = list(names)[len(keys) :]
    return TableGrid([*axes, *keys], list(map(Heading, titles)), rows, compared)


def cell_rows(*columns: Column) -> TableLayout:
    """Return the layout with one row per cell."""

    def lay_out(results: Results) -> TableGrid:
        found = ((row, shown_by(columns, row)) for row in each_cell(results))
        return grid_of(key_axes(results), found)

    return lay_out


def child_rows(
    results: Results, children: pd.DataFrame, columns: Sequence[Column], keys: Sequence[str]
) -> TableGrid:
    """Return one row per row of a frame, such as allocations, behind the axes of its cell."""
    by_cell: dict[str, list[Row]] = defaultdict(list)
    for row in each(children):
        by_cell[row["cell"]].append(row)
    found = []
    for cell in each_cell(results):
        found += [(cell, shown_by(columns, row)) for row in by_cell[cell["cell"]]]
    return grid_of(key_axes(results), found, keys)


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
    known_by: tuple[str, ...]
    title: str

    def __call__(self, results: Results) -> TableGrid:
        columns = {}
        for phase, _ in self.phases:
            columns[phase] = [(title, make(phase)) for title, make in self.columns]
        found: list[tuple[Row, Entries]] = []
        for row in each_cell(results):
            phases = [phase for phase in self.phases if self._is_known(row, phase[0])]
            for phase, name in phases:
                found.append((row, {self.title: Entry(name), **shown_by(columns[phase], row)}))
            if not phases:
                titles = dict(self.columns)
                found.append((row, {self.title: MISSING, **dict.fromkeys(titles, missing(row))}))
        return grid_of(key_axes(results), found, [self.title], self.title)

    def _is_known(self, row: Row, phase: str) -> bool:
        return any(has_value(row, column.format(phase)) for column in self.known_by)


@dataclass(frozen=True)
class CompareColumns:
    """One row per combination of the other axes; one group of columns per value of an axis.

    The first value is the baseline, unless `baseline` names it.

    value, extra: shown for each value. against: comparisons with the baseline.
    """

    axis: str
    value: Column
    against: Comparisons = ()
    extra: tuple[Column, ...] = ()
    baseline: str = ""

    def __call__(self, results: Results) -> TableGrid:
        axes = key_axes(results, without=(self.axis,))
        in_order = each(results.cells, [self.axis])
        values = list(dict.fromkeys(str(row[self.axis]) for row in in_order))
        rows: Rows = []
        for group in groups(results.cells, axes):
            by_value = {str(row[self.axis]): row for row in group}
            # With a named baseline, other values stand for themselves.
            if len(by_value) < 2 and (not self.baseline or self.baseline in by_value):
                continue
            baseline = by_value.get(self.baseline or values[0])
            entries = axis_entries(group[0], axes)
            for value in values:
                entries += self._entries(by_value.get(value), baseline)
            rows.append(entries)
        titles = [self.value[0], *(title for title, _ in (*self.against, *self.extra))]
        headings = [Heading(title, value) for value in values for title in titles]
        return TableGrid(axes, headings, rows)

    def _entries(self, row: Row | None, baseline: Row | None) -> list[Entry]:
        if row is None:
            return [MISSING] * (1 + len(self.against) + len(self.extra))
        compared = [MISSING] * len(self.against)
        if baseline and row is not baseline:
            compared = [compare(row, baseline) for _, compare in self.against]
        return [self.value[1](row), *compared, *(show(row) for _, show in self.extra)]


def shown_by(columns: Iterable[Column], row: Row) -> dict[str, Entry]:
    """Return the entry of each column for a row."""
    return {title: show(row) for title, show in columns}
