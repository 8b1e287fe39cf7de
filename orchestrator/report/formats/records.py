"""Tables for programs: numbers in numeric columns, and own columns for intervals and statuses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from operator import attrgetter

from orchestrator.common.text import KEY_NAME
from orchestrator.report.tables.table import (
    NOTES,
    Entry,
    RenderedTable,
    is_empty,
    notes_of,
)
from orchestrator.report.tables.views import Column, TableView, view_of

Scalar = str | float | None  # a number, a bool or a text; None is nothing or a failed cell
_ENDS = {"low": "low", "high": "high", "deviation": "sd"}  # of intervals, by fields of entries


def typed_columns(page: RenderedTable, view: TableView | None = None) -> dict[str, list[Scalar]]:
    """Return the columns of a view of a table, or of the table with all its rows and columns.

    The name of a column has its unit. `status` and `cpu_bound` are columns, one for each compared
    value, so that every other column holds values of one type.
    """
    view = view or view_of(page, max_rows=None, max_columns=None)
    columns: dict[str, list[Scalar]] = {}
    for column in view.columns:
        for name, values in _columns_of(column, page.grid.notes):
            columns[_unused(name, columns)] = values
    for group in dict.fromkeys(map(attrgetter("group"), view.measures)):
        own = [one.entries for one in view.measures if one.group == group]
        rows = list(zip(*own, strict=True))
        for name, read in (("status", _status), ("cpu_bound", _is_cpu_bound)):
            full_name, values = _snake(f"{group} {name}"), list(map(read, rows))
            # Unless the table has a measure that says it, or no times that the CPU may bound.
            if full_name not in columns and (read is _status or values.count(None) < len(values)):
                columns[full_name] = values
    return columns


def _columns_of(column: Column, notes: Sequence[str]) -> Iterator[tuple[str, list[Scalar]]]:
    name = re.sub(r" ± sd$| \[.*\]$", "", f"{column.group} {column.name}".strip())
    unit = "" if column.unit.lower() in name.lower().split() else column.unit
    entries = column.entries
    if column.name == NOTES and not column.is_key:
        entries = [Entry(" ".join(notes_of(notes, entry.text))) for entry in entries]
    # A key of a mapping is named as in `cells`, such as `model_args.n_layer`.
    is_of_mapping = column.is_key and KEY_NAME.fullmatch(name)
    yield name if is_of_mapping else _snake(f"{name} {unit}"), _values(entries)
    for end, suffix in _ENDS.items():
        values = list(map(attrgetter(end), entries))
        if values.count(None) < len(values):
            yield _snake(f"{name} {suffix} {unit}"), values


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
