"""`sweep report`: print and write the tables of one or more runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.commands.option_types import ReferenceDevice, RunLocationType
from orchestrator.cli.text import warn_of_incomplete
from orchestrator.common.errors import ConfigError
from orchestrator.common.files import return_freed_memory
from orchestrator.common.output import ProgressLine
from orchestrator.common.run_location import RunLocation
from orchestrator.common.text import path_argument, shell_command, shell_path
from tasks.spec.messages import escape_unprintable

if TYPE_CHECKING:
    from orchestrator.analysis.results import Results
    from orchestrator.report.page.html import RenderedReport
    from orchestrator.report.tables.table import RenderedTable, Table
    from orchestrator.store.run import Run

# Nobody reads more on a screen, and laying out a row takes a millisecond.
MOST_ROWS = 2_000


@dataclass(frozen=True)
class ReportOptions:
    """The options of `sweep report`. `cells`: beginnings of ids, separated by commas."""

    run_folders: tuple[RunLocation, ...]
    tables: tuple[str, ...]
    form: str
    cells: str | None
    wheres: tuple[str, ...]
    reference: str | None
    columns: str | None

    @property
    def column_names(self) -> list[str]:
        return [name.strip() for name in (self.columns or "").split(",") if name.strip()]

    @property
    def selects_cells(self) -> bool:
        return self.cells is not None or bool(self.wheres)

    @property
    def command(self) -> str:
        """The command for the same cells, to which `--table NAME` may be added."""
        words = ["sweep", "report", *map(path_argument, self.run_folders)]
        if self.cells:
            words += ["--cells", self.cells]
        for where in self.wheres:
            words += ["--where", where]
        if self.reference:
            words += ["--reference", self.reference]
        return shell_command(words)


@click.command()
@click.argument("run_folders", metavar="RUN...", nargs=-1, required=True, type=RunLocationType())
@click.option(
    "--table",
    "tables",
    multiple=True,
    help=f"Print only this table, with all its rows, or a slice of one with more than {MOST_ROWS:,}."
    " May be repeated; `list` names all tables.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "md", "csv", "tex", "typ", "json"]),
    default="text",
    help="Format that is printed.  [text]",
)
@click.option(
    "--cells",
    metavar="A,B",
    help="Print only these cells, by the beginnings of their ids. Writes no files.",
)
@click.option(
    "--where",
    "wheres",
    multiple=True,
    metavar="AXIS=A,AXIS=B|C",
    help="Print only cells that match. Writes no files.",
)
@click.option(
    "--columns",
    metavar="A,B",
    help="Print only these columns of the tables, by their titles in the table.",
)
@click.option(
    "--reference",
    type=ReferenceDevice(),
    help="Add the table `reference`: what others published for the same cells on this device.",
)
def report(**chosen: Any) -> None:
    """Print an overview of RUN, and write its tables to RUN/report.

    The files are Markdown, CSV, LaTeX and Typst. LaTeX and Typst have at most 20 rows and the
    columns that fit the page: --where selects other rows. With --format and without --table, all
    tables are printed; as JSON, one object for each cell.

    Without --table, --cells and --where, it also writes one page with charts,
    RUN/report/index.html, and the charts as SVG and PNG.

    With several runs, each table has the cells of all of them, with the name of their run. The
    files are written into a folder in the first run.

    If the files cannot be written, the tables are printed and the exit code is 2.

    Example: sweep report results/demo --table timings
    """
    options = ReportOptions(**chosen)
    if "list" in options.tables:
        click.echo(_listed_tables())
        return
    # Large tables are read first and large texts built then: one would add to the other.
    return_freed_memory()
    with ProgressLine("reading the results"):
        from orchestrator.analysis.results import load_results
        from orchestrator.report.formats.files import files_of
        from orchestrator.report.formats.terminal import Screen, overview
        from orchestrator.store.open import open_runs

        run = open_runs(options.run_folders)
        results = load_results(run)
        selected = _selected_cells(results, options)
    references: tuple[Table, ...] = ()
    if device := options.reference or run.reference:
        from orchestrator.report.references.tables import reference_tables

        references = reference_tables(device)
    whole = None
    with ProgressLine("making the tables"):
        if options.tables or options.selects_cells or options.columns is not None:
            pages = _chosen_tables(selected, options, references)
        else:
            whole = _whole_report(run, results, references)
            pages = whole.pages
    if whole and options.form == "text" and pages:
        screen = Screen.of_stdout()
        click.echo(overview(results, whole.findings, pages, options.command, screen))
    elif options.form == "json" and not options.tables:
        click.echo(selected.cells.to_json(orient="records", date_format="iso", indent=1))
    else:
        for text in _printed(pages, options):
            click.echo(text)
    _warn_of_missing_tables(selected, options, pages, references)
    _warn_of_missing_results(run, results, options)
    if whole:
        from orchestrator.report.build import PAGE, report_files

        with ProgressLine("drawing the charts"):
            run.write_report(report_files(whole, run))
        page = escape_unprintable(str(run.folder / "report" / PAGE))
        click.echo(f"as one page: {page}", err=True)
    elif not options.selects_cells and options.columns is None:
        with ProgressLine("writing the files"):
            run.write_report(files_of(pages))


def _whole_report(run: Run, results: Results, references: tuple[Table, ...]) -> RenderedReport:
    from orchestrator.report.charts.rendering import require_packages

    require_packages()
    # The import loads what draws charts and fills the page, which a single table does not need.
    from orchestrator.report.build import make_report

    return make_report(run, results, references)


def _selected_cells(results: Results, options: ReportOptions) -> Results:
    from orchestrator.analysis.results import choose_cells, choose_where

    if options.cells is not None:
        results = choose_cells(results, _cell_prefixes(options.cells))
    if options.wheres:
        from orchestrator.config.selection import parse_selection

        results = choose_where(results, parse_selection((), options.wheres).where)
    return results


def _cell_prefixes(text: str) -> list[str]:
    """Return the beginnings of ids. Raise ConfigError if there are none."""
    # An empty beginning, as after a comma at the end, would select every cell.
    prefixes = [part.strip() for part in text.split(",") if part.strip()]
    if not prefixes:
        raise ConfigError(
            f"--cells {text!r}: names no cell",
            "Write the beginnings of their ids: --cells 3f2a,91c",
        )
    return prefixes


def _chosen_tables(
    selected: Results, options: ReportOptions, references: tuple[Table, ...]
) -> Sequence[RenderedTable]:
    """Return the named tables, and those of published numbers if --reference is given."""
    from orchestrator.report.tables.registry import TABLES, lay_out
    from orchestrator.report.tables.table import with_columns

    names = options.tables
    if options.columns is not None and not names:
        raise ConfigError("--columns without --table", "Name the table whose columns these are")
    if names and options.reference:
        names += tuple(table.name for table in references if table.name not in names)
    pages = lay_out(selected, names, (*TABLES, *references))
    if options.column_names:
        pages = [with_columns(page, options.column_names) for page in pages]
    return pages


def _printed(pages: Sequence[RenderedTable], options: ReportOptions) -> Iterator[str]:
    from orchestrator.report.formats.files import WHOLE, to_markdown, to_typst
    from orchestrator.report.formats.latex import to_latex
    from orchestrator.report.formats.terminal import Screen, table_text
    from orchestrator.report.tables.views import MAX_ROWS, view_of

    # Whoever selects cells wants all of them, on as many pages as they need.
    max_rows = None if options.selects_cells else MAX_ROWS
    screen = Screen.of_stdout()
    if options.form in ("text", "md"):
        pages = _with_provenance_at_the_end(pages)
    for page in pages:
        if options.form == "text":
            rows: int | None = MAX_ROWS
            if options.tables:
                rows = None if page.row_count <= MOST_ROWS else MOST_ROWS
            command = f"{options.command} --table {page.table.name} --format csv"
            yield table_text(page, screen, rows, command) + "\n"
        elif options.form == "tex":
            yield to_latex(page, max_rows)
        elif options.form == "typ":
            yield to_typst(page, max_rows)
        elif options.form == "md":
            yield to_markdown(view_of(page, max_rows=None))
        else:
            yield WHOLE[options.form](page)


def _with_provenance_at_the_end(pages: Sequence[RenderedTable]) -> list[RenderedTable]:
    """Return the tables so that the line on hardware and software follows the last one only."""
    # Tables of one report have it in common.
    return [*(replace(page, provenance="") for page in pages[:-1]), *pages[-1:]]


def _listed_tables() -> str:
    from orchestrator.report.tables.registry import TABLES

    width = max(len(table.name) for table in TABLES) + 1
    lines = []
    for is_default in (True, False):
        lines.append("Shown on the page:" if is_default else "\nOn demand:")
        own = [table for table in TABLES if table.is_default == is_default]
        lines += [f"  {table.name:{width}} {table.title}" for table in own]
    return "\n".join(lines)


def _warn_of_missing_tables(
    selected: Results,
    options: ReportOptions,
    pages: Sequence[RenderedTable],
    references: tuple[Table, ...],
) -> None:
    from orchestrator.report.tables.registry import lay_out

    has_cells = len(selected.cells) > 0
    if options.reference is not None and has_cells and not lay_out(selected, (), references):
        from orchestrator.report.references.tables import nothing_in_common

        click.echo(nothing_in_common(options.reference), err=True)
    elif not pages and has_cells and options.tables:
        names = ", ".join(options.tables)
        remedy = "Some tables need an instrument, such as --instrument kernels"
        click.echo(f"these cells have no numbers for --table {names}. {remedy}", err=True)
    elif not pages:
        click.echo("nothing measured yet")


def _warn_of_missing_results(run: Run, results: Results, options: ReportOptions) -> None:
    """Print on stderr which requested cells are not measured, and which have no samples."""
    from orchestrator.common.text import cell_count, cells_and_verb

    warn_of_incomplete(run, results.incomplete)
    missing = 0
    if not options.selects_cells:  # a selection says nothing about the other cells
        missing = run.unfinished_count()
    # A published run is closed: its cells are not measured later.
    if missing and run.is_published:
        counts = [
            f"{left} of {asked} of {name}" for name, (left, asked) in run.unfinished().items()
        ]
        click.echo(f"not measured: {', '.join(counts)}", err=True)
    elif missing:
        commands = [f"`sweep status {shell_path(folder)}`" for folder in options.run_folders]
        verb = "lists" if len(commands) == 1 else "list"
        cells = cells_and_verb(missing, "is", "are")
        asked = f"{cells} asked for and not measured yet"
        click.echo(f"{asked}: {' and '.join(commands)} {verb} what is left", err=True)
    if results.cells_without_samples:
        click.echo(
            f"{cell_count(results.cells_without_samples)} succeeded but have no samples here. "
            "Copy the run again, or measure them again with --retry ok",
            err=True,
        )
