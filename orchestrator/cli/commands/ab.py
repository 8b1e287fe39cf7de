"""`sweep ab`: measure two programs in turn, and compare them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.commands.compare import GATE_OPTIONS, read_policy, write_files
from orchestrator.cli.commands.option_types import Gpu, RunLocationType
from orchestrator.cli.commands.options import (
    CELL_OPTIONS,
    CONFIG_OPTIONS,
    EXECUTION_OPTIONS,
    Chosen,
    parse_request,
)
from orchestrator.common.errors import EXIT_INTERRUPTED, EXIT_TIME_LIMIT, ConfigError
from orchestrator.common.output import ProgressLine, say
from orchestrator.common.run_location import is_address
from orchestrator.common.text import counted, shell_command, without_separator

if TYPE_CHECKING:
    from orchestrator.analysis.gate_policy import Policy
    from orchestrator.hardware.gpu_catalog import GpuModel
    from orchestrator.planning.request import SweepRequest
    from orchestrator.sweep.ab_rounds import Contest
    from orchestrator.sweep.sides import Program, Side

_OUT = Path("results/ab")
_WORKTREES = "worktrees"
_CONFIG = [option for option in CONFIG_OPTIONS if option.name != "out"]
_OPTIONS = [
    click.Option(
        ["--out"], type=RunLocationType(), help="Folder of the runs of both sides.  [results/ab]"
    ),
    click.Option(
        ["--a", "side_a"],
        required=True,
        metavar="SIDE",
        help="python=PATH, commit=REF, env=NAME=VALUE, or several of them joined by commas.",
    ),
    click.Option(
        ["--b", "side_b"], required=True, metavar="SIDE", help="The other side, likewise."
    ),
    click.Option(
        ["--plan", "is_plan"],
        is_flag=True,
        help="Check and show both sides, how long it would take and which change it would find;"
        " measure nothing.",
    ),
    click.Option(
        ["--gpu"], type=Gpu(), metavar="NAME", help="With --plan: for this GPU, such as H100."
    ),
    click.Option(
        ["--strict"],
        is_flag=True,
        help="Limits of 1% and 3 + 4 rounds, which find a slow-down of 2%, instead of a --policy.",
    ),
    *(option for option in CELL_OPTIONS if option.name == "instruments"),
]
# The variables of a side would not reach a running cluster, and a folder has no other driver.
_WITHOUT = {"address": None, "take_over": False}
_EXECUTION = [option for option in EXECUTION_OPTIONS if option.name not in _WITHOUT]


@click.command(params=[*_CONFIG, *_OPTIONS, *_EXECUTION, *GATE_OPTIONS])
def ab(config: Path, is_plan: bool, gpu: GpuModel | None, **chosen: Any) -> None:
    """Measure two Pythons, commits or environments in turn, and show what is slower in B.

    The cells of CONFIG are measured in rounds A B, B A, each into OUT/a and OUT/b, and those in
    doubt in further rounds. Exit codes are those of `sweep compare --gate`. Run the same command
    again to continue where it stopped.

    Example: sweep ab configs/gate.yaml --a commit=origin/main --b commit=HEAD
    """
    from orchestrator.sweep.ab_rounds import Contest, run_rounds
    from orchestrator.sweep.sides import SIDES, parse_side, remove_worktrees

    deadline = None
    if chosen["time_limit"] is not None:
        deadline = time.monotonic() + chosen["time_limit"]
    policy = _policy(chosen)
    named = {side: parse_side(chosen[f"side_{side}"], f"--{side}") for side in SIDES}
    out = chosen["out"] or _OUT
    if is_address(out):
        raise ConfigError(f"--out {out}: is an address", "Name a folder, and copy it afterwards")
    out = Path(out)
    request = parse_request({**_WITHOUT, **chosen, "config": config, "out": out / "a"})
    if is_plan:
        # Not into OUT, whose worktrees another `sweep ab` may be measuring.
        with TemporaryDirectory() as folder:
            _prepare(named, config, Path(folder))
            remove_worktrees(config, Path(folder))
        _print_plan(request, policy, gpu)
        return
    if gpu is not None:
        raise ConfigError(f"--gpu {gpu.name}: is for a plan", "Add --plan, or leave it out")
    programs = _prepare(named, config, out / _WORKTREES)
    command = without_separator(sys.argv[1:])
    contest = Contest(
        programs, out, [*_words(chosen)], chosen["wheres"], request.selection, policy, deadline,
        command,
    )  # fmt: skip
    before = [contest.repetitions(side) for side in SIDES]
    try:
        code = run_rounds(contest, say)
    except KeyboardInterrupt:  # between two turns
        code = EXIT_INTERRUPTED
    if code:
        done = [contest.repetitions(side) for side in SIDES]
        least = len(request.expansion.cells) * policy.rounds.first
        counts = " and ".join(
            f"{counted(number, 'repetition')} of {side.upper()}"
            for side, number in zip(SIDES, done, strict=True)
        )
        say(f"measured so far: {counts}; each side takes at least {least}")
        if code == EXIT_TIME_LIMIT and done == before:
            say("nothing was measured within the time limit: only a longer one may help")
        reason = {EXIT_TIME_LIMIT: "the time limit was reached", EXIT_INTERRUPTED: "stopped"}
        words = shell_command(["sweep", *command])
        say(f"{reason.get(code, f'exit code {code}')}. To continue: {words}")
        sys.exit(code)
    remove_worktrees(config, out / _WORKTREES)
    _conclude(contest, chosen, command)


def _prepare(named: Mapping[str, Side], config: Path, trees: Path) -> dict[str, Program]:
    """Return what measures each side, and print it."""
    from orchestrator.sweep.sides import prepare_sides

    with ProgressLine("preparing both sides"):
        programs = prepare_sides(named, config, trees)
    for side, program in programs.items():
        say(f"{side.upper()}: {program}")
    if programs["a"].identity == programs["b"].identity:
        say("A and B are the same program. This is an A/A test: each failure is a false alarm")
    return programs


def _policy(chosen: Chosen) -> Policy:
    from orchestrator.analysis.gate_policy import STRICT

    if not chosen["strict"]:
        return read_policy(chosen["policy"])
    if chosen["policy"]:
        raise ConfigError("--strict: is a policy by itself", "Leave out --policy or --strict")
    return STRICT


def _conclude(contest: Contest, chosen: Chosen, command: Sequence[str]) -> None:
    """Print the comparison, write the files, and exit with the code of the gate."""
    from orchestrator.cli.text.ab import describe_decision
    from orchestrator.cli.text.comparison import describe_comparison
    from orchestrator.report.formats.terminal import Screen

    with ProgressLine("comparing"):
        comparison = replace(contest.compare(), is_same=contest.is_same)
    screen = Screen.of_stdout(may_color=False)
    lines = list(describe_comparison(comparison, screen))
    if comparison.outcome != "PASS":
        lines += describe_decision(comparison, command, contest.out, chosen["policy"])
    for line in lines:
        click.echo(screen.text(line))
    write_files(comparison, (), {**chosen, "gate": True}, "sweep ab")
    say(f"results in {contest.run('a')} and {contest.run('b')}")
    sys.exit(comparison.exit_code)


def _print_plan(request: SweepRequest, policy: Policy, gpu: GpuModel | None) -> None:
    from orchestrator.cli.text.ab import describe_ab_plan
    from orchestrator.store.run import Run

    other = Run(request.run.folder.parent / "b")
    for line in describe_ab_plan(request, policy, (request.run, other), gpu):
        click.echo(line)


def _words(chosen: Chosen) -> Iterator[str]:
    """Yield the options of `sweep run` that select values, instruments and the way to run."""
    for option in (*_CONFIG, *_OPTIONS, *_EXECUTION):
        value, name = chosen.get(str(option.name)), option.opts[0]
        if name in ("--set", "--instrument"):
            for text in value or ():
                yield from (name, text)
        elif option not in _EXECUTION or name == "--time-limit" or value == option.default:
            continue
        elif value is True:
            yield name
        elif value not in (None, False):
            yield from (name, str(value))
