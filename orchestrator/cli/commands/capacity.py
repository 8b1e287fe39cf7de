"""`sweep max-context` and `sweep max-batch`: find the largest size that fits."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from orchestrator.cli.commands.option_types import Gpu
from orchestrator.cli.commands.options import (
    CONFIG_OPTIONS,
    EXECUTION_OPTIONS,
    Chosen,
    parse_request,
)
from orchestrator.cli.commands.run import end_with
from orchestrator.common.errors import EXIT_FAILURES, ConfigError
from orchestrator.common.output import say
from orchestrator.common.units import GIB

if TYPE_CHECKING:
    from orchestrator.hardware.gpu_catalog import GpuModel

# The axes along which the largest value is searched, with the default of --granularity and --up-to.
AXES = {"context_length": (128, 131072), "batch_size": (1, 4096)}
ANY_SIZE = click.IntRange(1, 2**63 - 1)  # the largest parameter, LARGEST_INT of tasks.spec


def limit_options(axis: str) -> list[click.Parameter]:
    """Return the options of a search along an axis."""
    granularity, up_to = AXES[axis]
    return [
        *CONFIG_OPTIONS,
        click.Option(
            ["--gpu"],
            type=Gpu(),
            metavar="NAME",
            help="Predict for this GPU, such as 'RTX 5090'.  [this machine's]",
        ),
        click.Option(
            ["--granularity"],
            type=ANY_SIZE,
            default=granularity,
            help=f"Try multiples of this number.  [{granularity}]",
        ),
        click.Option(
            ["--up-to"],
            type=ANY_SIZE,
            default=up_to,
            help=f"Try no {axis} above this number.  [{up_to}]",
        ),
        click.Option(
            ["--confirm"],
            is_flag=True,
            help="Measure the predicted limit and the next value. Needs the device.",
        ),
        *EXECUTION_OPTIONS,
    ]


@click.command("max-context", params=limit_options("context_length"))
def max_context(**chosen: object) -> None:
    """Find the largest context length that fits, for each cell of CONFIG.

    The context lengths in CONFIG are ignored. The limit is predicted, which needs no GPU.
    --confirm also measures it, and stores the measured cells in the results folder.

    Example: sweep max-context configs/full.yaml --gpu H200 --where compile=eager,pass=train_step
    """
    print_limits("context_length", chosen, bool(chosen["confirm"]))


@click.command("max-batch", params=limit_options("batch_size"))
def max_batch(**chosen: object) -> None:
    """Find the largest batch size that fits, for each cell of CONFIG.

    The batch sizes in CONFIG are ignored. The limit is predicted, which needs no GPU. --confirm
    also measures it, and stores the measured cells in the results folder.

    Example: sweep max-batch configs/full.yaml --set memory_limit_gib=32 --where
    size=small,compile=eager,pass=train_step
    """
    print_limits("batch_size", chosen, bool(chosen["confirm"]))


def refuse_named_gpu(gpu: GpuModel | None) -> None:
    """Raise ConfigError if a GPU was named for a command that measures."""
    if gpu is not None:
        raise ConfigError(
            "--gpu: a search measures on the GPU of this machine, not on a named one",
            f"Predict only, or use --set memory_limit_gib={gpu.usable_bytes / GIB:.1f} instead",
        )


def print_limits(axis: str, chosen: Chosen, measures: bool) -> None:
    """Find and print the limits along an axis, and exit with 1 if one was not found.

    measures: False to predict only.
    """
    from orchestrator.cli.text.capacity import describe_limits
    from orchestrator.config.cell_labels import CellLabels
    from orchestrator.execution.host_probe import probe_here
    from orchestrator.planning.preflight import Preflight, check_devices
    from orchestrator.report.formats.terminal import Screen
    from orchestrator.sweep.capacity_limits import Bounds
    from orchestrator.sweep.capacity_search import find_limits
    from orchestrator.sweep.console import SweepConsole
    from orchestrator.sweep.pipeline import Runtime

    gpu = chosen["gpu"]
    if measures:
        refuse_named_gpu(gpu)
    request = parse_request(chosen)
    cells = request.expansion.cells
    # Predicting takes minutes: a missing GPU is reported before. A cluster is not known yet.
    if measures and not chosen["address"]:
        check_devices(request, Preflight(cells, hosts=(probe_here(),)), say)
    granularity, up_to = AXES[axis]
    bounds = Bounds(axis, chosen["granularity"] or granularity, chosen["up_to"] or up_to)
    runtime = Runtime(SweepConsole(CellLabels(cells, axis))) if measures else None
    found = find_limits(request, bounds, gpu, runtime)
    screen = Screen.of_stdout(may_color=False)
    for line in describe_limits(request, found, bounds, screen):
        click.echo(screen.text(line))
    if found.result is not None and found.result.is_cut_short:
        end_with(found.result)
    if measures:
        say(f"results in {request.run}")
    if any(group.is_unknown for group in found.groups):
        sys.exit(EXIT_FAILURES)
