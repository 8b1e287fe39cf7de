"""`sweep compare`: is one run faster than another?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.commands.option_types import Percentage
from orchestrator.cli.text import warn_of_incomplete
from orchestrator.common.errors import EXIT_FAILURES, ConfigError
from orchestrator.common.output import ProgressLine
from orchestrator.common.run_location import RunLocation, is_address, require_name, split_cell

if TYPE_CHECKING:
    from orchestrator.analysis.comparison import ComparisonReport
    from orchestrator.report.tables.table import RenderedTable


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--fail-on",
    type=click.Choice(["slower", "faster", "ambiguous"]),
    multiple=True,
    help="Exit with code 1 if more cells of B have this verdict than chance explains. May be"
    " repeated.",
)
@click.option(
    "--threshold",
    default="0%",
    type=Percentage(),
    help="With --fail-on, ignore differences up to this one, such as 3%.  [0%]",
)
@click.option(
    "--table",
    type=click.Choice(["kernel-diff"]),
    help="Show the kernels that differ most between two cells or imported traces.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "md", "csv", "json"]),
    default="text",
    help="Format that is printed. All but text have every column of the table, and nothing else."
    "  [text]",
)
def compare(a: str, b: str, table: str | None, form: str, **gate: Any) -> None:
    """Show which cells of B are faster or slower than in A.

    A and B are two runs, or two cells as RUN:CELL. Measure both with --repeat: a difference must
    exceed the noise, which is how much repetitions of a cell differ.

    Example: sweep compare results/demo results/other
    """
    from orchestrator.analysis.comparison import compare_runs
    from orchestrator.analysis.results import incomplete_cells
    from orchestrator.cli.text.comparison import (
        compare_kernels,
        comparison_table,
        describe_comparison,
    )
    from orchestrator.report.formats.terminal import Screen, table_text
    from orchestrator.report.tables.views import MAX_ROWS
    from orchestrator.store.open import open_run

    (run_a, cell_a), (run_b, cell_b) = _run_and_cell(a), _run_and_cell(b)
    if table:
        cells = (cell_a, cell_b)
        with ProgressLine("comparing"):
            kernels = compare_kernels(open_run(run_a), open_run(run_b), cells)
        if form == "text":
            click.echo(table_text(kernels, Screen.of_stdout(), MAX_ROWS, "--format csv"))
        else:
            click.echo(_printed(kernels, form).rstrip("\n"))
        return
    if bool(cell_a) != bool(cell_b):
        raise ConfigError(
            f"{a} and {b}: one is a run and the other a cell",
            "Name two runs, or two cells as RUN:CELL",
        )
    pair = (cell_a, cell_b) if cell_a else None
    with ProgressLine("comparing"):
        runs = (open_run(run_a), open_run(run_b))
        report = compare_runs(*runs, pair)
    for run in runs:
        warn_of_incomplete(run, incomplete_cells(run))
    if form == "text":
        screen = Screen.of_stdout(may_color=False)
        for line in describe_comparison(report, screen):
            click.echo(screen.text(line))
    else:
        click.echo(_printed(comparison_table(report), form).rstrip("\n"))
    if _differs(report, **gate):
        sys.exit(EXIT_FAILURES)


def _differs(report: ComparisonReport, fail_on: tuple[str, ...], threshold: float) -> bool:
    """Return True if more cells than by chance have one of the verdicts of --fail-on."""
    large = [one for one in report.comparisons if abs(one.ratio.middle - 1) > threshold]
    for verdict in fail_on:
        count = sum(one.change.lower() == verdict for one in large)
        by_chance = 0.0 if verdict == "ambiguous" else report.differing_by_chance
        if count > by_chance:
            return True
    return False


def _printed(table: RenderedTable, form: str) -> str:
    """Return every row and column of a table in a format other than text."""
    from orchestrator.report.formats.files import WHOLE, to_markdown
    from orchestrator.report.tables.views import view_of

    if form == "md":
        return to_markdown(view_of(table, max_rows=None, max_columns=None))
    return WHOLE[form](table)


def _run_and_cell(text: str) -> tuple[RunLocation, str]:
    """Split `RUN:CELL`. A run that is no folder here is looked up in `results`."""
    if is_address(text):
        return split_cell(text)
    folder, colon, cell = text.rpartition(":")
    if not colon:
        folder, cell = text, ""
    # The name of a folder may have colons: the whole text is tried first.
    for run, cell_of_run in ((text, ""), (folder, cell)):
        for path in (Path(require_name(run, "RUN")), Path("results") / run):
            if path.exists():
                return path, cell_of_run
    return Path(folder), cell
