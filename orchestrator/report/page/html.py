"""The report as one HTML file that works offline.

Texts from outside are escaped by Jinja, or are packed data that the script of the page inserts
as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from orchestrator.analysis.results import Results
from orchestrator.report.charts.registry import Drawing
from orchestrator.report.page.cell_details import Details
from orchestrator.report.page.packing import packed
from orchestrator.report.tables.formatters import end_location, failure_reason, gib, step_ms, text
from orchestrator.report.tables.layouts import CellRows
from orchestrator.report.tables.table import RenderedTable, Table
from orchestrator.report.text.key_findings import KeyFinding
from orchestrator.report.text.provenance import provenance

# Rows of a table that are in the HTML; "Show more rows" inserts the others. A report of ten
# thousand cells therefore opens as
# fast as one of ten.
ROWS_AT_ONCE = 200

_CELLS = Table(
    "cells",
    "Every cell",
    "Click an id for everything about a cell: parameters, attempts with evidence, samples, log.",
    CellRows(
        (
            ("task", text("task")),
            ("cell", text("cell")),
            ("status", text("status")),
            ("step ms", step_ms),
            ("peak GiB", gib("peak_allocated_bytes")),
            ("where", end_location),
            ("why", failure_reason),
        )
    ),
)
_PLATFORM = ("gpu", "cpu", "torch", "cuda", "driver", "python", "host")
_FAILURES = "failures"


@dataclass(frozen=True)
class PageContent:
    """Content of the page. missing: the number of cells without a result, which are called
    `missing_status`.
    """

    results: Results
    answers: Sequence[KeyFinding]
    tables: Sequence[RenderedTable]
    drawing: Drawing
    details: Details
    missing: int = 0
    missing_status: str = "pending"


def to_html(content: PageContent) -> Iterator[str]:
    """Yield the page in pieces, so that the details of all cells are never in memory together."""
    results, drawing = content.results, content.drawing
    figures = drawing.figures()
    failures = [page for page in content.tables if page.table.name == _FAILURES]
    tables = [page for page in content.tables if page.table.name != _FAILURES]
    has_charts = any(not figure.problem for figure in figures)
    return (
        _environment()
        .get_template("index.html")
        .generate(
            manifest=results.manifest,
            provenance=provenance(results),
            platforms=_platforms(results),
            statuses=_statuses(content),
            answers=content.answers,
            failures=failures,
            figures=figures,
            tables=tables,
            cells=_cells(results),
            series=content.details.series,
            details=((cell["cell"], packed(cell)) for cell in content.details.cells),
            rows_at_once=ROWS_AT_ONCE,
            vega=Markup(drawing.script()) if has_charts else "",
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("orchestrator.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"with_code": _with_code, "packed": packed}
    return environment


def _statuses(content: PageContent) -> dict[str, int]:
    """Return the number of cells by status."""
    counts = content.results.cells["status"].value_counts()
    statuses = {str(status): int(count) for status, count in counts.items()}
    if statuses and content.missing:
        statuses[content.missing_status] = content.missing
    return statuses


def _platforms(results: Results) -> list[dict[str, str]]:
    """Return the distinct combinations of hardware and software. Cells that recorded none are
    left out.
    """
    present = [name for name in _PLATFORM if name in results.cells]
    platforms = []
    for row in results.cells[present].drop_duplicates().to_dict("records"):
        known = {str(name): str(value) for name, value in row.items() if not pd.isna(value)}
        if known:
            platforms.append(known)
    return platforms


def _with_code(text: str) -> Markup:
    """Return HTML in which text between backticks is code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _cells(results: Results) -> list[RenderedTable]:
    header, rows = _CELLS.lay_out(results)
    return [RenderedTable(_CELLS, header, rows, provenance(results))] if rows else []
