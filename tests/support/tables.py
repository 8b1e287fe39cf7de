"""Rows of tables as a reader sees them."""

from __future__ import annotations

from orchestrator.report.tables.table import RenderedTable


def texts_of(page: RenderedTable) -> list[list[str]]:
    """Return the rows of a table as texts with their marks."""
    return [list(map(str, row)) for row in page.rows]


def records_of_texts(page: RenderedTable) -> list[dict[str, str]]:
    """Return the rows of a table as texts by their headings."""
    return [dict(zip(page.header, row, strict=True)) for row in texts_of(page)]
