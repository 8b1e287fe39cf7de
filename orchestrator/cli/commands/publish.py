"""`sweep publish`: copy the results of runs into a folder for others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.commands.option_types import (
    FolderType,
    Megabytes,
    ReferenceDevice,
    RunLocationType,
)
from orchestrator.common.output import ProgressLine, say
from orchestrator.common.run_location import RunLocation
from orchestrator.common.text import cell_count, counted, shell_path

if TYPE_CHECKING:
    from orchestrator.analysis.results import Results
    from orchestrator.common.files import Content
    from orchestrator.publication.publish import Published
    from orchestrator.store.run import Run


@click.command()
@click.argument("run_folders", metavar="RUN...", nargs=-1, required=True, type=RunLocationType())
@click.option(
    "--out",
    required=True,
    type=FolderType(),
    help="Folder to write to. An earlier publication in it is replaced.",
)
@click.option(
    "--limit-mb",
    type=Megabytes(),
    default=25,
    help="Largest size of the folder, in 10⁶ bytes.  [25]",
)
@click.option(
    "--reference",
    type=ReferenceDevice(),
    default="all",
    help="Compare the report with the numbers that others published for this device.  [all]",
)
def publish(
    run_folders: tuple[RunLocation, ...], out: Path, limit_mb: float, reference: str
) -> None:
    """Copy the results of one or more RUNs into a folder for others.

    `sweep report` prints the same tables from this folder on any machine. It contains the tables,
    the config, the evidence of failed cells, and the report as a page, as Markdown and as SVG.
    Names of hosts and users, absolute paths, logs and artifacts are left out.

    Example: sweep publish results/full results/attention --out results/published/h200
    """
    from orchestrator.publication.publish import MB

    with ProgressLine(f"publishing {counted(len(run_folders), 'run')}"):
        published = publish_runs(run_folders, out, round(limit_mb * MB), reference)
    for sentence in published.left_out:
        click.echo(f"left out: {sentence}")
    size = f"{published.size / MB:.1f} MB"
    command = f"sweep report {shell_path(out)}"
    say(f"published {cell_count(published.cells)}, {size}, in {out}: {command}")


def publish_runs(
    folders: Sequence[RunLocation], out: Path, most_bytes: int, reference: str | None
) -> Published:
    """Publish runs together with their report: see `orchestrator/publication/publish.py`."""
    from orchestrator.report.charts.rendering import require_packages

    require_packages()
    from orchestrator.publication.publish import publish
    from orchestrator.report.build import make_report, report_files
    from orchestrator.report.references.tables import reference_tables

    def rendered(run: Run, results: Results) -> Iterator[tuple[str, Content]]:
        report = make_report(run, results, reference_tables(reference), out)
        # `sweep report` makes the other formats from the same data.
        return report_files(report, run, formats=("md",), pictures=("svg",))

    return publish(folders, out, most_bytes, reference, rendered)
