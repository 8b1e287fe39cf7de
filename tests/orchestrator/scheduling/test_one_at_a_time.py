"""One cell at a time, and what is measured so again in place of what was measured beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.analysis.cell_timing import load_counted, sides_of
from orchestrator.analysis.results import load_results
from orchestrator.planning.history import read_history
from orchestrator.planning.options import BESIDE, Choice
from orchestrator.planning.request import Request, resolve
from orchestrator.scheduling.one_at_a_time import OneByOne, Placed
from orchestrator.scheduling.ray_scheduler import OnStart
from orchestrator.store.run import Run
from orchestrator.store.run_collection import open_runs
from orchestrator.sweep.pipeline import run_sweep
from orchestrator.sweep.result import Summary
from orchestrator.sweep.runtime import Means
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.orchestrator.sweep.test_pipeline import CPU, FakeScheduler, Silent

CONFIG = """
name: test
grids:
  - task: train_step
    axes: {context_length: [16, 32, 64]}
    fixed: {device: cpu, size: tiny}
"""
AGAIN = Choice(retry=frozenset({BESIDE}))


def at(attempt: Attempt, begin: float, ms: float) -> Outcome:
    samples = tuple(
        Sample("timing", "duration", "ms", ms + 0.01 * step, "synced", "step", step)
        for step in range(10)
    )
    return Outcome(attempt, Status.OK, "", "", {}, {"host": "one"}, samples, 1.7e9 + begin, 10.0)


def length_of(attempt: Attempt) -> int:
    return int(attempt.cell.params.values()["context_length"])


def measured(attempt: Attempt) -> Outcome:
    """First the two shorter ones beside each other, a fifth slower for it; later one after the other."""
    begin = (
        {16: 0.0, 32: 1.0, 64: 20.0}[length_of(attempt)]
        if attempt.number == 1
        else 1000.0 * attempt.number + length_of(attempt)
    )
    return at(attempt, begin, 12.0 if begin < 10 else 10.0)


class Counting(FakeScheduler):
    """at_once: what it was given each time."""

    def __init__(self, measure: Callable[[Attempt], Outcome]) -> None:
        super().__init__(measure)
        self.at_once: list[list[Attempt]] = []

    def run(self, attempts: Iterable[Attempt], on_start: OnStart) -> Iterator[Outcome]:
        self.at_once.append(list(attempts))
        return super().run(self.at_once[-1], on_start)


@pytest.fixture
def request_of(write_config: Callable[..., Path], tmp_path: Path) -> Callable[[], Request]:
    return lambda: resolve(write_config(CONFIG), [], [], tmp_path / "out")


def go(request: Request, scheduler: FakeScheduler, choice: Choice = AGAIN, **more: Any) -> Summary:
    return run_sweep(
        request, choice, Means(lambda example: scheduler, lambda total, left: Silent(), **more)
    )


def test_one_by_one_is_one_place(make_attempt: Callable[..., Attempt]) -> None:
    attempt = make_attempt(context_length=16)
    scheduler = FakeScheduler(lambda one: measured(one), CPU)
    alone = OneByOne(scheduler, {attempt.cell.id: Placed("one", "", "")})
    scheduler.places = lambda device, kind=None: 0 if kind else 4  # type: ignore[method-assign]
    assert (alone.places("cuda"), alone.places("cuda", "A100")) == (1, 0)
    assert len(list(alone.run([attempt, attempt], lambda started: None))) == 2
    assert "CUDA_VISIBLE_DEVICES" not in scheduler.begun[0].settings.env


def test_what_needed_its_host_beside_others_is_measured_again_alone_and_in_its_place(
    request_of: Callable[[], Request],
) -> None:
    summary = go(request_of(), FakeScheduler(measured), Choice())
    assert (summary.flaws["beside"], summary.flaws["disturbed"]) == (2, 0)
    cells = load_results(request_of().run).cells.set_index("context_length")
    assert cells["beside"].to_dict() == {16: True, 32: True, 64: False}
    assert cells["neighbours"].to_dict() == pytest.approx({16: 0.9, 32: 0.9, 64: 0.0})

    scheduler = Counting(measured)
    summary = go(request_of(), scheduler)
    assert [[length_of(attempt) for attempt in at_once] for at_once in scheduler.at_once] == [
        [16],
        [32],
    ]
    assert (summary.flaws["beside"], summary.statuses) == (0, {Status.OK: 2})
    run = request_of().run
    assert [side.medians_ms for side in sides_of(*load_counted(run)).values()] == [
        pytest.approx((10.045,))
    ] * 3
    after = load_results(run).cells.set_index("context_length")
    assert after[["attempts", "repetitions", "beside"]].to_dict("index") == {
        16: {"attempts": 2, "repetitions": 1, "beside": False},
        32: {"attempts": 2, "repetitions": 1, "beside": False},
        64: {"attempts": 1, "repetitions": 1, "beside": False},
    }
    assert not go(request_of(), FakeScheduler(measured)).statuses


def test_what_has_a_wide_interval_is_measured_again_in_its_place_and_not_alone(
    request_of: Callable[[], Request],
) -> None:
    def unsteady(attempt: Attempt) -> Outcome:
        spread = 0.2 if length_of(attempt) != 64 and attempt.number == 1 else 0.01
        outcome = measured(attempt)
        samples = tuple(
            replace(sample, value=10.0 + spread * (sample.step or 0)) for sample in outcome.samples
        )
        return replace(outcome, samples=samples)

    assert go(request_of(), FakeScheduler(unsteady), Choice()).flaws["wide"] == 2
    assert load_results(request_of().run).cells.set_index("context_length")["wide"].to_dict() == {
        16: True,
        32: True,
        64: False,
    }
    scheduler = Counting(unsteady)
    summary = go(request_of(), scheduler, Choice(retry=frozenset({"wide"})))
    assert [sorted(length_of(attempt) for attempt in at_once) for at_once in scheduler.at_once] == [
        [16, 32]
    ]
    assert (summary.flaws["wide"], summary.statuses) == (0, {Status.OK: 2})
    after = load_results(request_of().run).cells.set_index("context_length")
    assert after["repetitions"].to_list() == [1, 1, 1]
    assert after["step_ms_median"].to_dict() == pytest.approx({16: 10.045, 32: 10.045, 64: 10.045})
    assert not go(request_of(), FakeScheduler(unsteady), Choice(retry=frozenset({"wide"}))).statuses


def test_what_was_not_timed_was_slowed_by_nobody(request_of: Callable[[], Request]) -> None:
    def one_runs_out(attempt: Attempt) -> Outcome:
        outcome = measured(attempt)
        return (
            replace(outcome, status=Status.OOM, samples=()) if length_of(attempt) == 16 else outcome
        )

    assert go(request_of(), FakeScheduler(one_runs_out), Choice()).flaws["beside"] == 1
    scheduler = FakeScheduler(measured)
    go(request_of(), scheduler)
    assert [length_of(attempt) for attempt in scheduler.begun] == [32]


def test_repetitions_of_what_is_measured_again_add_to_it_alone(
    request_of: Callable[[], Request],
) -> None:
    go(request_of(), FakeScheduler(measured), Choice())
    scheduler = FakeScheduler(measured)
    go(request_of(), scheduler, Choice(retry=frozenset({BESIDE}), repeat=2))
    assert [(length_of(one), one.number, one.replaces) for one in scheduler.begun] == [
        (16, 2, 1), (32, 2, 1), (64, 2, 0), (16, 3, 1), (32, 3, 1),
    ]  # fmt: skip
    run = request_of().run
    assert load_results(run).cells["repetitions"].to_list() == [2, 2, 2]
    assert sorted(len(side.medians_ms) for side in sides_of(*load_counted(run)).values()) == [
        2,
        2,
        2,
    ]


def test_what_fails_when_it_is_measured_again_takes_nobodys_place(
    request_of: Callable[[], Request],
) -> None:
    def crashing(attempt: Attempt) -> Outcome:
        return Outcome(attempt, Status.CRASHED, "", "", {}, {"host": "one"}, (), 1.7e9 + 1000, 1.0)

    go(request_of(), FakeScheduler(measured), Choice())
    go(request_of(), FakeScheduler(crashing))
    cells = load_results(request_of().run).cells.set_index("context_length")
    assert cells.loc[16, ["status", "attempt", "repetitions"]].to_list() == ["ok", 1, 1]
    scheduler = FakeScheduler(measured)
    go(request_of(), scheduler)
    assert [length_of(attempt) for attempt in scheduler.begun] == [16, 32]


def test_a_success_is_replaced_whichever_of_those_in_its_place_succeeds(
    request_of: Callable[[], Request],
) -> None:
    """They may run at once, and the first of them fail."""

    def first_fails(attempt: Attempt) -> Outcome:
        outcome = measured(attempt)
        return (
            replace(outcome, status=Status.CRASHED, samples=()) if attempt.number == 2 else outcome
        )

    go(request_of(), FakeScheduler(measured), Choice())
    request = request_of()
    begun = FakeScheduler(first_fails)
    begun.run = lambda attempts, on_start: map(first_fails, list(attempts))  # type: ignore[method-assign,assignment]
    run_sweep(
        request,
        Choice(retry=frozenset({"ok"}), repeat=2),
        Means(lambda example: begun, lambda total, left: Silent()),
    )
    cells = load_results(request.run).cells
    assert cells[["attempts", "repetitions", "attempt"]].to_numpy().tolist() == [[3, 1, 3]] * 3
    assert {past.successes for past in read_history(request.run).values()} == {1}


def test_one_of_several_repetitions_beside_others_is_enough(
    request_of: Callable[[], Request],
) -> None:
    go(request_of(), FakeScheduler(measured), Choice())
    go(request_of(), FakeScheduler(measured), Choice(repeat=3))
    cells = load_results(request_of().run).cells.set_index("context_length")
    assert cells["neighbours"].to_list() == [0.0, 0.0, 0.0]
    assert cells["beside"].to_list() == [True, True, False]
    scheduler = FakeScheduler(measured)
    go(request_of(), scheduler)
    assert sorted(length_of(attempt) for attempt in scheduler.begun) == [16, 16, 16, 32, 32, 32]


def test_runs_that_are_read_together_have_hosts_of_their_own(
    request_of: Callable[[], Request], tmp_path: Path
) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        go(
            replace(request_of(), run=Run(folder)),
            FakeScheduler(lambda one: at(one, length_of(one), 10.0)),
            Choice(),
        )
    alone = load_results(Run(folders[0])).cells["neighbours"].to_list()
    assert load_results(open_runs(folders)).cells["neighbours"].to_list() == alone * 2
