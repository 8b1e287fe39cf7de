"""A report of thousands of cells: its page has every cell and little to lay out."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import make_run, report
from tests.support.pages import cells_of_page


@pytest.mark.render
@pytest.mark.timeout(280)
def test_the_report_of_many_cells(tmp_path: Path) -> None:
    """A quarter of what benchmarks/report.py makes, in which cells have all their samples."""
    request = make_run(tmp_path / "many", 2_500)
    cells = len(request.expansion.cells)
    cost = report(tmp_path / "many")
    page = (tmp_path / "many" / "report" / "index.html").read_text()
    assert len(set(cells_of_page(page))) == cells == 2_520
    assert page.count("<tr>") < 3_000  # which a browser lays out when it opens the page
    assert cost.peak_mb < 430
