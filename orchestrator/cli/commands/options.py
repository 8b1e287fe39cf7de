"""Options that several commands share, and the requests that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from orchestrator.cli.commands.option_types import Duration, Percentage, RunLocationType
from orchestrator.common.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.planning.invocation import ExecutionOptions, RunOptions
    from orchestrator.planning.request import SweepRequest

# The options of a command by parameter, as click passes them.
Chosen: TypeAlias = Mapping[str, Any]

# The words of --retry and --only, which `planning.invocation` declares too. Importing that module
# loads pydantic (0.4 s), and `sweep --help` needs 0.1 s in all. A test compares the lists.
FLAWS = ("cpu-contended", "interval-wide", "beaten")
STATUSES = (
    "ok", "oom", "oom_inferred", "host_oom", "timeout", "crashed", "failed", "skipped", "lost",
    "pending", "incomplete",
)  # fmt: skip

CONFIG_OPTIONS: list[click.Parameter] = [
    click.Argument(["config"], type=click.Path(path_type=Path)),
    click.Option(
        ["--set", "sets"],
        multiple=True,
        metavar="AXIS=A,B",
        help="Use these values of an axis, not those in CONFIG.",
    ),
    click.Option(
        ["--where", "wheres"],
        multiple=True,
        metavar="AXIS=A,AXIS=B|C",
        help="Select the cells that match.",
    ),
    click.Option(
        ["--out"],
        type=RunLocationType(),
        help="Results folder, or s3://bucket/folder.  [results/NAME]",
    ),
]

CELL_OPTIONS: list[click.Parameter] = [
    click.Option(
        ["--sample"],
        metavar="SHARE",
        type=Percentage(),
        help="Select a random share of the cells, such as 10%. It is the same each time.",
    ),
    click.Option(
        ["--instrument", "instruments"],
        multiple=True,
        metavar="NAME",
        help="Add this instrument, such as kernel_time.",
    ),
    click.Option(
        ["--retry"],
        multiple=True,
        type=click.Choice([*STATUSES, *FLAWS]),
        help="Measure cells with this status again. cpu-contended: cells that competed for the"
        " CPU. interval-wide: cells whose median has an interval wider than 5 %. beaten: cells that"
        " `sweep best` ended early.",
    ),
    click.Option(
        ["--only"],
        multiple=True,
        type=click.Choice(STATUSES),
        help="Select cells with this status.",
    ),
    click.Option(
        ["--repeat"],
        type=click.IntRange(1, 1000),
        default=1,
        help="Measure each cell this number of times, in rounds over all cells.  [1]",
    ),
    click.Option(
        ["--fresh"],
        is_flag=True,
        help="Measure all cells again. Earlier rows stay in the results folder.",
    ),
    click.Option(
        ["--infer-oom"],
        is_flag=True,
        help="Do not measure cells that need at least as much memory as one that ran out of it.",
    ),
]

EXECUTION_OPTIONS: list[click.Parameter] = [
    click.Option(
        ["--address"],
        metavar="ADDRESS",
        help="Use a running Ray cluster: `auto` or host:port.  [the GPUs of this machine]",
    ),
    click.Option(
        ["--scheduler"],
        type=click.Choice(["ray", "serial"]),
        default="ray",
        help="serial: measure one cell at a time, without Ray.  [ray]",
    ),
    click.Option(
        ["--cpu-cells"],
        type=click.IntRange(1),
        default=1,
        help="Number of cells on the CPU that run at the same time and share the cores.  [1]",
    ),
    click.Option(
        ["--time-limit"],
        metavar="DURATION",
        type=Duration(),
        help="Start only cells that are expected to finish before the limit: 90s, 9m, 2h."
        " Exit code 75 if cells are left.",
    ),
    click.Option(
        ["--start-method"],
        type=click.Choice(["fork", "spawn"]),
        help="Start of each measuring process. fork: copy a process that has imported torch,"
        " where that works. spawn: start a new process.  [fork]",
    ),
    click.Option(
        ["--mixed"],
        is_flag=True,
        help="Allow results from different hardware or software in one results folder.",
    ),
    click.Option(
        ["--take-over"],
        is_flag=True,
        help="Write to a bucket folder even if another driver seems to write to it.",
    ),
]


def parse_request(chosen: Chosen) -> SweepRequest:
    """Return the request of a command line. Raise ConfigError if it is not valid."""
    from orchestrator.config.selection import parse_selection
    from orchestrator.planning.request import resolve

    selection = parse_selection(
        chosen["sets"], chosen["wheres"], chosen.get("sample"), chosen.get("instruments", ())
    )
    if chosen.get("over"):
        selection = replace(selection, skip_refused=True)
    request = resolve(chosen["config"], selection, chosen["out"])
    # Not every command has all three groups of options.
    if "repeat" in chosen:
        request = replace(request, options=_parse_options(chosen))
    if "scheduler" in chosen:
        request = replace(request, execution=_parse_execution(chosen))
    return request


def _parse_options(chosen: Chosen) -> RunOptions:
    from orchestrator.planning.invocation import RunOptions

    # A cell with a flaw is a success: `--only ok` selects it.
    selected = set(chosen["only"])
    if "ok" in selected:
        selected |= {*FLAWS}
    excluded = [word for word in chosen["retry"] if word not in selected]
    if selected and excluded:
        status = "ok" if excluded[0] in FLAWS else excluded[0]
        raise ConfigError(
            f"--retry {excluded[0]}: --only excludes all such cells",
            f"Add --only {status}, or leave one out",
        )
    return RunOptions(
        retry=frozenset(chosen["retry"]),
        only=frozenset(chosen["only"]),
        repeat=chosen["repeat"],
        fresh=chosen["fresh"],
        infer_oom=chosen["infer_oom"],
    )


def _parse_execution(chosen: Chosen) -> ExecutionOptions:
    from orchestrator.planning.invocation import ExecutionOptions

    needs_ray = {"--address": chosen["address"] is not None, "--cpu-cells": chosen["cpu_cells"] > 1}
    for option, is_given in needs_ray.items():
        if is_given and chosen["scheduler"] == "serial":
            raise ConfigError(
                f"{option}: needs Ray, and --scheduler serial measures in this process",
                "Leave one of them out",
            )
    return ExecutionOptions(
        time_limit_s=chosen["time_limit"],
        scheduler=chosen["scheduler"],
        address=chosen["address"],
        cpu_cells=chosen["cpu_cells"],
        start_method=chosen["start_method"],
        allow_mixed=chosen["mixed"],
        take_over=chosen["take_over"],
        skip_predicted_oom=chosen.get("skip_predicted_oom", False),
    )
