"""Layouts of tables: functions and classes that turn cells into typed columns, and cell filters.

The keys of a row are the axes that vary, so that a reader can tell its cell from the others. The
modules of tables say which layout shows which measures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.analysis.axes import COMPILE_AXES, Row, axis_texts, each, has_value, key_axes
from orchestrator.analysis.pairs import select
from orchestrator.analysis.results import Results
from orchestrator.report.tables import table
from orchestrator.report.tables.formatters import Value, missing
from orchestrator.report.tables.table import MISSING, Entry, RenderedTable, Table, TableGrid

Measure = tuple[str, Value]  # the title of a column, and how each of its values is made


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
    found: Iterable[tuple[Row, Mapping[Any, Entry]]],
    keys: Sequence[str] = (),
    compared: str = "",
    label: str = "",
) -> TableGrid:
    """Return a grid of rows, each of a cell with its entries. keys: entries behind the axes.

    Raise ValueError if the rows do not have the same entries.
    """
    names: dict[table.Title, Entry] = {}
    rows = []
    for cell, named in found:
        names = names or {**dict.fromkeys(keys, MISSING), **named}
        if named.keys() != names.keys():
            raise ValueError(f"two rows differ in {sorted(map(str, named.keys() ^ names.keys()))}")
        keys_of_cell = (table.axis_entry(cell[axis]) for axis in axes)
        rows.append([*keys_of_cell, *map(named.__getitem__, names)])
    return table.grid_of_rows([*axes, *keys], list(names)[len(keys) :], rows, compared, label)


def cell_rows(*columns: Measure) -> table.TableLayout:
    """Return the layout with one row per cell."""

    def lay_out(results: Results) -> TableGrid:
        found = ((row, shown_by(columns, row)) for row in each_cell(results))
        return grid_of(key_axes(results), found)

    return lay_out


def child_rows(
    results: Results, children: pd.DataFrame, columns: Sequence[Measure], keys: Sequence[str]
) -> TableGrid:
    """Return one row per row of a frame, such as allocations, behind the axes of its cell."""
    by_cell: dict[str, list[Row]] = defaultdict(list)
    for row in each(children):
        by_cell[row["cell"]].append(row)
    found = []
    for cell in each_cell(results):
        found += [(cell, shown_by(columns, row)) for row in by_cell[cell["cell"]]]
    return grid_of(key_axes(results), found, keys)


def phase_rows(
    title: str,
    phases: Sequence[tuple[str, str]],
    columns: Sequence[tuple[str, Callable[[str], Value]]],
    known_by: Sequence[str],
) -> table.TableLayout:
    """Return the layout with one row per cell and phase that has a value in one of `known_by`.

    A cell without such a phase has one row that shows its status.

    title: of the column of phases. phases: their names as in the columns, and as readers see them.
    columns: titles, and functions from a phase to a formatter. known_by: templates of columns; {}
    stands for the phase.
    """
    of_phase = {phase: [(name, make(phase)) for name, make in columns] for phase, _ in phases}

    def lay_out(results: Results) -> TableGrid:
        found: list[tuple[Row, dict[str, Entry]]] = []
        for row in each_cell(results):
            count = len(found)
            for phase, name in phases:
                if any(has_value(row, column.format(phase)) for column in known_by):
                    found.append((row, {title: Entry(name), **shown_by(of_phase[phase], row)}))
            if len(found) == count:
                found.append((row, {title: MISSING, **dict.fromkeys(dict(columns), missing(row))}))
        return grid_of(key_axes(results), found, [title], title)

    return lay_out


def compare_columns(
    axis: str,
    value: Measure,
    against: Sequence[tuple[str, Callable[[Row, Row], Entry]]] = (),
    extra: tuple[Measure, ...] = (),
    baseline: str = "",
) -> table.TableLayout:
    """Return the layout with one row per combination of the other axes, and columns per value.

    value, extra: shown for each value of the axis. against: comparisons with the baseline, which is
    the first value unless it is named.
    """
    titles = [title for title, _ in (value, *against, *extra)]

    def entries_of(row: Row | None, base: Row | None) -> dict[str, Entry]:
        entries = dict.fromkeys(titles, MISSING)
        if row is not None:
            entries |= shown_by([value, *extra], row)
            if base and row is not base:
                entries |= {title: compare(row, base) for title, compare in against}
        return entries

    def lay_out(results: Results) -> TableGrid:
        axes = key_axes(results, without=(axis,))
        values = list(dict.fromkeys(str(row[axis]) for row in each(results.cells, [axis])))
        found = []
        for group in groups(results.cells, axes):
            rows = {str(row[axis]): row for row in group}
            # With a named baseline, other values stand for themselves.
            if len(rows) < 2 and (not baseline or baseline in rows):
                continue
            entries: dict[table.Title, Entry] = {}
            for one in values:
                own = entries_of(rows.get(one), rows.get(baseline or values[0]))
                entries |= {(one, title): entry for title, entry in own.items()}
            found.append((group[0], entries))
        return grid_of(axes, found)

    return lay_out


def shown_by(columns: Iterable[Measure], row: Row) -> dict[str, Entry]:
    """Return the entry of each column for a row."""
    return {title: show(row) for title, show in columns}


# ---------------------------------------------------------------------- tables of commands


def text_table(
    title: str,
    rows: Sequence[tuple[Mapping[str, str], Mapping[str, Entry]]],
    label: str = "",
) -> RenderedTable:
    """Return a table of rows, each with its settings and the entry of each measure.

    The first measures are the most important. label: the one that every view shows. An entry of
    NOTES is a note as a text; the table has its number.
    """
    keys = list(dict.fromkeys(chain.from_iterable(settings for settings, _ in rows)))
    texts = [measures[table.NOTES].text if table.NOTES in measures else "" for _, measures in rows]
    numbers, notes = table.note_entries([text] if text else [] for text in texts)
    found = []
    for (settings, measures), number in zip(rows, numbers, strict=True):
        own = {key: Entry(settings[key]) if key in settings else MISSING for key in keys}
        note = {table.NOTES: number} if table.NOTES in measures else {}
        found.append((settings, {**own, **measures, **note}))
    grid = grid_of([], found, keys, label=label)._replace(notes=notes).without_empty_columns()
    return RenderedTable(Table(title.lower(), title, "", lambda results: grid), grid, "")


# ---------------------------------------------------------------------- filters of cells


def of_task(*names: str) -> table.CellFilter:
    """Return a filter for the cells of one or several tasks."""
    return lambda cells: select(cells, cells["task"].isin(names)) if "task" in cells else cells


def varying(axis: str, *tasks: str) -> table.CellFilter:
    """Return a filter for the cells of tasks with an axis, if it has at least two values."""

    def choose(cells: pd.DataFrame) -> pd.DataFrame:
        known = both(of_task(*tasks), having(axis))(cells)
        return known if known.empty or known[axis].nunique() > 1 else known.iloc[:0]

    return choose


def both(first: table.CellFilter, second: table.CellFilter) -> table.CellFilter:
    """Return a filter that applies two filters."""
    return lambda cells: second(first(cells))


def having(*columns: str) -> table.CellFilter:
    """Return a filter for the cells that have a value in at least one of these columns."""

    def choose(cells: pd.DataFrame) -> pd.DataFrame:
        # By column: a frame of all of them takes several times as long.
        has_value = np.zeros(len(cells), dtype=bool)
        for name in columns:
            if name in cells:
                has_value |= cells[name].notna().to_numpy()
        return select(cells, has_value)

    return choose


def compiled_with_eager(cells: pd.DataFrame) -> pd.DataFrame:
    """Return compiled cells, with a copy of the eager cells for each way of compiling."""
    cells = having("compile")(of_task("train_step", "attention")(cells))
    if cells.empty:
        return cells
    is_eager = cells["compile"] == "eager"
    # Eager cells have no compile_mode and no compile_cache. Without copies they would differ from
    # the compiled cells in these axes too, and would be compared with none of them.
    modes = [axis for axis in COMPILE_AXES if axis in cells]
    combinations = cells.loc[~is_eager, modes].drop_duplicates()
    if combinations.empty or not modes:
        return cells if len(combinations) else cells.iloc[:0]
    copies = cells[is_eager].drop(columns=modes).merge(combinations, how="cross")
    return pd.concat([copies, cells[~is_eager]], ignore_index=True)
