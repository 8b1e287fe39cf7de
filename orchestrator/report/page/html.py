"""The report as one HTML file that works offline.

Texts from outside are escaped by Jinja, or are packed data that the script of the page inserts
as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
# thousand cells therefore opens as fast as one of ten.
ROWS_AT_ONCE = 200

_CELLS = Table(
    "cells",
    "All cells",
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
    """Content of the page. missing: number of cells without a result, called `missing_status`."""

    results: Results
    findings: Sequence[KeyFinding]
    tables: Sequence[RenderedTable]
    drawing: Drawing
    details: Details
    missing: int = 0
    missing_status: str = "pending"


def to_html(content: PageContent) -> Iterator[str]:
    """Yield the page in pieces, so that the details of all cells are never in memory together."""
    results, drawing = content.results, content.drawing
    figures = drawing.figures()
    has_charts = any(not figure.problem for figure in figures)
    return (
        _environment()
        .get_template("index.html")
        .generate(
            manifest=results.manifest,
            provenance=provenance(results),
            platforms=_platforms(results),
            statuses=_statuses(content),
            findings=content.findings,
            failures=[page for page in content.tables if page.table.name == _FAILURES],
            figures=figures,
            tables=[page for page in content.tables if page.table.name != _FAILURES],
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
    statuses: dict[Any, int] = content.results.cells["status"].value_counts().to_dict()
    if statuses and content.missing:
        statuses[content.missing_status] = content.missing
    return statuses


def _platforms(results: Results) -> list[dict[Any, str]]:
    """Return the distinct combinations of hardware and software that cells recorded."""
    platforms = []
    for _, row in results.cells.filter(_PLATFORM).drop_duplicates().iterrows():
        known = row.dropna().astype(str)
        if len(known):
            platforms.append(known.to_dict())
    return platforms


def _with_code(text: str) -> Markup:
    # Escaped first: the text may be a message from outside, and the tags below must stay.
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _cells(results: Results) -> list[RenderedTable]:
    header, rows = _CELLS.lay_out(results)
    return [RenderedTable(_CELLS, header, rows, provenance(results))] if rows else []
