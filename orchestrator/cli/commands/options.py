"""Options that several commands share, and what their values mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.commands.option_types import Percentage, WordChoice
from orchestrator.common.errors import (
    ConfigError,
)
from orchestrator.store.remote.address import RunLocationType

if TYPE_CHECKING:
    pass

# The words of --retry besides statuses. Planning declares them too, but importing it takes a while, and
# `sweep --help` should not.
FLAWS = ("cpu-contended", "interval-wide")
STATUSES = (
    "ok",
    "oom",
    "oom_inferred",
    "host_oom",
    "timeout",
    "crashed",
    "failed",
    "skipped",
    "lost",
    "pending",
)


def with_options(options: Iterable[Any]) -> Callable[[Any], Any]:
    def add(command: Any) -> Any:
        for option in reversed(list(options)):
            command = option(command)
        return command

    return add


config_options = with_options(
    [
        click.argument("config", type=click.Path(path_type=Path)),
        click.option(
            "--set", "sets", multiple=True, metavar="AXIS=A,B", help="Narrow or replace an axis."
        ),
        click.option(
            "--where",
            "wheres",
            multiple=True,
            metavar="AXIS=A,AXIS=B|C",
            help="Only the cells that match.",
        ),
        click.option(
            "--out",
            type=RunLocationType(),
            help="Results folder, or s3://bucket/folder.  [results/NAME]",
        ),
    ]
)


cell_options = with_options(
    [
        click.option(
            "--sample",
            metavar="SHARE",
            type=Percentage(),
            help="A random part of the cells, such as 10%: the same ones each time.",
        ),
        click.option(
            "--instrument",
            "instruments",
            multiple=True,
            metavar="NAME",
            help="Watch with this too, such as kernel_time.",
        ),
        click.option(
            "--retry",
            multiple=True,
            type=WordChoice(
                [*STATUSES, *FLAWS], {"disturbed": "cpu-contended", "wide": "interval-wide"}
            ),
            help="Measure cells of this status again; or cpu-contended: cells that competed for the CPU; or interval-wide: cells whose median has an interval wider than 5 %.",
        ),
        click.option(
            "--only", multiple=True, type=click.Choice(STATUSES), help="Only cells of this status."
        ),
        click.option(
            "--repeat",
            type=click.IntRange(1, 1000),
            default=1,
            help="Measure each cell so often, by turns.  [1]",
        ),
        click.option(
            "--fresh",
            is_flag=True,
            help="Measure everything again, from the first cell; older rows stay.",
        ),
        click.option(
            "--infer-oom",
            is_flag=True,
            help="Do not measure what asks for no less memory than a cell that ran out.",
        ),
        click.option(
            "--verify-inferred",
            type=click.IntRange(0),
            default=0,
            help="Measure so many of those all the same.",
        ),
    ]
)


execution_options = with_options(
    [
        click.option(
            "--address",
            help="Of a Ray cluster that is running (`auto`, or host:port); else this machine's GPUs.",
        ),
        click.option(
            "--scheduler",
            type=click.Choice(["ray", "serial"]),
            default="ray",
            help="serial: one by one, without Ray.",
        ),
        click.option(
            "--cpu-cells",
            type=click.IntRange(1),
            default=1,
            help="CPU cells at a time; they share the cores.  [1]",
        ),
        click.option(
            "--time-limit",
            help="Start nothing that would not end within it: 90s, 9m, 2h. Exit code 75 if cells are left.",
        ),
        click.option(
            "--start-method",
            type=click.Choice(["fork", "spawn"]),
            help="Of each cell's process: from a prepared parent where that works, or afresh.  [fork]",
        ),
        click.option(
            "--mixed",
            is_flag=True,
            help="Let results of other hardware or software into the same folder.",
        ),
        click.option(
            "--take-over",
            is_flag=True,
            help="Write to a bucket folder although another driver seems to write to it.",
        ),
    ]
)


def open_runtime(label: Callable[[Any], str], chosen: dict[str, Any]) -> Any:
    from orchestrator.scheduling.ray_scheduler import RayScheduler
    from orchestrator.scheduling.serial import SerialScheduler
    from orchestrator.sweep.console import SweepConsole, make_display, say
    from orchestrator.sweep.runtime import Means

    console, address, cpu_cells = SweepConsole(), chosen["address"], chosen["cpu_cells"]
    if chosen["scheduler"] == "serial":
        for option, is_asked in (
            ("--address", address is not None),
            ("--cpu-cells", cpu_cells > 1),
        ):
            if is_asked:
                raise ConfigError(
                    f"{option}: is of Ray, and --scheduler serial measures here, one by one",
                    "Leave one of them out",
                )
    return Means(
        open_scheduler=lambda example: (
            RayScheduler(say, address, cpu_cells, example)
            if chosen["scheduler"] == "ray"
            else SerialScheduler(say)
        ),
        open_display=lambda total, left: make_display(total, label, console, left),
        time_limit_s=parse_time_limit(chosen["time_limit"]),
        mixed=chosen["mixed"],
        take_over=chosen["take_over"],
        start_method=chosen["start_method"],
        say=say,
    )


def parse_options(chosen: dict[str, Any]) -> Any:
    from orchestrator.planning.options import RunOptions

    if chosen["verify_inferred"] and not chosen["infer_oom"]:
        raise ConfigError(
            "--verify-inferred: nothing is inferred without --infer-oom",
            "Add that, or leave this out",
        )
    within = {*chosen["only"], *(FLAWS if "ok" in chosen["only"] else ())}
    if within and (beyond := [word for word in chosen["retry"] if word not in within]):
        raise ConfigError(
            f"--retry {beyond[0]}: --only leaves out all such cells",
            f"Add --only {_status_of(beyond[0])}, or leave one out",
        )
    return RunOptions(
        infer_oom=chosen["infer_oom"],
        verify=chosen["verify_inferred"],
        repeat=chosen["repeat"],
        retry=frozenset(chosen["retry"]),
        only=frozenset(chosen["only"]),
        fresh=chosen["fresh"],
    )


def _status_of(retried: str) -> str:
    return "ok" if retried in FLAWS else retried


def parse_time_limit(text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", text.strip())
    if not found:
        raise ConfigError(f"--time-limit {text}: is not a duration", "Write 90s, 9m or 2h")
    from orchestrator.config.schema import LONGEST_S

    seconds = float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2] or "s"]
    if seconds > LONGEST_S:
        raise ConfigError(
            f"--time-limit {text}: is longer than {LONGEST_S / 3600:,.0f} h",
            "Leave it out for no limit",
        )
    return seconds
