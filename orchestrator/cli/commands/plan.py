"""`sweep plan`: show what would run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.commands.options import (
    cell_options,
    config_options,
    parse_request,
)

if TYPE_CHECKING:
    pass


@click.command()
@config_options
@cell_options
@click.option("--all", "everything", is_flag=True, help="Print every cell.")
@click.option(
    "--memory", is_flag=True, help="Predict what memory each cell would take on a GPU; needs none."
)
@click.option(
    "--gpu",
    metavar="NAME",
    help="How long it would take, and with --memory what fits, on this GPU, such as 'RTX 5090'.",
)
def plan(config: Path, everything: bool, memory: bool, gpu: str | None, **chosen: Any) -> None:
    """Show the cells of CONFIG, how many are done, what would run, why and for how long. Starts
    nothing.

    Example: sweep plan configs/full.yaml --where size=xl --memory --gpu H200
    """
    from orchestrator.cli.text.memory import describe_memory
    from orchestrator.cli.text.plan import describe_cost, describe_plan
    from orchestrator.hardware.gpu_catalog import find_gpu
    from orchestrator.planning.plan import plan_request
    from orchestrator.planning.prior_results import describe_prior_results
    from orchestrator.planning.resumption import describe_resumption, resume

    model = find_gpu(gpu) if gpu is not None else None
    request = parse_request({"config": config, **chosen})
    invocation = request.new_invocation()
    request = resume(request, invocation)
    planned = plan_request(request)
    if request.expansion.duplicates:
        click.echo(
            f"{request.expansion.duplicates} combinations name a cell that another one names too:"
            " each is one cell"
        )
    if message := describe_resumption(request):
        click.echo(message)
    cost = describe_cost(request, planned, model)
    for line in describe_plan(planned, request.expansion.label, cost, everything):
        click.echo(line)
    for line in describe_prior_results(request, planned, invocation):
        click.echo(line)
    if memory:
        for line in describe_memory(request, model):
            click.echo(line)
