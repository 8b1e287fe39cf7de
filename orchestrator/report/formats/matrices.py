"""Matrices of the terminal: one number of every cell of a slice, by size, precision and context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from orchestrator.analysis.axes import NOTHING, RUN
from orchestrator.analysis.results import Results
from orchestrator.report.tables.entries import MISSING, Entry
from orchestrator.report.tables.formatters import Value, peak_gib, step_ms
from orchestrator.report.tables.layouts import CellRows
from orchestrator.report.tables.table import Rows
from orchestrator.report.tables.views import DEFAULTS
from orchestrator.report.text.numbers import format_number

_ROW_AXES = ("size", "model", "d_head", "attention")
_COLUMN_AXES = ("precision", "context_length")
_TASKS = ("train_step", "attention")
_MAX_ROWS = 12
_GAP = 2  # blanks between two columns
_VALUES: tuple[tuple[str, Value], ...] = (
    ("Step time, ms", step_ms),
    ("Peak memory, GiB", peak_gib()),
)


@dataclass(frozen=True)
class Matrix:
    """Numbers of a slice of cells. columns: precision and context of each."""

    title: str
    row_axis: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[tuple[str, list[Entry]]]


def matrices(results: Results, width: int) -> Iterator[Matrix]:
    """Yield the matrices of step times and of peaks that a run has, no wider than `width`."""
    cells = _of_one_task(results.cells)
    if cells.empty:
        return
    grid = CellRows(_VALUES).lay_out(replace(results, cells=cells))
    row_axis = next((axis for axis in _ROW_AXES if axis in grid.keys), "")
    shown = (row_axis, *_COLUMN_AXES)
    rows, settings = _slice(grid.keys, grid.rows, shown)
    for index, (title, _) in enumerate(_VALUES, len(grid.keys)):
        by_place: dict[tuple[str, tuple[str, str]], Entry] = {}
        for row in rows:
            values = dict(zip(grid.keys, row, strict=False))
            name, group, column = (str(values.get(axis, "")) for axis in shown)
            by_place.setdefault((name, (group, column)), _short(row[index]))
        if any(entry.number is not None for entry in by_place.values()):
            full_title = f"{title}: {settings}" if settings else title
            yield _matrix(full_title, row_axis, by_place, width)


def _matrix(
    title: str, row_axis: str, by_place: Mapping[tuple[str, tuple[str, str]], Entry], width: int
) -> Matrix:
    names = list(dict.fromkeys(name for name, _ in by_place))[:_MAX_ROWS]
    columns = list(dict.fromkeys(column for _, column in by_place))
    groups = list(dict.fromkeys(group for group, _ in columns))
    columns.sort(key=lambda column: groups.index(column[0]))
    entry_width = max(len(str(text)) for text in (*by_place.values(), *sum(columns, ())))
    room = max((width - max(map(len, [*names, row_axis])) - _GAP) // (entry_width + _GAP), 1)
    while len(columns) > room and len(groups) > 1:
        # The first and the last precision are those that readers compare.
        groups = [*groups[:-2], groups[-1]] if len(groups) > 2 else groups[-1:]
        columns = [column for column in columns if column[0] in groups]
    columns = columns[-room:]
    rows = []
    for name in names:
        rows.append((name, [by_place.get((name, column), MISSING) for column in columns]))
    heads = []
    for index, (group, column) in enumerate(columns):
        is_first = index == 0 or columns[index - 1][0] != group
        heads.append((group if is_first else "", column))
    return Matrix(title, row_axis, heads, rows)


def _of_one_task(cells: pd.DataFrame) -> pd.DataFrame:
    for task in _TASKS:
        own: pd.DataFrame = cells[cells["task"] == task]
        if len(own):
            return own
    return cells.iloc[:0]


def _slice(keys: Sequence[str], rows: Rows, shown: Sequence[str]) -> tuple[Rows, str]:
    """Return the rows that differ in the shown axes alone, and their other settings as text."""
    settings = []
    # The run first: others repeat some of its cells with other settings.
    others = sorted((key for key in keys if key not in shown), key=lambda key: key != RUN)
    for key in others:
        index = keys.index(key)
        counts = Counter(row[index].text for row in rows)
        if not counts:
            break
        most_common = counts.most_common(1)[0][0]
        value = DEFAULTS[key] if DEFAULTS.get(key) in counts else most_common
        rows = [row for row in rows if row[index].text == value]
        if value != NOTHING:
            settings.append(f"{key}={value}")
    return rows, ", ".join(settings)


def _short(entry: Entry) -> Entry:
    """Return an entry with three significant digits, or with an abbreviated status."""
    if entry.number is None:
        return entry
    form = ".2f"
    if entry.number >= 10:
        form = ".1f" if entry.number < 100 else ".0f"
    return entry._replace(text=format_number(entry.number, form))
