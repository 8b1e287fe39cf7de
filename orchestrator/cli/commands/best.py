"""`sweep best`: find the fastest configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from orchestrator.cli.commands.option_types import Gpu, Percentage
from orchestrator.cli.commands.options import (
    CONFIG_OPTIONS,
    EXECUTION_OPTIONS,
    Chosen,
    parse_request,
)
from orchestrator.cli.commands.run import end_with
from orchestrator.common.errors import ConfigError
from orchestrator.common.output import say
from orchestrator.common.units import GIB

if TYPE_CHECKING:
    from orchestrator.hardware.gpu_catalog import GpuModel
    from orchestrator.planning.request import SweepRequest
    from tasks.spec.cell import Cell


@click.command(params=[*CONFIG_OPTIONS, *EXECUTION_OPTIONS])
@click.option(
    "--over",
    multiple=True,
    required=True,
    metavar="AXIS[=A,B]",
    help="Search along this axis: its values in CONFIG, or these. Several: compile,attention.",
)
@click.option(
    "--default",
    "defaults",
    multiple=True,
    metavar="AXIS=VALUE,…",
    help="Compare with this configuration.  [the first values in CONFIG]",
)
@click.option(
    "--until",
    type=Percentage(),
    default="1%",
    metavar="SHARE",
    help="Stop when no candidate has a larger expected gain.  [1%]",
)
@click.option("--plan", "is_plan", is_flag=True, help="Predict only; start nothing.")
@click.option(
    "--gpu", type=Gpu(), metavar="NAME", help="With --plan: predict for this GPU, such as H100."
)
@click.option("--try-perhaps", is_flag=True, help="Measure also candidates that may not fit.")
@click.option(
    "--write",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE",
    help="Write a config with the best configurations.",
)
def best(gpu: GpuModel | None, is_plan: bool, write: Path | None, **chosen: Any) -> None:
    """Find the fastest configuration of each model in CONFIG, along the axes of --over.

    Few candidates are measured: each is chosen by what it may gain. What surely does not fit is
    never started. Cells that the results folder has are not measured again.

    Example: sweep best configs/full.yaml --over precision,compile --where size=medium
    """
    from orchestrator.cli.text.best import config_text, describe_best
    from orchestrator.config.cell_labels import CellLabels
    from orchestrator.config.selection import parse_selection
    from orchestrator.execution.host_probe import probe_here
    from orchestrator.planning.preflight import Preflight, check_devices, smallest_gpu
    from orchestrator.report.formats.terminal import Screen
    from orchestrator.sweep.best_search import Goal, find_best
    from orchestrator.sweep.console import SweepConsole
    from orchestrator.sweep.pipeline import Runtime

    if gpu is not None and not is_plan:
        raise ConfigError(
            "--gpu: a search measures on the GPU of this machine, not on a named one",
            f"Add --plan, or use --set memory_limit_gib={gpu.usable_bytes / GIB:.1f} instead",
        )
    names, request = _searched(chosen)
    default = parse_selection((), chosen["defaults"]).where
    goal = Goal(names, default, chosen["until"], chosen["try_perhaps"])
    cells = request.expansion.cells
    host = None
    if any(cell.params.device == "cuda" for cell in cells) and gpu is None:
        host = probe_here()
        if not is_plan and not chosen["address"]:
            check_devices(request, Preflight(cells, hosts=(host,)), say)
        gpu = smallest_gpu([host])
    slots = max(1, len(host.gpus)) if host else 1
    runtime = None if is_plan else Runtime(SweepConsole(CellLabels(cells)))
    found = find_best(request, goal, gpu, runtime, slots)
    screen = Screen.of_stdout(may_color=False)
    for line in describe_best(request, found, goal, screen, is_plan):
        click.echo(screen.text(line))
    if write is not None:
        write.write_text(config_text(request, found))
        say(f"wrote {write}. To run it: sweep run {write}")
    if found.result is not None and found.result.is_cut_short:
        end_with(found.result)
    if not is_plan:
        say(f"results in {request.run}")


def _searched(chosen: Chosen) -> tuple[tuple[str, ...], SweepRequest]:
    """Return the axes of --over, and the request with all their values. Raise ConfigError."""
    names: list[str] = []
    sets: list[str] = [*chosen["sets"]]
    for text in chosen["over"]:
        if "=" in text:
            names.append(text.partition("=")[0].strip())
            sets.append(text)
        else:
            names += [word.strip() for word in text.split(",") if word.strip()]
    request = parse_request({**chosen, "sets": sets})
    cells = request.expansion.cells
    _require_choices(names, cells)
    for name in names:
        if len({repr(cell.params.values().get(name)) for cell in cells}) < 2:
            if any(one.partition("=")[0] == name for one in sets):
                raise ConfigError(f"--over {name}: has one value", "Name several: axis=A,B")
            sets.append(f"{name}={','.join(_known_values(name, cells))}")
    return tuple(dict.fromkeys(names)), parse_request({**chosen, "sets": sets})


def _require_choices(names: Iterable[str], cells: Iterable[Cell]) -> None:
    """Raise ConfigError for an axis along which the model or its work changes."""
    from tasks.spec.axes import Choice, axes_of

    for params in {type(cell.params) for cell in cells}:
        axes = axes_of(params)
        choices = [name for name, axis in axes.items() if axis.choice is not Choice.NONE]
        for name in names:
            if name in axes and name not in choices:
                raise ConfigError(
                    f"--over {name}: another {name} is another model, another work, or another way "
                    "to measure it",
                    f"Choose from {', '.join(choices)}",
                )


def _known_values(name: str, cells: Iterable[Cell]) -> list[str]:
    """Return all values that the tasks know of an axis. Raise ConfigError for one of numbers."""
    for cell in cells:
        fields: Mapping[str, object] = type(cell.params).model_fields
        if name in fields:
            values = get_args(type(cell.params).model_fields[name].annotation)
            if values and all(isinstance(value, str) for value in values):
                return [str(value) for value in values]
    raise ConfigError(
        f"--over {name}: CONFIG has one value of it", f"Name several: --over {name}=A,B"
    )
