"""`sweep import`: add traces and memory snapshots of other programs to a run."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli.commands.option_types import RunLocationType
from orchestrator.common.output import ProgressLine, say
from orchestrator.common.run_location import RunLocation
from orchestrator.common.text import path_argument, shell_command


@click.command("import")
@click.argument("files", metavar="FILE…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=RunLocationType(),
    help="Results folder to add the files to; created if missing.  [results/FILE]",
)
@click.option(
    "--phase",
    "phases",
    metavar="NAME=PHASE",
    multiple=True,
    help="Count ranges of this name as forward, backward or optimizer. May be repeated.",
)
@click.option(
    "--steps",
    type=click.IntRange(1, 2**31 - 1),  # the column has 32 bits
    help="Number of training steps in each trace.  [counted from its ranges]",
)
def import_(
    files: tuple[Path, ...], out: RunLocation | None, phases: tuple[str, ...], steps: int | None
) -> None:
    """Add traces and memory snapshots of other programs to a run.

    Each FILE is a trace of torch.profiler (.json or .json.gz), of Nsight Systems (.sqlite or
    .nsys-rep), or a memory snapshot of torch (.pickle). The tables of its kernels and allocations
    are printed.

    Example: sweep import trace.json.gz report1.sqlite --out results/imported
    """
    from orchestrator.analysis.results import choose_cells, load_results
    from orchestrator.report.formats.terminal import Screen, table_text
    from orchestrator.report.tables.registry import lay_out
    from orchestrator.report.tables.views import MAX_ROWS
    from orchestrator.store.open import open_run
    from orchestrator.sweep.trace_import import ImportOptions, import_file, parse_phases

    options = ImportOptions(parse_phases(phases), steps)
    run = open_run(out or Path("results") / (files[0].name.partition(".")[0] or files[0].name))
    cells: list[str] = []
    stored: list[str] = []
    notes: list[str] = []
    for file in files:
        with ProgressLine(f"reading {file}"):
            imported = import_file(file, run, options)
        cells += imported.cells
        noun = "cell" if len(imported.cells) == 1 else "cells"
        source = f"{file} is " if len(files) > 1 else ""
        stored.append(f"{source}stored in {run} as {noun} {', '.join(imported.cells)}")
        notes += imported.notes
    screen = Screen.of_stdout()
    with ProgressLine("making the tables"):
        pages = lay_out(choose_cells(load_results(run), cells))
    for page in pages:
        words = ["sweep", "report", path_argument(run), "--table", page.table.name]
        click.echo(table_text(page, screen, MAX_ROWS, shell_command(words)))
    for note in notes:
        click.echo(note, err=True)
    for line in stored:
        say(line)
