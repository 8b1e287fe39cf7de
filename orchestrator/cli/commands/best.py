"""`sweep best`: find the fastest configuration."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.commands.option_types import Gpu, Percentage
from orchestrator.cli.commands.options import (
    CONFIG_OPTIONS,
    EXECUTION_OPTIONS,
    Chosen,
    parse_request,
)
from orchestrator.cli.commands.run import end_with
from orchestrator.common.errors import EXIT_FAILURES, ConfigError
from orchestrator.common.output import say
from orchestrator.common.text import counted, shell_path, value_text
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
def best(
    config: Path, gpu: GpuModel | None, is_plan: bool, write: Path | None, **chosen: Any
) -> None:
    """Find the fastest configuration of each model in CONFIG, along the axes of --over.

    Few candidates are measured: each is chosen by what it may gain. What surely does not fit is
    never started. Cells that the results folder has are not measured again.

    Example: sweep best configs/full.yaml --over precision,compile --where size=medium
    """
    from orchestrator.cli.text.best import config_text, describe_best
    from orchestrator.config.selection import parse_selection
    from orchestrator.report.formats.terminal import Screen
    from orchestrator.sweep.best_groups import Goal
    from orchestrator.sweep.best_search import find_best
    from orchestrator.sweep.console import SweepConsole
    from orchestrator.sweep.pipeline import Runtime

    if gpu is not None and not is_plan:
        raise ConfigError(
            "--gpu: a search measures on the GPU of this machine, not on a named one",
            f"Add --plan, or use --set memory_limit_gib={gpu.usable_bytes / GIB:.1f} instead",
        )
    if write is not None and (not write.parent.is_dir() or write.resolve() == config.resolve()):
        raise ConfigError(
            f"--write {write}: its folder does not exist, or it is CONFIG", "Name another file"
        )
    names, request = _searched({"config": config, **chosen})
    if "timing" not in request.config.instruments:
        raise ConfigError(f"{config}: does not time the steps", "Add timing to instruments")
    if refused := request.expansion.refused:
        left_out = counted(len(refused), "impossible combination")
        say(f"left out {left_out}, such as: {refused[0]}")
    default = parse_selection((), chosen["defaults"]).where
    goal = Goal(names, default, chosen["until"], chosen["try_perhaps"])
    gpu, slots = _resources(request, gpu, chosen, is_plan)
    runtime = None if is_plan else Runtime(SweepConsole(request.expansion.label))
    found = find_best(request, goal, gpu, runtime, slots)
    screen = Screen.of_stdout(may_color=False)
    for line in describe_best(request, found, goal, screen, is_plan):
        click.echo(screen.text(line))
    winners = [group.winner for group in found.groups]
    if write is not None and any(winners):
        write.write_text(config_text(request, found))
        say(f"wrote {write}. To run it: sweep run {shell_path(write)}")
    if found.result is not None and found.result.is_cut_short:
        end_with(found.result)
    if not is_plan:
        say(f"results in {request.run}")
        if None in winners:
            sys.exit(EXIT_FAILURES)


def _resources(
    request: SweepRequest, gpu: GpuModel | None, chosen: Chosen, is_plan: bool
) -> tuple[GpuModel | None, int]:
    """Return the GPU to predict for, and how many cells run at the same time. Raise SweepError."""
    from orchestrator.execution.host_probe import probe_here
    from orchestrator.planning.preflight import Preflight, check_devices, smallest_gpu
    from tasks.spec.cell import device_types

    cells, slots = request.expansion.cells, chosen["cpu_cells"]
    if gpu is None and "cuda" in device_types(cells):
        host = probe_here()
        gpu, slots = smallest_gpu([host]), max(1, len(host.gpus))
        if is_plan and gpu is None:
            raise ConfigError("for which GPU? This machine has none", "Add --gpu H100")
        if not is_plan and not chosen["address"]:
            check_devices(request, Preflight(cells, hosts=(host,)), say)
    return gpu, 1 if chosen["scheduler"] == "serial" else slots


def _searched(chosen: Chosen) -> tuple[tuple[str, ...], SweepRequest]:
    """Return the axes of --over, and the request with all their values. Raise ConfigError."""
    from tasks.spec.axes import words_of

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
    for name in dict.fromkeys(names):
        if len({repr(cell.params.values()[name]) for cell in cells}) == 1:
            words = words_of(type(cells[0].params), name)
            if name in request.selection.set or not words:
                raise ConfigError(
                    f"--over {name}: has one value", f"Name several: --over {name}=A,B"
                )
            # The config's own value first, which is the default.
            words = tuple(dict.fromkeys([value_text(cells[0].params.values()[name]), *words]))
            sets.append(f"{name}={','.join(words)}")
    return tuple(dict.fromkeys(names)), parse_request({**chosen, "sets": sets})


def _require_choices(names: Iterable[str], cells: Iterable[Cell]) -> None:
    """Raise ConfigError for an axis along which the model or its work changes."""
    from tasks.spec.axes import Choice, axes_of

    for task, params in {cell.task: type(cell.params) for cell in cells}.items():
        axes = axes_of(params)
        choices = [name for name, axis in axes.items() if axis.choice is not Choice.NONE]
        for name in names:
            if name in choices:
                continue
            problem = (
                f"another {name} is another model, another work, or another way to measure it"
                if name in axes
                else f"{task} has no such axis"
            )
            raise ConfigError(
                f"--over {name}: {problem}",
                f"Choose from {', '.join(choices)}, or cells of another task with --where task=NAME",
            )
