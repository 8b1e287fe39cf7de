"""Tests of what is surely faster, and of two configurations that were measured several times."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from orchestrator.analysis.fastest import Contender, Ranking, Speed, confirm, speeds_of
from orchestrator.analysis.results import load_results
from orchestrator.planning.invocation import RunOptions
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.orchestrator.analysis.test_comparison import gpu_cell, write
from tests.support.fake_sweep import CONFIG, FakeScheduler, go, request_for

GIB = 2**30


def timed(step_s: float, *rounds: float, peak_gib: float | None = None) -> Speed:
    peak = None if peak_gib is None else peak_gib * GIB
    return Speed(step_s, step_s, step_s, False, peak, rounds=rounds)


def test_the_interval_of_rounds_is_that_of_a_t_test() -> None:
    own, other = (0.90, 0.91, 0.93, 0.90), (1.0, 1.01, 0.99, 1.02)
    found = confirm(Contender({}, 2, timed(1.0, *own)), Contender({}, 1, timed(1.0, *other)))
    logs = np.log(np.array(own) / 2 / np.array(other))
    assert found is not None
    assert (found.rounds, found.is_faster) == (4, True)
    assert found.ratio == pytest.approx(math.exp(logs.mean()))
    reference = stats.ttest_1samp(logs, 0.0).confidence_interval(0.90).high  # 95 % on one side
    assert found.upper == pytest.approx(math.exp(reference))
    reference = stats.ttest_1samp(logs, 0.0).confidence_interval(0.90).low
    assert found.lower == pytest.approx(math.exp(reference))


@pytest.mark.parametrize("rounds", [(), (0.5,)])
def test_less_than_two_rounds_show_nothing(rounds: tuple[float, ...]) -> None:
    one, other = Contender({}, 1, timed(0.5, *rounds)), Contender({}, 1, timed(1.0, 1.0, 1.0))
    assert confirm(one, other) is None
    assert confirm(other, Contender({})) is None


@pytest.mark.parametrize(
    ("rounds", "winner"), [((0.6, 0.61, 0.6), "a"), ((0.6, 1.2, 0.6), "default"), ((), "default")]
)
def test_rounds_decide_also_about_what_the_cpu_limits(
    rounds: tuple[float, ...], winner: str
) -> None:
    """With one process each, a step that is 25 % shorter proves nothing on a CPU."""
    default = Speed(1.0, 1.0, 1.0, True, None, rounds=(1.0, 1.01, 1.0))
    entrants = (
        Contender({"x": "default"}, 1, default),
        Contender({"x": "a"}, 1, Speed(0.75, 0.75, 0.75, True, None, rounds=rounds)),
    )
    found = Ranking(entrants, 0)
    assert found.challenger is entrants[1]
    assert found.winner is not None
    assert found.winner.options["x"] == winner


@pytest.mark.parametrize(("is_cpu_bound", "winner"), [(False, "b"), (True, "a"), (None, "a")])
def test_a_step_that_the_cpu_may_limit_must_be_30_percent_faster(
    is_cpu_bound: bool | None, winner: str
) -> None:
    """Without pipelined steps it is not known what limits a step."""
    entrants = (
        Contender({"x": "a"}, 1, Speed(1.0, 1.0, 1.0, is_cpu_bound, None)),
        Contender({"x": "b"}, 1, Speed(0.9, 0.9, 0.9, is_cpu_bound, None)),
    )
    best = Ranking(entrants, 0).winner
    assert best is not None
    assert best.options["x"] == winner


@pytest.mark.parametrize(("is_beaten", "winner"), [(False, "a"), (True, "b")])
def test_a_few_steps_do_not_show_what_is_faster_unless_they_lost(
    is_beaten: bool, winner: str
) -> None:
    """Five steps have no interval at 95 %, but each step of a beaten candidate was too slow."""
    few = Speed(1.0, 1.0, 1.0, False, None, is_beaten=is_beaten, coverage=0.9375)
    entrants = (
        Contender({"x": "a"}, 1, few),
        Contender({"x": "b"}, 1, Speed(0.5, 0.5, 0.5, False, None, coverage=0.98)),
    )
    best = Ranking(entrants, 0).winner
    assert best is not None
    assert best.options["x"] == winner


def test_it_is_unknown_what_limits_a_step_without_a_lead(
    tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    leads = {"known": 20.0, "waits": 0.0, "unknown": None}
    found = {}
    for name, lead_ms in leads.items():
        (cell,) = gpu_cell(make_outcome(device="cuda"), (40.0,), lead_ms=lead_ms or 0.0)
        if lead_ms is None:
            samples = tuple(one for one in cell.samples if one.metric != "lead")
            cell = replace(cell, samples=samples)
        (speed,) = speeds_of(load_results(write(tmp_path / name, cell))).values()
        found[name] = speed.is_cpu_bound
    assert found == {"known": False, "waits": True, "unknown": None}


def test_the_front_is_of_what_nothing_beats_in_speed_and_memory() -> None:
    steps = {
        "best": (1.0, 9.0),
        "a": (1.1, 10.0),
        "b": (1.2, 8.0),
        "c": (1.3, 8.0),
        "d": (1.4, 2.0),
    }
    entrants = tuple(
        Contender({"x": name}, 1, timed(step_s, peak_gib=peak))
        for name, (step_s, peak) in steps.items()
    )
    found = Ranking(entrants, 4)
    assert [one.options["x"] for one in found.front(entrants[0])] == ["b", "d"]


def test_the_first_attempt_counts_and_later_ones_are_rounds(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    def measured(attempt: Attempt) -> Outcome:
        length = attempt.cell.params.values()["context_length"]
        if length == 128:
            return Outcome(attempt, Status.FAILED, "build", "", {}, {}, (), 1.7e9, 1.0)
        samples = tuple(
            Sample(
                "timing", "duration", "ms", length * attempt.number + step, "synced", "step", step
            )
            for step in range(7)
        )
        wall_s = 4.0 * attempt.number
        return Outcome(attempt, Status.OK, "", "", {}, {"host": "one"}, samples, 1.7e9, wall_s)

    request = request_for(write_config(CONFIG), [], [], tmp_path / "out")
    go(request, FakeScheduler(measured), RunOptions(repeat=3))
    results = load_results(request.run)
    lengths = results.cells.set_index("cell")["context_length"].to_dict()
    speeds = {lengths[cell]: speed for cell, speed in speeds_of(results).items()}
    assert speeds.keys() == {16, 32, 64}
    assert speeds[16] == Speed(
        0.019, 0.016, 0.022, True, None, pytest.approx(0.019), False, (0.035, 0.051), 4.0, 1 - 2**-6
    )
    # What was measured again from the start has other first attempts.
    go(request, FakeScheduler(measured), RunOptions(fresh=True))
    again = speeds_of(load_results(request.run))
    assert {lengths[cell]: one.step_s for cell, one in again.items()}[16] == 0.067
