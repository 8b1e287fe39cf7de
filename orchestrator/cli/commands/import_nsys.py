"""`sweep import-nsys`: add a trace of Nsight Systems to a run."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.store.remote_address import RunLocation, RunLocationType


@click.command("import-nsys")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=RunLocationType(),
    help="Results folder to add the trace to; created if missing.  [results/FILE]",
)
def import_nsys(file: Path, out: RunLocation | None) -> None:
    """Add the kernels of an Nsight Systems trace to a run.

    FILE is an .sqlite or .nsys-rep file. The tables of its kernels are printed.

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
    click.echo(f"stored in {run} as cell {cell}")
