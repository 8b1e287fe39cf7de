"""Rounds of `sweep ab`: two programs measure the same cells in turn, A B B A A B.

There is no state: which rounds are left follows from the rows of the two runs. Each turn is a child
process, `sweep run CONFIG --repeat N` of that side, which measures what its run lacks. A command
that was interrupted or killed therefore continues where it stopped.

Both sides have one cache of compiled code. If each side compiled by itself, torch.compile could
choose other kernels for the same program (see analysis/time_checks.py).
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from orchestrator.analysis.checks import Check, Comparison
from orchestrator.analysis.comparison import Extent, compare_runs
from orchestrator.analysis.cpu_bound import BoundBy
from orchestrator.analysis.gate_policy import Policy
from orchestrator.analysis.time_checks import CPU_ROUNDS, OPERATIONS
from orchestrator.analysis.verdicts import Verdict
from orchestrator.common.errors import (
    COMPLETED,
    EXIT_INTERRUPTED,
    EXIT_TIME_LIMIT,
    ConfigError,
    PlatformError,
)
from orchestrator.common.files import replace_file
from orchestrator.common.output import Notify, say
from orchestrator.common.text import cell_count, cells_and_verb
from orchestrator.config.grid import expand
from orchestrator.config.schema import load_config
from orchestrator.config.selection import Selection
from orchestrator.execution.child_environment import SHARED_CACHE
from orchestrator.execution.exit_diagnosis import signal_name
from orchestrator.execution.program import lifeline
from orchestrator.planning.invocation import UNMEASURED
from orchestrator.store.cell_state import read_states
from orchestrator.store.layout import CACHE
from orchestrator.store.run import Run
from orchestrator.sweep.interruption import SAVING_S, Interruption
from orchestrator.sweep.sides import SIDES, SIDES_FILE, Program, plain
from tasks.spec.status import Status

# The kernel kills the child with the process that started it (see tasks/process/lifeline.py). Its
# measuring processes and Ray end with the child, as those of any killed `sweep run` do.
_CHILD = """
import runpy, sys
from tasks.process.lifeline import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
runpy.run_module("orchestrator", run_name="__main__", alter_sys=True)
"""

# Lines that are about one turn: they would be wrong about the command.
_OF_ONE_SIDE = re.compile(
    r"^preparing: |^measured 0 cells|^nothing was measured|: sweep (run|report) "
)
_RELAY_S = 2.0


@dataclass(frozen=True)
class Turn:
    """One side measures until each cell has this number of rounds.

    cells: ids of the cells; None: all.
    """

    side: str
    rounds: int
    cells: frozenset[str] | None = None


def turns(first: int, last: int, cells: frozenset[str] | None = None) -> list[Turn]:
    """Return the turns of some rounds in the order A B B A A B; two turns of one side are one."""
    found: list[Turn] = []
    for number in range(first, last + 1):
        for side in SIDES if number % 2 else reversed(SIDES):
            if found and found[-1].side == side:
                found.pop()
            found.append(Turn(side, number, cells))
    return found


def further_turns(doubts: Mapping[str, int], first: int) -> list[Turn]:
    """Return the turns that follow the first rounds. doubts: rounds in all, by cell."""
    found: list[Turn] = []
    done = first
    for rounds in sorted(set(doubts.values())):
        cells = frozenset(cell for cell, target in doubts.items() if target >= rounds)
        found += turns(done + 1, rounds, cells)
        done = max(done, rounds)
    return found


def rounds_by_doubt(comparison: Comparison, policy: Policy) -> dict[str, int]:
    """Return how many rounds the cells in doubt need, by cell, from the first rounds of all cells.

    A cell is in doubt if it is undecided and more rounds help, or if a ratio of one of its rounds
    is above half the threshold. All others have passed. A cell in doubt is judged once, after its
    last round, so that the second look adds no false alarm.
    """
    doubts, rounds = {}, policy.rounds
    for check in comparison.times:
        if check.gate == OPERATIONS and check.threshold is None:
            doubts[check.cell] = CPU_ROUNDS
        elif rounds.more and _is_in_doubt(check):
            doubts[check.cell] = rounds.first + rounds.more
    return doubts


def _is_in_doubt(check: Check) -> bool:
    if not check.log_ratios or check.threshold is None:
        return False
    ratios = [*check.log_ratios]
    if check.step_ratio and check.bound_by is BoundBy.GPU:
        ratios.append(math.log(check.step_ratio))
    is_far = max(map(abs, ratios)) > math.log1p(check.threshold) / 2
    return is_far or check.verdict is Verdict.UNDECIDED


@dataclass(frozen=True)
class Contest:
    """Two programs that measure the same config into OUT/a and OUT/b.

    words: options of `sweep run` that both get. wheres: the values of its option --where.
    selection: of cells, as these options say.
    deadline: monotonic time at which the command ends; None: no limit. command: its arguments.
    """

    programs: Mapping[str, Program]
    out: Path
    words: Sequence[str]
    wheres: Sequence[str]
    selection: Selection
    policy: Policy
    deadline: float | None = None
    command: Sequence[str] = ()

    def run(self, side: str) -> Run:
        return Run(self.out / side)

    def compare(self, rounds: int | None = None) -> Comparison:
        """Compare the cells of both sides. The runs may have more, from another command."""
        cells = self.cells["a"] | self.cells["b"]
        return compare_runs(*self.runs, self.policy, extent=Extent(rounds, cells))

    def repetitions(self, side: str) -> int:
        """Return how many repetitions a side has."""
        run, own = self.run(side), self.cells[side]
        states = read_states(run) if run.exists else {}
        return sum(len(state.valid) for cell, state in states.items() if cell in own)

    @property
    def is_same(self) -> bool:
        """True if A and B are one program."""
        first, second = self.programs.values()
        return first.identity == second.identity

    @property
    def cache(self) -> Path:
        """The folder of the compiled code of both sides."""
        return self.out / CACHE

    @property
    def runs(self) -> tuple[Run, Run]:
        return self.run("a"), self.run("b")

    @cached_property
    def cells(self) -> Mapping[str, frozenset[str]]:
        """The ids of the cells of each side, whose commit may have another config.

        They are read once: the worktree of a commit is removed before the command ends.
        """
        found = {}
        for side, program in self.programs.items():
            config, source = load_config(program.config)
            cells = expand(config, source, self.selection).cells
            found[side] = frozenset(cell.id for cell in cells)
        return found


Measure = Callable[[Contest, Turn], int]  # returns the exit code of `sweep run`


def run_rounds(contest: Contest, notify: Notify, measure: Measure | None = None) -> int:
    """Measure all rounds that are left. Return 0, or the exit code of what stopped it.

    measure: measures one turn; tests replace it.
    """
    require_sides(contest)
    measure = measure or run_child
    policy = contest.policy
    first = policy.rounds.first
    if code := _measure_turns(contest, turns(1, first), notify, measure):
        return code
    comparison = contest.compare(rounds=first)
    doubts = rounds_by_doubt(comparison, policy)
    if doubts:
        count = cells_and_verb(len(doubts), "is in doubt and gets", "are in doubt and get")
        notify(f"after {first} rounds, {count} {max(doubts.values())} rounds")
    return _measure_turns(contest, further_turns(doubts, first), notify, measure)


def _measure_turns(
    contest: Contest,
    left: Iterable[Turn],
    notify: Notify,
    measure: Measure,
) -> int:
    for turn in left:
        own = contest.cells[turn.side]
        wanted = own if turn.cells is None else turn.cells & own
        wanted = cells_left(contest.run(turn.side), wanted, turn.rounds)
        if not wanted:
            continue
        if contest.deadline is not None and contest.deadline - time.monotonic() <= SAVING_S:
            return EXIT_TIME_LIMIT
        notify(f"{turn.side.upper()}, up to round {turn.rounds}: {cell_count(len(wanted))}")
        code = measure(contest, replace(turn, cells=None if wanted == own else wanted))
        if code not in COMPLETED:
            return code
    return 0


def cells_left(run: Run, cells: frozenset[str], rounds: int) -> frozenset[str]:
    """Return the cells without this number of rounds, except those that ended without a result."""
    states = read_states(run) if run.exists else {}
    done = set()
    for cell in cells & states.keys():
        state = states[cell]
        if state.status == Status.OK:
            is_done = len(state.valid) >= rounds
        else:
            is_done = state.status not in (*UNMEASURED, Status.LOST)
        if is_done:
            done.add(cell)
    return cells - done


def run_child(contest: Contest, turn: Turn) -> int:
    """Measure one turn in a child process and return its exit code; 130 if this one is stopped.

    The child has another session, so that a Ctrl-C of the terminal reaches it once, from here.
    """
    program = contest.programs[turn.side]
    words = ["run", str(program.config), *contest.words, "--repeat", str(turn.rounds)]
    wheres = contest.wheres
    if turn.cells is not None:
        wheres = [f"cell={'|'.join(sorted(turn.cells))}"]
    words += [word for where in wheres for word in ("--where", where)]
    if contest.deadline is not None:
        words += ["--time-limit", f"{contest.deadline - time.monotonic():.0f}s"]
    words += ["--out", str(contest.run(turn.side).folder.absolute())]
    with Interruption(time_limit_s=None) as interruption, lifeline() as end:
        # A signal until it is awaited ends the child by the lifeline: it has measured nothing yet.
        child = subprocess.Popen(
            [program.python, "-P", "-c", _CHILD, str(end), *words],
            cwd=program.folder,
            env={**os.environ, **program.env, SHARED_CACHE: str(contest.cache.absolute())},
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=(end,),
            start_new_session=True,
        )
        relay = threading.Thread(target=_relay, args=(child,), daemon=True)
        relay.start()
        with interruption.stops_here():
            child.wait()
        if interruption.reason:
            child.send_signal(signal.SIGINT)  # it stores its rows
        code = child.wait()
        relay.join(_RELAY_S)  # a process that the child left behind may hold its output open
    if interruption.reason:
        return EXIT_INTERRUPTED
    if code < 0:
        problem = f"side {turn.side.upper()}: `sweep run` was ended by {signal_name(-code)}"
        raise PlatformError(problem, "Run the same command again to continue")
    if code not in (*COMPLETED, EXIT_TIME_LIMIT, EXIT_INTERRUPTED):
        problem = f"side {turn.side.upper()}: `sweep run` ended with exit code {code}"
        raise PlatformError(problem, "The line above says why")
    return code


def _relay(child: subprocess.Popen[str]) -> None:
    """Print the output of a child, without advice to continue or repeat one side by itself."""
    assert child.stdout is not None
    with child.stdout as lines:
        for line in lines:
            if not _OF_ONE_SIDE.search(line):
                say(line.rstrip("\n"))


def require_sides(contest: Contest) -> None:
    """Write what A and B are into OUT. Raise ConfigError if its rounds are those of other sides."""
    path = contest.out / SIDES_FILE
    own = {side: program.identity for side, program in contest.programs.items()}
    if path.is_file():
        known = json.loads(path.read_text())
        for side in SIDES:
            if known.get(side) != own[side]:
                differences = ", ".join(_differences(known.get(side, {}), own[side]))
                problem = f"{contest.out}: has rounds of another {side.upper()}: {differences}"
                raise ConfigError(problem, "Name another --out")
    elif any(run.exists for run in contest.runs):
        problem = f"{contest.out}: has runs that `sweep ab` did not measure"
        raise ConfigError(problem, "Name another --out")
    contest.out.mkdir(parents=True, exist_ok=True)
    facts = {**own, "command": [*contest.command]}  # for origin_of
    replace_file(path, json.dumps(facts, indent=1) + "\n")


def _differences(known: Mapping[str, object], own: Mapping[str, object]) -> Iterator[str]:
    """Yield what differs in the identities of two programs."""
    for name in own:
        if known.get(name) != own[name]:
            yield f"{name} {plain(known.get(name))} instead of {plain(own[name])}"
