"""`sweep ab`: its plan, bad input, and the result of rounds that were measured before."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import Result

from orchestrator.analysis.checks import Check, Comparison
from orchestrator.analysis.gate_policy import STRICT, Policy, PolicyFile
from orchestrator.analysis.verdicts import Verdict
from orchestrator.cli.text.ab import describe_decision
from orchestrator.sweep import ab_rounds, sides
from orchestrator.sweep.ab_rounds import Contest, Turn
from tasks.spec.outcome import Outcome
from tests.conftest import ROOT
from tests.orchestrator.analysis.test_comparison import gpu_cell, on, write
from tests.orchestrator.sweep.test_sides import git
from tests.support.fake_sweep import request_for

Sweep = Callable[..., Result]
CONFIG = """
name: tiny
grids:
  - task: train_step
    fixed: {size: tiny, context_length: 16, device: cuda}
"""
TWO = ("--a", "env=A=1", "--b", "env=A=2")
SAME = ("--a", "env=A=1", "--b", "env=A=1")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    facts = {"root": str(ROOT), "torch": "2.13.0", "python": "3.11.7"}
    monkeypatch.setattr(sides, "_probe", lambda *_: facts)
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def measured(
    config: Path, make_outcome: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> list[Turn]:
    """The turns that the command asks for. B takes 5 % longer than A."""
    gpu = make_outcome(device="cuda")
    (cell,) = request_for(config).expansion.cells
    gpu = replace(gpu, attempt=replace(gpu.attempt, cell=cell))
    turns: list[Turn] = []

    def run_child(contest: Contest, turn: Turn) -> int:
        turns.append(turn)
        middle = 40.0 if turn.side == "a" else 42.0
        medians = [middle * (1 + number / 1e4) for number in range(turn.rounds)]
        known = max((one.rounds for one in turns[:-1] if one.side == turn.side), default=0)
        write(contest.run(turn.side).folder, *gpu_cell(gpu, medians)[known:])
        return 0

    monkeypatch.setattr(ab_rounds, "run_child", run_child)
    return turns


def test_a_slower_side_fails_and_the_files_say_why(
    sweep_here: Sweep, measured: list[Turn], tmp_path: Path
) -> None:
    words = ("ab", "tiny.yaml", *TWO, "--markdown", "x.md", "--junit", "x.xml", "--json", "x.json")
    done = sweep_here(*words)
    assert done.exit_code == 1, (done.output, done.exception)
    assert "FAIL: 1 of 1 cell is worse in B" in done.stdout
    assert "after 2 rounds, 1 cell is in doubt and gets 5 rounds" in done.stdout
    assert "A/A" not in done.stdout
    assert [(turn.side, turn.rounds) for turn in measured] == [
        ("a", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 4), ("a", 5), ("b", 5),
    ]  # fmt: skip
    assert (tmp_path / "x.md").read_text().startswith("## FAIL: 1 of 1 cell")
    suite = ElementTree.parse(tmp_path / "x.xml").getroot()
    assert (suite.get("name"), suite.get("failures")) == ("sweep ab", "1")
    (check, *_) = json.loads((tmp_path / "x.json").read_text())["checks"]
    assert len(check["rounds"]) == 5
    again = sweep_here(*words)
    assert again.exit_code == 1
    assert len(measured) == 7
    swapped = sweep_here("ab", "tiny.yaml", "--a", "env=A=2", "--b", "env=A=1")
    assert swapped.exit_code == 2
    assert swapped.stderr == (
        "sweep: results/ab: has rounds of another A: env A=1 instead of A=2. Name another --out\n"
    )


def test_a_failure_of_equal_sides_is_a_false_alarm(sweep_here: Sweep, measured: list[Turn]) -> None:
    done = sweep_here("ab", "tiny.yaml", *SAME, "--markdown", "x.md")
    assert done.exit_code == 1
    assert Path("x.md").read_text().startswith("## FALSE ALARM: 1 of 1 cell")
    assert "A and B are the same program. This is an A/A test" in done.stdout
    assert "FALSE ALARM: 1 of 1 cell is worse in B" in done.stdout


def test_the_summary_of_a_job_gets_the_result(
    sweep_here: Sweep, measured: list[Turn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    sweep_here("ab", "tiny.yaml", *TWO)
    assert (tmp_path / "summary.md").read_text().startswith("## FAIL")


def test_a_plan_says_what_it_takes_and_finds(sweep_here: Sweep, config: Path) -> None:
    done = sweep_here("ab", ROOT / "configs" / "gate.yaml", *TWO, "--plan", "--gpu", "H100")
    assert done.exit_code == 0, done.output
    a, b, *lines = done.stdout.splitlines()
    assert a == "A: env=A=1, torch 2.13.0, Python 3.11.7"
    assert b == "B: env=A=2, torch 2.13.0, Python 3.11.7"
    assert lines[0] == (
        "40 cells; rounds: 2 of all cells, 3 more of those in doubt; each measures A and B"
    )
    assert lines[1].startswith("the first 2 rounds of both sides: expected: ")
    assert "on one H100" in lines[1]
    assert lines[2].startswith("all 5 rounds, if every cell is in doubt: expected: ")
    assert "5 rounds find a slow-down of 2.1% with 90%" in lines[3]
    assert lines[-1].startswith("not judged: the ms of CPU-bound steps")
    assert not Path("results").exists()


def test_a_strict_plan_finds_two_percent(sweep_here: Sweep, config: Path) -> None:
    words = ("ab", ROOT / "configs" / "gate.yaml", *TWO, "--strict", "--plan", "--gpu", "H100")
    lines = sweep_here(*words).stdout.splitlines()[2:]
    assert "rounds: 3 of all cells, 4 more of those in doubt" in lines[0]
    assert "7 rounds find a slow-down of 1.1% with 90%" in lines[3]
    assert "7 rounds find a slow-down of 1.2% with 90%" in lines[4]


def test_a_plan_after_some_rounds_uses_their_noise(sweep_here: Sweep, measured: list[Turn]) -> None:
    sweep_here("ab", "tiny.yaml", *TWO)
    done = sweep_here("ab", "tiny.yaml", *TWO, "--plan")
    assert "in the median cell (median of 1 cell in results/ab)" in done.stdout
    assert "Add --instrument kernel_time" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--a", "main", "--b", "env=A=1"), "--a main: is not a side"),
        (("--a", "python=/none", "--b", "env=A=1"), "--a python=/none: is no program"),
        ((*TWO, "--out", "s3://bucket/ab"), "--out s3://bucket/ab: is an address"),
        ((*TWO, "--gpu", "H100"), "--gpu H100: is for a plan"),
        ((*TWO, "--policy", "none.yaml"), "none.yaml: cannot be read"),
        ((*TWO, "--policy", "none.yaml", "--strict"), "--strict: is a policy by itself"),
        ((*TWO, "--set", "size=none"), "--set"),
        (("--a", "main", "--b", "env=A=1", "--plan"), "--a main: is not a side"),
        (("--a", "env=A=1", "--b", "python=/none", "--plan"), "--b python=/none: is no program"),
        (("--a", "env=A=1", "--b", "commit=none", "--plan"), "--b commit=none: is not known"),
        (("--a", "commit=HEAD~1", "--b", "env=A=1", "--plan"), "has no tiny.yaml"),
    ],
)
def test_bad_input_is_one_line(
    sweep_here: Sweep, config: Path, words: tuple[str, ...], message: str
) -> None:
    git(config.parent, "init", "-q")
    git(config.parent, "commit", "-q", "--allow-empty", "-m", "none")
    git(config.parent, "add", config.name)
    git(config.parent, "commit", "-q", "-m", "config")
    done = sweep_here("ab", "tiny.yaml", *words)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not Path("results").exists()


def test_a_plan_leaves_no_worktree(sweep_here: Sweep, config: Path) -> None:
    git(config.parent, "init", "-q")
    git(config.parent, "add", config.name)
    git(config.parent, "commit", "-q", "-m", "config")
    sides_of_a_commit = ("--a", "commit=HEAD", "--b", "commit=HEAD")
    done = sweep_here("ab", "tiny.yaml", *sides_of_a_commit, "--plan")
    assert done.exit_code == 0, done.output
    head = git(config.parent, "rev-parse", "HEAD")[:12]
    assert done.stdout.splitlines()[0] == f"A: commit={head}, torch 2.13.0, Python 3.11.7"
    assert "This is an A/A test" in done.stdout
    assert len(git(config.parent, "worktree", "list").splitlines()) == 1
    assert not Path("results").exists()


def undecided(gate: str, remedy: str, threshold: float | None = None) -> Check:
    reason, settings = "for a reason", {"task": "train_step"}
    return Check("id", settings, gate, Verdict.UNDECIDED, None, None, "ms", reason, remedy,
                 threshold=threshold)  # fmt: skip


@pytest.mark.parametrize(
    ("checks", "words", "lines"),
    [
        ([undecided("step", "")], "", []),
        (
            [undecided("kernels", "--repeat 20", 0.02), undecided("step", "--repeat 9", 0.02)],
            "--out=results/ab --json x.json",
            [
                "to decide, write into gate.yaml:",
                "  gate: {rounds: {first: 2, more: 18}}",
                "and measure into another folder, so that no round is judged twice:",
                "  sweep ab c.yaml --json x.json --policy gate.yaml --out results/ab-2",
            ],
        ),
        (
            [undecided("step", "--repeat 20"), undecided("step", "--instrument kernel_time")],
            "--policy my.yaml",
            [
                "to decide, write into my.yaml:",
                "  gate: {step: {cpu_bound: 10%}}",
                "and measure into another folder, so that no round is judged twice:",
                "  sweep ab c.yaml --instrument kernel_time --policy my.yaml --out results/ab-2",
            ],
        ),
        (
            [undecided("step", "--repeat 20")],
            "--strict",
            [
                "to decide, write into gate.yaml:",
                "  gate: {step: {gpu_bound: 1%, cpu_bound: 10%}, rounds: {first: 3, more: 4},"
                " kernels: {same_machine: 1%}}",
                "and measure into another folder, so that no round is judged twice:",
                "  sweep ab c.yaml --policy gate.yaml --out results/ab-2",
            ],
        ),
        (
            [undecided("step", "--retry ok", 0.02)],
            "--strict",
            [
                "to decide, measure into another folder:",
                "  sweep ab c.yaml --strict --out results/ab-2",
            ],
        ),
    ],
)
def test_what_is_undecided_has_a_policy_and_a_command_that_decide(
    checks: list[Check], words: str, lines: list[str]
) -> None:
    policy = Path("my.yaml") if "my.yaml" in words else None
    limits = STRICT if "--strict" in words else Policy()
    command = ["ab", "c.yaml", *words.split()]
    found = list(
        describe_decision(Comparison(tuple(checks), limits), command, Path("results/ab"), policy)
    )
    assert found == lines
    for line in found:
        if line.startswith("  gate:"):
            PolicyFile.model_validate(yaml.safe_load(line))


def test_cells_on_a_cpu_are_undecided_with_the_ratio_of_each_round(
    sweep_here: Sweep, config: Path, make_outcome: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config.write_text(CONFIG.replace("cuda", "cpu"))
    (cell,) = request_for(config).expansion.cells

    def run_child(contest: Contest, turn: Turn) -> int:
        number = contest.repetitions(turn.side) + 1
        while number <= turn.rounds:
            one = make_outcome(step_ms=(10.0 * number if turn.side == "b" else 10.0,) * 3)
            attempt = replace(one.attempt, cell=cell, number=number)
            write(contest.run(turn.side).folder, on("one", replace(one, attempt=attempt)))
            number += 1
        return 0

    monkeypatch.setattr(ab_rounds, "run_child", run_child)
    plan = sweep_here("ab", "tiny.yaml", *TWO, "--plan").stdout
    assert "any time of 1 cell on the CPU, so the exit code is 3 unless a cell fails" in plan
    done = sweep_here("ab", "tiny.yaml", *TWO, "--json", "x.json")
    assert done.exit_code == 3, done.output
    (check, *_) = json.loads(Path("x.json").read_text())["checks"]
    assert (check["verdict"], check["rounds"]) == ("UNDECIDED", pytest.approx([1.0, 2.0]))
    assert "  gate: {step: {cpu_bound: 10%}}\n" in done.stdout
    assert done.stdout.splitlines()[-2].startswith("  sweep ab tiny.yaml --a env=A=1 --b env=A=2")
    # The two runs know what measured them: it ends with that command, and A and B differ.
    first, *_, advice, command = sweep_here(
        "compare", "results/ab/a", "results/ab/b"
    ).stdout.splitlines()
    assert first == "env: A=1 → A=2"
    assert advice.startswith("to decide, run again what measured them")
    assert command == "  sweep ab tiny.yaml --a env=A=1 --b env=A=2 --json x.json"
    swapped = sweep_here("compare", "results/ab/b", "results/ab/a").stdout
    assert swapped.startswith("env: A=2 → A=1\n")


def test_ctrl_c_between_two_turns_says_how_to_continue(
    sweep_here: Sweep, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_child(contest: Contest, turn: Turn) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(ab_rounds, "run_child", run_child)
    done = sweep_here("ab", "tiny.yaml", *TWO)
    assert done.exit_code == 130
    progress, last = done.stdout.splitlines()[-2:]
    assert progress == (
        "measured so far: 0 repetitions of A and 0 repetitions of B; each side takes at least 2"
    )
    assert last.startswith("stopped. To continue: sweep ab tiny.yaml")


def test_both_sides_get_the_options_of_a_sweep(
    sweep_here: Sweep, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Contest] = []

    def run_child(contest: Contest, turn: Turn) -> int:
        given.append(contest)
        return 75

    monkeypatch.setattr(ab_rounds, "run_child", run_child)
    options = (
        "--set", "batch_size=2", "--where", "size=tiny", "--instrument", "kernel_time",
        "--scheduler", "serial", "--start-method", "spawn", "--mixed", "--time-limit", "9m",
    )  # fmt: skip
    done = sweep_here("ab", "tiny.yaml", *TWO, *options)
    assert done.exit_code == 75
    assert "nothing was measured within the time limit: only a longer one may help" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(
        "the time limit was reached. To continue: sweep ab tiny.yaml --a env=A=1"
    )
    (contest,) = given
    assert [*contest.words] == [
        "--set", "batch_size=2", "--instrument", "kernel_time", "--scheduler", "serial",
        "--start-method", "spawn", "--mixed",
    ]  # fmt: skip
    assert [*contest.wheres] == ["size=tiny"]
    assert contest.deadline is not None
