"""Tables for programs: numbers in numeric columns, and own columns for intervals and statuses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import attrgetter

from orchestrator.common.text import KEY_NAME
from orchestrator.report.tables.table import (
    NOTES,
    Entry,
    RenderedTable,
    columns_of,
    is_empty,
    notes_of,
)
from orchestrator.report.tables.views import Measure, TableView, view_of

Scalar = str | float | None  # a number, a bool or a text; None is nothing or a failed cell
_ENDS = {"low": "low", "high": "high", "deviation": "sd"}  # of intervals, by fields of entries


def typed_columns(page: RenderedTable, view: TableView | None = None) -> dict[str, list[Scalar]]:
    """Return the columns of a view of a table, or of the table with all its rows and columns.

    The name of a column has its unit. `status` and `cpu_bound` are columns, one for each compared
    value, so that every other column holds values of one type.
    """
    view = view or view_of(page, max_rows=None, max_columns=None)
    columns: dict[str, list[Scalar]] = {}
    entries = columns_of(view.rows, len(view.header))
    for name, values in zip(view.keys, entries, strict=False):
        # A key of a mapping is named as in `cells`, such as `model_args.n_layer`.
        title = name if KEY_NAME.fullmatch(name) else _snake(name)
        columns[_unused(title, columns)] = _values(values)
    of_measures = list(zip(view.measures, entries[len(view.keys) :], strict=True))
    for measure, values in of_measures:
        if measure.name == NOTES:
            notes = map(notes_of, repeat(page.grid.notes), map(str, values))
            values = list(map(Entry, map(" ".join, notes)))
        for name, column in _measure_columns(measure, values):
            columns[_unused(name, columns)] = column
    for group in dict.fromkeys(map(attrgetter("group"), view.measures)):
        own = [values for measure, values in of_measures if measure.group == group]
        for name, column in _state_columns(list(zip(*own, strict=True))):
            full_name = _snake(f"{group} {name}")
            if full_name not in columns:  # the table has a measure that says it
                columns[full_name] = column
    return columns


def _measure_columns(
    measure: Measure, entries: Sequence[Entry]
) -> Iterator[tuple[str, list[Scalar]]]:
    name = re.sub(r" ± sd$| \[.*\]$", "", f"{measure.group} {measure.name}".strip())
    unit = "" if measure.unit.lower() in name.lower().split() else measure.unit
    yield _snake(f"{name} {unit}"), _values(entries)
    for end, suffix in _ENDS.items():
        values = list(map(attrgetter(end), entries))
        if values.count(None) < len(values):
            yield _snake(f"{name} {suffix} {unit}"), values


def _state_columns(rows: Sequence[Sequence[Entry]]) -> Iterator[tuple[str, list[Scalar]]]:
    """Yield the status of each row, and whether its times are CPU-bound if they can be."""
    yield "status", list(map(_status, rows))
    bound = list(map(_is_cpu_bound, rows))
    if bound.count(None) < len(bound):
        yield "cpu_bound", bound


def _status(row: Sequence[Entry]) -> Scalar:
    status = next(filter(None, map(attrgetter("status"), row)), "ok")
    return None if status == "ok" and is_empty(row) else status


def _is_cpu_bound(row: Sequence[Entry]) -> Scalar:
    flags = set(map(attrgetter("is_cpu_bound"), row)) - {None}
    return any(flags) if flags else None


def _values(entries: Sequence[Entry]) -> list[Scalar]:
    numbers: list[Scalar] = list(map(attrgetter("number"), entries))
    is_text = numbers.count(None) == len(numbers)
    return list(map(_text, entries)) if is_text else numbers


def _text(entry: Entry) -> str | None:
    return None if entry.is_missing or entry.status else entry.full or str(entry)


def _snake(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower().replace("µ", "u")).strip("_")


def _unused(name: str, taken: dict[str, list[Scalar]]) -> str:
    while name in taken:
        name += "_"
    return name
