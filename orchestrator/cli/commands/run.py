"""`sweep run`: measure the cells of a config. Other commands that measure end as it does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from orchestrator.cli.commands.options import (
    CELL_OPTIONS,
    CONFIG_OPTIONS,
    EXECUTION_OPTIONS,
    parse_request,
)
from orchestrator.common.output import say
from orchestrator.common.text import shell_command, without_options, without_separator

if TYPE_CHECKING:
    from orchestrator.sweep.outcome_log import SweepResult


@click.command(params=[*CONFIG_OPTIONS, *CELL_OPTIONS, *EXECUTION_OPTIONS])
@click.option(
    "--skip-predicted-oom",
    is_flag=True,
    help="Leave out the cells that are predicted to run out of memory.",
)
def run(config: Path, **chosen: object) -> None:
    """Measure the cells of CONFIG that are missing or failed.

    Run the same command again to continue where it stopped.

    Example: sweep run configs/demo.yaml
    """
    # Ray, pandas and pyarrow take seconds to import, during which the terminal would stay empty.
    starting = "" if chosen["scheduler"] == "serial" else ", starting Ray"
    say(f"preparing: importing torch{starting}")
    from orchestrator.sweep.console import SweepConsole
    from orchestrator.sweep.pipeline import Runtime, run_sweep

    request = parse_request({"config": config, **chosen})
    result = run_sweep(request, Runtime(SweepConsole(request.expansion.label)))
    end_with(result)


def end_with(result: SweepResult) -> NoReturn:
    """Print the end of a sweep and exit. Raise the error that stopped it."""
    from orchestrator.cli.text.sweep_result import OUT_OF_MEMORY, conclude
    from orchestrator.planning.invocation import REPEATS_WORK

    arguments = without_separator(sys.argv[1:])
    command = shell_command(["sweep", *arguments])
    again = shell_command(["sweep", *without_options(arguments, REPEATS_WORK)])
    lines, exit_code = conclude(result, command, again)
    for line in lines:
        # Not click.echo: a sweep ends well even if nobody reads its output.
        say(line)
    if set(OUT_OF_MEMORY) & set(result.counts) and Path(result.folder).is_dir():
        for line in ("", *_memory_failures(Path(result.folder)).splitlines()):
            say(line)
    if result.error:
        raise result.error
    sys.exit(exit_code)


def _memory_failures(folder: Path) -> str:
    from orchestrator.analysis.results import load_results
    from orchestrator.report.formats.terminal import Screen, memory_failures_text
    from orchestrator.store.run import Run

    return memory_failures_text(load_results(Run(folder)), Screen.of_stdout())
