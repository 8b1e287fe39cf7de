"""`sweep report`: print and write the tables of one or more runs."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.commands.option_types import ReferenceDevice, RenamedOption
from orchestrator.common.errors import (
    ConfigError,
)
from orchestrator.store.remote.address import RunLocation, RunLocationType

if TYPE_CHECKING:
    from orchestrator.report.tables.table import Table


@click.command()
@click.argument("run_folders", metavar="RUN...", nargs=-1, required=True, type=RunLocationType())
@click.option("--table", "tables", multiple=True, help="Only this table; may be repeated.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["md", "csv", "tex", "typ"]),
    default="md",
    help="What is printed.  [md]",
)
@click.option(
    "--cells",
    metavar="A,B",
    help="Only these cells, by the beginnings of their ids; the files stay as they are.",
)
@click.option(
    "--where",
    "wheres",
    multiple=True,
    metavar="AXIS=A,AXIS=B|C",
    help="Only the cells that match, as of `sweep run`; as with --cells.",
)
@click.option(
    "--reference",
    "--against",
    cls=RenamedOption,
    type=ReferenceDevice(),
    help="Add the table `reference`: what others published for the same cells on this device.",
)
def report(
    run_folders: tuple[RunLocation, ...],
    tables: tuple[str, ...],
    form: str,
    cells: str | None,
    wheres: tuple[str, ...],
    reference: str | None,
) -> None:
    """Print what the cells of RUN say, in words and in tables, and write it to RUN/report, as Markdown, CSV, LaTeX and Typst.

    Without --table, no more than some sentences and the first rows of each are printed as Markdown; in the files are all.

    Without --table, --cells or --where, also as one page with charts, RUN/report/index.html, and the charts as SVG and PNG.

    With --reference, the table `reference` compares published numbers with the cells that they may belong to.

    Several runs stand in the same tables, told apart by their names; what is written is in a folder within the first.

    Where it cannot be written, the tables are printed all the same, and the exit code is 2.

    Example: sweep report results/demo --table timings
    """
    from orchestrator.analysis.results import choose_cells, choose_where, load_results
    from orchestrator.common.text import cell_count
    from orchestrator.config.selection import parse_selection
    from orchestrator.report.formats.files import FORMATS, files_of
    from orchestrator.report.formats.markdown import first_rows, lay_out, to_markdown
    from orchestrator.report.references.tables import nothing_in_common, reference_tables
    from orchestrator.report.tables.registry import TABLES
    from orchestrator.store.open import open_runs, published_reference

    run, conditions = open_runs(run_folders), parse_selection((), wheres).where
    results = load_results(run)
    beside = reference_tables(reference or published_reference(run))
    some = cells is not None or bool(conditions)
    whole = _whole_report(run, results, beside) if not tables and not some else None
    chosen = results if cells is None else choose_cells(results, _named_cells(cells))
    chosen = choose_where(chosen, conditions) if conditions else chosen
    pages = (
        whole.pages
        if whole
        else lay_out(
            chosen, _with_published(tables, beside if reference else ()), (*TABLES, *beside)
        )
    )
    if form == "md" and whole and whole.words:
        click.echo(whole.first_words)
    for page in pages:
        if form != "md":
            click.echo(FORMATS[form](page))
        elif tables:
            click.echo(to_markdown(page))
        else:
            device = reference if page.table in beside else None
            click.echo(
                first_rows(page, _command_for(page.table.name, run_folders, cells, wheres, device))
            )
    if reference is not None and len(results.cells) and not lay_out(chosen, (), beside):
        click.echo(nothing_in_common(reference), err=True)
    elif not pages:
        click.echo(
            "nothing measured yet"
            if results.cells.empty or not tables
            else f"no cell of these is for {', '.join(tables)}"
        )
    if missing := 0 if some else run.unfinished_count():
        of_each = (
            ", ".join(f"{count} of {name}" for name, count in run.unfinished_runs().items())
            if run.is_published
            else ""
        )
        pending = (
            f"{missing} cells that were asked for are still to be measured: sweep status says which"
        )
        click.echo(f"not measured: {of_each}" if of_each else pending, err=True)
    if results.cells_without_samples:
        click.echo(
            f"of {cell_count(results.cells_without_samples)} that ended well no sample is here: copy the run again, or measure them with --retry ok",
            err=True,
        )
    if some:
        return
    run.write_report(whole.files() if whole else files_of(pages))
    if whole:
        click.echo(f"as one page: {run.folder / 'report' / whole.page}", err=True)


def _whole_report(run: Any, results: Any, beside: tuple[Table, ...]) -> Any:
    """Loads what draws, which a table alone does not need."""
    from orchestrator.report.build import make_report

    return make_report(run, results, beside)


def _named_cells(text: str) -> list[str]:
    """Raises ConfigError where it names none: every id begins with nothing."""
    found = [name for part in text.split(",") if (name := part.strip())]
    if not found:
        raise ConfigError(
            f"--cells {text!r}: names no cell",
            "Write the beginnings of their ids: --cells 3f2a,91c",
        )
    return found


def _with_published(names: tuple[str, ...], beside: tuple[Table, ...]) -> tuple[str, ...]:
    """Who names tables and asks for published numbers wants those too, unless some of them are named."""
    published = tuple(table.name for table in beside)
    return names if not names or set(names) & set(published) else (*names, *published)


def _command_for(
    table: str,
    run_folders: tuple[RunLocation, ...],
    cells: str | None,
    wheres: tuple[str, ...],
    reference: str | None,
) -> str:
    """What prints that table alone, of the same cells."""
    some = [
        *(["--cells", cells] if cells else []),
        *(word for where in wheres for word in ("--where", where)),
    ]
    options = [*some, *(["--reference", reference] if reference else [])]
    return shlex.join(["sweep", "report", *map(str, run_folders), *options, "--table", table])
