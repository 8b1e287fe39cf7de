"""Tables as Markdown, for the terminal and for the report folder of a run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from orchestrator.analysis.axes import NOTHING
from orchestrator.analysis.cpu_bound import BoundBy
from orchestrator.analysis.results import Results
from orchestrator.common.errors import ConfigError
from orchestrator.common.suggestions import suggestion
from orchestrator.report.tables.formatters import HOST_MARK, NOISE_MARK
from orchestrator.report.tables.layouts import Header, Rows
from orchestrator.report.tables.registry import FORMER_NAMES, TABLES
from orchestrator.report.tables.table import NOTES, RenderedTable, Table
from orchestrator.report.text.answers import Answer
from orchestrator.report.text.provenance import provenance
from tasks.spec.messages import typed_error_text

MAX_ROWS = 40  # rows of a table on the terminal, unless the user named the table
# The title of the column that lists which values of a row have the mark.
_MARKS = {
    HOST_MARK: f"{BoundBy.CPU} ({HOST_MARK})",
    NOISE_MARK: f"within noise ({NOISE_MARK})",
}
_PROBLEM = "this table cannot be made"
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
    for name in names or by_name:
        table = by_name[name]
        try:
            header, rows = table.lay_out(results)
        except Exception as error:  # one table that fails must not cost the report
            header, rows = [_PROBLEM], [[typed_error_text(error)]]
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
    if not page.notes or row[page.header.index(NOTES)] == NOTHING:
        return []
    numbers = row[page.header.index(NOTES)].split(", ")
    return [page.notes[int(number) - 1] for number in numbers]


def table_for_programs(page: RenderedTable) -> tuple[Header, Rows]:
    """Return header and rows in a form that programs can read.

    Notes are in full, 12,313 is 12313, and a standard deviation has its own column. Marks are
    removed; one more column for each mark lists the values that have it.
    """
    titles, texts = _split_deviations(page.header, page.rows)
    seen = "".join(set(map(marks_of, chain.from_iterable(texts))))
    marks = [mark for mark in _MARKS if mark in seen]
    rows = []
    for row, original in zip(texts, page.rows, strict=True):
        values = list(map(_without_marks, row))
        if page.notes:
            values[titles.index(NOTES)] = " ".join(notes_of(page, original))
        for mark in marks:
            values.append("; ".join(_marked_titles(mark, titles, row)) or NOTHING)
        rows.append(values)
    return [*titles, *[_MARKS[mark] for mark in marks]], rows


def _marked_titles(mark: str, titles: Header, row: list[str]) -> list[str]:
    return [title for title, text in zip(titles, row, strict=True) if mark in marks_of(text)]


def _split_deviations(header: Header, rows: Rows) -> tuple[Header, Rows]:
    """Split each column that has a mean ± its standard deviation. The first part keeps the mark."""
    titles: list[str] = []
    columns: list[list[str]] = []
    for title, *texts in zip(header, *rows, strict=True):
        found = list(map(_MEAN_SD.fullmatch, texts))
        if not any(found):
            titles.append(title)
            columns.append(texts)
            continue
        # `warm-up: mean ± sd` becomes `warm-up: mean` and `warm-up: sd`; others get a second title.
        first, _, second = title.partition(_PLUS_MINUS)
        titles += [first, first.removesuffix("mean") + second if second else f"{first} sd"]
        means, deviations = [], []
        for text, parts in zip(texts, found, strict=True):
            mean, deviation = (parts[1] + parts[3], parts[2]) if parts else (text, NOTHING)
            means.append(mean)
            deviations.append(deviation)
        columns += [means, deviations]
    return titles, list(map(list, zip(*columns, strict=True)))


def marks_of(text: str) -> str:
    """Return the marks behind a number."""
    if not text[:1].isdigit():
        return ""
    return text[len(text.rstrip(_ALL_MARKS)) :]


def _without_marks(text: str) -> str:
    """Remove the mark of a number and the commas between its thousands."""
    text = text.removesuffix(marks_of(text))
    if "," in text and _WITH_THOUSANDS.fullmatch(text):
        return text.replace(",", "")
    return text


def first_rows(page: RenderedTable, command: str) -> str:
    """Return the first rows of a table for the terminal, and the command that prints all."""
    surplus = len(page.rows) - MAX_ROWS
    if surplus <= 0:
        return to_markdown(page)
    noun = "row" if surplus == 1 else "rows"
    shown = replace(page, rows=page.rows[:MAX_ROWS])
    return to_markdown(shown, below=f"… and {surplus:,} more {noun}: {command}")


def to_markdown(page: RenderedTable, aligned: bool = True, below: str = "") -> str:
    """Return a table as Markdown.

    aligned: pad the columns for readers of the source.
    below: a line after the rows.
    """
    rows = list(map(_escape_pipes, page.rows))
    # Without padding, a table of many columns takes half the bytes.
    widths = [0] * len(page.header)
    if aligned:
        widths = column_widths(page.header, rows)
    rule = "|".join(["-" * max(width + 1, 3) + ":" for width in widths])
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
    return "\n\n".join(filter(None, parts)) + "\n"


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


def answers_to_markdown(answers: Iterable[Answer], measured_with: str) -> str:
    """Return the answers as a Markdown list. Each starts with its number and interval."""
    lines = ["## Answers", ""]
    for answer in answers:
        value = " ".join(filter(None, (f"**{answer.number}**", answer.interval)))
        lines.append(f"- {answer.label}: {value}. {answer.sentence}")
    return "\n".join([*lines, "", f"*{measured_with}*"]) + "\n"
