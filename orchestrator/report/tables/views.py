"""Views of tables: what a reader sees first, with typed entries for each format to write.

A view has at most MAX_KEYS keys, MAX_COLUMNS columns and MAX_ROWS rows. Axes with one value among
its rows are lifted into the caption. Of a longer table it shows one slice, and says which.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from operator import attrgetter

from orchestrator.analysis.axes import ALWAYS_SHOWN, MAIN, NOTHING
from orchestrator.common.text import CLASS_NAME, KEY_NAME, short_names
from orchestrator.report.tables.table import (
    Entry,
    RenderedTable,
    Rows,
    Table,
    TableGrid,
    columns_of,
    is_empty,
)
from orchestrator.report.text.slices import usual_value

MAX_KEYS = 3
MAX_COLUMNS = 8
MAX_ROWS = 20


@dataclass(frozen=True, eq=False)
class Column:
    """A typed column of a view: a key or a measure.

    group: the compared value, such as `bf16`. is_text: true if no entry is a number or a flag, and
    for keys. priority: the least is the most important; a narrow screen shows only the first ones.
    """

    name: str
    entries: Sequence[Entry]
    is_key: bool = False
    is_text: bool = True
    unit: str = ""
    group: str = ""
    priority: int = 0

    @property
    def title(self) -> str:
        """The heading: group, name and unit, which is left out if the name has it."""
        words = f"{self.group} {self.name}".strip()
        is_named = not self.unit or self.unit in words.split()
        return words if is_named else f"{words} ({self.unit})"


@dataclass(frozen=True)
class TableView:
    """A table as it is shown.

    columns: the keys come first. hidden_rows: how many rows the table has besides. hidden_measures:
    its other measures.
    """

    page: RenderedTable
    caption: str
    columns: Sequence[Column]
    hidden_rows: int = 0
    hidden_measures: Sequence[Column] = ()

    @property
    def rows(self) -> Rows:
        return list(map(list, zip(*map(attrgetter("entries"), self.columns), strict=True)))

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.columns if one.is_key)

    @property
    def measures(self) -> list[Column]:
        return [one for one in self.columns if not one.is_key]

    @property
    def header(self) -> list[str]:
        return [*self.key_titles, *map(attrgetter("title"), self.measures)]

    @property
    def sides(self) -> list[str]:
        """The alignment of each column: `right` for numbers, `left` for keys and other texts."""
        return ["left" if one.is_text else "right" for one in self.columns]

    @property
    def left_out(self) -> str:
        """A line for the source of a document with the columns that had no room, if there are any."""
        titles = ", ".join(map(attrgetter("title"), self.hidden_measures))
        return f"columns left out: {titles}" if titles else ""

    @property
    def numbered_notes(self) -> list[str]:
        return [f"{index}. {note}" for index, note in enumerate(self.page.grid.notes, 1)]

    @property
    def key_titles(self) -> list[str]:
        """The titles of the keys: words, or the key of a mapping as the user wrote it."""
        short = short_names(self.keys, KEY_NAME)
        return [key.replace("_", " ") if short[key] == key else short[key] for key in self.keys]


def view_of(
    page: RenderedTable, max_rows: int | None = MAX_ROWS, max_columns: int | None = MAX_COLUMNS
) -> TableView:
    """Return the view of a table. None as a limit: all of its rows, or all of its columns."""
    columns, sliced = _slice(page, None if max_columns is None else max_rows)
    shown, lifted = columns, {}
    if max_columns is not None:
        keys = [one for one in columns if one.is_key]
        lifted = _constants(page.grid.keys, [one.entries for one in keys])
        fewest = 2 if page.grid.label else 1  # a name of rows without a number says nothing
        room = max(max_columns - len(keys) + len(lifted), fewest)
        shown = [_with_short_names(one) for one in keys if one.name not in lifted]
        shown += _chosen(columns[len(keys) :], room)
    rows = [replace(one, entries=one.entries[:max_rows]) for one in shown]
    count = len(columns[0].entries[:max_rows]) if columns else 0
    return TableView(
        page,
        _caption(page.table, shown, {**page.settings, **lifted}, sliced),
        rows,
        hidden_rows=len(page.rows) - count,
        hidden_measures=[one for one in columns if not one.is_key and one not in shown],
    )


# A format that must fit a page tries views with several numbers of columns.
@lru_cache(maxsize=4)
def _slice(page: RenderedTable, max_rows: int | None) -> tuple[list[Column], dict[str, str]]:
    """Return the typed columns of one slice, and the values that choose it."""
    if max_rows is None:
        return _typed(page.grid, page.rows), {}
    rows, sliced = _sliced_rows(page.grid, max_rows)
    return _typed(page.grid, rows), sliced


def _sliced_rows(grid: TableGrid, max_rows: int) -> tuple[Rows, dict[str, str]]:
    """Return the rows of one slice, and the values that choose it."""
    keys, rows = grid.keys, grid.rows
    sliced: dict[str, str] = {}
    # Without a default, an axis that every reader looks for is not sliced.
    fixed = {*MAIN, *ALWAYS_SHOWN, grid.compared}
    others = [key for key in reversed(keys) if key not in fixed]
    is_of_attention = grid.compared == "attention" and grid.compared in keys
    if is_of_attention:
        others.append("context_length")  # implementations are compared at one context
    for key in (*MAIN, *others):
        if key not in keys or key == grid.compared:
            continue
        varying = set(keys) - set(_constants(keys, columns_of(rows, len(keys))))
        is_short = len(rows) <= max_rows and len(varying) <= MAX_KEYS
        if key not in varying or is_short:
            continue
        by_value: dict[str, Rows] = defaultdict(list)
        for row in rows:
            by_value[row[keys.index(key)].text].append(row)
        counts = {value: len(own) for value, own in by_value.items()}
        if is_of_attention:
            counts = _of_most_compared(by_value, counts, keys.index(grid.compared))
        sliced[key] = usual_value(key, counts)
        rows = by_value[sliced[key]]
    return rows, sliced


def _of_most_compared(
    by_value: Mapping[str, Rows], counts: Mapping[str, int], compared: int
) -> dict[str, int]:
    """Return the counts of those values of a key for which most values are compared."""
    variety = {value: len({row[compared].text for row in own}) for value, own in by_value.items()}
    most = max(variety.values())
    return {value: count for value, count in counts.items() if variety[value] == most}


def _with_short_names(key: Column) -> Column:
    """Return a key whose values are `Gpt` for `my_models:Gpt` if no other one ends so."""
    short = short_names({entry.text for entry in key.entries}, CLASS_NAME)
    # Most keys have no such value, and copies of all entries took 4% of a large report's time.
    if all(text == name for text, name in short.items()):
        return key
    return replace(key, entries=[entry._replace(text=short[entry.text]) for entry in key.entries])


def _constants(keys: Sequence[str], columns: Sequence[Sequence[Entry]]) -> dict[str, str]:
    """Return the keys that have the same value in all rows. The first key of one row stays."""
    constants = {}
    for key, entries in zip(keys, columns, strict=False):
        # Ends at the first other value. A set of all texts took a sixth of a large report's time.
        if entries and all(entry.text == entries[0].text for entry in entries):
            constants[key] = entries[0].text
    if len(constants) == len(keys):
        constants.pop(next(iter(keys), ""), None)
    return constants


def _typed(grid: TableGrid, rows: Rows) -> list[Column]:
    titles: dict[str, list[str]] = defaultdict(list)
    for heading in grid.measures:
        titles[heading.group].append(heading.title)
    # The baseline, which comes first, has no comparisons: the fullest group has the order.
    fullest = max(titles.values(), key=len, default=[])
    order = list(dict.fromkeys(chain([grid.label], fullest, *titles.values())))
    of_rows = columns_of(rows, len(grid.keys) + len(grid.measures))
    columns = [Column(key, entries, True) for key, entries in zip(grid.keys, of_rows, strict=False)]
    for (name, group), entries in zip(grid.measures, of_rows[len(grid.keys) :], strict=True):
        unit = next(filter(None, map(attrgetter("unit"), entries)), "")
        is_text = all(entry.number is None for entry in entries)
        columns.append(Column(name, entries, False, is_text, unit, group, order.index(name)))
    return columns


def _chosen(measures: Sequence[Column], room: int) -> list[Column]:
    """Return the measures that fit, by priority, of those with a value.

    A measure that is compared is shown for all values, or else for the last one that has it.
    """
    by_priority: dict[int, list[Column]] = defaultdict(list)
    for measure in measures:
        # Others are of rows that are not shown, such as the time in another precision.
        if not is_empty(measure.entries):
            by_priority[measure.priority].append(measure)
    chosen: list[Column] = []
    for _, same in sorted(by_priority.items()):
        left = room - len(chosen)
        chosen += (same if len(same) <= left else same[-1:])[:left]
    return [measure for measure in measures if measure in chosen]


def _caption(
    table: Table,
    shown: Sequence[Column],
    lifted: Mapping[str, str],
    sliced: Mapping[str, str],
) -> str:
    """Return how to read the shown columns, with the settings that all rows have."""
    parts = [table.read]
    for pattern, note in table.column_notes.items():
        if any(re.match(pattern, one.name) for one in shown if not one.is_key):
            parts.append(note)
    of_all = {key: text for key, text in lifted.items() if key not in sliced}
    for title, values in (("All rows", of_all), ("Shown", sliced)):
        settings = [f"{key}={text}" for key, text in values.items() if text != NOTHING]
        if settings:
            parts.append(f"{title}: {', '.join(settings)}.")
    return " ".join(parts)
