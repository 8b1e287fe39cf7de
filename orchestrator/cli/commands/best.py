"""`sweep best`: find the fastest configuration."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from orchestrator.cli.commands.capacity import ANY_SIZE, AXES, print_limits, refuse_named_gpu
from orchestrator.cli.commands.option_types import Gpu, Percentage, TokensPerUpdate
from orchestrator.cli.commands.options import (
    CONFIG_OPTIONS,
    EXECUTION_OPTIONS,
    Chosen,
    parse_request,
)
from orchestrator.cli.commands.run import end_with
from orchestrator.common.errors import EXIT_FAILURES, ConfigError
from orchestrator.common.output import ProgressLine, say
from orchestrator.common.text import counted, shell_path, value_text

if TYPE_CHECKING:
    from orchestrator.hardware.gpu_catalog import GpuModel
    from orchestrator.planning.request import SweepRequest
    from orchestrator.sweep.best_groups import Goal
    from orchestrator.sweep.best_search import BestFound
    from tasks.spec.cell import Cell


# Options of one of the two searches, by parameter.
_OF_FASTEST = ("over", "defaults", "hold", "until", "confirm", "try_perhaps", "write")
_OF_LARGEST = ("granularity", "up_to")


@click.command(params=[*CONFIG_OPTIONS, *EXECUTION_OPTIONS])
@click.option(
    "--over",
    multiple=True,
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
    "--hold",
    type=TokensPerUpdate(),
    metavar="tokens_per_update=N",
    help="Adapt gradient_accumulation so that each update has N tokens: batch_size x"
    " gradient_accumulation x context_length.",
)
@click.option(
    "--until",
    type=Percentage(),
    default="1%",
    metavar="SHARE",
    help="Stop when no candidate has a larger expected gain.  [1%]",
)
@click.option(
    "--confirm",
    type=click.IntRange(2, 100),
    metavar="N",
    help="Then measure the answer and the default N times alternately.",
)
@click.option(
    "--largest",
    type=click.Choice([*AXES]),
    help="Instead of the fastest configuration, find the largest value of this axis that fits.",
)
@click.option("--granularity", type=ANY_SIZE, help="With --largest: try multiples of this number.")
@click.option("--up-to", type=ANY_SIZE, help="With --largest: try no value above this number.")
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
def best(**chosen: Any) -> None:
    """Find the fastest configuration of each model in CONFIG, along the axes of --over.

    Few candidates are measured: each is chosen by what it may gain. What surely does not fit is
    never started. Cells that the results folder has are not measured again.

    Example: sweep best configs/full.yaml --over precision,compile --where size=medium
    """
    if not chosen["is_plan"]:
        refuse_named_gpu(chosen["gpu"])
    _require_one_search(chosen["largest"])
    if chosen["largest"]:
        print_limits(chosen["largest"], chosen, measures=not chosen["is_plan"])
    else:
        _print_best(chosen)


def _require_one_search(largest: str | None) -> None:
    """Raise ConfigError for options of the other search: of the fastest, or of the largest."""
    others = _OF_FASTEST if largest else _OF_LARGEST
    context = click.get_current_context()
    for parameter in context.command.params:
        is_default = context.get_parameter_source(parameter.name or "") is ParameterSource.DEFAULT
        if parameter.name in others and not is_default:
            remedy = "Leave one of them out" if largest else "Add --largest batch_size"
            with_what = "cannot be combined with" if largest else "needs"
            raise ConfigError(f"{parameter.opts[0]}: {with_what} --largest", remedy)
    if not largest and not "".join(context.params["over"]).strip(", "):
        raise ConfigError(
            "no axis to search is given",
            "Add --over compile,attention or --largest batch_size",
        )


def _print_best(chosen: Chosen) -> None:
    """Find and print the fastest configurations, and exit with 1 if there is none for a group."""
    config, write, is_plan = chosen["config"], chosen["write"], chosen["is_plan"]
    with ProgressLine("reading the config"):
        from orchestrator.cli.text.best import describe_best
        from orchestrator.config.selection import parse_selection
        from orchestrator.report.formats.terminal import Screen
        from orchestrator.sweep.best_groups import Goal
        from orchestrator.sweep.best_search import find_best
        from orchestrator.sweep.console import SweepConsole
        from orchestrator.sweep.pipeline import Runtime

        names, request, left_out = _searched(chosen)
        if write is not None:
            _require_usable(write, request)
    if left_out:
        say(left_out)
    if "timing" not in request.config.instruments:
        raise ConfigError(f"{config}: does not time the steps", "Add timing to instruments")
    if refused := request.expansion.refused:
        left_out = counted(len(refused), "impossible combination")
        say(f"left out {left_out}, such as: {refused[0]}")
    goal = Goal(
        names,
        parse_selection((), chosen["defaults"]).where,
        chosen["until"],
        chosen["try_perhaps"],
        chosen["confirm"] or 0,
        is_held=chosen["hold"] is not None,
    )
    gpu, slots = _resources(request, chosen)
    runtime = None if is_plan else Runtime(SweepConsole(request.expansion.label))
    found = find_best(request, goal, gpu, runtime, slots)
    screen = Screen.of_stdout(may_color=False)
    for line in describe_best(request, found, goal, screen):
        click.echo(screen.text(line))
    winners = [group.winner for group in found.groups]
    if write is not None:
        say(_write(write, request, found, goal))
    if found.result is not None and found.result.is_cut_short:
        end_with(found.result)
    if not is_plan:
        say(f"results in {request.run}")
        if None in winners:
            sys.exit(EXIT_FAILURES)


def _require_usable(file: Path, request: SweepRequest) -> None:
    """Raise ConfigError if a config cannot be written there, or would not find the same models."""
    from orchestrator.config.yaml_source import Source
    from orchestrator.planning.named_modules import require_modules

    if not file.parent.is_dir():
        raise ConfigError(f"--write {file}: its folder does not exist", "Create it first")
    if file.resolve() == request.config_path.resolve():
        raise ConfigError(f"--write {file}: is CONFIG itself", "Name another file")
    written = replace(request, config_path=file)
    remedy = f"Write it to {request.config_path.parent}"
    try:
        require_modules(request.expansion.cells, written.search_path, Source(f"--write {file}", {}))
    except ConfigError as error:
        raise ConfigError(error.message, remedy) from error
    found = written.model_sources()
    for model, digest in request.model_sources().items():
        if found[model] != digest:
            problem = f"--write {file}: the model {model!r} is another one from there"
            raise ConfigError(problem, remedy)


def _write(file: Path, request: SweepRequest, found: BestFound, goal: Goal) -> str:
    """Write a config with the answers, and return a line that says so."""
    from orchestrator.cli.text.best import config_text, what_is_open

    if not any(group.winner for group in found.groups):
        return f"did not write {file}: there is no answer"
    file.write_text(config_text(request, found, goal))
    pairs = zip(found.groups, found.ends, strict=True)
    still_open = [text for group, end in pairs if (text := what_is_open(group, end, goal))]
    suffix = f", but the search is {still_open[0]}" if still_open else ""
    return f"wrote {file}{suffix}. To run it: sweep run {shell_path(file)}"


def _resources(request: SweepRequest, chosen: Chosen) -> tuple[GpuModel | None, int]:
    """Return the GPU to predict for, and how many cells run at the same time. Raise SweepError."""
    from orchestrator.execution.host_probe import probe_here
    from orchestrator.planning.preflight import Preflight, check_devices, smallest_gpu
    from orchestrator.sweep.search_loop import this_gpu
    from tasks.spec.cell import device_types

    cells, gpu, slots = request.expansion.cells, chosen["gpu"], chosen["cpu_cells"]
    if chosen["is_plan"]:
        gpu = gpu or this_gpu(cells, measures=False)
    elif "cuda" in device_types(cells):
        host = probe_here()
        gpu, slots = smallest_gpu([host]), max(1, len(host.gpus))
        if not chosen["address"]:
            check_devices(request, Preflight(cells, hosts=(host,)), say)
    return gpu, 1 if chosen["scheduler"] == "serial" else slots


def _searched(chosen: Chosen) -> tuple[tuple[str, ...], SweepRequest, str]:
    """Return the axes of --over, the request with all their values, and what --hold leaves out.

    Raise ConfigError.
    """
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
    request, left_out = parse_request({**chosen, "sets": sets}), ""
    if chosen["hold"] is not None:
        names.append("gradient_accumulation")
        request, left_out = _held(request, {**chosen, "sets": sets})
    return tuple(dict.fromkeys(names)), request, left_out


def _held(request: SweepRequest, chosen: Chosen) -> tuple[SweepRequest, str]:
    """Return the request with as many micro-batches as an update of constant tokens needs.

    The text is about the cells that have no such number. Raise ConfigError if none has one.
    """
    from orchestrator.config.selection import TOKENS
    from tasks.spec.axes import select
    from tasks.spec.messages import assignments

    axis, tokens = "gradient_accumulation", chosen["hold"]
    if any(text.partition("=")[0].strip() == axis for text in chosen["sets"]):
        raise ConfigError(f"--hold: chooses {axis} itself", f"Leave {axis} out")
    counts, left_out = dict[int, None](), Counter[str]()
    for cell in request.expansion.cells:
        params = cell.params
        own = getattr(params, "tokens", 0) // getattr(params, axis, 1)
        if own and tokens % own == 0:
            counts[tokens // own] = None
        else:
            shown = select(params.values(), ("batch_size", "context_length"))
            left_out[" ".join(assignments(shown))] += 1
    if not counts:
        raise ConfigError(
            f"--hold {TOKENS}={tokens}: no candidate divides it", "Name a multiple of their tokens"
        )
    text = ""
    if left_out:
        count = counted(left_out.total(), "combination")
        text = f"left out {count}, because {tokens:,} tokens are no multiple of theirs: "
        text += "; ".join(left_out)
    sets = [*chosen["sets"], f"{axis}={','.join(map(str, counts))}"]
    wheres = [*chosen["wheres"], f"{TOKENS}={tokens}"]
    return parse_request({**chosen, "sets": sets, "wheres": wheres}), text


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
