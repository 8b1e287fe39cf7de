"""The whole report of a run as files: answers, tables, charts and the page."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.analysis.results import Results
from orchestrator.common.files import Content, trim_memory
from orchestrator.report.charts.registry import PICTURES, Figure, begin_drawing, figure_files
from orchestrator.report.formats.files import FORMATS, copies_of, files_of, without_tags
from orchestrator.report.formats.markdown import answers_to_markdown
from orchestrator.report.page.cell_details import read_details
from orchestrator.report.page.html import PageContent, to_html
from orchestrator.report.tables.registry import TABLES, lay_out
from orchestrator.report.tables.table import RenderedTable, Table
from orchestrator.report.text.answers import Answer, answers
from orchestrator.report.text.provenance import provenance
from orchestrator.store.run import Run

ANSWERS = "answers.md"


@dataclass(frozen=True)
class RenderedReport:
    """A report whose tables are laid out. `files` makes each file when it is needed."""

    run: Run
    results: Results
    answers: Sequence[Answer]
    pages: Sequence[RenderedTable]
    figures: Sequence[Figure]
    run_argument: str  # names the run in commands of the page
    page: str = "index.html"

    @property
    def words(self) -> str:
        """The answers as Markdown; empty if there are none."""
        return answers_to_markdown(self.answers, provenance(self.results)) if self.answers else ""

    def files(
        self, formats: Collection[str] = tuple(FORMATS), pictures: Collection[str] = PICTURES
    ) -> Iterator[tuple[str, Content]]:
        """Yield path and content of each file. The page is the last."""
        copies = {}
        for page in self.pages:
            yield from files_of([page], formats)
            copies[page.table.name] = copies_of(page)
        if self.words:
            yield ANSWERS, without_tags(self.words)
        yield from figure_files(self.figures, pictures).items()
        self.run.fetch_artifacts()
        content = PageContent(
            self.results,
            self.answers,
            self.pages,
            self.figures,
            read_details(self.run, self.results),
            run_argument=self.run_argument,
            missing=self.run.unfinished_count(),
            copies=copies,
        )
        yield self.page, to_html(content)


def make_report(
    run: Run, results: Results, references: Sequence[Table] = (), folder: Path | None = None
) -> RenderedReport:
    """Return the report of a run.

    references: tables of the published numbers of others. folder: where readers will find the
    run, if it is not there yet.
    """
    figures = begin_drawing(results)
    found, pages = answers(results), lay_out(results, (), (*TABLES, *references))
    trim_memory()  # another process may still draw
    # Once the charts are drawn, there is memory for what is written.
    return RenderedReport(run, results, found, pages, figures(), _shown_path(folder or run.folder))


def _shown_path(folder: Path) -> str:
    """Return the path of a run for commands; one outside this folder would name this machine."""
    if not folder.is_absolute():
        return str(folder)
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else folder.name
