"""Tables as Markdown, and the choice of the tables that a report has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from orchestrator.analysis.axes import NOTHING
from orchestrator.analysis.results import Results
from orchestrator.common.errors import ConfigError
from orchestrator.common.suggestions import suggestion
from orchestrator.report.tables.entries import Entry
from orchestrator.report.tables.layouts import Heading, TableGrid
from orchestrator.report.tables.registry import FORMER_NAMES, TABLES
from orchestrator.report.tables.table import NOTES, RenderedTable, Table
from orchestrator.report.tables.views import TableView
from orchestrator.report.text.answers import Answer
from orchestrator.report.text.provenance import provenance
from tasks.spec.messages import typed_error_text

_PROBLEM = "this table cannot be made"


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
            grid, settings = table.lay_out(results), table.settings(results)
        except Exception as error:  # one table that fails must not cost the report
            settings = {}
            grid = TableGrid([], [Heading(_PROBLEM)], [[Entry(typed_error_text(error))]])
        if grid.rows:
            page = RenderedTable(table, grid, measured_with, settings=settings)
            rendered.append(_number_notes(page))
    return rendered


def _number_notes(page: RenderedTable) -> RenderedTable:
    """Replace the sentences in the column of notes by numbers, and list each sentence once."""
    if NOTES not in page.header:
        return page
    column = page.header.index(NOTES)
    numbers: dict[str, int] = {}
    rows = []
    for row in page.rows:
        notes = row[column].text.splitlines()
        own = {numbers.setdefault(note, len(numbers) + 1) for note in notes}
        text = ", ".join(map(str, sorted(own))) or NOTHING
        rows.append([*row[:column], Entry(text), *row[column + 1 :]])
    return replace(page, grid=page.grid._replace(rows=rows), notes=tuple(numbers))


def notes_of(notes: Sequence[str], text: str) -> list[str]:
    """Return the sentences that a row refers to by their numbers, such as `1, 3`."""
    return [] if text == NOTHING else [notes[int(number) - 1] for number in text.split(", ")]


def to_markdown(view: TableView, is_aligned: bool = True) -> str:
    """Return a table as Markdown. is_aligned: pad the columns for readers of the source."""
    rows = [_escape_pipes(list(map(str, row))) for row in view.rows]
    # Without padding, a table of many columns takes half the bytes.
    widths = column_widths(view.header, rows) if is_aligned else [0] * len(view.header)
    rule = "|".join(["-" * max(width + 1, 3) + ":" for width in widths])
    lines = [_join_pipes(view.header, widths), f"|{rule}|"]
    lines += [_join_pipes(row, widths) for row in rows]
    notes = [f"{number}. {note}" for number, note in enumerate(view.notes, 1)]
    parts = [
        f"## {view.title}",
        view.caption,
        "\n".join(lines),
        "\n".join(notes),
        f"*{view.provenance}*",
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
