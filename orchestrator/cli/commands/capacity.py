"""`sweep max-context` and `sweep max-batch`: find the largest size that fits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.commands.options import (
    config_options,
    execution_options,
    parse_request,
    with_options,
)
from orchestrator.cli.commands.run import end_with
from orchestrator.common.errors import (
    EXIT_FAILURES,
    ConfigError,
)

if TYPE_CHECKING:
    pass


def limit_options(axis: str, granularity: int, up_to: int) -> Callable[[Any], Any]:
    any_size = click.IntRange(1, 2**63 - 1)  # that a parameter may have
    return with_options(
        [
            click.option(
                "--gpu", metavar="NAME", help="On this GPU, such as 'RTX 5090'.  [this machine's]"
            ),
            click.option(
                "--granularity",
                type=any_size,
                default=granularity,
                help=f"Multiples of it are tried.  [{granularity}]",
            ),
            click.option(
                "--up-to", type=any_size, default=up_to, help=f"No {axis} above it.  [{up_to}]"
            ),
            click.option(
                "--confirm",
                is_flag=True,
                help="Measure what was found, and what is next to it; needs the device.",
            ),
        ]
    )


@click.command("max-context")
@config_options
@limit_options("context_length", 128, 131072)
@execution_options
def max_context(**chosen: Any) -> None:
    """Find the largest context length that fits, for each cell of CONFIG with its context length
    left open.

    By prediction, which needs no GPU, and by measuring with --confirm, the rows of which are kept
    in the run.

    Example: sweep max-context configs/full.yaml --gpu H200 --where compile=eager,pass=train_step
    """
    find_limits_of("context_length", chosen)


@click.command("max-batch")
@config_options
@limit_options("batch_size", 1, 4096)
@execution_options
def max_batch(**chosen: Any) -> None:
    """Find the largest batch size that fits, for each cell of CONFIG with its batch size left open.

    By prediction, which needs no GPU, and by measuring with --confirm, the rows of which are kept
    in the run.

    Example: sweep max-batch configs/full.yaml --set memory_limit_gib=32 --where
    size=small,compile=eager,pass=train_step
    """
    find_limits_of("batch_size", chosen)


def find_limits_of(axis: str, chosen: dict[str, Any]) -> None:
    from orchestrator.cli.text.capacity import describe_limits
    from orchestrator.execution.host_probe import probe_here
    from orchestrator.hardware.gpu_catalog import find_gpu
    from orchestrator.planning.preflight import require_devices
    from orchestrator.sweep.capacity_limits import Bounds
    from orchestrator.sweep.capacity_search import find_limits
    from orchestrator.sweep.runtime import default_runtime
    from tasks.spec.cell import varying_axes

    gpu = find_gpu(chosen["gpu"]) if chosen["gpu"] is not None else None
    if gpu is not None and chosen["confirm"]:
        gib = f"{gpu.usable_bytes / 1024**3:.1f}"
        raise ConfigError(
            "--confirm: measures on the GPU of this machine, not on a named one",
            f"Use --set memory_limit_gib={gib} instead of --gpu",
        )
    request = parse_request(chosen)
    cells = request.expansion.cells
    if chosen["confirm"] and not chosen["address"]:  # before minutes of prediction
        require_devices(request, [cell.params.device for cell in cells], [probe_here()])
    bounds = Bounds(axis, chosen["granularity"], chosen["up_to"])
    axes = dict.fromkeys([*varying_axes(cells), axis])
    runtime = default_runtime(lambda cell: cell.describe(axes)) if chosen["confirm"] else None
    found = find_limits(request, bounds, gpu, runtime)
    for line in describe_limits(request, found, bounds):
        click.echo(line)
    if found.result is not None and found.result.is_cut_short:
        end_with(found.result)
    if chosen["confirm"]:
        click.echo(f"results in {request.run}")
    if any(group.failure for group in found.groups):
        sys.exit(EXIT_FAILURES)
