"""Options that several commands share, and what their values mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.commands.option_types import Percentage, WordChoice
from orchestrator.common.errors import (
    ConfigError,
)
from orchestrator.store.remote_address import RunLocationType

if TYPE_CHECKING:
    from orchestrator.planning.options import ExecutionOptions, RunOptions
    from orchestrator.planning.request import SweepRequest

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


def parse_request(chosen: Mapping[str, Any]) -> SweepRequest:
    """Return the request of a command line. Raises ConfigError."""
    from orchestrator.config.selection import parse_selection
    from orchestrator.planning.request import resolve

    selection = parse_selection(
        chosen["sets"],
        chosen["wheres"],
        chosen.get("sample"),
        chosen.get("instruments", ()),
    )
    request = resolve(chosen["config"], selection, chosen["out"])
    if "repeat" in chosen:
        request = replace(request, options=parse_options(chosen))
    if "scheduler" in chosen:
        request = replace(request, execution=parse_execution(chosen))
    return request


def parse_options(chosen: Mapping[str, Any]) -> RunOptions:
    """Return the options that select cells. Raises ConfigError if they contradict each other."""
    from orchestrator.planning.options import RunOptions

    selected = {*chosen["only"], *(FLAWS if "ok" in chosen["only"] else ())}
    excluded = [word for word in chosen["retry"] if word not in selected]
    if selected and excluded:
        raise ConfigError(
            f"--retry {excluded[0]}: --only excludes all such cells",
            f"Add --only {_status_of(excluded[0])}, or leave one out",
        )
    return RunOptions(
        retry=frozenset(chosen["retry"]),
        only=frozenset(chosen["only"]),
        repeat=chosen["repeat"],
        fresh=chosen["fresh"],
        infer_oom=chosen["infer_oom"],
    )


def parse_execution(chosen: Mapping[str, Any]) -> ExecutionOptions:
    """Return the options of how cells run. Raises ConfigError if they contradict each other."""
    from orchestrator.planning.options import ExecutionOptions

    needs_ray = {"--address": chosen["address"] is not None, "--cpu-cells": chosen["cpu_cells"] > 1}
    for option, is_given in needs_ray.items():
        if is_given and chosen["scheduler"] == "serial":
            raise ConfigError(
                f"{option}: needs Ray, and --scheduler serial measures in this process",
                "Leave one of them out",
            )
    return ExecutionOptions(
        time_limit_s=parse_time_limit(chosen["time_limit"]),
        scheduler=chosen["scheduler"],
        address=chosen["address"],
        cpu_cells=chosen["cpu_cells"],
        start_method=chosen["start_method"],
        allow_mixed=chosen["mixed"],
        take_over=chosen["take_over"],
        skip_predicted_oom=chosen.get("skip_predicted_oom", False),
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
