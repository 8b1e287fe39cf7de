"""A table of the report: its name, its caption, the cells that it shows, and their layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.analysis.axes import NOTHING
from orchestrator.analysis.results import Results
from orchestrator.report.tables.cell_filters import CellFilter
from orchestrator.report.tables.layouts import PHASE, Header, Layout, Rows

NOTES = "note"  # title of a column of sentences, one a line, that become numbered notes


@dataclass(frozen=True)
class Table:
    """A table of the report. It is left out if no cell passes its filter.

    read: how to read the table, for its caption.
    """

    name: str
    title: str
    read: str
    layout: Layout
    cells: CellFilter = lambda cells: cells

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        """Return the header and rows, without those that have no value besides names of cells."""
        chosen = self.cells(results.cells)
        if chosen.empty:
            return [], []
        header, rows = self.layout.lay_out(replace(results, cells=chosen))
        keys = {*results.axes, PHASE}
        values = [index for index, title in enumerate(header) if title not in keys]
        # Of 1,028 published rows of times, 425 were of cells whose memory alone was measured.
        rows = [row for row in rows if any(row[index] != NOTHING for index in values)]
        header, rows = _without_empty_columns(header, rows)
        has_values = bool(set(header) - {*keys, NOTES})
        return (header, rows) if has_values else ([], [])


def _without_empty_columns(header: Header, rows: Rows) -> tuple[Header, Rows]:
    """Drop the columns that are empty in every row, such as the allocator's peaks on a CPU."""
    visible = [index for index in range(len(header)) if any(row[index] != NOTHING for row in rows)]
    return [header[index] for index in visible], [[row[index] for index in visible] for row in rows]


@dataclass(frozen=True)
class RenderedTable:
    """A table as texts. Rows refer to `notes` by number, starting at 1."""

    table: Table
    header: list[str]
    rows: list[list[str]]
    provenance: str
    notes: tuple[str, ...] = ()
