"""Tables and findings as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from orchestrator.report.findings.finding import Finding
from orchestrator.report.tables.table import Entry
from orchestrator.report.tables.views import TableView
from tasks.spec.messages import escape_controls


def to_markdown(view: TableView, is_aligned: bool = True) -> str:
    """Return a table as Markdown. is_aligned: pad the columns for readers of the source."""
    rows = [list(map(_escaped, row)) for row in view.rows]
    # Without padding, a table of many columns takes half the bytes.
    widths = _column_widths(view.header, rows) if is_aligned else [0] * len(view.header)
    rule = "|".join(["-" * max(width + 1, 3) + ":" for width in widths])
    lines = [_join_pipes(view.header, widths), f"|{rule}|"]
    lines += map(_join_pipes, rows, repeat(widths))
    parts = [
        f"## {view.page.table.title}",
        view.caption,
        "\n".join(lines),
        "\n".join(view.numbered_notes),
        f"*{view.page.provenance}*" if view.page.provenance else "",
    ]
    return escape_controls("\n\n".join(filter(None, parts)) + "\n")


def _column_widths(header: list[str], rows: list[list[str]]) -> list[int]:
    """Return the widths of columns in characters."""
    # tabulate would align the whole table, but takes a minute for ten thousand cells.
    columns = zip(header, *rows, strict=True)
    return [max(len(title) + 2, *map(len, texts)) for title, *texts in columns]


def _join_pipes(texts: list[str], widths: list[int]) -> str:
    return "| " + " | ".join(map(str.rjust, texts, widths)) + " |"


def _escaped(entry: Entry) -> str:
    """Return the text of an entry, in which nothing ends a table cell."""
    return str(entry).replace("|", "\\|").replace("\n", " ")


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
