"""`sweep run`: measure the cells of a config."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli.commands.ending import end_with
from orchestrator.cli.commands.options import (
    CELL_OPTIONS,
    CONFIG_OPTIONS,
    EXECUTION_OPTIONS,
    parse_request,
)
from orchestrator.common.output import say


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
    from orchestrator.sweep.pipeline import default_runtime, run_sweep

    request = parse_request({"config": config, **chosen})
    result = run_sweep(request, default_runtime(request.expansion.label))
    end_with(result)
