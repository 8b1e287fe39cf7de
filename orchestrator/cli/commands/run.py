"""`sweep run`: measure the cells of a config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.commands.options import (
    cell_options,
    config_options,
    execution_options,
    open_runtime,
    parse_options,
)
from orchestrator.cli.text.sweep_result import conclude

if TYPE_CHECKING:
    pass


@click.command()
@config_options
@cell_options
@execution_options
@click.option(
    "--skip-predicted-oom",
    is_flag=True,
    help="Leave out the cells that are predicted to run out of memory.",
)
def run(config: Path, **chosen: Any) -> None:
    """Measure the cells of CONFIG that are missing or failed. Run it again to go on.

    Example: sweep run configs/demo.yaml
    """
    from orchestrator.planning.request import resolve
    from orchestrator.sweep.console import say
    from orchestrator.sweep.pipeline import run_sweep

    request = resolve(
        config,
        chosen["sets"],
        chosen["wheres"],
        chosen["out"],
        chosen["sample"],
        chosen["instruments"],
    )
    means = replace(
        open_runtime(request.expansion.label, chosen),
        skip_predicted_oom=chosen["skip_predicted_oom"],
    )
    summary = run_sweep(request, parse_options(chosen), means)
    done = not (summary.stopped or summary.late or summary.broken)
    if done and chosen["verify_inferred"] and not summary.verified:
        say("there was nothing to verify: nothing is inferred, or so many were verified before")
    conclude(summary, request)
