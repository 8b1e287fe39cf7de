"""Views of tables: what a reader sees first, with typed entries for each format to write.

A view has at most MAX_KEYS keys, MAX_COLUMNS columns and MAX_ROWS rows. Axes with one value among
its rows are lifted into the caption. Of a longer table it shows one slice, and says which.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, compress
from operator import attrgetter

from orchestrator.analysis.axes import ALWAYS_SHOWN, MAIN, NOTHING
from orchestrator.common.text import CLASS_NAME, KEY_NAME, short_names
from orchestrator.report.tables.table import Entry, RenderedTable, Rows, Table, columns_of, is_empty
from orchestrator.report.text.slices import usual_value

MAX_KEYS = 3
MAX_COLUMNS = 8
MAX_ROWS = 20


@dataclass(frozen=True)
class Measure:
    """A measure of a view.

    group: the compared value, such as `bf16`. is_text: true if no entry is a number or a flag.
    priority: the least is the most important; a narrow screen shows only the first ones.
    """

    name: str
    unit: str
    is_text: bool
    priority: int
    group: str = ""

    @property
    def title(self) -> str:
        """The heading: group, name and unit, which is left out if the name has it."""
        words = f"{self.group} {self.name}".strip()
        is_named = not self.unit or self.unit in words.split()
        return words if is_named else f"{words} ({self.unit})"


@dataclass(frozen=True)
class TableView:
    """A table as it is shown.

    rows: an entry for each key, then one for each measure. hidden_rows: how many rows the table has
    besides. hidden_measures: its other measures.
    """

    page: RenderedTable
    caption: str
    keys: tuple[str, ...]
    measures: tuple[Measure, ...]
    rows: Rows
    hidden_rows: int = 0
    hidden_measures: tuple[Measure, ...] = ()

    @property
    def header(self) -> list[str]:
        return [*self.key_titles, *map(attrgetter("title"), self.measures)]

    @property
    def sides(self) -> list[str]:
        """The alignment of each column: `right` for numbers, `left` for keys and other texts."""
        of_measures = ["left" if one.is_text else "right" for one in self.measures]
        return ["left"] * len(self.keys) + of_measures

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
    keys, rows = page.grid.keys, page.rows
    sliced: dict[str, str] = {}
    if max_rows is not None and max_columns is not None:
        rows, sliced = _slice(page, max_rows)
    columns = columns_of(rows, len(keys) + len(page.grid.measures))
    key_columns, measured = columns[: len(keys)], columns[len(keys) :]
    measures = _measures(page, measured)
    lifted: dict[str, str] = {}
    chosen = set(range(len(measures)))
    if max_columns is not None:
        lifted = _constants(keys, key_columns)
        key_columns = list(map(_with_short_names, key_columns))
        fewest = 2 if page.grid.label else 1  # a name of rows without a number says nothing
        room = max(max_columns - len(keys) + len(lifted), fewest)
        chosen = _chosen(measures, measured, room)
    is_shown = [key not in lifted for key in keys]
    is_chosen = [index in chosen for index in range(len(measures))]
    entries = compress([*key_columns, *measured], [*is_shown, *is_chosen])
    shown_measures = tuple(compress(measures, is_chosen))
    return TableView(
        page,
        _caption(page.table, shown_measures, {**page.settings, **lifted}, sliced),
        tuple(compress(keys, is_shown)),
        shown_measures,
        list(map(list, zip(*entries, strict=True)))[:max_rows],
        hidden_rows=len(page.rows) - len(rows[:max_rows]),
        hidden_measures=tuple(one for one in measures if one not in shown_measures),
    )


# A format that must fit a page tries views with several numbers of columns.
@lru_cache(maxsize=4)
def _slice(page: RenderedTable, max_rows: int) -> tuple[Rows, dict[str, str]]:
    """Return the rows of one slice, and the values that choose it."""
    grid = page.grid
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


def _with_short_names(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return a key's values with `Gpt` for `my_models:Gpt` if no other one ends so."""
    short = short_names({entry.text for entry in entries}, CLASS_NAME)
    # Most keys have no such value, and copies of all entries took 4% of a large report's time.
    if all(text == name for text, name in short.items()):
        return entries
    return [entry._replace(text=short[entry.text]) for entry in entries]


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


def _measures(page: RenderedTable, columns: Sequence[Sequence[Entry]]) -> list[Measure]:
    titles: dict[str, list[str]] = defaultdict(list)
    for heading in page.grid.measures:
        titles[heading.group].append(heading.title)
    # The baseline, which comes first, has no comparisons: the fullest group has the order.
    fullest = max(titles.values(), key=len)
    order = list(dict.fromkeys(chain([page.grid.label], fullest, *titles.values())))
    measures = []
    for heading, entries in zip(page.grid.measures, columns, strict=True):
        unit = next(filter(None, map(attrgetter("unit"), entries)), "")
        is_text = all(entry.number is None for entry in entries)
        priority = order.index(heading.title)
        measures.append(Measure(heading.title, unit, is_text, priority, heading.group))
    return measures


def _chosen(measures: Sequence[Measure], columns: Sequence[Sequence[Entry]], room: int) -> set[int]:
    """Return the indices of the measures that fit, by priority, of those with a value.

    A measure that is compared is shown for all values, or else for the last one that has it.
    """
    by_priority: dict[int, list[int]] = defaultdict(list)
    for index, (measure, entries) in enumerate(zip(measures, columns, strict=True)):
        # Others are of rows that are not shown, such as the time in another precision.
        if not is_empty(entries):
            by_priority[measure.priority].append(index)
    chosen: list[int] = []
    for _, indices in sorted(by_priority.items()):
        left = room - len(chosen)
        shown = indices if len(indices) <= left else indices[-1:]
        chosen += shown[:left]
    return set(chosen)


def _caption(
    table: Table,
    shown: Sequence[Measure],
    lifted: Mapping[str, str],
    sliced: Mapping[str, str],
) -> str:
    """Return how to read the shown columns, with the settings that all rows have."""
    parts = [table.read]
    for pattern, note in table.column_notes.items():
        if any(re.match(pattern, measure.name) for measure in shown):
            parts.append(note)
    of_all = {key: text for key, text in lifted.items() if key not in sliced}
    for title, values in (("All rows", of_all), ("Shown", sliced)):
        settings = [f"{key}={text}" for key, text in values.items() if text != NOTHING]
        if settings:
            parts.append(f"{title}: {', '.join(settings)}.")
    return " ".join(parts)
