"""Matrices of the terminal: one number of every cell of a slice, by size, precision and context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.analysis.results import Results
from orchestrator.report.tables.entries import MISSING, Entry
from orchestrator.report.tables.formatters import Value, peak_gib, step_ms
from orchestrator.report.tables.layouts import each
from orchestrator.report.text.cell_names import LENGTH, NAME, sort_by
from orchestrator.report.text.numbers import format_number
from orchestrator.report.text.slices import choose_slice, main_cells

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
    cells, row_axis = main_cells(results)
    shown = [axis for axis in (row_axis, "precision", LENGTH) if axis in cells]
    cells, settings = choose_slice(cells, results.axes, shown)
    rows = list(each(sort_by(cells, shown))) if len(cells) else []
    for title, value in _VALUES:
        by_place: dict[tuple[str, tuple[str, str]], Entry] = {}
        for row in rows:
            place = (str(row.get("precision", "")), str(row.get(LENGTH, "")))
            by_place[str(row[row_axis]), place] = _short(value(row))
        if any(entry.number is not None for entry in by_place.values()):
            full_title = f"{title}: {settings}" if settings else title
            yield _matrix(full_title, row_axis.replace(NAME, "model"), by_place, width)


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


def _short(entry: Entry) -> Entry:
    """Return an entry with three significant digits, or with an abbreviated status."""
    if entry.number is None:
        return entry
    form = ".2f"
    if entry.number >= 10:
        form = ".1f" if entry.number < 100 else ".0f"
    return entry._replace(text=format_number(entry.number, form))
