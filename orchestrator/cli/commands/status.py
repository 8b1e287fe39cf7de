"""`sweep status` and `sweep show`: what a results folder holds."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli.commands.option_types import RunLocationType
from orchestrator.cli.text import warn_of_incomplete
from orchestrator.common.output import ProgressLine
from orchestrator.common.run_location import RunLocation


@click.command()
@click.argument("run_folder", metavar="RUN", type=RunLocationType())
def status(run_folder: RunLocation) -> None:
    """Show how many cells of RUN are done, what failed, and what is left.

    Example: sweep status results/demo
    """
    with ProgressLine("reading the run"):
        from orchestrator.cli.text.plan import describe_status
        from orchestrator.planning.cell_decisions import leave_out_wider, plan_request
        from orchestrator.planning.request import resolve_again
        from orchestrator.store.open import open_run

        request = resolve_again(open_run(run_folder))
        host_gpus = request.run.read_manifest().get("host_gpus", [])
        plan = leave_out_wider(plan_request(request), host_gpus)
    warn_of_incomplete(request.run, plan.incomplete)
    for line in describe_status(request, plan):
        click.echo(line)


@click.command()
@click.argument("run_folder", metavar="RUN", type=RunLocationType())
@click.argument("cell", required=False)
@click.option(
    "--traceback",
    "with_traceback",
    is_flag=True,
    help="End with the whole message and traceback of the last attempt.",
)
def show(run_folder: RunLocation, cell: str | None, with_traceback: bool) -> None:
    """Show everything about one CELL of RUN.

    Prints its parameters, attempts, samples and log, and the command that measures it again by
    hand; of a cell that ran out of memory, also the cheapest changes that fit. CELL is the beginning of the cell's id. If several runs were published together, RUN may
    be their folder, and CELL is written as in its tables: full:3f2a. Without CELL, it lists the
    cells with their ids.

    Example: sweep show results/demo 3f2a
    """
    from orchestrator.cli.text.cell import describe_cell, list_cells
    from orchestrator.cli.text.changes import changes_of_stored
    from orchestrator.store.layout import RUN_SEPARATOR
    from orchestrator.store.open import open_run
    from orchestrator.store.run_collection import is_publication

    name, separator, cell_of_run = (cell or "").partition(RUN_SEPARATOR)
    if separator and is_publication(run_folder):
        run_folder, cell = Path(run_folder) / name, cell_of_run
    with ProgressLine("reading the run"):
        run = open_run(run_folder)
        if cell is None:
            lines = list(list_cells(run))
        else:
            lines = list(describe_cell(run, cell, with_traceback))
    click.echo("\n".join(lines))
    if cell is not None and not with_traceback:
        for line in changes_of_stored(run, cell):
            click.echo(line)
