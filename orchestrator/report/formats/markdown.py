"""Tables as Markdown, for the terminal and for the report folder of a run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

from orchestrator.analysis.axes import NOTHING
from orchestrator.analysis.cpu_bound import BoundBy
from orchestrator.analysis.results import Results
from orchestrator.common.errors import ConfigError, suggestion
from orchestrator.report.tables.formatters import HOST_MARK, NOISE_MARK
from orchestrator.report.tables.layouts import Header, Rows
from orchestrator.report.tables.registry import FORMER_NAMES, TABLES
from orchestrator.report.tables.table import NOTES, RenderedTable, Table
from orchestrator.report.text.key_findings import KeyFinding
from orchestrator.report.text.provenance import provenance

MOST_ROWS = 40  # rows of a table on the terminal, unless the user named the table
# The title of the column that lists which values of a row have the mark.
_MARKS = {
    HOST_MARK: f"{BoundBy.CPU} ({HOST_MARK})",
    NOISE_MARK: f"within noise ({NOISE_MARK})",
}
_ALL_MARKS = "".join(_MARKS)
_WITH_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_PLUS_MINUS = " ± "  # between a mean and its standard deviation, in values and in titles
_MEAN_SD = re.compile(rf"([\d.]+){_PLUS_MINUS}([\d.]+|{NOTHING})([{_ALL_MARKS}]?)")


def lay_out(
    results: Results, names: Iterable[str] = (), tables: Sequence[Table] = TABLES
) -> list[RenderedTable]:
    """Return the named tables, or all, without those that have no rows.

    Raise ConfigError for an unknown name. A name of an earlier version counts as the current one.
    """
    by_name = {table.name: table for table in tables}
    names = dict.fromkeys(FORMER_NAMES.get(name, name) for name in names)
    for name in names:
        if name not in by_name:
            raise ConfigError(f"there is no table {name!r}", suggestion(name, by_name))
    rendered, measured_with = [], provenance(results)
    for table in [by_name[name] for name in names] or list(tables):
        header, rows = table.lay_out(results)
        if rows:
            # The tables of 10,000 cells have 571,078 values; only 21,922 are distinct.
            rows = [list(map(sys.intern, row)) for row in rows]
            rendered.append(_number_notes(RenderedTable(table, header, rows, measured_with)))
    return rendered


def _number_notes(page: RenderedTable) -> RenderedTable:
    """Replace the sentences in the column of notes by numbers, and list each sentence once."""
    if NOTES not in page.header:
        return page
    column = page.header.index(NOTES)
    numbers: dict[str, int] = {}
    rows = []
    for row in page.rows:
        own = {numbers.setdefault(note, len(numbers) + 1) for note in row[column].splitlines()}
        text = ", ".join(map(str, sorted(own))) or NOTHING
        rows.append([*row[:column], text, *row[column + 1 :]])
    return replace(page, rows=rows, notes=tuple(numbers))


def notes_of(page: RenderedTable, row: Sequence[str]) -> list[str]:
    """Return the sentences that a row refers to."""
    numbers = row[page.header.index(NOTES)] if page.notes else NOTHING
    if numbers == NOTHING:
        return []
    return [page.notes[int(number) - 1] for number in numbers.split(", ")]


def written_out(page: RenderedTable) -> tuple[Header, Rows]:
    """Return header and rows for programs.

    Notes are in full, 12,313 is 12313, and a standard deviation has its own column. Marks are
    removed; one more column for each mark lists the values that have it.
    """
    titles, texts = _split_deviations(page.header, page.rows)
    seen = set("".join(marks_of(text) for row in texts for text in row))
    marks = [mark for mark in _MARKS if mark in seen]
    rows = []
    for row, original in zip(texts, page.rows, strict=True):
        values = [_plain(text) for text in row]
        if page.notes:
            values[titles.index(NOTES)] = " ".join(notes_of(page, original))
        rows.append([*values, *(_marked_with(mark, titles, row) for mark in marks)])
    return [*titles, *(_MARKS[mark] for mark in marks)], rows


def _split_deviations(header: Header, rows: Rows) -> tuple[Header, Rows]:
    """Split each column that has a mean ± its standard deviation. The first part keeps the mark."""
    columns = range(len(header))
    has_sd = [any(_MEAN_SD.fullmatch(row[column]) for row in rows) for column in columns]
    if not any(has_sd):
        return header, rows
    titles: list[str] = []
    for title, is_split in zip(header, has_sd, strict=True):
        titles += _two_titles(title) if is_split else (title,)
    split_rows = []
    for row in rows:
        values: list[str] = []
        for text, is_split in zip(row, has_sd, strict=True):
            values += _two_texts(text) if is_split else (text,)
        split_rows.append(values)
    return titles, split_rows


def _two_titles(title: str) -> tuple[str, str]:
    """Split `forward` into forward and forward sd, `warm-up: mean ± sd` into warm-up: mean and
    warm-up: sd.
    """
    mean, _, deviation = title.partition(_PLUS_MINUS)
    return (mean, mean.removesuffix("mean") + deviation) if deviation else (title, f"{title} sd")


def _two_texts(text: str) -> tuple[str, str]:
    found = _MEAN_SD.fullmatch(text)
    return (f"{found[1]}{found[3]}", found[2]) if found else (text, NOTHING)


def _marked_with(mark: str, header: Header, row: list[str]) -> str:
    values = zip(header, row, strict=True)
    return "; ".join(title for title, text in values if mark in marks_of(text)) or NOTHING


def marks_of(text: str) -> str:
    """Return the marks behind a number."""
    return text[len(text.rstrip(_ALL_MARKS)) :] if text[:1].isdigit() else ""


def _plain(text: str) -> str:
    """Remove the mark of a number and the commas between its thousands. Other texts stay as they
    are.
    """
    text = text.removesuffix(marks_of(text))
    return text.replace(",", "") if "," in text and _WITH_THOUSANDS.fullmatch(text) else text


def first_rows(page: RenderedTable, command: str) -> str:
    """Return a table for the terminal with its first rows, and the command that prints all of
    them.
    """
    more = len(page.rows) - MOST_ROWS
    if more <= 0:
        return to_markdown(page)
    rows = "1 row" if more == 1 else f"{more:,} rows"
    shown = replace(page, rows=page.rows[:MOST_ROWS])
    return to_markdown(shown, below=f"… and {rows} more: {command}")


def to_markdown(page: RenderedTable, aligned: bool = True, below: str = "") -> str:
    """Return a table as Markdown.

    aligned: pad the columns for readers of the source. Without padding, a table of many columns
    takes half the bytes. below: a line after the rows.
    """
    rows = [_escape_pipes(row) for row in page.rows]
    widths = column_widths(page.header, rows) if aligned else [0] * len(page.header)
    rule = "|".join("-" * max(width + 1, 3) + ":" for width in widths)
    lines = [_join_pipes(page.header, widths), f"|{rule}|"]
    lines += [_join_pipes(row, widths) for row in rows]
    notes = [f"{number}. {note}" for number, note in enumerate(page.notes, 1)]
    parts = [
        f"## {page.table.title}",
        page.table.read,
        "\n".join(lines),
        below,
        "\n".join(notes),
        f"*{page.provenance}*",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def column_widths(header: list[str], rows: list[list[str]]) -> list[int]:
    """Return the widths of columns in characters."""
    # tabulate would align the whole table, but takes a minute for ten thousand cells.
    columns = zip(header, *rows, strict=True)
    return [max(len(title) + 2, *map(len, texts)) for title, *texts in columns]


def _join_pipes(texts: list[str], widths: list[int]) -> str:
    return "| " + " | ".join(map(str.rjust, texts, widths)) + " |"


def _escape_pipes(row: list[str]) -> list[str]:
    """Escape what would end a table cell."""
    whole = "".join(row)
    if "|" not in whole and "\n" not in whole:
        return row  # the fast path: almost every row
    return [text.replace("|", "\\|").replace("\n", " ") for text in row]


def answers_to_markdown(found: Iterable[KeyFinding], measured_with: str) -> str:
    """Return the key findings as Markdown."""
    parts = ["## In words"]
    for one in found:
        sentences = [f"- {sentence}" for sentence in one.sentences]
        parts.append("\n".join([f"### {one.question}", "", *sentences]))
    return "\n\n".join([*parts, f"*{measured_with}*"]) + "\n"
