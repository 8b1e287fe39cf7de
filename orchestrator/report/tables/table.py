"""A table of the report: a name, how to read it, which cells it is about and how they are laid out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.analysis.axes import NOTHING
from orchestrator.analysis.results import Results
from orchestrator.report.tables.cell_filters import Selection
from orchestrator.report.tables.layouts import PHASE, Header, Layout, Rows

NOTES = "doubts"  # the title of a column of sentences, one a line, that stand as numbered notes under a table


@dataclass(frozen=True)
class Table:
    """A table of the report.

    read: how to read it, in one line. cells: which rows of the frame it is about; a table without rows is left out.
    """

    name: str
    title: str
    read: str
    layout: Layout
    cells: Selection = lambda cells: cells

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        chosen = self.cells(results.cells)
        if chosen.empty:
            return [], []
        header, rows = self.layout.lay_out(replace(results, cells=chosen))
        keys = {*results.axes, PHASE}
        header, rows = _without_empty_columns(header, _without_empty_rows(header, rows, keys))
        says_something = set(header) - {*keys, NOTES}
        return (header, rows) if says_something else ([], [])


def _without_empty_rows(header: Header, rows: Rows, keys: set[str]) -> Rows:
    """Drops the rows that say nothing but which cell they are of, such as one whose memory alone was measured among times."""
    places = [i for i, title in enumerate(header) if title not in keys]
    return [row for row in rows if any(row[i] != NOTHING for i in places)]


def _without_empty_columns(header: Header, rows: Rows) -> tuple[Header, Rows]:
    """Drops the columns that this run has nothing for, such as the allocator's peaks on the CPU."""
    kept = [i for i in range(len(header)) if any(row[i] != NOTHING for row in rows)]
    if len(kept) == len(header):
        return header, rows
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]
