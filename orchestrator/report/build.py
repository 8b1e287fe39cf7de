"""The whole report of a run as files: key findings, tables, charts and the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.analysis.results import Results
from orchestrator.common.files import Content
from orchestrator.report.charts.registry import PICTURES, Drawing, begin_drawing, figure_files
from orchestrator.report.formats.files import FORMATS, files_of, without_tags
from orchestrator.report.formats.markdown import findings_to_markdown, lay_out
from orchestrator.report.page.cell_details import read_details
from orchestrator.report.page.html import PageContent, to_html
from orchestrator.report.tables.registry import TABLES
from orchestrator.report.tables.table import RenderedTable, Table
from orchestrator.report.text.key_findings import KeyFinding, key_findings, shorten
from orchestrator.report.text.provenance import provenance
from orchestrator.store.artifacts import read_artifacts
from orchestrator.store.run import Run

if TYPE_CHECKING:
    from collections.abc import Collection

PAGE = "index.html"
FINDINGS = "answers.md"


@dataclass(frozen=True)
class RenderedReport:
    """A report whose tables are laid out. `files` makes each file when it is needed."""

    run: Run
    results: Results
    found: Sequence[KeyFinding]
    pages: Sequence[RenderedTable]
    drawing: Drawing

    @property
    def words(self) -> str:
        """The key findings as Markdown; empty if there are none."""
        return self._in_markdown(self.found)

    @property
    def first_words(self) -> str:
        """The key findings for a terminal, shortened."""
        file = str(self.run.folder / "report" / FINDINGS)
        return self._in_markdown([shorten(finding, file) for finding in self.found])

    def _in_markdown(self, found: Sequence[KeyFinding]) -> str:
        return findings_to_markdown(found, provenance(self.results)) if found else ""

    def files(
        self, formats: Collection[str] = tuple(FORMATS), pictures: Collection[str] = PICTURES
    ) -> Iterator[tuple[str, Content]]:
        """Yield path and content of each file. The page is the last."""
        yield from files_of(self.pages, formats)
        if self.words:
            yield FINDINGS, without_tags(self.words)
        yield from figure_files(self.drawing.figures(), pictures).items()
        self.drawing.script()  # nothing is drawn after this, so there is memory for the samples
        self.run.fetch_artifacts()
        details = read_details(self.run, self.results, partial(read_artifacts, self.run))
        content = PageContent(
            self.results,
            self.found,
            self.pages,
            self.drawing,
            details,
            missing=self.run.unfinished_count(),
            missing_status="not measured" if self.run.is_published else "pending",
        )
        yield PAGE, to_html(content)


def make_report(run: Run, results: Results, references: Sequence[Table] = ()) -> RenderedReport:
    """Return the report of a run. references: tables of the published numbers of others."""
    drawing = begin_drawing(results)
    report = RenderedReport(
        run, results, key_findings(results), lay_out(results, (), (*TABLES, *references)), drawing
    )
    drawing.figures()  # once they are drawn, there is memory for what is written
    return report
