"""`sweep ab`: its plan, bad input, and the result of rounds that were measured before."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import Result

from orchestrator.sweep import ab_rounds, sides
from orchestrator.sweep.ab_rounds import Contest, Turn
from tasks.spec.outcome import Outcome
from tests.conftest import ROOT
from tests.orchestrator.analysis.test_comparison import gpu_cell, write
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
    assert "results/ab: has rounds of another A" in swapped.stderr


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
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "40 cells; rounds: 2 of all cells, 3 more of those in doubt; each measures A and B"
    )
    assert lines[1].startswith("the first 2 rounds of both sides: expected: ")
    assert "on one H100" in lines[1]
    assert "5 rounds find a slow-down of 2.1% with 90%" in lines[2]
    assert lines[-1].startswith("not judged: the ms of CPU-bound steps")
    assert not Path("results").exists()


def test_a_strict_plan_finds_two_percent(sweep_here: Sweep, config: Path) -> None:
    words = ("ab", ROOT / "configs" / "gate.yaml", *TWO, "--strict", "--plan", "--gpu", "H100")
    lines = sweep_here(*words).stdout.splitlines()
    assert "rounds: 3 of all cells, 4 more of those in doubt" in lines[0]
    assert "7 rounds find a slow-down of 1.1% with 90%" in lines[2]
    assert "7 rounds find a slow-down of 1.2% with 90%" in lines[3]


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
    ],
)
def test_bad_input_is_one_line(
    sweep_here: Sweep, config: Path, words: tuple[str, ...], message: str
) -> None:
    done = sweep_here("ab", "tiny.yaml", *words)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not Path("results").exists()


def test_ctrl_c_between_two_turns_says_how_to_continue(
    sweep_here: Sweep, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_child(contest: Contest, turn: Turn) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(ab_rounds, "run_child", run_child)
    done = sweep_here("ab", "tiny.yaml", *TWO)
    assert done.exit_code == 130
    assert done.stdout.splitlines()[-1].startswith("stopped. To continue: sweep ab tiny.yaml")


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
