"""`sweep plan`: show what would run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.commands.option_types import Gpu
from orchestrator.cli.commands.options import CELL_OPTIONS, CONFIG_OPTIONS, parse_request
from orchestrator.cli.text import warn_of_incomplete
from orchestrator.common.output import ProgressLine

if TYPE_CHECKING:
    from orchestrator.hardware.gpu_catalog import GpuModel


@click.command(params=[*CONFIG_OPTIONS, *CELL_OPTIONS])
@click.option(
    "--all",
    is_flag=True,
    help="Print every cell, and with --memory also what is planned for it.",
)
@click.option(
    "--memory",
    is_flag=True,
    help="Predict the memory that each cell needs on a GPU. Works without a GPU.",
)
@click.option(
    "--gpu",
    type=Gpu(),
    metavar="NAME",
    help="Estimate the duration, and with --memory what fits, for this GPU, such as 'RTX 5090'.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    help="json: a list with an object for each cell: its id, parameters, status, what is planned"
    " (run, keep, infer or defer) and why, and with --memory its prediction in bytes.  [text]",
)
def plan(config: Path, memory: bool, gpu: GpuModel | None, form: str, **chosen: object) -> None:
    """Show which cells of CONFIG would run, why, and for how long.

    Starts nothing.

    Example: sweep plan configs/full.yaml --where size=xl --memory --gpu H200
    """
    from orchestrator.cli.text.plan import (
        SHOWN_CELLS,
        describe_cost,
        describe_plan,
        plan_records,
    )
    from orchestrator.config.cell_labels import shared_settings
    from orchestrator.hardware.nvml import gpu_names
    from orchestrator.planning.cell_decisions import (
        describe_continuation,
        leave_out_wider,
        plan_request,
    )
    from orchestrator.planning.prior_results import describe_prior_results

    with ProgressLine("reading the config"):
        request = parse_request({"config": config, **chosen})
        invocation = request.new_invocation()
        planned = plan_request(request, invocation)
        gpus = gpu_names() if gpu is None else []  # of another host, only the kind is known
        planned = leave_out_wider(planned, [Counter(gpus)] if gpus else [])
        here = _gpu_here() if memory and gpu is None else None
    warn_of_incomplete(request.run, planned.incomplete)
    cells = request.expansion.cells
    if form == "json":
        from orchestrator.planning.prediction_requests import predict_memory, require_prediction

        card = gpu or here
        predictions = predict_memory(cells, card, request.import_paths) if memory else {}
        if memory:
            require_prediction(cells, predictions)
        records = map(json.dumps, plan_records(planned, predictions, card))
        click.echo("[\n" + ",\n".join(records) + "\n]")
        return
    lines = []
    if repeated := request.expansion.duplicates:
        lines.append(f"combinations of axes that repeat a cell: {repeated}. Each cell runs once")
    if message := describe_continuation(planned):
        lines.append(message)
    cost = describe_cost(request, planned, gpu)
    # The table of memory names each cell once more.
    shown = 0 if memory else SHOWN_CELLS
    if chosen["all"]:
        shown = len(planned.decisions)
    shared = shared_settings(cells, request.selection.set)
    lines += describe_plan(planned, request.expansion.label, cost, shown, shared)
    lines += describe_prior_results(request, planned, invocation)
    if not memory:
        for line in lines:
            click.echo(line)
        return
    from orchestrator.cli.text.memory import describe_memory
    from orchestrator.report.formats.terminal import Screen

    screen = Screen.of_stdout(may_color=False)
    # Before the prediction, which takes minutes for many cells.
    for line in lines:
        click.echo(screen.text(line))
    for line in describe_memory(request, gpu or here, screen):
        click.echo(screen.text(line))


def _gpu_here() -> GpuModel | None:
    """Return the smallest GPU of this machine, or None without one."""
    from orchestrator.execution.host_probe import probe_here
    from orchestrator.hardware.nvml import gpu_names
    from orchestrator.planning.preflight import smallest_gpu

    # The probe imports torch, which takes seconds.
    return smallest_gpu([probe_here()]) if gpu_names() else None
