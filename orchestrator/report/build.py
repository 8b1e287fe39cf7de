"""The whole report of a run as files: answers, tables, charts and the page, which is the last."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from orchestrator.analysis.results import Results
from orchestrator.common.files import Content, trim_memory
from orchestrator.report.charts.registry import PICTURES, drawn_figures, figure_files
from orchestrator.report.findings.registry import findings
from orchestrator.report.formats import files
from orchestrator.report.page.cell_data import read_details
from orchestrator.report.page.html import RenderedReport, to_html
from orchestrator.report.tables.registry import TABLES, lay_out
from orchestrator.report.tables.table import Table
from orchestrator.report.text.provenance import provenance
from orchestrator.store.run import Run
from tasks.spec.messages import escape_controls

ANSWERS, PAGE = "answers.md", "index.html"


def make_report(
    run: Run, results: Results, references: Sequence[Table] = (), folder: Path | None = None
) -> RenderedReport:
    """Return the report of a run.

    references: tables of the published numbers of others. folder: where readers will find the
    run, if it does not exist yet.
    """
    figures = drawn_figures(results)
    found, pages = findings(results), lay_out(results, (), (*TABLES, *references))
    trim_memory()  # before the page is written
    shown = folder or run.folder
    if shown.is_absolute():  # a path outside this folder would name this machine
        is_inside = shown.is_relative_to(Path.cwd())
        shown = shown.relative_to(Path.cwd()) if is_inside else Path(shown.name)
    return RenderedReport(results, found, pages, figures, str(shown))


def report_files(
    report: RenderedReport,
    run: Run,
    formats: Collection[str] = tuple(files.FORMATS),
    pictures: Collection[str] = PICTURES,
) -> Iterator[tuple[str, Content]]:
    """Yield path and content of each file of a report, each made when it is needed."""
    copies = {}
    for page in report.pages:
        yield from files.files_of([page], formats)
        copies[page.table.name] = files.copies_of(page)
    if report.findings:
        text = files.findings_to_markdown(report.findings, provenance(report.results))
        yield ANSWERS, files.without_tags(text)
    yield from figure_files(report.figures, pictures).items()
    run.fetch_artifacts()
    details = read_details(run, report.results)
    yield PAGE, map(escape_controls, to_html(report, details, copies, run.unfinished_count()))
