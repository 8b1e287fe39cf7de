"""`sweep status` and `sweep show`: what a results folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.store.remote_address import RunLocation, RunLocationType

if TYPE_CHECKING:
    pass


@click.command()
@click.argument("run_folder", metavar="RUN", type=RunLocationType())
def status(run_folder: RunLocation) -> None:
    """Count the cells of RUN by status; say what failed and why, and what would run next.

    Example: sweep status results/demo
    """
    from orchestrator.cli.text.status import describe_status
    from orchestrator.planning.request import resolve_again
    from orchestrator.store.mirror import open_run

    for line in describe_status(resolve_again(open_run(run_folder))):
        click.echo(line)


@click.command()
@click.argument("run_folder", metavar="RUN", type=RunLocationType())
@click.argument("cell")
def show(run_folder: RunLocation, cell: str) -> None:
    """Show one CELL of RUN, named by the beginning of its id: all that is known of it, and how to
    re-run it by hand.

    Of several that were published together RUN may be their folder, and CELL as it stands in its
    tables: full:3f2a

    Example: sweep show results/demo 3f2a
    """
    from orchestrator.cli.text.cell import describe_cell
    from orchestrator.store.layout import RUN_SEPARATOR
    from orchestrator.store.mirror import open_run
    from orchestrator.store.publication import is_publication

    name, of_several, own = cell.partition(RUN_SEPARATOR)
    if of_several and is_publication(run_folder):
        run_folder, cell = Path(run_folder) / name, own
    for line in describe_cell(open_run(run_folder), cell):
        click.echo(line)
