"""The report as one page that needs nothing else: no server, no network, no other file.

Whatever came from outside is escaped by Jinja, or stands in JSON that the page's script puts there as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from orchestrator.analysis.results import Results
from orchestrator.report.charts.registry import Drawing
from orchestrator.report.formats.markdown import RenderedTable
from orchestrator.report.formats.provenance import provenance
from orchestrator.report.key_findings import KeyFinding
from orchestrator.report.page.cell_details import Details
from orchestrator.report.page.packing import PackedCells, packed_chart, packed_rows
from orchestrator.report.tables.formatters import end_location, failure_reason, gib, step_ms, text
from orchestrator.report.tables.layouts import CellRows
from orchestrator.report.tables.table import Table

ROWS_AT_ONCE = 200  # of a table; further ones are shown when asked for, so that ten thousand cells open as fast as ten

_CELLS = Table(
    "cells",
    "Every cell",
    "A click on its id opens all that is known of a cell: parameters, attempts with their evidence, samples, log.",
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


def to_html(
    results: Results,
    missing: int,
    found: Sequence[KeyFinding],
    pages: Sequence[RenderedTable],
    drawing: Drawing,
    details: Details,
    is_published: bool = False,
) -> Iterator[str]:
    """In pieces, of which none grows with the number of cells but for the tables and the texts in which cells differ.

    missing: how many cells are not measured: pending, unless it is published. found: what it says in words. pages: its tables.
    """
    environment = Environment(
        loader=PackageLoader("orchestrator.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "with_code": _with_code,
        "packed_rows": packed_rows,
        "packed_chart": packed_chart,
    }
    environment.policies["json.dumps_function"], environment.policies["json.dumps_kwargs"] = (
        _to_json,
        {},
    )
    figures = drawing.figures()
    packed = PackedCells()
    return environment.get_template("index.html").generate(
        manifest=results.manifest,
        provenance=provenance(results),
        platforms=_platforms(results),
        statuses=_statuses(results, missing, "not measured" if is_published else "pending"),
        answers=found,
        failures=[page for page in pages if page.table.name == _FAILURES],
        figures=figures,
        tables=[page for page in pages if page.table.name != _FAILURES],
        cells=_cells(results),
        series=details.series,
        details=((cell["cell"], packed.pack(cell)) for cell in details.cells),
        packed=packed,
        rows_at_once=ROWS_AT_ONCE,
        vega=Markup(drawing.script()) if any(not figure.problem for figure in figures) else "",
    )


def _to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _statuses(results: Results, missing: int, called: str) -> dict[str, int]:
    ended = {
        str(status): int(count) for status, count in results.cells["status"].value_counts().items()
    }
    return {**ended, called: missing} if ended and missing else ended


def _platforms(results: Results) -> list[dict[str, str]]:
    """The different combinations of hardware and software that cells were measured on; a cell without any says nothing."""
    present = [name for name in _PLATFORM if name in results.cells]
    rows = results.cells[present].drop_duplicates().to_dict("records")
    known = [
        {str(name): str(value) for name, value in row.items() if not pd.isna(value)} for row in rows
    ]
    return [row for row in known if row]


def _with_code(text: str) -> Markup:
    """What stands between backticks, as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _cells(results: Results) -> list[RenderedTable]:
    header, rows = _CELLS.lay_out(results)
    return [RenderedTable(_CELLS, header, rows, provenance(results))] if rows else []
