"""Views of tables that are no wider than the text of a page, by an estimate of their letters."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

from orchestrator.report.tables.table import Entry, RenderedTable
from orchestrator.report.tables.views import MAX_COLUMNS, view_of
from tasks.spec.messages import shorten

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
    many = product((_LONG, _SHORT), range(max_columns, 4, -1))
    for longest, columns in (*many, *product((_SHORT,), _FEW), (10, 1)):
        view = view_of(page, max_rows, columns)
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
