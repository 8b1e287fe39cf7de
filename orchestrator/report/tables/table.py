"""Tables: typed entries, which each format writes in its own way, and which cells a table shows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, compress
from operator import attrgetter
from typing import Literal, NamedTuple

import pandas as pd

from orchestrator.analysis.axes import NOTHING, axis_text, is_null
from orchestrator.analysis.results import Results
from orchestrator.common.errors import ConfigError
from orchestrator.common.suggestions import suggestion
from orchestrator.common.text import KEY_NAME, short_names
from orchestrator.report.text.numbers import format_ms, format_number, marks


class Entry(NamedTuple):
    """A value of a table: a number, a flag (a bool), a text, a status or nothing.

    text: what a reader sees of the value itself, without unit.
    full: the value in files, where `text` is a shortened name.
    number: the value in `unit`; None for a text, a status and nothing.
    spread: what a reader sees behind the text, such as ` ± 0.1` or ` [1.2, 1.4]`.
    low, high: ends of the 95 % interval. deviation: the sample standard deviation.
    is_cpu_bound: None if the value is no time of steps and no ratio of such times.
    status: the status of a failed cell, where `text` stands in for a number.
    """

    text: str
    number: float | None = None
    unit: str = ""
    spread: str = ""
    low: float | None = None
    high: float | None = None
    deviation: float | None = None
    is_cpu_bound: bool | None = None
    is_within_noise: bool = False
    status: str = ""
    full: str = ""

    def __str__(self) -> str:
        return f"{self.text}{self.spread}{self.marks}"

    @property
    def marks(self) -> str:
        """The marks behind the value."""
        return marks(self.is_cpu_bound, self.is_within_noise)

    @property
    def is_missing(self) -> bool:
        # Without a value, a prediction may follow it.
        return self.text == NOTHING and not self.spread


MISSING = Entry(NOTHING)


def quantity(value: float | None, form: str, unit: str = "") -> Entry:
    """Return an entry of a number, written with the format `form`; the missing one for null."""
    if value is None or is_null(value):
        return MISSING
    return Entry(format_number(value, form), value, unit)


def milliseconds(ms: float | None) -> Entry:
    """Return an entry of milliseconds; the missing one for null."""
    return MISSING if ms is None or is_null(ms) else Entry(format_ms(ms), ms, "ms")


def quotient(numerator: float, denominator: float, form: str = ".2f") -> Entry:
    """Return an entry of a ratio, missing if the divisor is not above 0 or it is not finite."""
    if not denominator > 0 or not math.isfinite(numerator / denominator):
        return MISSING
    return quantity(numerator / denominator, form)


def at_least(entry: Entry) -> Entry:
    """Return the entry of a lower bound."""
    return entry if entry.is_missing else entry._replace(text=f"≥ {entry.text}")


# The same values stand in many rows of many tables.
@lru_cache(maxsize=4096, typed=True)
def axis_entry(value: object) -> Entry:
    """Return the entry of one value of an axis."""
    if is_null(value):
        return MISSING
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return Entry(axis_text(value), float(value) if is_number else None)  # type: ignore[arg-type]


# Axes that readers look for, which the caption names if all cells have the same value.
_SETTINGS = (
    # Three ways to name a model; `size` is a key of every table.
    "model", "d_model", "d_ff", "num_layers", "num_heads",
    "precision", "compile", "pass", "attention", "batch_size",
)  # fmt: skip
NOTES = "note"  # title of the column with the numbers of notes
Rows = Sequence[Sequence[Entry]]


@dataclass(frozen=True, eq=False)
class Column:
    """A typed column of a table: a key, in which rows differ, or a measure.

    group: the compared value that a measure belongs to, such as `bf16`. priority: the least is the
    most important; a narrow screen shows only the first ones.
    """

    name: str
    entries: Sequence[Entry]
    is_key: bool = False
    group: str = ""
    priority: int = 0

    @cached_property
    def is_text(self) -> bool:
        """True for keys, and if no entry is a number or a flag."""
        return self.is_key or all(entry.number is None for entry in self.entries)

    @cached_property
    def unit(self) -> str:
        return next(filter(None, map(attrgetter("unit"), self.entries)), "")

    @property
    def full_name(self) -> str:
        return f"{self.group} {self.name}".strip()

    @property
    def title(self) -> str:
        """The heading of a measure: its full name, and the unit unless the name has it."""
        is_named = not self.unit or self.unit in self.full_name.split()
        return self.full_name if is_named else f"{self.full_name} ({self.unit})"


# Of a measure; with the compared value that it belongs to in front of it.
Title = str | tuple[str, str]


class TableGrid(NamedTuple):
    """Typed columns of equal length: the keys first, then the measures.

    compared: the key whose values a reader compares, so that no view is of one value. notes: of
    rows, which refer to them in the column NOTES by number, starting at 1. label: the measure that
    names the rows, such as the names of kernels, which every view shows.
    """

    columns: Sequence[Column] = ()
    compared: str = ""
    notes: tuple[str, ...] = ()
    label: str = ""

    @property
    def keys(self) -> list[Column]:
        return [one for one in self.columns if one.is_key]

    @property
    def measures(self) -> list[Column]:
        return [one for one in self.columns if not one.is_key]

    @property
    def rows(self) -> list[list[Entry]]:
        return list(map(list, zip(*map(attrgetter("entries"), self.columns), strict=True)))

    def with_rows(self, is_shown: Sequence[bool]) -> TableGrid:
        """Return the grid with some of its rows."""
        columns = []
        for one in self.columns:
            columns.append(replace(one, entries=list(compress(one.entries, is_shown))))
        return self._replace(columns=columns)

    def without_empty_columns(self) -> TableGrid:
        """Drop the columns that are empty in every row, such as the allocator's peaks on a CPU."""
        return self._replace(columns=[one for one in self.columns if not is_empty(one.entries)])

    def without_empty(self) -> TableGrid:
        """Drop the rows without a measure, and then the empty columns."""
        count = len(self.keys)
        is_shown = [not is_empty(row[count:]) for row in self.rows]
        return self.with_rows(is_shown).without_empty_columns()


def grid_of_rows(
    keys: Sequence[str], measures: Sequence[Title], rows: Rows, compared: str = "", label: str = ""
) -> TableGrid:
    """Return the typed columns of rows. The first measures are the most important, after `label`."""
    named = [title if isinstance(title, tuple) else ("", title) for title in measures]
    titles: dict[str, list[str]] = defaultdict(list)
    for group, title in named:
        titles[group].append(title)
    # The baseline, which comes first, may have no comparisons: the fullest group has the order.
    fullest = max(titles.values(), key=len, default=[])
    order = list(dict.fromkeys(chain([label], fullest, *titles.values())))
    entries = list(zip(*rows, strict=True)) if rows else [()] * (len(keys) + len(named))
    columns = [Column(key, own, is_key=True) for key, own in zip(keys, entries, strict=False)]
    for (group, name), own in zip(named, entries[len(keys) :], strict=True):
        columns.append(Column(name, own, False, group, order.index(name)))
    return TableGrid(columns, compared, label=label)


def note_entries(
    notes_of_rows: Iterable[Sequence[str]],
) -> tuple[list[Entry], tuple[str, ...]]:
    """Return the entry of each row, which names its notes by their numbers, and all notes."""
    entries = []
    known: dict[str, int] = {}
    for notes in notes_of_rows:
        for note in notes:
            known.setdefault(note, len(known) + 1)
        own = sorted(set(notes), key=known.__getitem__)
        numbers = ", ".join(str(known[note]) for note in own)
        entries.append(Entry(numbers or NOTHING, full=" ".join(own)))
    return entries, tuple(known)


CellFilter = Callable[[pd.DataFrame], pd.DataFrame]  # chooses some of the cells
TableLayout = Callable[[Results], TableGrid]  # turns cells into the grid of a table


@dataclass(frozen=True)
class Table:
    """A table of the report. It is left out if no cell passes its filter.

    read: how to read the table, for its caption. column_notes: sentences that follow it if a column
    is shown whose title begins with their pattern. layout: its first measures are the most important.
    is_default: shown by `sweep report` and on the page without being asked for.
    """

    name: str
    title: str
    read: str
    layout: TableLayout
    cells: CellFilter = lambda cells: cells
    is_default: bool = False
    column_notes: Mapping[str, str] = field(default_factory=dict)

    def render(self, results: Results, provenance: str) -> RenderedTable:
        """Return the table without rows and columns in which no measure has a value."""
        chosen = replace(results, cells=self.cells(results.cells))
        grid, settings = TableGrid(), {}
        if len(chosen.cells):
            # Of 1,028 published rows of times, 425 were of cells whose memory alone was measured.
            grid = self.layout(chosen).without_empty()
        if not {one.name for one in grid.measures} - {NOTES}:
            return RenderedTable(self, TableGrid(), provenance)
        for axis in _SETTINGS:
            values = list(chosen.cells[axis].unique()) if axis in chosen.cells else []
            if len(values) == 1 and not is_null(values[0]):
                settings[axis] = axis_text(values[0])
        return RenderedTable(self, grid, provenance, settings)


def is_empty(entries: Sequence[Entry]) -> bool:
    return all(entry.is_missing for entry in entries)


@dataclass(frozen=True, eq=False)
class RenderedTable:
    """A table with all its rows, or a view of it.

    settings: values of axes that all of its cells share. caption: how to read a view. hidden_rows,
    hidden_measures: what the table has besides.
    """

    table: Table
    grid: TableGrid
    provenance: str
    settings: Mapping[str, str] = field(default_factory=dict)
    caption: str = ""
    hidden_rows: int = 0
    hidden_measures: Sequence[Column] = ()

    @property
    def header(self) -> list[str]:
        """The names of the columns."""
        return [one.full_name for one in self.grid.columns]

    @property
    def titles(self) -> list[str]:
        """The heads of the columns for a reader.

        A key is words, or the key of a mapping as the user wrote it; a measure has its unit.
        """
        short = short_names([one.name for one in self.grid.keys], KEY_NAME)
        keys = [name.replace("_", " ") if word == name else word for name, word in short.items()]
        return [*keys, *(one.title for one in self.grid.measures)]

    @property
    def rows(self) -> list[list[Entry]]:
        return self.grid.rows

    @property
    def row_count(self) -> int:
        return len(self.grid.columns[0].entries) if self.grid.columns else 0

    @property
    def sides(self) -> list[Literal["left", "right"]]:
        """The alignment of each column: `right` for numbers, `left` for keys and other texts."""
        return ["left" if one.is_text else "right" for one in self.grid.columns]

    @property
    def left_out(self) -> str:
        """A line for the source of a document with the columns that had no room, if there are any."""
        titles = ", ".join(one.title for one in self.hidden_measures)
        return f"columns left out: {titles}" if titles else ""

    @property
    def numbered_notes(self) -> list[str]:
        return [f"{index}. {note}" for index, note in enumerate(self.grid.notes, 1)]


def with_columns(page: RenderedTable, names: Sequence[str]) -> RenderedTable:
    """Return a table with the measures of these titles only, without rows that have none of them.

    A name is the title of a measure, with or without the compared value in front of it. Raise
    ConfigError for another name.
    """
    known = {text: None for one in page.grid.measures for text in (one.name, one.full_name)}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--columns {name}: the table {page.table.name} has no such column",
                suggestion(name, known) or f"It has: {', '.join(known)}",
            )
    columns = page.grid.columns
    shown = [one for one in columns if one.is_key or {one.name, one.full_name} & {*names}]
    return replace(page, grid=page.grid._replace(columns=shown).without_empty())
