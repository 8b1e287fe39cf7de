"""Cells that are measured again replace an earlier success or add to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.analysis.cell_timing import load_timings
from orchestrator.analysis.results import load_results
from orchestrator.planning.invocation import RunOptions
from orchestrator.planning.request import SweepRequest
from orchestrator.report.text.provenance import provenance
from orchestrator.store.cell_state import read_states
from orchestrator.store.open import open_runs
from orchestrator.store.run import Run
from orchestrator.sweep.outcome_log import SweepResult
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.support import fake_sweep
from tests.support.fake_sweep import FakeScheduler, request_for

CONFIG = """
name: test
grids:
  - task: train_step
    axes: {context_length: [16, 32, 64]}
    fixed: {device: cpu, size: tiny}
"""
AGAIN = RunOptions(retry=frozenset({"interval-wide"}))


def outcome_at(attempt: Attempt, begin_s: float, spread_ms: float = 0.01) -> Outcome:
    """Return a success of 10 s with ten steps, each `spread_ms` longer than the one before."""
    samples = []
    for step in range(10):
        ms = 10.0 + spread_ms * step
        samples.append(Sample("timing", "duration", "ms", ms, "synced", "step", step))
    facts = {"host": "one"}
    return Outcome(attempt, Status.OK, "", "", {}, facts, tuple(samples), 1.7e9 + begin_s, 10.0)


def length_of(attempt: Attempt) -> int:
    return int(attempt.cell.params.values()["context_length"])


def measured(attempt: Attempt) -> Outcome:
    """Return wide intervals for the first attempts at 16 and 32, which ran at the same time."""
    length = length_of(attempt)
    if attempt.number > 1:
        return outcome_at(attempt, 1000.0 * attempt.number + length)
    begin_s = {16: 0.0, 32: 1.0, 64: 20.0}[length]
    return outcome_at(attempt, begin_s, spread_ms=0.01 if length == 64 else 0.2)


@pytest.fixture
def request_of(write_config: Callable[..., Path], tmp_path: Path) -> Callable[[], SweepRequest]:
    return lambda: request_for(write_config(CONFIG), [], [], tmp_path / "out")


def go(
    request: SweepRequest,
    scheduler: FakeScheduler,
    options: RunOptions = AGAIN,
    summary: bool = False,
) -> SweepResult:
    return fake_sweep.go(request, scheduler, options, summary=summary)


def test_cpu_bound_cells_that_ran_at_the_same_time_are_counted(
    request_of: Callable[[], SweepRequest],
) -> None:
    result = go(request_of(), FakeScheduler(measured), RunOptions(), summary=True)
    assert (result.quality["concurrent"], result.quality["cpu-contended"]) == (2, 0)
    results = load_results(request_of().run)
    concurrent = results.cells.set_index("context_length")["concurrent_attempts"].to_dict()
    assert concurrent == pytest.approx({16: 0.9, 32: 0.9, 64: 0.0})
    assert "2 of 3 cells are CPU-bound and ran while others used their host" in provenance(results)

    result = go(request_of(), FakeScheduler(measured), RunOptions(fresh=True), summary=True)
    assert result.quality["concurrent"] == 0
    assert "ran while others" not in provenance(load_results(request_of().run))


def test_cells_without_a_time_are_not_counted_as_concurrent(
    request_of: Callable[[], SweepRequest],
) -> None:
    def one_runs_out(attempt: Attempt) -> Outcome:
        outcome = measured(attempt)
        if length_of(attempt) != 16:
            return outcome
        return replace(outcome, status=Status.OOM, samples=())

    result = go(request_of(), FakeScheduler(one_runs_out), RunOptions(), summary=True)
    assert result.quality["concurrent"] == 1


def test_a_cell_with_a_wide_interval_is_replaced(request_of: Callable[[], SweepRequest]) -> None:
    result = go(request_of(), FakeScheduler(measured), RunOptions(), summary=True)
    assert result.quality["interval-wide"] == 2
    cells = load_results(request_of().run).cells.set_index("context_length")
    assert cells["interval_wide"].to_dict() == {16: True, 32: True, 64: False}

    scheduler = FakeScheduler(measured)
    result = go(request_of(), scheduler, summary=True)
    assert sorted(map(length_of, scheduler.begun)) == [16, 32]
    assert (result.quality["interval-wide"], result.counts) == (0, {Status.OK: 2})
    run = request_of().run
    timings = load_timings(run).timings.values()
    assert [timing.steps_ms for timing in timings] == [pytest.approx((10.045,))] * 3
    after = load_results(run).cells.set_index("context_length")
    assert after["attempts"].to_dict() == {16: 2, 32: 2, 64: 1}
    assert after["repetitions"].to_list() == [1, 1, 1]
    assert after["step_ms_median"].to_dict() == pytest.approx({16: 10.045, 32: 10.045, 64: 10.045})
    assert not go(request_of(), FakeScheduler(measured)).counts


def test_repetitions_of_a_replaced_cell_add_to_the_new_attempt(
    request_of: Callable[[], SweepRequest],
) -> None:
    go(request_of(), FakeScheduler(measured), RunOptions())
    scheduler = FakeScheduler(measured)
    go(request_of(), scheduler, replace(AGAIN, repeat=2))
    assert [(length_of(one), one.number) for one in scheduler.begun] == [
        (16, 2), (32, 2), (64, 2), (16, 3), (32, 3),
    ]  # fmt: skip
    run = request_of().run
    replaced = [one.cell.id for one in scheduler.begun[:2]]
    assert run.marks() == {cell: [1] for cell in replaced}
    assert load_results(run).cells["repetitions"].to_list() == [2, 2, 2]
    timings = load_timings(run).timings.values()
    assert [len(timing.steps_ms) for timing in timings] == [2, 2, 2]


def test_a_failed_replacement_leaves_the_earlier_success(
    request_of: Callable[[], SweepRequest],
) -> None:
    def crashing(attempt: Attempt) -> Outcome:
        return Outcome(attempt, Status.CRASHED, "", "", {}, {"host": "one"}, (), 1.7e9 + 1000, 1.0)

    go(request_of(), FakeScheduler(measured), RunOptions())
    go(request_of(), FakeScheduler(crashing))
    cells = load_results(request_of().run).cells.set_index("context_length")
    assert cells.loc[16, ["status", "attempt", "repetitions"]].to_list() == ["ok", 1, 1]
    scheduler = FakeScheduler(measured)
    go(request_of(), scheduler)
    assert [length_of(attempt) for attempt in scheduler.begun] == [16, 32]


def test_any_successful_replacement_replaces_the_earlier_success(
    request_of: Callable[[], SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several replacements may run at the same time, and the first of them may fail."""

    def first_fails(attempt: Attempt) -> Outcome:
        outcome = measured(attempt)
        return (
            replace(outcome, status=Status.CRASHED, samples=()) if attempt.number == 2 else outcome
        )

    go(request_of(), FakeScheduler(measured), RunOptions())
    request = request_of()
    scheduler = FakeScheduler(first_fails)
    # All attempts are taken before the first ends, as on several GPUs.
    monkeypatch.setattr(scheduler, "run", lambda queue, _: map(first_fails, list(queue)))
    go(request, scheduler, RunOptions(retry=frozenset({"ok"}), repeat=2))
    cells = load_results(request.run).cells
    assert cells[["attempts", "repetitions", "attempt"]].to_numpy().tolist() == [[3, 1, 3]] * 3
    assert {one.valid for one in read_states(request.run).values()} == {(3,)}


def test_hosts_of_different_runs_are_not_the_same_host(
    request_of: Callable[[], SweepRequest], tmp_path: Path
) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        scheduler = FakeScheduler(lambda attempt: outcome_at(attempt, length_of(attempt)))
        go(replace(request_of(), run=Run(folder)), scheduler, RunOptions())
    single = load_results(Run(folders[0])).cells["concurrent_attempts"].to_list()
    assert load_results(open_runs(folders)).cells["concurrent_attempts"].to_list() == single * 2
