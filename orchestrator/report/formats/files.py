"""Rendered tables as files: Markdown, CSV, LaTeX, Typst and JSON."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from orchestrator.report.formats.latex import to_latex
from orchestrator.report.formats.markdown import to_markdown
from orchestrator.report.formats.records import Scalar, typed_columns
from orchestrator.report.formats.typst import to_typst
from orchestrator.report.tables.table import RenderedTable
from orchestrator.report.tables.views import MAX_ROWS, Column, TableView, view_of
from tasks.spec.messages import escape_controls

# The first letters of a formula, also after a tab or a carriage return, which spreadsheets skip.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "'")
_EXACT = 1e15  # up to here, a float holds each integer


def to_csv(page: RenderedTable, view: TableView | None = None) -> str:
    """Return a view of a table as CSV, or all its rows and columns, with every digit of a number.

    An apostrophe precedes a text that a spreadsheet would execute as a formula.
    """
    lines: list[str] = []
    columns = typed_columns(page, view)
    # The writer quotes only those line breaks that occur in its own line ends.
    writer = csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n")
    writer.writerow(map(_without_formula, columns))
    for row in zip(*columns.values(), strict=True):
        writer.writerow(map(_csv_text, row))
    text = "".join([line.removesuffix("\r\n") + "\n" for line in lines])
    return escape_controls(text)


def _csv_text(value: Scalar) -> str:
    if isinstance(value, str):
        return _without_formula(value)
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None or math.isnan(value) else str(_exact(value))


def _exact(value: Scalar) -> Scalar:
    """Return an integer for a float without a fraction."""
    if isinstance(value, float) and abs(value) < _EXACT and value.is_integer():
        return int(value)
    return value


def _without_formula(text: str) -> str:
    # An apostrophe is escaped too, so that removing one at the beginning restores every text.
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text


def to_json(page: RenderedTable) -> str:
    """Return a table as a JSON array with one object a row; a value that is not finite is null."""
    columns = typed_columns(page)
    objects = []
    for row in zip(*columns.values(), strict=True):
        objects.append(dict(zip(columns, map(_finite, row), strict=True)))
    return json.dumps(objects, ensure_ascii=False, indent=1)


def _finite(value: Scalar) -> Scalar:
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    return None if is_infinite else _exact(value)


def to_markdown_file(page: RenderedTable) -> str:
    """Return a table as Markdown for a file, with all its rows and without padding."""
    return without_tags(to_markdown(view_of(page, max_rows=None), is_aligned=False))


def without_tags(text: str) -> str:
    """Escape `<` for renderers of Markdown, which would drop `Functor<float>` as an unknown tag."""
    return text.replace("<", r"\<")


FORMATS: Mapping[str, Callable[[RenderedTable], str]] = {
    "md": to_markdown_file,
    "csv": to_csv,
    "tex": partial(to_latex, max_rows=MAX_ROWS),
    "typ": partial(to_typst, max_rows=MAX_ROWS),
}


# The formats that have every row and every column of a table, and nothing else.
WHOLE: Mapping[str, Callable[[RenderedTable], str]] = {"csv": to_csv, "json": to_json}


def copies_of(page: RenderedTable) -> dict[str, str]:
    """Return what the page shows of a table, in the formats of its copy buttons."""
    view = view_of(page)
    return {
        "Markdown": to_markdown(view),
        "CSV": to_csv(page, replace(view, columns=list(map(_as_shown, view.columns)))),
        "LaTeX": to_latex(page, MAX_ROWS),
        "Typst": to_typst(page, MAX_ROWS),
    }


def _as_shown(column: Column) -> Column:
    """Return a column with six digits and shortened names: the page holds a copy of each table."""
    entries = []
    for entry in column.entries:
        number = entry.number if isinstance(entry.number, bool) else _rounded(entry.number)
        low, high, deviation = map(_rounded, (entry.low, entry.high, entry.deviation))
        entries.append(
            entry._replace(number=number, low=low, high=high, deviation=deviation, full="")
        )
    return replace(column, entries=entries)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def files_of(
    pages: Iterable[RenderedTable], formats: Collection[str] = tuple(FORMATS)
) -> Iterator[tuple[str, str]]:
    """Yield file name and content of each table in each format, one at a time."""
    for page in pages:
        for suffix in formats:
            yield f"{page.table.name}.{suffix}", FORMATS[suffix](page)
