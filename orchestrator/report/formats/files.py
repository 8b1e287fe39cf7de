"""Rendered tables as files: Markdown, CSV, LaTeX, Typst and JSON."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from operator import attrgetter
from types import SimpleNamespace

from orchestrator.common.text import KEY_NAME
from orchestrator.report.findings.finding import Finding
from orchestrator.report.formats.latex import to_latex
from orchestrator.report.tables.table import NOTES, Column, Entry, RenderedTable, is_empty
from orchestrator.report.tables.views import MAX_ROWS, fitting_view, heads, printable, view_of
from tasks.spec.messages import escape_controls


def to_markdown(view: RenderedTable, is_aligned: bool = True) -> str:
    """Return a table as Markdown. is_aligned: pad the columns for readers of the source."""
    # Nothing in a text may end a table cell.
    rows = [
        [str(entry).replace("|", "\\|").replace("\n", " ") for entry in row] for row in view.rows
    ]
    # Without padding, a table of many columns takes half the bytes.
    widths = [0] * len(view.titles)
    if is_aligned:
        # tabulate would align the whole table, but takes a minute for ten thousand cells.
        columns = zip(view.titles, *rows, strict=True)
        widths = [max(len(title) + 2, *map(len, texts)) for title, *texts in columns]
    rule = "|".join(["-" * max(width + 1, 3) + ":" for width in widths])
    lines = [_join_pipes(view.titles, widths), f"|{rule}|"]
    lines += map(_join_pipes, rows, repeat(widths))
    parts = [
        f"## {view.table.title}",
        view.caption,
        "\n".join(lines),
        "\n".join(view.numbered_notes),
        f"*{view.provenance}*" if view.provenance else "",
    ]
    return escape_controls("\n\n".join(filter(None, parts)) + "\n")


def _join_pipes(texts: list[str], widths: list[int]) -> str:
    return "| " + " | ".join(map(str.rjust, texts, widths)) + " |"


def findings_to_markdown(findings: Iterable[Finding], measured_with: str) -> str:
    """Return the findings as a Markdown list. Each starts with its number and interval."""
    lines = ["## Answers", ""]
    for one in findings:
        value = " ".join(filter(None, (f"**{one.marked_number}**", one.interval)))
        lines.append(f"- {one.label}: {value}. {one.sentence}")
        if one.table.rows:
            rule = ["---", *(["---:"] * len(one.table.header[1:]))]
            table = [one.table.header, rule, *one.table.rows]
            rows = [f"  | {' | '.join(texts)} |" for texts in table]
            lines += ["", f"  {one.table.caption}:", "", *rows, ""]
    return escape_controls("\n".join([*lines, "", f"*{measured_with}*"]) + "\n")


Scalar = str | float | None  # a number, a bool or a text; None is nothing or a failed cell
_ENDS = {"low": "low", "high": "high", "deviation": "sd"}  # of intervals, by fields of entries
# The first letters of a formula, also after a tab or a carriage return, which spreadsheets skip.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "'")
_STRING = json.JSONEncoder(ensure_ascii=False)
_EXACT = 1e15  # up to here, a float holds each integer


def typed_columns(page: RenderedTable) -> dict[str, list[Scalar]]:
    """Return the columns of a table, or of a view, for programs.

    The name of a column has its unit. `status` and `cpu_bound` are columns, one for each compared
    value, so that every other column holds values of one type.
    """
    columns: dict[str, list[Scalar]] = {}
    for column in page.grid.columns:
        for name, values in _columns_of(column):
            while name in columns:
                name += "_"
            columns[name] = values
    for group in dict.fromkeys(one.group for one in page.grid.measures):
        own = [one.entries for one in page.grid.measures if one.group == group]
        rows = list(zip(*own, strict=True))
        for name, read in (("status", _status), ("cpu_bound", _is_cpu_bound)):
            full_name, values = _snake(f"{group} {name}"), list(map(read, rows))
            # Unless the table has a measure that says it, or no times that the CPU may bound.
            if full_name not in columns and (read is _status or values.count(None) < len(values)):
                columns[full_name] = values
    return columns


def _columns_of(column: Column) -> Iterator[tuple[str, list[Scalar]]]:
    name = re.sub(r" ± sd$| \[.*\]$", "", column.full_name)
    unit = "" if column.unit.lower() in name.lower().split() else column.unit
    # A key of a mapping is named as in `cells`, such as `model_args.n_layer`.
    is_of_mapping = column.is_key and KEY_NAME.fullmatch(name)
    yield name if is_of_mapping else _snake(f"{name} {unit}"), _values(column.entries)
    for end, suffix in _ENDS.items():
        values = list(map(attrgetter(end), column.entries))
        if values.count(None) < len(values):
            yield _snake(f"{name} {suffix} {unit}"), values


def _status(row: Sequence[Entry]) -> Scalar:
    status = next(filter(None, map(attrgetter("status"), row)), "ok")
    return None if status == "ok" and is_empty(row) else status


def _is_cpu_bound(row: Sequence[Entry]) -> Scalar:
    flags = set(map(attrgetter("is_cpu_bound"), row)) - {None}
    return any(flags) if flags else None


def _values(entries: Sequence[Entry]) -> list[Scalar]:
    if any(entry.number is not None for entry in entries):
        return list(map(attrgetter("number"), entries))
    shown = [entry if not entry.is_missing and not entry.status else None for entry in entries]
    return [entry and (entry.full or str(entry)) for entry in shown]


def _snake(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower().replace("µ", "u")).strip("_")


def to_csv(page: RenderedTable) -> str:
    """Return a table, or a view, as CSV with every digit of a number.

    An apostrophe precedes a text that a spreadsheet would execute as a formula.
    """
    lines: list[str] = []
    columns = typed_columns(page)
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
        values = [
            None if isinstance(value, float) and not math.isfinite(value) else _exact(value)
            for value in row
        ]
        objects.append(dict(zip(columns, values, strict=True)))
    return json.dumps(objects, ensure_ascii=False, indent=1)


def to_typst(page: RenderedTable, max_rows: int | None = None) -> str:
    """Return a Typst `figure` with a caption, which may break across pages.

    Cells are strings, so that nothing in them is markup.
    """
    view = fitting_view(page, max_rows)
    caption = _STRING.encode(printable(f"{page.table.title}. {view.caption} {page.provenance}"))
    titles = list(map("\n".join, heads(view)))
    comments = [f"// {printable(view.left_out)}"] if view.left_out else []
    lines = [
        *comments,
        "#[",
        "#show figure: set block(breakable: true)",
        "#set text(size: 9pt)",
        "#figure(",
        f"  caption: {caption},",
        "  table(",
        f"    columns: {len(titles)}, stroke: none, inset: 4pt,",
        f"    align: ({', '.join(view.sides)},),",
        f"    table.hline(), table.header({_row(titles)}), table.hline(),",
        *(f"    {_row(row)}," for row in view.rows),
        "    table.hline(),",
        "  ),",
        f") <tab-{page.table.name}>",
        "]",
    ]
    if page.grid.notes:
        lines.append(f"#enum({_row(page.grid.notes)})")
    return "\n".join(lines) + "\n"


def _row(values: Iterable[object]) -> str:
    lines = [map(printable, str(value).split("\n")) for value in values]
    return ", ".join(_STRING.encode("\n".join(one)) for one in lines)


def without_tags(text: str) -> str:
    """Escape `<` for renderers of Markdown, which would drop `Functor<float>` as an unknown tag."""
    return text.replace("<", r"\<")


FORMATS: Mapping[str, Callable[[RenderedTable], str]] = {
    "md": lambda page: without_tags(to_markdown(view_of(page, max_rows=None), is_aligned=False)),
    "csv": to_csv,
    "tex": partial(to_latex, max_rows=MAX_ROWS),
    "typ": partial(to_typst, max_rows=MAX_ROWS),
}


# The formats that have every row and every column of a table, and nothing else.
WHOLE: Mapping[str, Callable[[RenderedTable], str]] = {"csv": to_csv, "json": to_json}


def copies_of(page: RenderedTable) -> dict[str, str]:
    """Return what the page shows of a table, in the formats of its copy buttons."""
    view = view_of(page)
    columns = list(map(_as_shown, view.grid.columns))
    return {
        "Markdown": to_markdown(view),
        "CSV": to_csv(replace(view, grid=view.grid._replace(columns=columns))),
        "LaTeX": to_latex(page, MAX_ROWS),
        "Typst": to_typst(page, MAX_ROWS),
    }


def _as_shown(column: Column) -> Column:
    """Return a column with six digits and shortened names: the page holds a copy of each table."""
    entries = []
    for entry in column.entries:
        values = {name: getattr(entry, name) for name in ("number", "low", "high", "deviation")}
        for name, value in values.items():
            if value is not None and not isinstance(value, bool):
                values[name] = float(f"{value:.6g}")
        entries.append(entry._replace(**values, full=entry.full if column.name == NOTES else ""))
    return replace(column, entries=entries)


def files_of(
    pages: Iterable[RenderedTable], formats: Collection[str] = tuple(FORMATS)
) -> Iterator[tuple[str, str]]:
    """Yield file name and content of each table in each format, one at a time."""
    for page in pages:
        for suffix in formats:
            yield f"{page.table.name}.{suffix}", FORMATS[suffix](page)
