"""Views of tables: what a reader sees first, with typed entries for each format to write.

A view has at most MAX_KEYS keys, MAX_COLUMNS columns and MAX_ROWS rows. Axes with one value among
its rows are lifted into the caption. Of a longer table it shows one slice, and says which. A view
of all rows has all keys that differ, and FEWEST_MEASURES measures even if that makes more columns.
A view that fits has as many of its columns as a screen, or the text of a page, has room for.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

from orchestrator.analysis.axes import ALWAYS_SHOWN, MAIN, NOTHING
from orchestrator.common.text import CLASS_NAME, short_names
from orchestrator.report.tables.table import (
    Column,
    Entry,
    RenderedTable,
    Table,
    TableGrid,
    is_empty,
)
from orchestrator.report.text.cell_names import usual_value
from tasks.spec.messages import shorten

MAX_KEYS = 3
MAX_COLUMNS = 8
FEWEST_MEASURES = 3
MAX_ROWS = 20
# Of LaTeX's article class, the narrowest text that papers have in common.
TEXT_PT = 345
# Widths of letters of Computer Modern in \\small, rounded up; any other letter is a common one.
_LETTERS_PT = {
    **dict.fromkeys("0123456789†", 4.8),
    **dict.fromkeys("ABCDEFGHJKLNOPQRSTUVXYZ", 7.8),
    **dict.fromkeys("mw%×±≈≥≤→·", 8.4),
    **dict.fromkeys("MW", 10.3),
    **dict.fromkeys("ijlfrtI|'!()[]-", 4.0),
    **dict.fromkeys(".,:; ", 3.2),
}
_COMMON_PT = 5.6
BETWEEN_COLUMNS_PT = 8
# Letters of a text, such as the name of a kernel, and the columns that a view then has at most. A
# table has five columns or more if its texts have 20 letters; it has fewer only if none of those
# views fits, and shorter texts only if not even one measure fits.
_LONG, _SHORT = 42, 20
_FEW = range(4, 0, -1)
_lines = partial(textwrap.wrap, width=10, break_long_words=False, break_on_hyphens=False)


def view_of(
    page: RenderedTable,
    max_rows: int | None = MAX_ROWS,
    max_columns: int | None = MAX_COLUMNS,
    fewest: int = FEWEST_MEASURES,
) -> RenderedTable:
    """Return the view of a table. None as a limit: all of its rows, or all of its columns.

    fewest: measures that it has at least, even if it then has more than max_columns columns.
    """
    grid = page.grid
    sliced: dict[str, str] = {}
    if max_rows is not None and max_columns is not None:
        grid, sliced = _slice(page, max_rows)
    keys, measures, lifted = grid.keys, grid.measures, {}
    if max_columns is not None:
        lifted = _constants(keys)
        if grid.label:  # a name of rows without a number says nothing
            fewest = max(fewest, 2)
        room = max(max_columns - len(keys) + len(lifted), fewest)
        keys = [_with_short_names(one) for one in keys if one.name not in lifted]
        measures = _chosen(measures, room)
    shown = [replace(one, entries=one.entries[:max_rows]) for one in (*keys, *measures)]
    return replace(
        page,
        grid=grid._replace(columns=shown),
        caption=_caption(page.table, shown, {**page.settings, **lifted}, sliced),
        hidden_rows=page.row_count - (len(shown[0].entries) if shown else 0),
        hidden_measures=[one for one in grid.measures if one not in measures],
    )


# A format that must fit a page tries views with several numbers of columns.
@lru_cache(maxsize=4)
def _slice(page: RenderedTable, max_rows: int) -> tuple[TableGrid, dict[str, str]]:
    """Return the rows of one slice, and the values that choose it."""
    grid = page.grid
    names = [one.name for one in grid.keys]
    sliced: dict[str, str] = {}
    # Without a default, an axis that every reader looks for is not sliced.
    fixed = {*MAIN, *ALWAYS_SHOWN, grid.compared}
    others = [name for name in reversed(names) if name not in fixed]
    is_of_attention = grid.compared == "attention" and grid.compared in names
    if is_of_attention:
        others.append("context_length")  # implementations are compared at one context
    for name in (*MAIN, *others):
        keys = {one.name: [entry.text for entry in one.entries] for one in grid.keys}
        if name not in keys or name == grid.compared:
            continue
        varying = keys.keys() - _constants(grid.keys).keys()
        is_short = len(keys[name]) <= max_rows and len(varying) <= MAX_KEYS
        if name not in varying or is_short:
            continue
        texts, counts = keys[name], Counter(keys[name])
        if is_of_attention:  # of the values for which most implementations are compared
            compared = Counter(text for text, _ in set(zip(texts, keys["attention"], strict=True)))
            most = max(compared.values())
            counts = Counter(text for text in texts if compared[text] == most)
        sliced[name] = usual_value(name, counts)
        grid = grid.with_rows([text == sliced[name] for text in texts])
    return grid, sliced


def _with_short_names(key: Column) -> Column:
    """Return a key whose values are `Gpt` for `my_models:Gpt` if no other one ends so."""
    short = short_names({entry.text for entry in key.entries}, CLASS_NAME)
    # Most keys have no such value, and copies of all entries took 4% of a large report's time.
    if all(text == name for text, name in short.items()):
        return key
    return replace(key, entries=[entry._replace(text=short[entry.text]) for entry in key.entries])


def _constants(keys: Sequence[Column]) -> dict[str, str]:
    """Return the keys that have the same value in all rows. The first key of one row stays."""
    constants = {}
    for key in keys:
        # Ends at the first other value. A set of all texts took a sixth of a large report's time.
        if key.entries and all(entry.text == key.entries[0].text for entry in key.entries):
            constants[key.name] = key.entries[0].text
    if len(constants) == len(keys):
        constants.pop(next(iter(constants), ""), None)
    return constants


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


def printable(text: str) -> str:
    """Replace control characters, such as the colours of a message, which no compiler accepts."""
    if text.isprintable():
        return text
    return "".join([letter if letter.isprintable() else " " for letter in text])


def narrowed(
    page: RenderedTable,
    max_rows: int | None,
    fits: Callable[[RenderedTable], bool],
    max_columns: int = MAX_COLUMNS,
) -> RenderedTable:
    """Return the view with the most columns that fits, with its long texts shortened."""
    most = max(max_columns, len(view_of(page, max_rows, max_columns).titles))
    many = product((_LONG, _SHORT), range(most, 4, -1))
    for longest, columns in (*many, *product((_SHORT,), _FEW), (10, 1)):
        view = view_of(page, max_rows, columns, fewest=1)
        short = []
        for column in view.grid.columns:
            entries = [_shortened(entry, longest) for entry in column.entries]
            short.append(replace(column, entries=entries))
        view = replace(view, grid=view.grid._replace(columns=short))
        if fits(view):
            break
    return view


def _shortened(entry: Entry, longest: int) -> Entry:
    text, spread = entry.text, entry.spread
    if entry.number is None:  # a number with a missing digit would be another number
        text = shorten(text, longest)
    if len(text) + len(spread) > longest:
        spread = spread.partition(";")[0]  # without the prediction behind a measured size
    if (text, spread) == (entry.text, entry.spread):
        return entry
    return entry._replace(text=text, spread=spread)


@lru_cache(maxsize=1)  # LaTeX and Typst of a table follow each other, as files and as copies
def fitting_view(page: RenderedTable, max_rows: int | None) -> RenderedTable:
    """Return the view with the most columns that are no wider than TEXT_PT together."""
    return narrowed(page, max_rows, lambda view: estimated_pt(view) <= TEXT_PT)


def estimated_pt(view: RenderedTable) -> float:
    """Return the width of a table whose heads break between words."""
    total = float(len(view.titles) * BETWEEN_COLUMNS_PT)
    for head, column in zip(heads(view), view.grid.columns, strict=True):
        total += max(map(_width_pt, [*head, *map(str, column.entries)]))
    return total


@lru_cache(maxsize=4096)
def _width_pt(text: str) -> float:
    return sum(_LETTERS_PT.get(letter, _COMMON_PT) for letter in text)


def heads(view: RenderedTable) -> list[list[str]]:
    """Return the lines of the head of each column: its words, joined while they stay short."""
    return list(map(_lines, view.titles))
