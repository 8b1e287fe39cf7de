"""The command line. Thin: each command opens what it needs, calls the function of its name, prints.

What it needs is imported inside each command, so that `sweep --help` is there at once and only `run` loads Ray.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.container_init import go_on_behind_an_init
from orchestrator.cli.report_commands import Percentage, compare, import_nsys, publish, report
from orchestrator.common.errors import (
    EXIT_FAILURES,
    EXIT_INTERRUPTED,
    EXIT_TIME_LIMIT,
    EXIT_USER,
    ConfigError,
    SweepError,
)
from orchestrator.store.remote.address import RunPlace, Where

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
FLAWS = {
    "disturbed": "timed while something else had the cores of the host: once it is gone, --retry disturbed measures again",
    "beside": "in need of the host timed beside others, which may have slowed them: --retry beside measures again, one at a time",
    "wide": "with steps that differ so much that the interval of their median is wider than 5 %: --retry wide measures again",
}


class OneLine(click.Group):
    """Turns what the user can mend into one line on stderr and exit code 2."""

    def main(self, *words: Any, **options: Any) -> Any:
        go_on_behind_an_init()
        return super().main(*words, **options)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SweepError as error:
            click.echo(f"sweep: {error}", err=True)
            ctx.exit(EXIT_USER)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "sweep"
            said = re.sub(r"(?<![.?])$", ".", error.format_message())
            click.echo(f"{command}: {said} See `{command} --help`", err=True)
            ctx.exit(EXIT_USER)
        except (
            KeyboardInterrupt
        ):  # before a sweep began or after it ended: click would say 1, as of cells that failed
            click.echo("sweep: stopped by SIGINT", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            from orchestrator.sweep.console import drop_output

            drop_output(sys.stdout)
            click.echo(
                f"sweep: its output cannot be written: {os.strerror(error.errno)}. Free some space and run again",
                err=True,
            )
            ctx.exit(EXIT_USER)


def _with_options(options: Iterable[Any]) -> Callable[[Any], Any]:
    def add(command: Any) -> Any:
        for option in reversed(list(options)):
            command = option(command)
        return command

    return add


config_options = _with_options(
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
            "--out", type=RunPlace(), help="Results folder, or s3://bucket/folder.  [results/NAME]"
        ),
    ]
)
choice_options = _with_options(
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
            type=click.Choice([*STATUSES, *FLAWS]),
            help="Also cells of this status, those `disturbed`, of `wide` intervals, or `beside` others: then one at a time.",
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
means_options = _with_options(
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
    ]
)


@click.group(cls=OneLine)
@click.version_option(package_name="transformer-sweep")
def main() -> None:
    """Sweep a grid of Transformer training configurations over your GPUs, one isolated cell at a time."""


for command in (report, compare, import_nsys, publish):
    main.add_command(command)


@main.command()
@config_options
@choice_options
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
    """Show the cells of CONFIG, how many are done, what would run, why and for how long. Starts nothing.

    Example: sweep plan configs/full.yaml --where size=xl --memory --gpu H200
    """
    from orchestrator.cli.text.memory import describe_memory
    from orchestrator.cli.text.plan import describe_cost, describe_plan
    from orchestrator.execution.measuring_process import git_commit
    from orchestrator.hardware.gpu_catalog import find_gpu
    from orchestrator.planning.invocation import new_invocation
    from orchestrator.planning.plan import plan_request
    from orchestrator.planning.prior_results import describe_kept, read_kept
    from orchestrator.planning.request import resolve
    from orchestrator.planning.resumption import describe_going_on, going_on

    card = find_gpu(gpu) if gpu is not None else None

    request = resolve(
        config,
        chosen["sets"],
        chosen["wheres"],
        chosen["out"],
        chosen["sample"],
        chosen["instruments"],
    )
    invocation = new_invocation(request, _choice(chosen), git_commit())
    choice = going_on(request, _choice(chosen), invocation)
    planned = plan_request(request, choice)
    if request.expansion.duplicates:
        click.echo(
            f"{request.expansion.duplicates} combinations name a cell that another names too: each is one cell"
        )
    for line in describe_going_on(request, choice):
        click.echo(line)
    for line in describe_plan(
        planned, request.expansion.label, describe_cost(request, planned, card), everything
    ):
        click.echo(line)
    kept = read_kept(request.run, planned)
    for line in describe_kept(kept, request.config, invocation):
        click.echo(line)
    if memory:
        for line in describe_memory(request, card):
            click.echo(line)


@main.command()
@config_options
@choice_options
@means_options
@click.option(
    "--skip-predicted-oom",
    is_flag=True,
    help="Leave out the cells that are predicted to run out of memory.",
)
@click.option(
    "--check-contention",
    is_flag=True,
    help="At the end, measure a twentieth of what ran beside others again, alone.",
)
def run(config: Path, **chosen: Any) -> None:
    """Measure the cells of CONFIG that are missing or failed. Run it again to go on.

    Example: sweep run configs/demo.yaml
    """
    from orchestrator.planning.request import resolve
    from orchestrator.sweep.console import say
    from orchestrator.sweep.contention import run_and_check
    from orchestrator.sweep.pipeline import run_sweep

    request = resolve(
        config,
        chosen["sets"],
        chosen["wheres"],
        chosen["out"],
        chosen["sample"],
        chosen["instruments"],
    )
    means = replace(
        _means(request.expansion.label, chosen), skip_predicted_oom=chosen["skip_predicted_oom"]
    )
    measure = run_and_check if chosen["check_contention"] else run_sweep
    summary = measure(request, _choice(chosen), means)
    done = not (summary.stopped or summary.late or summary.broken)
    if done and chosen["verify_inferred"] and not summary.verified:
        say("there was nothing to verify: nothing is inferred, or so many were verified before")
    _conclude(summary, request)


def limit_options(axis: str, granularity: int, up_to: int) -> Callable[[Any], Any]:
    any_size = click.IntRange(1, 2**63 - 1)  # that a parameter may have
    return _with_options(
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


@main.command("max-context")
@config_options
@limit_options("context_length", 128, 131072)
@means_options
def max_context(**chosen: Any) -> None:
    """Find the largest context length that fits, for each cell of CONFIG with its context length left open.

    By prediction, which needs no GPU, and by measuring with --confirm, the rows of which are kept in the run.

    Example: sweep max-context configs/full.yaml --gpu H200 --where compile=eager,pass=train_step
    """
    _find_limits("context_length", chosen)


@main.command("max-batch")
@config_options
@limit_options("batch_size", 1, 4096)
@means_options
def max_batch(**chosen: Any) -> None:
    """Find the largest batch size that fits, for each cell of CONFIG with its batch size left open.

    By prediction, which needs no GPU, and by measuring with --confirm, the rows of which are kept in the run.

    Example: sweep max-batch configs/full.yaml --set memory_limit_gib=32 --where size=small,compile=eager,pass=train_step
    """
    _find_limits("batch_size", chosen)


@main.command()
@click.argument("run_folder", metavar="RUN", type=RunPlace())
def status(run_folder: Where) -> None:
    """Count the cells of RUN by status; say what failed and why, and what would run next.

    Example: sweep status results/demo
    """
    from orchestrator.cli.text.status import describe_status
    from orchestrator.planning.request import resolve_again
    from orchestrator.store.remote.remote_run import open_run

    for line in describe_status(resolve_again(open_run(run_folder))):
        click.echo(line)


@main.command()
@click.argument("run_folder", metavar="RUN", type=RunPlace())
@click.argument("cell")
def show(run_folder: Where, cell: str) -> None:
    """Show one CELL of RUN, named by the beginning of its id: all that is known of it, and how to re-run it by hand.

    Of several that were published together RUN may be their folder, and CELL as it stands in its tables: full:3f2a

    Example: sweep show results/demo 3f2a
    """
    from orchestrator.cli.text.cell import describe_cell
    from orchestrator.store.remote.remote_run import open_run
    from orchestrator.store.run_collection import MARK, is_publication

    name, of_several, own = cell.partition(MARK)
    if of_several and is_publication(run_folder):
        run_folder, cell = Path(run_folder) / name, own
    for line in describe_cell(open_run(run_folder), cell):
        click.echo(line)


@main.command()
@click.option("--out", type=RunPlace(), default=Path("results"), help="Where results would go.")
def doctor(out: Where) -> None:
    """Say what this machine can do, what is missing, and what to do about it.

    Example: sweep doctor
    """
    from orchestrator.doctor import examine

    bad = False
    for finding in examine(out):
        click.echo(str(finding))
        bad |= finding.good is False
    sys.exit(EXIT_FAILURES if bad else 0)


@main.command()
def schema() -> None:
    """Print the JSON Schema of a config, for editors.

    Example: sweep schema > sweep.schema.json
    """
    import json

    from orchestrator.config.schema import json_schema

    click.echo(json.dumps(json_schema(), indent=1))


def _means(label: Callable[[Any], str], chosen: dict[str, Any]) -> Any:
    from orchestrator.scheduling.ray_scheduler import RayScheduler, SerialScheduler
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
            RayScheduler(address, cpu_cells, example)
            if chosen["scheduler"] == "ray"
            else SerialScheduler()
        ),
        open_display=lambda total, left: make_display(total, label, console, left),
        time_limit_s=_seconds(chosen["time_limit"]),
        mixed=chosen["mixed"],
        start_method=chosen["start_method"],
        say=say,
    )


def _find_limits(axis: str, chosen: dict[str, Any]) -> None:
    from orchestrator.cli.text.capacity import describe_limits
    from orchestrator.execution.host_probe import probe_here
    from orchestrator.hardware.gpu_catalog import find_gpu
    from orchestrator.planning.preflight import require_devices
    from orchestrator.planning.request import resolve
    from orchestrator.sweep.capacity_search import Bounds, find_limits
    from tasks.spec.cell import varying_axes

    card = find_gpu(chosen["gpu"]) if chosen["gpu"] is not None else None
    if card is not None and chosen["confirm"]:
        gib = f"{card.usable_bytes / 1024**3:.1f}"
        raise ConfigError(
            "--confirm: measures on the GPU that is here, not on a named one",
            f"--set memory_limit_gib={gib}",
        )
    request = resolve(chosen["config"], chosen["sets"], chosen["wheres"], chosen["out"])
    if chosen["confirm"] and not chosen["address"]:  # sooner than after minutes of prediction
        require_devices(
            request, (cell.params.device for cell in request.expansion.cells), [probe_here()]
        )
    bounds = Bounds(axis, chosen["granularity"], chosen["up_to"])
    axes = dict.fromkeys([*varying_axes(request.expansion.cells), axis])
    means = _means(lambda cell: cell.describe(axes), chosen) if chosen["confirm"] else None
    found = find_limits(request, bounds, card, means)
    for line in describe_limits(request, found, bounds):
        click.echo(line)
    if found.summary.stopped or found.summary.broken or found.summary.late:
        _conclude(found.summary, request)
    if chosen["confirm"]:
        click.echo(f"kept in {request.run}")
    if any(group.unmeasured for group in found.groups):
        sys.exit(EXIT_FAILURES)


def _choice(chosen: dict[str, Any]) -> Any:
    from orchestrator.planning.options import Choice

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
    return Choice(
        infer_oom=chosen["infer_oom"],
        verify=chosen["verify_inferred"],
        repeat=chosen["repeat"],
        retry=frozenset(chosen["retry"]),
        only=frozenset(chosen["only"]),
        fresh=chosen["fresh"],
    )


def _status_of(retried: str) -> str:
    return "ok" if retried in FLAWS else retried


def _seconds(text: str | None) -> float | None:
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


def _conclude(summary: Any, request: Any) -> None:
    """What came of a run, what to do next, and the exit code."""
    from orchestrator.common.text import format_seconds, so_many
    from orchestrator.sweep.console import say

    folder, again = shlex.quote(str(request.run)), shlex.join(["sweep", *sys.argv[1:]])
    if summary.recovered:
        say(f"kept {so_many(summary.recovered)}, finished by an earlier run that was killed")
    counts = ", ".join(f"{count} {status}" for status, count in summary.measured.items())
    if summary.foreseen:
        say(f"left out {so_many(summary.foreseen)}, predicted to run out of memory")
    inferred = (
        f"; inferred that {summary.inferred} more run out of memory" if summary.inferred else ""
    )
    times = summary.measured.total()
    often = f", {times} times in all" if times > summary.cells else ""
    if (
        any(summary.statuses.values())
        or summary.stopped
        or summary.late
        or summary.broken
        or not summary.before
    ):
        say(
            f"measured {so_many(summary.cells)}{often}{f': {counts}' if counts else ''}{inferred}; kept in {folder}"
        )
    else:
        before = ", ".join(f"{count} {status}" for status, count in sorted(summary.before.items()))
        say(
            f"nothing to measure: of {so_many(sum(summary.before.values()))} {before}; kept in {folder}"
        )
    if summary.refuted:
        cells = ", ".join(request.expansion.label(cell) for cell in summary.refuted)
        say(
            f"inferred to run out of memory, and yet they fit: {cells}. Without --infer-oom all of them are measured"
        )
    if summary.broken:
        say(f"{so_many(summary.left)} left. To go on: {again}")
        raise summary.broken
    if summary.stopped and summary.stopped != "time limit":
        say(f"stopped by {summary.stopped} with {so_many(summary.left)} left. To go on: {again}")
        sys.exit(EXIT_INTERRUPTED)
    if summary.stopped or summary.late:
        shortest = (
            f", the shortest of which is expected to take {format_seconds(summary.late_s)}"
            if summary.late_s
            else ""
        )
        say(f"out of time with {so_many(summary.left)} left{shortest}. To go on: {again}")
        if not times:
            say(
                "nothing was measured within that time: where it takes as long to begin again, only a longer one goes on"
            )
        sys.exit(EXIT_TIME_LIMIT)
    for flaw, what in FLAWS.items():
        if count := summary.flaws[flaw]:
            say(f"{so_many(count)} {what}")
    say(f"the tables: sweep report {folder}")
    if summary.given_up:
        say(f"left alone {so_many(summary.given_up)} that failed too often before")
    bad = {"failed", "crashed", "timeout", "host_oom", "lost"} & set(summary.statuses)
    if bad or summary.given_up:
        say(f"what went wrong: sweep status {folder}")
    if bad or summary.given_up or summary.refuted:
        sys.exit(EXIT_FAILURES)
