"""Views of tables: what a reader sees first, with typed entries for each format to write.

A view has at most MAX_KEYS keys, MAX_COLUMNS columns and MAX_ROWS rows. Axes with one value among
its rows are lifted into the caption. Of a longer table it shows one slice, and says which.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from orchestrator.analysis.axes import ALWAYS_SHOWN, MAIN, NOTHING
from orchestrator.common.text import CLASS_NAME, KEY_NAME, short_names
from orchestrator.report.tables.entries import Entry
from orchestrator.report.tables.table import Heading, RenderedTable, Rows, Table
from orchestrator.report.text.slices import usual_value

MAX_KEYS = 3
MAX_COLUMNS = 8
MAX_ROWS = 20


class Kind(StrEnum):
    """The kind of the entries of a measure."""

    NUMBER = "number"
    INTERVAL = "interval"  # numbers with a 95 % interval
    FLAG = "flag"
    TEXT = "text"


@dataclass(frozen=True)
class Measure:
    """A measure of a view.

    group: the compared value, such as `bf16`. digits: after the decimal point, at most.
    priority: 0 is the most important; a narrow screen shows only the first ones.
    """

    name: str
    unit: str
    kind: Kind
    priority: int
    digits: int
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

    rows: an entry for each key, then one for each measure. hidden_rows, hidden_columns: how many
    the table has besides.
    """

    name: str
    title: str
    caption: str
    keys: tuple[str, ...]
    measures: tuple[Measure, ...]
    rows: Rows
    provenance: str
    notes: tuple[str, ...] = ()
    hidden_rows: int = 0
    hidden_columns: int = 0

    @property
    def header(self) -> list[str]:
        return [*self.key_titles, *(measure.title for measure in self.measures)]

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
    lifted = {} if max_columns is None else _constants(keys, rows)
    if max_columns is not None:
        rows = _with_short_names(rows, len(keys))
    shown = [index for index, key in enumerate(keys) if key not in lifted]
    measures = _measures(page, rows)
    room = len(measures) if max_columns is None else max(max_columns - len(shown), 1)
    filled = list(range(len(measures)))
    if max_columns is not None:
        # A measure of other rows, such as the time in a precision that no shown row has.
        filled = [index for index in filled if _has_value(rows, len(keys) + index)]
    chosen = sorted(_chosen(measures, filled, room))
    indices = [*shown, *(len(keys) + index for index in chosen)]
    return TableView(
        page.table.name,
        page.table.title,
        _caption(page.table, {**page.settings, **lifted}, sliced),
        tuple(keys[index] for index in shown),
        tuple(measures[index] for index in chosen),
        [[row[index] for index in indices] for row in rows[:max_rows]],
        page.provenance,
        page.notes,
        hidden_rows=len(page.rows) - len(rows[:max_rows]),
        hidden_columns=len(measures) - len(chosen),
    )


# A format that must fit a page tries views with several numbers of columns.
@lru_cache(maxsize=4)
def _slice(page: RenderedTable, max_rows: int) -> tuple[Rows, dict[str, str]]:
    """Return the rows of one slice, and the values that choose it."""
    grid = page.grid
    keys, rows = grid.keys, grid.rows
    sliced: dict[str, str] = {}
    varying = _varying(keys, rows)
    # Without a default, an axis that every reader looks for is not sliced.
    fixed = {*MAIN, *ALWAYS_SHOWN}
    others = [key for key in reversed(keys) if key not in fixed]
    is_of_attention = grid.compared == "attention" and grid.compared in keys
    if is_of_attention:
        others.append("context_length")  # implementations are compared at one context
    for key in [key for key in (*MAIN, *others) if key in keys and key != grid.compared]:
        if key not in varying or (len(rows) <= max_rows and len(varying) <= MAX_KEYS):
            continue
        index = keys.index(key)
        candidates = rows
        if is_of_attention:
            candidates = _most_compared(rows, index, keys.index(grid.compared))
        sliced[key] = usual_value(key, [row[index].text for row in candidates])
        rows = [row for row in rows if row[index].text == sliced[key]]
        varying = _varying(keys, rows)
    return rows, sliced


def _most_compared(rows: Rows, index: int, compared: int) -> Rows:
    """Return the rows with those values of a key for which most values are compared."""
    values: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        values[row[index].text].add(row[compared].text)
    most = max(map(len, values.values()))
    return [row for row in rows if len(values[row[index].text]) == most]


def _varying(keys: Sequence[str], rows: Rows) -> list[str]:
    constants = _constants(keys, rows)
    return [key for key in keys if key not in constants]


def _with_short_names(rows: Rows, key_count: int) -> Rows:
    """Return the rows with `Gpt` for a key's value `my_models:Gpt` if no other one ends so."""
    columns: list[Sequence[Entry]] = list(zip(*rows, strict=True))
    for index, entries in enumerate(columns[:key_count]):
        short = short_names({entry.text for entry in entries}, CLASS_NAME)
        columns[index] = [entry._replace(text=short[entry.text]) for entry in entries]
    return [list(row) for row in zip(*columns, strict=True)]


def _constants(keys: Sequence[str], rows: Rows) -> dict[str, str]:
    """Return the keys that have the same value in all rows. The first key of one row stays."""
    constants = {}
    for index, key in enumerate(keys if rows else ()):
        first = rows[0][index].text
        # Ends at the first other value. A set of all texts took a sixth of a large report's time.
        if all(row[index].text == first for row in rows):
            constants[key] = first
    if len(constants) == len(keys):
        constants.pop(next(iter(keys), ""), None)
    return constants


def _measures(page: RenderedTable, rows: Rows) -> list[Measure]:
    headings = page.grid.measures
    titles: dict[str, list[str]] = defaultdict(list)
    for heading in headings:
        titles[heading.group].append(heading.title)
    # The baseline, which comes first, has no comparisons: the fullest group has the order.
    fullest = max(titles.values(), key=len)
    order = list(dict.fromkeys([*fullest, *(heading.title for heading in headings)]))
    measures = []
    for index, heading in enumerate(headings, len(page.grid.keys)):
        entries = [row[index] for row in rows]
        measures.append(_measure(heading, entries, order.index(heading.title)))
    return measures


def _measure(heading: Heading, entries: Sequence[Entry], priority: int) -> Measure:
    numbers = [entry for entry in entries if entry.number is not None]
    unit = next((entry.unit for entry in numbers if entry.unit), "")
    digits = max((len(entry.text.partition(".")[2]) for entry in numbers), default=0)
    kind = Kind.NUMBER if numbers else Kind.TEXT
    if any(isinstance(entry.number, bool) for entry in numbers):
        kind = Kind.FLAG
    elif any(entry.low is not None for entry in numbers):
        kind = Kind.INTERVAL
    return Measure(heading.title, unit, kind, priority, digits, heading.group)


def _has_value(rows: Rows, index: int) -> bool:
    return any(not row[index].is_missing for row in rows)


def _chosen(measures: Sequence[Measure], filled: Sequence[int], room: int) -> Iterator[int]:
    """Yield the indices of the measures that fit, by priority. filled: those with a value.

    A measure that is compared is shown for all values, or else for the last one that has it.
    """
    for priority in sorted({measure.priority for measure in measures}):
        indices = [index for index in filled if measures[index].priority == priority]
        shown = indices if len(indices) <= room else indices[-1:]
        if len(shown) <= room:
            yield from shown
            room -= len(shown)


def _caption(table: Table, lifted: Mapping[str, str], sliced: Mapping[str, str]) -> str:
    """Return how to read the table, with the settings that all rows have."""
    parts = [table.read]
    for title, values in (("All rows", _without(lifted, sliced)), ("Shown", sliced)):
        settings = [f"{key}={text}" for key, text in values.items() if text != NOTHING]
        if settings:
            parts.append(f"{title}: {', '.join(settings)}.")
    return " ".join(parts)


def _without(settings: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in settings.items() if key not in others}
