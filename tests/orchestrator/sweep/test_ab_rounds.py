"""`sweep ab`: the order of rounds, cells in doubt, and continuing after each interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from orchestrator.analysis.comparison import Extent, compare_runs
from orchestrator.analysis.gate_policy import Policy, PolicyFile
from orchestrator.common.errors import (
    EXIT_FAILURES,
    EXIT_INTERRUPTED,
    EXIT_TIME_LIMIT,
    EXIT_UNDECIDED,
    ConfigError,
)
from orchestrator.config.selection import Selection
from orchestrator.planning.invocation import RunOptions
from orchestrator.store.run import Run
from orchestrator.sweep import ab_rounds
from orchestrator.sweep.ab_rounds import (
    Contest,
    Turn,
    further_turns,
    rounds_by_doubt,
    run_rounds,
    turns,
)
from orchestrator.sweep.sides import Program, Side
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tests.conftest import sweep_command
from tests.orchestrator.analysis.test_comparison import cpu_cell, gpu_cell, write
from tests.support.fake_sweep import CONFIG, FakeScheduler, go, outcome_of, request_for

MakeOutcome = Callable[..., Outcome]


def in_order(planned: Sequence[Turn]) -> str:
    """Return the sides of the processes of a cell, in the order in which they start."""
    done, order = {"a": 0, "b": 0}, ""
    for turn in planned:
        order += turn.side * (turn.rounds - done[turn.side])
        done[turn.side] = turn.rounds
    return order


def test_sides_alternate_by_whole_rounds() -> None:
    assert turns(1, 2) == [Turn("a", 1), Turn("b", 2), Turn("a", 2)]
    assert in_order(turns(1, 5)) == "abbaabbaab"
    assert in_order([*turns(1, 2), *turns(3, 5)]) == "abbaabbaab"
    assert in_order([*turns(1, 3), *turns(4, 7)]) == "abbaabbaabbaab"
    assert turns(3, 2) == []


def test_cells_get_the_rounds_that_they_need() -> None:
    assert further_turns({}, 2) == []
    found = further_turns({"x": 5, "y": 7}, 2)
    assert [turn.cells for turn in found] == [{"x", "y"}] * 4 + [{"y"}] * 3
    assert in_order([*turns(1, 2), *found]) == "abbaabbaabbaab"


@pytest.mark.parametrize(
    ("after", "kernels", "is_in_doubt"),
    [
        ((40.0, 40.04), (), False),  # nothing above half of 2 %
        ((40.5, 40.0), (), True),
        ((39.5, 40.0), (), True),  # a gain too is shown with its interval
        ((42.0, 42.0), (), True),  # two rounds do not show their noise
        ((40.0, 40.0), (30.5, 30.5), True),
        ((40.6, 40.6), (30.0, 30.0), True),  # the step grew, though the kernels did not
        ((40.0, 40.0), (30.0, 30.0), False),
    ],
)
def test_cells_in_doubt_get_further_rounds(
    tmp_path: Path,
    make_outcome: MakeOutcome,
    after: tuple[float, float],
    kernels: tuple[float, float] | tuple[()],
    is_in_doubt: bool,
) -> None:
    gpu = make_outcome(device="cuda")
    before = write(tmp_path / "a", *gpu_cell(gpu, (40.0, 40.0), (30.0, 30.0) if kernels else ()))
    changed = write(tmp_path / "b", *gpu_cell(gpu, after, kernels))
    found = rounds_by_doubt(compare_runs(before, changed), Policy())
    assert found == ({gpu.attempt.cell.id: 5} if is_in_doubt else {})


def test_which_cells_are_in_doubt_does_not_depend_on_later_rounds(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    gpu = make_outcome(device="cuda")
    before = write(tmp_path / "a", *gpu_cell(gpu, (40.0,) * 4))
    after = write(tmp_path / "b", *gpu_cell(gpu, (40.0, 40.04, 41.0, 42.0)))
    assert rounds_by_doubt(compare_runs(before, after, extent=Extent(2)), Policy()) == {}
    assert len(rounds_by_doubt(compare_runs(before, after, extent=Extent(3)), Policy())) == 1


def test_cpu_bound_cells_get_the_rounds_that_the_policy_implies(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    outcome, rng = make_outcome(), np.random.default_rng(0)
    runs = [write(tmp_path / name, *cpu_cell(outcome, 40.0, 400.0, rng, 2)) for name in "ab"]
    assert rounds_by_doubt(compare_runs(*runs), Policy()) == {}
    policy = PolicyFile.model_validate({"gate": {"step": {"cpu_bound": "10%"}}}).gate
    found = rounds_by_doubt(compare_runs(*runs, policy), policy)
    assert found == {outcome.attempt.cell.id: 20}


# Each attempt of four cells. One of them is in doubt: A B B A, then A B B A.
ALL_SIDES = "a" * 4 + "b" * 8 + "a" * 4 + "abba"


class Killed(BaseException):
    pass


class Measuring:
    """Measures turns without a process. It is killed after a number of attempts."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str, int]] = []
        self.killed_after = 1000
        self.fails: tuple[str, ...] = ()

    def __call__(self, contest: Contest, turn: Turn) -> int:
        def measure(attempt: Attempt) -> Outcome:
            if len(self.begun) >= self.killed_after:
                self.killed_after = 1000
                raise Killed
            self.begun.append((turn.side, attempt.cell.id, attempt.number))
            failed = attempt.cell.id in self.fails
            return outcome_of(attempt, Status.FAILED if failed else Status.OK)

        wheres = [] if turn.cells is None else [f"cell={'|'.join(sorted(turn.cells))}"]
        config = contest.programs[turn.side].config
        request = request_for(config, wheres=wheres, out=contest.run(turn.side).folder)
        go(request, FakeScheduler(measure), RunOptions(repeat=turn.rounds))
        return 0


@pytest.fixture
def contest(tmp_path: Path) -> Contest:
    config = tmp_path / "test.yaml"
    config.write_text(CONFIG)
    programs = {
        side: Program(Side(env={"A": side}), "python", tmp_path, config, {}, "torch 2.13.0")
        for side in "ab"
    }
    return Contest(programs, tmp_path / "out", (), (), Selection(), Policy())


@pytest.fixture
def doubtful(contest: Contest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a cell that is in doubt, for two more rounds."""
    cell = sorted(contest.cells["a"])[0]
    monkeypatch.setattr(ab_rounds, "rounds_by_doubt", lambda comparison, policy: {cell: 4})
    return cell


def test_a_contest_is_compared_after_the_worktrees_of_its_commits_were_removed(
    contest: Contest,
) -> None:
    assert run_rounds(contest, lambda message: None, Measuring()) == 0
    contest.programs["a"].config.unlink()
    assert set(contest.compare().cells) == contest.cells["a"]
    assert contest.repetitions("b") == 2 * len(contest.cells["b"])


def test_all_cells_are_measured_twice_and_those_in_doubt_again(
    contest: Contest, doubtful: str
) -> None:
    measuring, messages = Measuring(), list[str]()
    assert run_rounds(contest, messages.append, measuring) == 0
    sides = "".join(side for side, *_ in measuring.begun)
    assert sides == ALL_SIDES
    assert {cell for _, cell, number in measuring.begun if number > 2} == {doubtful}
    assert messages == [
        "A, up to round 1: 4 cells",
        "B, up to round 2: 4 cells",
        "A, up to round 2: 4 cells",
        "after 2 rounds, 1 cell is in doubt and gets 4 rounds",
        "A, up to round 3: 1 cell",
        "B, up to round 4: 1 cell",
        "A, up to round 4: 1 cell",
    ]
    again = Measuring()
    assert run_rounds(contest, messages.append, again) == 0
    assert not again.begun


@pytest.mark.parametrize("attempts", [0, 3, 4, 6, 12, 14, 16, 17, 19])
def test_an_interrupted_command_continues_with_the_turn_that_it_was_in(
    contest: Contest, doubtful: str, attempts: int
) -> None:
    measuring = Measuring()
    measuring.killed_after = attempts
    with pytest.raises(Killed):
        run_rounds(contest, print, measuring)
    assert len(measuring.begun) == attempts
    assert run_rounds(contest, print, measuring) == 0
    assert "".join(side for side, *_ in measuring.begun) == ALL_SIDES
    rounds = Counter((side, cell) for side, cell, _ in measuring.begun)
    cells = contest.cells["a"]
    assert rounds == {(side, cell): 4 if cell == doubtful else 2 for side in "ab" for cell in cells}


def test_a_cell_that_fails_does_not_keep_the_others_from_their_rounds(contest: Contest) -> None:
    measuring = Measuring()
    failing = sorted(contest.cells["a"])[0]
    measuring.fails = (failing,)
    assert run_rounds(contest, print, measuring) == 0
    failed = [side for side, cell, _ in measuring.begun if cell == failing]
    assert failed == ["a", "b"]  # each side once: a timeout would cost its limit in each turn
    assert len(measuring.begun) == 3 * 4 + 2
    count = len(measuring.begun)
    assert run_rounds(contest, print, measuring) == 0
    assert len(measuring.begun) == count  # it is not tried again


@pytest.mark.parametrize("code", [EXIT_TIME_LIMIT, EXIT_INTERRUPTED, 2])
def test_what_stops_a_side_stops_the_command(contest: Contest, code: int) -> None:
    begun: list[Turn] = []

    def measure(contest: Contest, turn: Turn) -> int:
        begun.append(turn)
        return code

    assert run_rounds(contest, print, measure) == code
    assert begun == [Turn("a", 1)]


def test_no_turn_begins_at_the_time_limit(contest: Contest) -> None:
    measuring = Measuring()
    late = replace(contest, deadline=time.monotonic() + 1)
    assert run_rounds(late, print, measuring) == EXIT_TIME_LIMIT
    assert not measuring.begun


def test_cells_of_an_earlier_config_are_not_judged(contest: Contest) -> None:
    run_rounds(contest, print, Measuring())
    first = sorted(contest.cells["a"])[0]
    fewer = replace(contest, selection=Selection(where={"cell": [first]}))
    assert fewer.compare().cells == [first]
    assert len(contest.compare().cells) == 4


def test_lines_about_one_turn_are_not_printed() -> None:
    lines = (
        "measured 0 cells; results in out/a",
        "nothing was measured within the time limit: if the next start takes as long",
        "out of time with 2 cells left. To continue: sweep run c.yaml",
    )
    assert all(map(ab_rounds._OF_ONE_SIDE.search, lines))
    assert not ab_rounds._OF_ONE_SIDE.search("measured 10 cells: 10 ok; results in out/a")


def test_rounds_of_other_sides_are_not_mixed(contest: Contest) -> None:
    run_rounds(contest, print, Measuring())
    side = Side(env={"A": "other"}, commit="123")
    other = replace(contest.programs["b"], side=side)
    message = "has rounds of another B: commit none instead of 123, env A=b instead of A=other"
    with pytest.raises(ConfigError, match=message):
        run_rounds(replace(contest, programs={**contest.programs, "b": other}), print, Measuring())


def test_runs_of_other_commands_are_not_continued(contest: Contest) -> None:
    go(
        request_for(contest.programs["a"].config, out=contest.run("a").folder),
        FakeScheduler(outcome_of),
    )
    with pytest.raises(ConfigError, match="has runs that `sweep ab` did not measure"):
        run_rounds(contest, print, Measuring())


TINY = """
name: tiny
grids:
  - task: accumulation
    fixed: {device: cpu, count: 1}
    axes: {seed: [1, 2, 3]}
"""


# With CHANGE=1, one cell prints within a compiled block, and one needs 2 GiB more than before.
CHANGING = """
import os

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, prints):
        super().__init__()
        self.linear, self.prints = nn.Linear(16, 16), prints

    def forward(self, x):
        if self.prints:
            print("a line")
        return torch.relu(self.linear(x))


class Model(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change if os.environ["CHANGE"] == "1" else ""
        self.table, self.head = nn.Embedding(100, 16), nn.Linear(16, 100)
        self.layers = nn.ModuleList(Layer(self.change == "print") for _ in range(2))

    def forward(self, tokens):
        x = self.table(tokens)
        if self.change == "memory":
            x = x + torch.zeros(2**29)[:16]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""
OF_CHANGING = """
name: changing
defaults:
  {device: cpu, pass: forward, vocab_size: 100, context_length: 16, memory_limit_gib: 1.5, warmup_steps: 1, measured_steps: 1}
instruments: [timing, memory]
grids:
  - task: train_step
    fixed: {model: "changing:Model", model_args: {change: print}, compile: blocks}
  - task: train_step
    fixed: {model: "changing:Model", compile: eager}
    axes: {model_args.change: [memory, nothing]}
"""


@pytest.mark.process
@pytest.mark.compile
@pytest.mark.timeout(300)
def test_a_new_graph_break_and_a_new_failure_are_found_in_a_real_run(
    tmp_path: Path, sweep: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "changing.py").write_text(CHANGING)
    (tmp_path / "changing.yaml").write_text(OF_CHANGING)
    (tmp_path / "gate.yaml").write_text("gate: {rounds: {first: 1, more: 0}}\n")
    sides = ("--a", "env=CHANGE=0", "--b", "env=CHANGE=1", "--json", "gate.json")
    words = ("ab", "changing.yaml", *sides, "--policy", "gate.yaml", "--scheduler", "serial")
    ended = sweep(*words, timeout=300)
    assert ended.returncode == EXIT_FAILURES, ended.stdout + ended.stderr
    assert "FAIL: 2 of 3 cells are worse in B" in ended.stdout
    checks = json.loads((tmp_path / "gate.json").read_text())["checks"]
    failures = {
        (one["settings"]["model_args.change"], one["gate"], one["reason"])
        for one in checks
        if one["fails"]
    }
    assert failures == {("print", "graph breaks", "0 → 1"), ("memory", "status", "ok → oom")}
    out = tmp_path / "results" / "ab"
    assert any(path.is_file() for path in (out / "cache").rglob("*"))
    assert not any(path.is_file() for side in "ab" for path in (out / side / "cache").rglob("*"))


def started(words: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(sweep_command(*words), cwd=folder, stdout=subprocess.PIPE, text=True)


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_real_command_is_stopped_killed_and_continued(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "gate.yaml").write_text("gate: {rounds: {first: 1, more: 0}}\n")
    sides = ("--a", "env=SIDE=1", "--b", "env=SIDE=2")
    words = ("ab", "tiny.yaml", *sides, "--policy", "gate.yaml", "--scheduler", "serial")
    with started(words, tmp_path) as stopped:
        assert stopped.stdout is not None
        next(line for line in stopped.stdout if line.startswith("[1/"))
        stopped.send_signal(signal.SIGINT)
        output = stopped.stdout.read()
    assert stopped.returncode == EXIT_INTERRUPTED
    assert output.splitlines()[-1].startswith("stopped. To continue: sweep ab tiny.yaml --a")
    assert "sweep run" not in output

    with started(words, tmp_path) as killed:
        assert killed.stdout is not None
        next(line for line in killed.stdout if line.startswith("["))
        children = psutil.Process(killed.pid).children(recursive=True)
        killed.kill()
    assert len(children) >= 1
    assert psutil.wait_procs(children, timeout=10)[1] == []

    ended = subprocess.run(
        sweep_command(*words), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == EXIT_UNDECIDED, ended.stdout + ended.stderr
    assert "exact: status not worse in 3 of 3" in ended.stdout  # these cells have no times
    assert "nan" not in ended.stdout
    for side in "ab":
        rows = Run(tmp_path / "results" / "ab" / side).read("attempts")
        successes = rows[rows["status"] == "ok"]
        assert successes.groupby("cell").size().tolist() == [1, 1, 1]
