"""What ran beside others, measured again alone: around a scheduler that is a function, with a clock of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import GpusLost
from orchestrator.planning.options import Choice
from orchestrator.planning.request import Request, resolve
from orchestrator.store.run import Run
from orchestrator.sweep import contention
from orchestrator.sweep.contention import cells_beside_others, request_alone, run_and_check
from orchestrator.sweep.pipeline import run_sweep
from orchestrator.sweep.result import Summary
from orchestrator.sweep.runtime import Means
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.conftest import with_samples
from tests.orchestrator.sweep.test_pipeline import FakeScheduler, Silent

CONFIG = """
name: test
grids:
  - task: train_step
    axes: {context_length: [16, 32, 64, 128]}
    fixed: {device: cpu, size: tiny}
"""
Measure = Callable[[Attempt], Outcome]


@pytest.fixture
def request_of(write_config: Callable[..., Path], tmp_path: Path) -> Callable[..., Request]:
    return lambda text=CONFIG: resolve(write_config(text), [], [], tmp_path / "out")


def length_of(attempt: Attempt) -> int:
    return int(attempt.cell.params.values()["context_length"])


def measured(
    attempt: Attempt,
    begin: float,
    wall_s: float,
    ms: float = 10.0,
    host: str = "one",
    gpu: str = "GPU-a",
    kind: str = "H200",
) -> Outcome:
    samples = tuple(
        Sample("timing", "duration", "ms", ms + 0.01 * step, "synced", "step", step)
        for step in range(10)
    )
    facts = {"host": host, "gpu": kind, "gpu_uuid": gpu, "visible_devices": gpu[-1]}
    return Outcome(attempt, Status.OK, "", "", {}, facts, samples, 1.7e9 + begin, wall_s)


def beside(attempt: Attempt) -> Outcome:
    """Two at a time, and 20 % slower for it; the last one alone."""
    place = [16, 32, 64, 128].index(length_of(attempt))
    alone = attempt.settings.alone_on is not None or place == 3
    begin = 100.0 + 10 * (place + 4 * attempt.number) if alone else 10.0 * (place // 2) + place
    return measured(
        attempt, begin, 5.0 if alone else 20.0, 10.0 if alone else 12.0, gpu=f"GPU-{place % 2}"
    )


def go(
    request: Request, scheduler: FakeScheduler, choice: Choice | None = None, **more: Any
) -> tuple[Summary, list[str]]:
    said: list[str] = []
    means = Means(lambda example: scheduler, lambda total, left: Silent(), say=said.append, **more)
    return run_and_check(request, choice or Choice(), means), said


def of_contention(said: list[str]) -> str:
    return next(line for line in said if "again alone:" in line)


def test_a_sample_is_measured_again_alone_and_the_first_rows_stay_as_they_were(
    request_of: Callable[..., Request], tmp_path: Path
) -> None:
    request, scheduler = request_of(), FakeScheduler(beside)
    summary, said = go(request, scheduler)
    assert (summary.statuses, summary.left) == ({Status.OK: 4}, 0)
    assert scheduler.closed
    first, again = scheduler.begun[:4], scheduler.begun[4:]
    assert [length_of(attempt) for attempt in again] == [16, 32, 64]  # the last one ran alone
    assert {attempt.settings.alone_on for attempt in first} == {None}
    assert [(one.settings.alone_on, one.settings.env["CUDA_VISIBLE_DEVICES"]) for one in again] == [
        ("one", "0"), ("one", "1"), ("one", "0"),
    ]  # fmt: skip
    assert of_contention(said) == (
        "contention: 3 cells again alone: beside others a step took 1.199 to 1.199 × as long (1.199 in the mean): 3 SLOWER"
    )
    assert "\n".join(said).count("1.1915 to 1.2068") == 3  # the interval of each
    untouched = tmp_path / "untouched"
    run_sweep(
        Request(**{**vars(request), "run": Run(untouched)}),
        Choice(),
        Means(lambda example: FakeScheduler(beside), lambda total, left: Silent()),
    )
    names = ["cell", "attempt", "attempts", "step_ms_median"]
    there, here = (
        Run(folder).folder / "cells.parquet" for folder in (untouched, request.run.folder)
    )
    import pandas as pd

    pd.testing.assert_frame_equal(pd.read_parquet(there)[names], pd.read_parquet(here)[names])


def test_what_was_measured_alone_is_not_again_and_goes_on_where_it_was_cut_off(
    request_of: Callable[..., Request],
) -> None:
    def stopped(attempt: Attempt) -> Outcome:
        if attempt.settings.alone_on and length_of(attempt) == 32:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        return beside(attempt)

    summary, _ = go(request_of(), FakeScheduler(stopped))
    assert (summary.stopped, summary.left, summary.statuses) == ("SIGINT", 2, {Status.OK: 4})
    scheduler = FakeScheduler(beside)
    _, said = go(request_of(), scheduler)
    assert [length_of(attempt) for attempt in scheduler.begun] == [32, 64]
    assert "3 cells again alone" in of_contention(said)
    third = FakeScheduler(beside)
    assert of_contention(go(request_of(), third)[1]) == of_contention(said)
    assert not third.begun


def test_a_command_is_not_at_its_end_before_its_cells_were_alone(
    request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["sweep", "run", "c.yaml", "--fresh", "--check-contention"])

    def now(attempt: Attempt) -> Outcome:
        return replace(beside(attempt), started_at=time.time(), wall_s=20.0)

    def stopped(attempt: Attempt) -> Outcome:
        if len(first.begun) == 4 + 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        return now(attempt)

    first = FakeScheduler(stopped)
    summary, said = go(request_of(), first, Choice(fresh=True))
    assert summary.stopped == "SIGINT"
    assert not any("did not end well" in line for line in said)
    for alone in ([True] * 2, [False] * 4 + [True] * 3):
        scheduler = FakeScheduler(now)
        go(request_of(), scheduler, Choice(fresh=True))
        assert [attempt.settings.alone_on is not None for attempt in scheduler.begun] == alone


def test_it_does_not_begin_where_the_time_is_up(request_of: Callable[..., Request]) -> None:
    def measure(attempt: Attempt) -> Outcome:
        time.sleep(0.4 if length_of(attempt) == 128 else 0)
        return beside(attempt)

    summary, _ = go(request_of(), scheduler := FakeScheduler(measure), time_limit_s=5.5)
    assert summary.stopped == "time limit" or summary.late
    assert summary.left > 0
    assert len(scheduler.begun) <= 4


def test_gpus_that_are_lost_while_cells_are_alone_end_the_sweep(
    request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Summary(broken=GpusLost("no GPU is left"), left=3)
    plain = contention.run_sweep
    monkeypatch.setattr(
        contention,
        "run_sweep",
        lambda request, *more: (
            gone if str(request.run).endswith("alone") else plain(request, *more)
        ),
    )
    summary, _ = go(request_of(), FakeScheduler(beside))
    assert (summary.broken, summary.left, summary.statuses) == (gone.broken, 3, {Status.OK: 4})


def test_repetitions_are_repeated_alone(request_of: Callable[..., Request]) -> None:
    scheduler = FakeScheduler(beside)
    go(request_of(), scheduler, Choice(repeat=2))
    alone = [attempt for attempt in scheduler.begun if attempt.settings.alone_on]
    assert [(length_of(attempt), attempt.number) for attempt in alone] == [
        (16, 1),
        (32, 1),
        (64, 1),
        (16, 2),
        (32, 2),
        (64, 2),
    ]


def test_nothing_is_measured_again_where_nothing_ran_beside_another(
    request_of: Callable[..., Request],
) -> None:
    def one_by_one(attempt: Attempt) -> Outcome:
        return measured(attempt, length_of(attempt), 10.0, host=f"host {length_of(attempt)}")

    scheduler = FakeScheduler(one_by_one)
    _, said = go(request_of(), scheduler)
    assert len(scheduler.begun) == 4
    assert (
        said[-1]
        == "contention: no timed cell ran beside another, so that there is nothing to check"
    )


def test_what_ran_beside_others_for_less_than_half_its_time_does_not_count(
    request_of: Callable[..., Request],
) -> None:
    begins = {16: (0.0, 10.0), 32: (6.0, 9.0), 64: (13.0, 10.0), 128: (100.0, 10.0)}
    request = request_of()
    run_sweep(
        request,
        Choice(),
        Means(
            lambda example: FakeScheduler(lambda one: measured(one, *begins[length_of(one)])),
            lambda total, left: Silent(),
        ),
    )
    placed = cells_beside_others(request)
    counted = {
        cell.params.values()["context_length"]
        for cell in request.expansion.cells
        if cell.id in placed
    }
    assert counted == {32}


def test_gpus_of_another_kind_are_not_compared_and_another_of_the_same_is_said(
    request_of: Callable[..., Request],
) -> None:
    def elsewhere(attempt: Attempt) -> Outcome:
        outcome = beside(attempt)
        if attempt.settings.alone_on is None:
            return outcome
        kind = "A100" if length_of(attempt) == 16 else "H200"
        return Outcome(
            **{**vars(outcome), "facts": {**outcome.facts, "gpu": kind, "gpu_uuid": "GPU-9"}}
        )

    _, said = go(request_of(), FakeScheduler(elsewhere))
    assert "2 cells again alone" in of_contention(said)
    assert any(
        line.startswith(
            "contention: 1 cell did not end well alone, or on another kind of GPU: sweep"
        )
        for line in said
    )
    assert (
        "2 cells alone on another GPU than before, which may be the faster or the slower one"
        in said
    )


def test_where_nothing_ends_well_alone_there_is_no_ratio(
    request_of: Callable[..., Request],
) -> None:
    def crashing(attempt: Attempt) -> Outcome:
        ended = beside(attempt)
        return (
            replace(ended, status=Status.CRASHED, samples=())
            if attempt.settings.alone_on
            else ended
        )

    summary, said = go(request_of(), FakeScheduler(crashing))
    assert summary.statuses == {Status.OK: 4}
    assert said[-1].startswith("contention: 3 cells did not end well alone")


def test_alone_the_compilers_cache_of_the_run_is_used(request_of: Callable[..., Request]) -> None:
    request = request_of()
    alone = request_alone(request, request.expansion.cells)
    assert alone.config.env["TORCHINDUCTOR_CACHE_DIR"] == str(
        request.run.folder.absolute() / "cache" / "inductor"
    )
    own = request_of(CONFIG + "env: {TORCHINDUCTOR_CACHE_DIR: /mine}\n")
    assert request_alone(own, []).config.env["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


def test_what_neighbours_did_to_the_host_is_no_excuse_here(
    request_of: Callable[..., Request],
) -> None:
    """It is what is asked."""

    def slowing(attempt: Attempt) -> Outcome:
        outcome = beside(attempt)
        pace = 400.0 if attempt.settings.alone_on else 200.0
        paces = (
            Sample("telemetry", "host_pace", "1/ms", pace, when) for when in ("before", "after")
        )
        return with_samples(outcome, *paces)

    _, said = go(request_of(), FakeScheduler(slowing))
    assert of_contention(said).endswith("3 SLOWER")


def test_what_was_measured_again_beside_others_is_checked(
    request_of: Callable[..., Request],
) -> None:
    alone = FakeScheduler(lambda one: measured(one, 1000.0 * one.number + 10 * length_of(one), 5.0))
    means = Means(lambda example: alone, lambda total, left: Silent())
    run_sweep(request_of(), Choice(), means)
    assert not cells_beside_others(request_of())
    again = FakeScheduler(lambda one: replace(beside(replace(one, number=1)), attempt=one))
    run_sweep(
        request_of(), Choice(fresh=True), replace(means, open_scheduler=lambda example: again)
    )
    assert len(cells_beside_others(request_of())) == 3
