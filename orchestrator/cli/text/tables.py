"""Tables that commands print and the report does not have, such as predicted memory.

They are written like those of the report, so that they fit the same screens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from orchestrator.report.tables.formatters import to_gib
from orchestrator.report.tables.table import (
    MISSING,
    Entry,
    Heading,
    RenderedTable,
    Table,
    TableGrid,
    without_empty_columns,
)


def text_table(
    title: str,
    measures: Sequence[str],
    rows: Sequence[tuple[Mapping[str, str], list[Entry]]],
    label: str = "",
    notes: Sequence[str] = (),
) -> RenderedTable:
    """Return a table of rows, each with its settings and an entry for each measure.

    measures: the most important first. label: the one that every view shows. notes: see TableGrid.
    """
    keys = list(dict.fromkeys(chain.from_iterable(settings for settings, _ in rows)))
    entries = []
    for settings, values in rows:
        own = [Entry(settings[key]) if key in settings else MISSING for key in keys]
        entries.append([*own, *values])
    headings = list(map(Heading, measures))
    grid = TableGrid(keys, headings, entries, notes=tuple(notes), label=label)
    grid = without_empty_columns(grid)
    return RenderedTable(Table(title.lower(), title, "", lambda results: grid), grid, "")


def note_entry(text: str, notes: Sequence[str]) -> Entry:
    """Return the entry of the column of notes that refers to a text; the missing one for none."""
    return Entry(str(notes.index(text) + 1)) if text else MISSING


def in_gib(nbytes: float | None, digits: int = 2) -> Entry:
    """Return an entry of a size in GiB; the missing one for none."""
    return MISSING if nbytes is None else to_gib(nbytes, f".{digits}f")


def at_least_gib(nbytes: float | None) -> Entry:
    """Return an entry of a lower bound in GiB; the missing one for none."""
    entry = in_gib(nbytes)
    return entry if entry.is_missing else entry._replace(text=f"≥ {entry.text}")
