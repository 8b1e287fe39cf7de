"""`sweep publish`: put the results of runs into a folder for others."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.commands.option_types import Megabytes, ReferenceDevice, RenamedOption
from orchestrator.store.remote_address import FolderType, RunLocation, RunLocationType

if TYPE_CHECKING:
    pass


@click.command()
@click.argument("run_folders", metavar="RUN...", nargs=-1, required=True, type=RunLocationType())
@click.option(
    "--out",
    required=True,
    type=FolderType(),
    help="Where to; what was published there is replaced.",
)
@click.option(
    "--limit-mb", type=Megabytes(), default=25, help="How large it may be, in 10⁶ bytes.  [25]"
)
@click.option(
    "--reference",
    "--against",
    cls=RenamedOption,
    type=ReferenceDevice(),
    default="all",
    help="Compare the report with the numbers that others published for this device.  [all]",
)
def publish(
    run_folders: tuple[RunLocation, ...], out: Path, limit_mb: float, reference: str
) -> None:
    """Put what one or more RUNs measured into a folder for others, from which `sweep report` makes
    the same tables anywhere.

    Its parts, its config, the evidence of what failed, and the report as a page, as Markdown and as
    SVG. Names of hosts and users, absolute paths, logs and artifacts stay here.

    Example: sweep publish results/full results/attention --out results/published/h200
    """
    from orchestrator.report.export.export import MB, publish

    done = publish(run_folders, out, round(limit_mb * MB), reference)
    for sentence in done.left_out:
        click.echo(f"left out: {sentence}")
    click.echo(
        f"published {done.cells} cells, {done.size / MB:.1f} MB, in {out}: sweep report {shlex.quote(str(out))}"
    )
