"""Marks of --fresh and --retry: what an interrupted command leaves, and what continues it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner

from orchestrator.analysis.results import load_results
from orchestrator.cli.main import main
from orchestrator.planning.cell_decisions import plan_request
from orchestrator.planning.invocation import RunOptions
from orchestrator.planning.preflight import Preflight
from orchestrator.planning.request import SweepRequest
from orchestrator.store.open import open_runs
from orchestrator.sweep.pipeline import check_hosts
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tests.support.fake_sweep import (
    CONFIG,
    FakeScheduler,
    go,
    journalled,
    length_of,
    lengths_of,
    outcome_of,
    request_for,
    status_lines,
)

ALL_AGAIN = RunOptions(retry=frozenset({"ok"}))
FRESH = RunOptions(fresh=True)
EACH = [16, 32, 64, 128]
ENDS = {16: Status.OK, 32: Status.CRASHED}


@pytest.fixture
def request_of(write_config: Callable[..., Path], tmp_path: Path) -> Callable[..., SweepRequest]:
    return lambda text=CONFIG, sets=(), wheres=(): request_for(
        write_config(text), sets, wheres, tmp_path / "out"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "again", [{"retry": frozenset({"ok"})}, {"fresh": True}, {"only": frozenset({"ok"})}], ids=str
)
def test_an_interrupted_command_given_again_continues_where_it_stopped(
    again: dict[str, Any], request_of: Callable[..., SweepRequest]
) -> None:
    """As a queue of a cluster gives the same command again, for as long as its exit code is 75."""

    go(request_of(), FakeScheduler(outcome_of))
    begun = []
    for length, left in ((64, 2), (128, 1)):
        scheduler = stopping_at(length)
        result = go(request_of(), scheduler, RunOptions(**again))
        assert (result.stop_reason, result.queue.remaining) == ("SIGTERM", left)
        begun += lengths_of(scheduler)
    last = FakeScheduler(outcome_of)
    assert not go(request_of(), last, RunOptions(**again)).queue.remaining
    assert [*begun, *lengths_of(last)] == [16, 32, 64, 64, 128, 128]
    once_more = FakeScheduler(outcome_of)
    go(request_of(), once_more, RunOptions(**again))
    assert lengths_of(once_more) == [16, 32, 64, 128]  # it had come to its end


def stopping_at(length: int, measure: Callable[[Attempt], Outcome] = outcome_of) -> FakeScheduler:
    def stop(attempt: Attempt) -> Outcome:
        if length_of(attempt) == length:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        return measure(attempt)

    return FakeScheduler(stop)


@pytest.mark.parametrize("again", [ALL_AGAIN, RunOptions()], ids=["same", "plain"])
def test_a_resumed_command_measures_each_cell_as_often_as_earlier_commands(
    again: RunOptions, request_of: Callable[..., SweepRequest]
) -> None:
    narrow = {"wheres": ["context_length=16|32"]}
    go(request_of(**narrow), FakeScheduler(outcome_of), RunOptions(repeat=3))
    first = stopping_at(32)
    assert go(request_of(**narrow), first, ALL_AGAIN).stop_reason == "SIGTERM"
    assert lengths_of(first) == [16, 32]
    messages: list[str] = []
    last = FakeScheduler(outcome_of)
    go(request_of(**narrow), last, again, messages=messages, summary=True)
    assert sorted(lengths_of(last)) == [16, 16, 32, 32, 32]
    assert messages[0] == "continuing --fresh or --retry: 2 cells are left to replace"
    assert set(pd.read_parquet(request_of().run.folder / "cells.parquet")["repetitions"]) == {3}


@pytest.mark.parametrize("again", [ALL_AGAIN, RunOptions()], ids=["same", "plain"])
@pytest.mark.parametrize("end", [Status.FAILED, Status.LOST])
def test_a_cell_that_failed_before_an_interruption_is_measured_again(
    end: Status, again: RunOptions, request_of: Callable[..., SweepRequest]
) -> None:
    go(request_of(), FakeScheduler(outcome_of))
    failing = stopping_at(32, lambda one: outcome_of(one, end))
    assert go(request_of(), failing, ALL_AGAIN).stop_reason == "SIGTERM"
    assert lengths_of(failing) == [16, 32]
    last = FakeScheduler(outcome_of)
    go(request_of(), last, again)
    assert lengths_of(last) == [16, 32, 64, 128]


def test_cells_that_only_fail_in_a_retry_are_counted_as_exhausted(
    request_of: Callable[..., SweepRequest],
) -> None:
    """That it had succeeded before does not hide it."""
    go(request_of(), FakeScheduler(outcome_of))
    fails = stopping_at(64, lambda one: outcome_of(one, Status.FAILED))
    for _ in range(request_of().config.limits.attempts):
        go(request_of(), fails, ALL_AGAIN)
    assert lengths_of(fails) == [16, 32, 64] * request_of().config.limits.attempts
    last = FakeScheduler(outcome_of)
    result = go(request_of(), last, ALL_AGAIN)
    assert (result.before, result.given_up) == ({"ok": 4}, {"failed": 2})
    assert lengths_of(last) == [64, 128]


def test_repetitions_of_what_had_failed_before_are_still_owed(
    request_of: Callable[..., SweepRequest],
) -> None:
    narrow = {"wheres": ["context_length=16"]}
    for _ in range(request_of().config.limits.attempts):
        go(request_of(**narrow), FakeScheduler(lambda one: outcome_of(one, Status.FAILED)))
    go(request_of(**narrow), FakeScheduler(outcome_of), RunOptions(retry=frozenset({"failed"})))
    twice = replace(ALL_AGAIN, repeat=2)
    first = FakeScheduler(
        lambda one: outcome_of(one) if len(first.begun) == 1 else stopping_at(16).measure(one)
    )
    assert go(request_of(**narrow), first, twice).stop_reason == "SIGTERM"
    last = FakeScheduler(outcome_of)
    go(request_of(**narrow), last, twice)
    assert lengths_of(last) == [16]


@pytest.mark.parametrize(
    ("changed", "source", "lengths"),
    [
        ("", "a", [64, 128]),
        ("env: {A: b}\n", "a", EACH),
        ("instruments: [timing]\n", "a", EACH),
        ("", "b", EACH),
    ],
)
def test_a_command_that_would_measure_otherwise_is_another_one(
    changed: str,
    source: str,
    lengths: list[int],
    request_of: Callable[..., SweepRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("orchestrator.planning.request.program_source", lambda: "a")
    assert go(request_of(), stopping_at(64), FRESH).stop_reason == "SIGTERM"
    monkeypatch.setattr("orchestrator.planning.request.program_source", lambda: source)
    monkeypatch.setattr(
        "orchestrator.planning.request.git_commit",
        lambda: "another, which is the same where its source is",
    )
    scheduler = FakeScheduler(outcome_of)
    go(request_of(CONFIG + changed), scheduler, FRESH)
    assert lengths_of(scheduler) == lengths


@pytest.mark.parametrize(
    ("choice", "lengths"),
    [
        (FRESH, [64, 128]),
        (RunOptions(), [64, 128]),
        (replace(FRESH, repeat=2), [*EACH, 64, 128]),
        (ALL_AGAIN, EACH),
    ],
    ids=["same", "plain", "more often", "other"],
)
def test_a_command_is_what_it_asks_for_and_not_its_words(
    choice: RunOptions,
    lengths: list[int],
    request_of: Callable[..., SweepRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A queue may give it another time limit, and a notebook has the same words for all that it calls."""
    monkeypatch.setattr(sys, "argv", ["sweep", "run", "c.yaml", "--fresh", "--time-limit", "9m"])
    go(request_of(), FakeScheduler(outcome_of))
    go(request_of(), stopping_at(64), FRESH)
    if choice == FRESH:
        monkeypatch.setattr(
            sys, "argv", ["sweep", "run", "c.yaml", "--time-limit", "2h", "--fresh"]
        )
    scheduler = FakeScheduler(outcome_of)
    go(request_of(), scheduler, choice)
    assert lengths_of(scheduler) == lengths


def test_going_on_asks_no_clock(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was set back by a day between the commands, and cells that began before all of them by what it says."""
    go(request_of(), FakeScheduler(outcome_of))
    assert go(request_of(), stopping_at(64), FRESH).stop_reason == "SIGTERM"

    class Yesterday(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) - timedelta(days=1)

    monkeypatch.setattr("orchestrator.planning.request.datetime", Yesterday)
    for length, lengths in ((128, [64, 128]), (None, [128])):
        scheduler = stopping_at(length) if length else FakeScheduler(outcome_of)
        go(request_of(), scheduler, FRESH)
        assert lengths_of(scheduler) == lengths


def test_a_cell_recovered_from_a_killed_driver_counts_for_its_command(
    request_of: Callable[..., SweepRequest],
) -> None:
    go(request_of(), FakeScheduler(outcome_of))

    def die(attempt: Attempt) -> Outcome:
        journalled(attempt)
        raise RuntimeError("the driver's power went")

    with pytest.raises(RuntimeError):
        go(request_of(), FakeScheduler(die), FRESH)
    scheduler = FakeScheduler(outcome_of)
    assert go(request_of(), scheduler, FRESH).recovered == 1
    assert lengths_of(scheduler) == [32, 64, 128]


def test_plan_and_status_show_an_interrupted_command(
    request_of: Callable[..., SweepRequest],
    write_config: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, out = str(write_config(CONFIG)), str(request_of().run)
    go(request_of(), FakeScheduler(outcome_of))
    monkeypatch.setattr(sys, "argv", ["sweep", "run", config, "--fresh", "--out", out])
    go(request_of(), stopping_at(64), FRESH)
    status = status_lines(request_of().run)
    assert f"left to measure: 2 of 4 cells. To continue: sweep run {config} --out {out}" in status
    plan = CliRunner().invoke(main, ["plan", config, "--fresh", "--out", out])
    assert plan.exit_code == 0, plan.output
    assert plan.output.startswith(
        "continuing --fresh or --retry: 2 cells are left to replace\n4 cells: 4 ok\n2 to run"
    )
    go(request_of(), FakeScheduler(outcome_of), FRESH)
    status = status_lines(request_of().run)
    assert status[-1] == "nothing is left to measure of 4 cells"


def test_a_command_that_asks_for_pending_cells_alone_goes_on_with_those_alone(
    request_of: Callable[..., SweepRequest],
) -> None:
    failing = stopping_at(32, lambda one: outcome_of(one, Status.FAILED))
    go(request_of(), failing, RunOptions(only=frozenset({"pending"})))
    last = FakeScheduler(outcome_of)
    go(request_of(), last, RunOptions(only=frozenset({"pending"})))
    assert lengths_of(last) == [32, 64, 128]


def test_two_commands_by_turns_both_come_to_their_end(
    request_of: Callable[..., SweepRequest],
) -> None:
    go(request_of(), FakeScheduler(outcome_of))
    halves = {"context_length=16|32": 32, "context_length=64|128": 128}
    begun = []
    for schedulers in (
        {where: stopping_at(length) for where, length in halves.items()},
        dict.fromkeys(halves),
    ):
        for where, scheduler in schedulers.items():
            scheduler = scheduler or FakeScheduler(outcome_of)
            go(request_of(wheres=[where]), scheduler, ALL_AGAIN)
            begun.append(lengths_of(scheduler))
    assert begun == [[16, 32], [64, 128], [32], [128]]


def test_a_command_killed_after_its_last_cell_has_nothing_left(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marks are fulfilled by the rows of its cells, and not by a word at its end."""
    go(request_of(), FakeScheduler(outcome_of))

    def die(*_: object) -> None:
        raise RuntimeError("the driver's power went")

    with monkeypatch.context() as killed:
        killed.setattr("orchestrator.sweep.pipeline.store_cells", die)
        with pytest.raises(RuntimeError):
            go(request_of(), FakeScheduler(outcome_of), FRESH, summary=True)
    scheduler = FakeScheduler(outcome_of)
    go(request_of(), scheduler)
    assert lengths_of(scheduler) == []


def test_the_order_in_which_values_are_named_is_of_no_matter(
    request_of: Callable[..., SweepRequest],
) -> None:
    go(request_of(wheres=["context_length=16|32|64"]), stopping_at(64), FRESH)
    scheduler = FakeScheduler(outcome_of)
    go(request_of(wheres=["context_length=64|32|16"]), scheduler, FRESH)
    assert lengths_of(scheduler) == [64]


def test_an_earlier_success_is_shown_until_a_new_one_exists(
    request_of: Callable[..., SweepRequest],
) -> None:
    """No result disappears by an interrupted --fresh or by a replacement that crashed."""
    go(request_of(), FakeScheduler(outcome_of))
    crashes = stopping_at(64, lambda one: outcome_of(one, ENDS[length_of(one)]))
    go(request_of(), crashes, FRESH)
    cells = load_results(request_of().run).cells.set_index("context_length")
    assert cells["status"].to_dict() == dict.fromkeys(EACH, "ok")
    assert cells["attempt"].to_dict() == {16: 2, 32: 1, 64: 1, 128: 1}
    assert cells["repetitions"].to_dict() == dict.fromkeys(EACH, 1)
    lines = status_lines(request_of().run)
    assert lines[0].split() == ["4", "ok"]
    assert lines[1].startswith("left to measure: 3 of 4 cells.")
    assert not any("crashed" in line for line in lines)


def test_failures_before_a_mark_do_not_count(request_of: Callable[..., SweepRequest]) -> None:
    """`--retry` gives a cell that was given up all its attempts again."""
    narrow = {"wheres": ["context_length=16"]}
    limit = request_of().config.limits.attempts
    fails = FakeScheduler(lambda one: outcome_of(one, Status.FAILED))
    for _ in range(limit + 1):
        go(request_of(**narrow), fails)
    assert len(fails.begun) == limit
    go(request_of(**narrow), fails, RunOptions(retry=frozenset({"failed"})))
    for _ in range(limit):
        go(request_of(**narrow), fails)
    assert len(fails.begun) == 2 * limit


def test_a_replacement_that_failed_is_named_by_its_status_and_by_that_of_the_cell(
    request_of: Callable[..., SweepRequest],
) -> None:
    go(request_of(), FakeScheduler(outcome_of))
    fails = FakeScheduler(lambda one: outcome_of(one, Status.FAILED))
    for _ in range(request_of().config.limits.attempts):
        go(request_of(), fails, ALL_AGAIN)
    assert " --retry failed --out " in status_lines(request_of().run)[1]
    for word in ("failed", "ok"):
        plan = plan_request(replace(request_of(), options=RunOptions(retry=frozenset({word}))))
        assert [cell.params.values()["context_length"] for cell in plan.to_run] == EACH


def test_a_cell_that_is_predicted_not_to_fit_is_not_marked(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the same command would never start from the first cell again."""
    go(request_of(), FakeScheduler(outcome_of))

    def exclude(*known: Any) -> Preflight:
        preflight = check_hosts(*known)
        large = [one for one in preflight.cells if one.params.values()["context_length"] > 64]
        return preflight.exclude(large, is_deferred=False)

    monkeypatch.setattr("orchestrator.sweep.pipeline.check_hosts", exclude)
    for _ in range(2):
        scheduler = FakeScheduler(outcome_of)
        go(request_of(), scheduler, FRESH, skip_predicted_oom=True)
        assert len(request_of().run.marks()) == 3


def test_marks_are_read_from_collections_and_lost_with_the_manifest(
    request_of: Callable[..., SweepRequest], tmp_path: Path
) -> None:
    go(request_of(), FakeScheduler(outcome_of))
    go(request_of(), FakeScheduler(outcome_of), FRESH)
    run = request_of().run
    other = shutil.copytree(run.folder, tmp_path / "other")
    both = load_results(open_runs([run.folder, other])).cells
    assert set(both["repetitions"]) == {1}
    (run.folder / "run.json").unlink()
    messages: list[str] = []
    go(request_of(), FakeScheduler(outcome_of), messages=messages)
    assert messages[0] == (
        f"{run}: run.json is gone, and with it what --fresh and --retry replaced"
    )
    assert set(load_results(run).cells["repetitions"]) == {2}
