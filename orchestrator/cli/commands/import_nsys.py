"""`sweep import-nsys`: add a trace of Nsight Systems to a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.store.remote_address import RunLocation, RunLocationType

if TYPE_CHECKING:
    pass


@click.command("import-nsys")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--out", type=RunLocationType(), help="The run to add it to, or a new folder.  [results/FILE]"
)
def import_nsys(file: Path, out: RunLocation | None) -> None:
    """Add the kernels of FILE, which Nsight Systems wrote (.sqlite or .nsys-rep), to a run, and
    print their tables.

    Example: sweep import-nsys report1.sqlite --out results/imported
    """
    from orchestrator.analysis.results import choose_cells, load_results
    from orchestrator.report.formats.markdown import lay_out, to_markdown
    from orchestrator.store.mirror import open_run
    from orchestrator.sweep.nsys_import import import_nsys

    run = open_run(out or Path("results") / file.stem)
    cell = import_nsys(file, run)
    for page in lay_out(choose_cells(load_results(run), [cell])):
        click.echo(to_markdown(page))
    click.echo(f"kept in {run} as cell {cell}")
