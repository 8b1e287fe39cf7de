"""`sweep compare`: is one run faster than another?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.commands.option_types import Percentage
from orchestrator.common.errors import (
    EXIT_FAILURES,
    ConfigError,
)
from orchestrator.store.remote_address import RunLocation, is_address, require_name, split_cell

if TYPE_CHECKING:
    pass


@click.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option(
    "--fail-on",
    type=click.Choice(["slower", "faster", "ambiguous"]),
    multiple=True,
    help="Exit code 1 if a cell is.",
)
@click.option(
    "--threshold",
    default="0%",
    type=Percentage(),
    help="With --fail-on: only for differences beyond it, such as 3%.  [0%]",
)
def compare(before: str, after: str, fail_on: tuple[str, ...], threshold: float) -> None:
    """Is B faster than A, or is it noise? Each is a run, or one cell of it, as RUN:CELL.

    Measure with --repeat: what repetitions of a cell differ in is the noise that a difference must
    exceed.

    Example: sweep compare results/demo results/other
    """
    from orchestrator.analysis.comparison import compare as held_against
    from orchestrator.report.text.comparison_text import describe_comparison
    from orchestrator.store.mirror import open_run

    (first, one), (second, other) = _run_and_cell(before), _run_and_cell(after)
    if bool(one) != bool(other):
        raise ConfigError(
            f"{before} and {after}: one is a run and the other a cell",
            "Name two runs, or two cells as RUN:CELL",
        )
    a, b = open_run(first), open_run(second)
    report = held_against(a, b, (one, other) if one else None)
    for line in describe_comparison(report):
        click.echo(line)
    bad = [
        one
        for one in report.comparisons
        if one.verdict.lower() in fail_on and abs(one.ratio - 1) > threshold
    ]
    sys.exit(EXIT_FAILURES if bad else 0)


def _run_and_cell(text: str) -> tuple[RunLocation, str]:
    """`RUN` or `RUN:CELL`. A run that is no folder here is looked for in `results`. Names of
    folders may have colons.
    """
    if is_address(text):
        return split_cell(text)
    folder, cell = text.rsplit(":", 1) if ":" in text else (text, "")
    for run, of_it in ((text, ""), (folder, cell)):
        for path in (Path(require_name(run, "RUN")), Path("results") / run):
            if path.exists():
                return path, of_it
    return Path(folder), cell
