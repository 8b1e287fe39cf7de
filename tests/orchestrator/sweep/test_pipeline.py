"""The run command around a scheduler that is a function: what is kept, resumed, refused and stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from orchestrator.cli.text.plan import describe_plan
from orchestrator.cli.text.status import describe_status
from orchestrator.cli.text.sweep_result import conclude
from orchestrator.common.errors import (
    ConfigError,
    PlatformError,
    RunError,
    RunMismatch,
    RunUnwritable,
)
from orchestrator.common.provenance import program_source
from orchestrator.execution.events import AttemptStarted
from orchestrator.hardware.host import GpuInfo, HostInfo
from orchestrator.planning.duration_estimate import DurationEstimator
from orchestrator.planning.history import read_history
from orchestrator.planning.options import RunOptions
from orchestrator.planning.plan import plan_request
from orchestrator.planning.request import SweepRequest, resolve, resolve_again
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.store.run_writer import RunWriter
from orchestrator.sweep.pipeline import run_sweep
from orchestrator.sweep.result import Summary
from orchestrator.sweep.runtime import Means
from tasks.prediction.records import Prediction, unknown
from tasks.process.journal import FinalStatus, Journal
from tasks.spec.attempt import ATTEMPT_FILE, JOURNAL_FILE, Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import Sample

CONFIG = """
name: test
limits: {attempts: 2}
grids:
  - task: train_step
    axes: {context_length: [16, 32, 64, 128]}
    fixed: {device: cpu, size: tiny}
"""
CPU = {"torch": "2.13.0", "cpu": "Test", "cores": 2, "python": "3.11"}
Measure = Callable[[Attempt], Outcome]


def outcome_of(attempt: Attempt, status: Status = Status.OK, wall_s: float = 2.0) -> Outcome:
    samples = (
        (Sample("timing", "duration", "ms", 5.0, "synced", "step", 0),)
        if status is Status.OK
        else ()
    )
    return Outcome(attempt, status, "", "", {}, {}, samples, 1.7e9, wall_s)


class FakeScheduler(Scheduler):
    """Calls a function where another would start a process."""

    def __init__(self, measure: Measure, fingerprint: Mapping[str, Any] = CPU) -> None:
        self.measure = measure
        self.fingerprint = fingerprint
        self.closed = False
        self.begun: list[Attempt] = []
        self.more: dict[str, list[Mapping[str, Any]]] = {}
        self.kinds: tuple[str, ...] = ()

    def hosts(self) -> Sequence[HostInfo]:
        return [HostInfo(fingerprints={"cpu": [self.fingerprint], **self.more})]

    def slots(self, device: str, gpu_kind: str | None = None) -> int:
        return int(gpu_kind is None or gpu_kind in self.kinds)

    def prepare(self, attempt: Attempt) -> None: ...

    def run(
        self, queue: Iterable[Attempt], on_start: Callable[[AttemptStarted], None]
    ) -> Iterator[Outcome]:
        for attempt in queue:
            self.begun.append(attempt)
            on_start(AttemptStarted(attempt, "here", "", time.monotonic()))
            yield self.measure(attempt)

    def close(self) -> None:
        self.closed = True


class Silent:
    def started(self, started: AttemptStarted) -> None: ...

    def finished(self, outcome: Outcome) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def request_of(write_config: Callable[..., Path], tmp_path: Path) -> Callable[..., SweepRequest]:
    return lambda text=CONFIG, sets=(), wheres=(): resolve(
        write_config(text), sets, wheres, tmp_path / "out"
    )


def go(
    request: SweepRequest, scheduler: FakeScheduler, choice: RunOptions | None = None, **means: Any
) -> Summary:
    return run_sweep(
        request,
        choice or RunOptions(),
        Means(lambda example: scheduler, lambda total, left: Silent(), **means),
    )


def test_everything_is_measured_once_and_kept(request_of: Callable[..., SweepRequest]) -> None:
    scheduler = FakeScheduler(outcome_of)
    summary = go(request_of(), scheduler)
    assert summary.statuses == {Status.OK: 4}
    assert scheduler.closed
    cells = pd.read_parquet(request_of().run.folder / "cells.parquet")
    assert sorted(cells["context_length"]) == [16, 32, 64, 128]
    assert set(cells["status"]) == {"ok"}
    assert {
        "task",
        "size",
        "context_length",
        "precision",
        "compile",
        "pass",
        "step_ms_median",
    } <= set(cells.columns)
    again = FakeScheduler(outcome_of)
    assert not go(request_of(), again).statuses
    assert not again.begun


def test_only_what_failed_is_done_again_up_to_the_limit(
    request_of: Callable[..., SweepRequest],
) -> None:
    def measure(attempt: Attempt) -> Outcome:
        ends = {16: Status.OK, 32: Status.OOM, 64: Status.CRASHED, 128: Status.SKIPPED}
        return outcome_of(attempt, ends[attempt.cell.params.values()["context_length"]])

    numbers = []
    for _ in range(4):
        scheduler = FakeScheduler(measure)
        go(request_of(), scheduler)
        numbers.append(
            [attempt.cell.params.values()["context_length"] for attempt in scheduler.begun]
        )
    assert numbers == [[16, 32, 64, 128], [64], [], []]
    scheduler = FakeScheduler(outcome_of)
    go(request_of(), scheduler, RunOptions(retry=frozenset({"oom"})))
    assert [attempt.cell.params.values()["context_length"] for attempt in scheduler.begun] == [32]


def test_repetitions_are_taken_by_turns_and_not_of_what_ended_badly(
    request_of: Callable[..., SweepRequest],
) -> None:
    def measure(attempt: Attempt) -> Outcome:
        return outcome_of(
            attempt,
            Status.OOM if attempt.cell.params.values()["context_length"] == 128 else Status.OK,
        )

    request, scheduler = request_of(), FakeScheduler(measure)
    summary = go(request, scheduler, RunOptions(repeat=2))
    lengths = [attempt.cell.params.values()["context_length"] for attempt in scheduler.begun]
    assert lengths == [16, 32, 64, 128, 16, 32, 64]
    assert [attempt.number for attempt in scheduler.begun] == [1, 1, 1, 1, 2, 2, 2]
    assert (summary.statuses, summary.left) == ({Status.OK: 6, Status.OOM: 1}, 0)
    assert sum(go(request, FakeScheduler(measure), RunOptions(repeat=2)).statuses.values()) == 0


def out_of_memory_from(context: int) -> Measure:
    return lambda attempt: outcome_of(
        attempt,
        Status.OOM if attempt.cell.params.values()["context_length"] >= context else Status.OK,
    )


def lengths_of_one(attempt: Attempt) -> int:
    return int(attempt.cell.params.values()["context_length"])


def lengths_of(scheduler: FakeScheduler) -> list[int]:
    return [lengths_of_one(attempt) for attempt in scheduler.begun]


def test_what_asks_for_no_less_than_a_cell_that_ran_out_is_inferred(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = FakeScheduler(out_of_memory_from(32))
    summary = go(request_of(), scheduler, RunOptions(infer_oom=True))
    assert lengths_of(scheduler) == [16, 32]
    assert (summary.statuses, summary.left) == (
        {Status.OK: 1, Status.OOM: 1, Status.OOM_INFERRED: 2},
        0,
    )
    attempts = request_of().run.read("attempts").set_index("status")
    witness = attempts.loc["oom", "cell"]
    assert set(
        attempts.loc["oom_inferred", "evidence"].map(lambda text: json.loads(text)["witness"])
    ) == {witness}
    again = FakeScheduler(out_of_memory_from(32))
    assert not go(request_of(), again, RunOptions(infer_oom=True)).statuses
    assert list(describe_status(resolve_again(request_of().run)))[-1].endswith(
        "would run 0 of 4 cells"
    )
    monkeypatch.setattr(sys, "argv", ["sweep", "run", "c.yaml", "--infer-oom"])
    go(request_of(sets=["context_length=16,32,64,128,256"]), again, RunOptions(infer_oom=True))
    assert list(describe_status(resolve_again(request_of().run)))[-1].endswith(
        "would run 0 of 5 cells"
    )
    assert go(request_of(), again).statuses == {
        Status.OOM: 2
    }  # what was inferred is measured where that was not asked for


@pytest.mark.parametrize(
    "again", [{"retry": frozenset({"oom"})}, {"fresh": True}], ids=["retry", "fresh"]
)
def test_what_is_to_be_tried_again_is_not_inferred_from_itself(
    again: dict[str, Any], request_of: Callable[..., SweepRequest]
) -> None:
    go(request_of(), FakeScheduler(out_of_memory_from(64)))
    scheduler = FakeScheduler(outcome_of)  # on a card with more memory, say
    plan = plan_request(request_of(), RunOptions(infer_oom=True, **again))
    assert (len(plan.to_measure), plan.inferred) == (2 if "retry" in again else 4, {})
    summary = go(request_of(), scheduler, RunOptions(infer_oom=True, **again))
    assert summary.statuses == {Status.OK: len(plan.to_measure)}


INFERRING = RunOptions(infer_oom=True)


def test_what_was_inferred_is_found_out_again_where_its_witness_fits_now(
    request_of: Callable[..., SweepRequest],
) -> None:
    go(request_of(), FakeScheduler(out_of_memory_from(32)), INFERRING)
    scheduler = FakeScheduler(outcome_of)
    go(request_of(), scheduler, RunOptions(infer_oom=True, retry=frozenset({"oom"})))
    assert lengths_of(scheduler) == [32, 64, 128]
    assert not go(request_of(), scheduler, INFERRING).statuses


@pytest.mark.parametrize("status", ["oom_inferred", "ok"])
@pytest.mark.parametrize("asked", ["retry", "only"])
def test_nothing_is_inferred_of_what_fitted_or_is_asked_for(
    status: str, asked: str, request_of: Callable[..., SweepRequest]
) -> None:
    ran_out = FakeScheduler(
        lambda one: outcome_of(one, Status.OOM if lengths_of_one(one) == 32 else Status.OK)
    )
    go(
        request_of(), ran_out, RunOptions(infer_oom=True, verify=int(status == "ok"))
    )  # 64 fits all the same: it was verified
    again = FakeScheduler(outcome_of)
    summary = go(
        request_of(wheres=["context_length=32|64"]),
        again,
        RunOptions(infer_oom=True, **{asked: frozenset({status})}),
    )
    assert lengths_of(again) == [64]
    assert summary.statuses == {Status.OK: 1}


def test_a_measured_out_of_memory_is_not_replaced_by_an_inferred_one(
    request_of: Callable[..., SweepRequest],
) -> None:
    go(request_of(), FakeScheduler(out_of_memory_from(64)))
    again = FakeScheduler(out_of_memory_from(64))
    assert go(
        request_of(), again, RunOptions(infer_oom=True, retry=frozenset({"oom"}))
    ).statuses == {Status.OOM: 2}
    assert lengths_of(again) == [64, 128]


def test_cells_that_were_given_up_are_told_and_so_is_the_exit_code(
    request_of: Callable[..., SweepRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    failing = FakeScheduler(
        lambda one: outcome_of(one, Status.FAILED if lengths_of_one(one) == 16 else Status.OK)
    )
    for _ in range(request_of().config.limits.attempts):
        summary = go(request_of(), failing)
        assert (summary.given_up, summary.statuses[Status.FAILED]) == (0, 1)
    summary = go(request_of(), failing)
    assert (summary.given_up, summary.statuses) == (1, {})
    with pytest.raises(SystemExit, match="1"):
        conclude(summary, request_of())
    assert "left alone 1 cell that failed too often before" in capsys.readouterr().out


@pytest.mark.parametrize("end", [Status.FAILED, Status.OOM])
def test_a_repetition_that_comes_to_nothing_is_not_tried_for_ever(
    end: Status, request_of: Callable[..., SweepRequest]
) -> None:
    narrow, scheduler = (
        {"wheres": ["context_length=16"]},
        FakeScheduler(lambda one: outcome_of(one, end)),
    )
    go(request_of(**narrow), FakeScheduler(outcome_of))
    for _ in range(5):
        go(request_of(**narrow), scheduler, RunOptions(repeat=2))
    assert len(scheduler.begun) == request_of().config.limits.attempts


def test_a_plan_says_what_would_be_inferred(request_of: Callable[..., SweepRequest]) -> None:
    request = request_of(sets=["context_length=16,32,64,128"])
    go(request_of(wheres=["context_length=16|32"]), FakeScheduler(out_of_memory_from(32)))
    plan = plan_request(request, RunOptions(infer_oom=True))
    witness = next(
        cell.id for cell in request.expansion.cells if cell.params.values()["context_length"] == 32
    )
    assert (plan.to_measure, set(plan.inferred.values())) == (
        [],
        {next(c for c in request.expansion.cells if c.id == witness)},
    )
    said = list(
        describe_plan(
            plan, lambda cell: str(cell.params.values()["context_length"]), "", everything=True
        )
    )
    assert said[1] == "0 to run, and 2 are inferred to run out of memory"
    assert [line.split(maxsplit=2)[::2] for line in said[2:4]] == [
        ["infer", f"{length}  (asks for no less than {witness}, which ran out of memory)"]
        for length in (64, 128)
    ]
    assert len(plan_request(request, RunOptions()).to_measure) == 2


def test_inferred_out_of_memories_are_verified_and_refuted(
    request_of: Callable[..., SweepRequest],
) -> None:
    liar = FakeScheduler(
        lambda attempt: out_of_memory_from(32 if attempt.number == 1 else 10**9)(attempt)
    )
    summary = go(request_of(), liar, RunOptions(infer_oom=True, verify=1))
    assert lengths_of(liar) == [16, 32, 64]
    assert [cell.params.values()["context_length"] for cell in summary.refuted] == [64]
    assert (summary.left, summary.verified, summary.inferred) == (0, 1, 1)
    assert summary.measured == {Status.OK: 2, Status.OOM: 1}
    assert {row[0]: row[1] for row in request_of().run.rows("attempts", ["attempt", "status"])}[
        2
    ] == "ok"


def test_what_an_earlier_run_inferred_is_verified_too_and_no_more_than_was_asked(
    request_of: Callable[..., SweepRequest],
) -> None:
    scheduler = FakeScheduler(out_of_memory_from(32))
    go(request_of(), scheduler, INFERRING)
    assert lengths_of(scheduler) == [16, 32]
    summary = go(request_of(), scheduler, RunOptions(infer_oom=True, verify=1))
    assert (lengths_of(scheduler)[2:], summary.verified, summary.statuses) == (
        [64],
        1,
        {Status.OOM: 1},
    )
    assert summary.inferred == 0  # this time
    assert go(request_of(), scheduler, RunOptions(infer_oom=True, verify=1)).verified == 0
    assert go(request_of(), scheduler, RunOptions(infer_oom=True, verify=5)).verified == 1
    assert lengths_of(scheduler) == [16, 32, 64, 128]


def test_a_verification_that_is_lost_is_none(request_of: Callable[..., SweepRequest]) -> None:
    def measure(attempt: Attempt) -> Outcome:
        return (
            outcome_of(attempt, Status.LOST)
            if lengths_of_one(attempt) > 32
            else out_of_memory_from(32)(attempt)
        )

    summary = go(request_of(), FakeScheduler(measure), RunOptions(infer_oom=True, verify=1))
    assert (summary.verified, summary.refuted, summary.inferred) == (0, (), 2)


def test_a_verification_that_fails_says_nothing_of_memory_and_is_tried_again(
    request_of: Callable[..., SweepRequest],
) -> None:
    def measure(attempt: Attempt) -> Outcome:
        return (
            outcome_of(attempt, Status.FAILED)
            if lengths_of_one(attempt) > 32
            else out_of_memory_from(32)(attempt)
        )

    for failed in [*[1] * request_of().config.limits.attempts, 0]:
        scheduler = FakeScheduler(measure)
        summary = go(request_of(), scheduler, RunOptions(infer_oom=True, verify=1))
        assert summary.statuses[Status.FAILED] == failed
        assert (
            read_history(request_of().run)[request_of().expansion.cells[2].id].status
            == Status.FAILED
        )
    assert summary.given_up == 1


def test_a_refuted_inference_is_said_however_the_run_ends(
    request_of: Callable[..., SweepRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    request = request_of()
    with pytest.raises(SystemExit, match="130"):
        conclude(Summary(stopped="SIGINT", refuted=request.expansion.cells[:1]), request)
    assert (
        "inferred to run out of memory, and yet they fit: train_step context_length=16"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("measured", [0, 2])
def test_a_time_limit_within_which_nothing_is_measured_is_said(
    measured: int, request_of: Callable[..., SweepRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    """Called again and again until its exit code is another, it might go on for ever."""
    summary = Summary(stopped="time limit", statuses=Counter({Status.OK: measured}), left=3)
    with pytest.raises(SystemExit, match="75"):
        conclude(summary, request_of())
    assert ("only a longer one goes on" in capsys.readouterr().out) == (measured == 0)


def test_what_there_is_no_time_to_verify_is_left_for_the_next_run(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = FakeScheduler(out_of_memory_from(32))
    with monkeypatch.context() as late:
        late.setattr(
            DurationEstimator,
            "at_most",
            lambda estimator, cell: 3600.0 * (cell.params.values()["context_length"] > 32),
        )
        summary = go(
            request_of(), scheduler, RunOptions(infer_oom=True, verify=1), time_limit_s=600
        )
    assert (lengths_of(scheduler), summary.late, summary.late_s, summary.left) == (
        [16, 32],
        1,
        3600,
        1,
    )
    assert go(request_of(), scheduler, RunOptions(infer_oom=True, verify=1)).verified == 1


def test_the_last_line_says_what_was_measured_and_what_is_inferred_still(
    request_of: Callable[..., SweepRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    request = request_of()
    summary = go(
        request, FakeScheduler(out_of_memory_from(32)), RunOptions(infer_oom=True, verify=1)
    )
    conclude(summary, request)
    said = capsys.readouterr().out.splitlines()
    assert (
        said[0]
        == f"measured 3 cells: 1 ok, 2 oom; inferred that 1 more run out of memory; kept in {request.run.folder}"
    )
    conclude(replace(summary, inferred=0), request)
    assert "inferred" not in capsys.readouterr().out


def test_nothing_is_inferred_across_kinds_of_gpu(request_of: Callable[..., SweepRequest]) -> None:
    two = FakeScheduler(outcome_of, {"gpu": "A100", "torch": "2.13.0"})
    marks = [{"gpu": gpu} for gpu in ("A100", "H100")]
    two.hosts = lambda: [HostInfo(fingerprints={"cuda": marks})]  # type: ignore[method-assign]
    request = request_of(CONFIG.replace("device: cpu", "device: cuda"))
    with pytest.raises(PlatformError, match="A100, H100"):
        go(request, two, RunOptions(infer_oom=True), mixed=True)


def test_a_narrower_selection_joins_the_same_run(request_of: Callable[..., SweepRequest]) -> None:
    go(request_of(wheres=["context_length=16"]), FakeScheduler(outcome_of))
    scheduler = FakeScheduler(outcome_of)
    go(request_of(), scheduler)
    assert len(scheduler.begun) == 3
    assert len(resolve_again(request_of().run).expansion.cells) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_is_finished(
    request_of: Callable[..., SweepRequest], number: int
) -> None:
    def measure(attempt: Attempt) -> Outcome:
        if attempt.cell.params.values()["context_length"] == 64:
            os.kill(os.getpid(), number)
            time.sleep(5)
        return outcome_of(attempt)

    before = signal.getsignal(number)
    scheduler = FakeScheduler(measure)
    summary = go(request_of(), scheduler)
    assert (summary.stopped, summary.left, summary.statuses) == (
        signal.Signals(number).name,
        2,
        {Status.OK: 2},
    )
    assert scheduler.closed
    assert signal.getsignal(number) == before
    assert len(pd.read_parquet(request_of().run.folder / "cells.parquet")) == 2
    assert go(request_of(), FakeScheduler(outcome_of)).statuses == {Status.OK: 2}


def test_what_comes_after_a_signal_interrupts_nothing_of_what_is_still_written(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(attempt: Attempt) -> Outcome:
        if attempt.number == 1 and attempt.cell.params.values()["context_length"] == 64:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        return outcome_of(attempt)

    real = RunWriter.write_cells

    def write_cells(writer: RunWriter, cells: pd.DataFrame) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # in impatience
            os.kill(os.getpid(), number)
        real(writer, cells)

    monkeypatch.setattr(RunWriter, "write_cells", write_cells)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    summary = go(request_of(), FakeScheduler(measure))
    assert (summary.stopped, summary.left) == ("SIGTERM", 2)
    assert len(pd.read_parquet(request_of().run.folder / "cells.parquet")) == 2
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


_STRUCK_WHILE_PANDAS_IS_IMPORTED = """
import os, signal, sys
from orchestrator.sweep.interruption import stoppable
from orchestrator.sweep.result import Summary

def strike(event, arguments):
    if event == "import" and arguments[0] == "pandas._libs.interval" and armed:
        armed.clear()
        os.kill(os.getpid(), signal.SIGTERM)

armed = []
sys.addaudithook(strike)
assert "pandas" not in sys.modules
summary = Summary()
with stoppable(None, summary):
    armed.append(True)
    import pandas
    os.kill(os.getpid(), signal.SIGTERM)
import pandas
print(summary.stopped, pandas.DataFrame({"a": [1]}).a[0])
"""


def test_a_signal_at_the_first_use_of_pandas_leaves_it_usable() -> None:
    """Its compiled modules cannot be imported a second time once the first has been broken off."""
    done = subprocess.run(
        [sys.executable, "-c", _STRUCK_WHILE_PANDAS_IS_IMPORTED],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "SIGTERM 1\n", done.stderr


def test_a_signal_in_the_middle_of_writing_loses_nothing(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples are on disk, the attempt is not: the next run finds the journal and keeps it."""
    from orchestrator.store import run_writer

    real = run_writer.write_part

    def write(path: Path, table: Any) -> None:
        if path.parent.name == "attempts" and not path.exists():
            monkeypatch.setattr(run_writer, "write_part", real)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        real(path, table)

    monkeypatch.setattr(run_writer, "write_part", write)
    summary = go(request_of(), FakeScheduler(journalled))
    assert (summary.stopped, summary.left) == ("SIGINT", 4)
    scheduler = FakeScheduler(journalled)
    summary = go(request_of(), scheduler)
    assert summary.recovered == 1
    assert len(scheduler.begun) == 3
    assert len(request_of().run.read("attempts")) == 4
    assert len(request_of().run.read("samples")) == 4


def test_what_is_recovered_is_of_the_run_that_measured_it_wherever_the_folder_lies_by_now(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(attempt: Attempt) -> Outcome:
        journalled(attempt)
        raise RuntimeError("the driver's power went")

    monkeypatch.setattr("orchestrator.sweep.pipeline.git_commit", lambda: "then")
    request = request_of()
    with pytest.raises(RuntimeError):
        go(request, FakeScheduler(die))
    moved = request.run.folder.rename(request.run.folder.parent / "moved")
    monkeypatch.setattr("orchestrator.sweep.pipeline.git_commit", lambda: "now")
    assert go(replace(request, run=Run(moved)), FakeScheduler(outcome_of)).recovered == 1
    rows = Run(moved).read("attempts")
    facts = [json.loads(text) for text in rows["facts"]]
    assert sorted(rows["commit"]) == ["now", "now", "now", "then"]
    told = [(one["env"], one["instruments"], one["program_source"]) for one in facts]
    assert told == [(facts[0]["env"], facts[0]["instruments"], program_source())] * 4


def test_a_results_folder_that_is_taken_away(request_of: Callable[..., SweepRequest]) -> None:
    """The run ends in one line; the next one begins anew, but for what the last cell had already left there again."""

    def measure(attempt: Attempt) -> Outcome:
        if attempt.cell.params.values()["context_length"] == 32:
            shutil.rmtree(request_of().run.folder)
        return journalled(attempt)

    scheduler = FakeScheduler(measure)
    with pytest.raises(
        RunUnwritable, match=r"cannot be written: No such file or directory.*run again"
    ):
        go(request_of(), scheduler)
    assert scheduler.closed
    summary = go(request_of(), FakeScheduler(journalled))
    assert (summary.recovered, summary.statuses) == (1, {Status.OK: 3})
    assert len(pd.read_parquet(request_of().run.folder / "cells.parquet")) == 4


def test_a_torn_part_is_named_and_what_it_held_is_done_again(
    request_of: Callable[..., SweepRequest],
) -> None:
    request = request_of()
    go(request, FakeScheduler(outcome_of))
    torn, *others = sorted((request.run.folder / "attempts").glob("*.parquet"))
    untouched = {part: part.read_bytes() for part in others}
    torn.write_bytes(torn.read_bytes()[:-100])
    scheduler = FakeScheduler(outcome_of)
    with pytest.raises(RunError, match=rf"{torn.name}: cannot be read: .*move it away"):
        go(request, scheduler)
    assert not scheduler.begun
    torn.unlink()
    assert go(request, scheduler).statuses == {Status.OK: 1}
    assert {part: part.read_bytes() for part in others} == untouched
    assert len(pd.read_parquet(request.run.folder / "cells.parquet")) == 4


def test_torn_samples_are_named_before_anything_is_measured_beside_them(
    request_of: Callable[..., SweepRequest],
) -> None:
    request = request_of()
    go(request, FakeScheduler(outcome_of))
    torn, *_ = sorted((request.run.folder / "samples").glob("*.parquet"))
    torn.write_bytes(torn.read_bytes()[:-50])
    scheduler = FakeScheduler(outcome_of)
    with pytest.raises(
        RunError, match=rf"{torn.name}: cannot be read: .*move it away with .*/attempts/{torn.name}"
    ):
        go(request, scheduler, RunOptions(fresh=True))
    assert not scheduler.begun
    for part in (torn, request.run.folder / "attempts" / torn.name):
        part.unlink()
    assert go(request, scheduler).statuses == {Status.OK: 1}
    assert set(pd.read_parquet(request.run.folder / "cells.parquet")["step_ms_median"]) == {5.0}


def journalled(attempt: Attempt) -> Outcome:
    """Leaves the files that a real child leaves."""
    outcome = outcome_of(attempt)
    attempt.path.mkdir(parents=True)
    (attempt.path / ATTEMPT_FILE).write_text(attempt.to_json())
    with (attempt.path / JOURNAL_FILE).open("w") as stream:
        Journal(stream).samples(outcome.samples)
        Journal(stream).end(FinalStatus(Status.OK))
    return outcome


def test_an_attempt_cut_off_gets_the_next_number(request_of: Callable[..., SweepRequest]) -> None:
    request = request_of()
    cut = request.run.attempt_folder(request.expansion.cells[0].id, 1)
    cut.mkdir(parents=True)
    scheduler = FakeScheduler(outcome_of)
    assert go(request, scheduler).recovered == 0
    assert [attempt.number for attempt in scheduler.begun] == [2, 1, 1, 1]


def test_the_time_limit_passes_over_what_would_not_end(
    request_of: Callable[..., SweepRequest],
) -> None:
    """Of eight seconds, five are for saving: after one cell that says it took 2.9, no other would end in time."""

    def measure(attempt: Attempt) -> Outcome:
        time.sleep(0.5)
        return outcome_of(attempt, wall_s=2.9)

    scheduler = FakeScheduler(measure)
    summary = go(request_of(), scheduler, time_limit_s=8)
    assert (len(scheduler.begun), summary.late, summary.left, summary.stopped) == (1, 3, 3, "")


def test_the_time_limit_ends_what_runs(request_of: Callable[..., SweepRequest]) -> None:
    def measure(attempt: Attempt) -> Outcome:
        time.sleep(20)
        return outcome_of(attempt)

    began = time.monotonic()
    summary = go(request_of(), FakeScheduler(measure), time_limit_s=6)
    assert (summary.stopped, summary.left) == ("time limit", 4)
    assert time.monotonic() - began < 6


def test_other_hardware_is_refused_unless_asked_for(
    request_of: Callable[..., SweepRequest],
) -> None:
    go(request_of(wheres=["context_length=16"]), FakeScheduler(outcome_of))
    other = FakeScheduler(outcome_of, {**CPU, "torch": "2.11.0"})
    with pytest.raises(RunMismatch, match=r"torch 2\.13\.0 \(here 2\.11\.0\).*--out.*--mixed"):
        go(request_of(), other)
    assert other.closed
    assert not other.begun
    assert go(request_of(), other, mixed=True).statuses == {Status.OK: 3}
    assert len(request_of().run.read_manifest()["fingerprints"]["cpu"]) == 2


def test_a_grid_for_two_devices_may_be_measured_one_after_the_other(
    request_of: Callable[..., SweepRequest],
) -> None:
    text = CONFIG.replace("context_length: [16, 32, 64, 128]", "device: [cpu, cuda]").replace(
        "device: cpu, ", ""
    )
    scheduler = FakeScheduler(outcome_of)
    scheduler.more = {"cuda": [{"gpu": "Test GPU"}]}
    assert go(request_of(text, wheres=["device=cpu"]), scheduler).statuses == {Status.OK: 1}
    assert go(request_of(text), scheduler).statuses == {Status.OK: 1}


def test_a_device_that_is_not_here(request_of: Callable[..., SweepRequest]) -> None:
    with pytest.raises(
        PlatformError,
        match=r"asks for device cuda, and here there is only cpu.*--set device=cpu",
    ):
        go(request_of(CONFIG.replace("device: cpu", "device: cuda")), FakeScheduler(outcome_of))


def test_what_is_refused_before_anything_ran_leaves_no_new_folder(
    request_of: Callable[..., SweepRequest], tmp_path: Path
) -> None:
    """What was there before stays, whoever made it."""
    request = request_of(CONFIG.replace("device: cpu", "device: cuda"))

    def left_in(folder: Path) -> list[str]:
        with pytest.raises(PlatformError, match="asks for device cuda"):
            go(replace(request, run=Run(folder)), FakeScheduler(outcome_of))
        return sorted(
            path.relative_to(tmp_path).as_posix() for path in (tmp_path / "mine").rglob("*")
        )

    (tmp_path / "mine" / "empty").mkdir(parents=True)
    assert left_in(tmp_path / "mine" / "new" / "run") == ["mine/empty"]
    assert left_in(tmp_path / "mine" / "empty") == ["mine/empty"]
    (tmp_path / "mine" / "empty" / "notes").write_text("keep me")
    assert left_in(tmp_path / "mine" / "empty") == ["mine/empty", "mine/empty/notes"]


@pytest.mark.parametrize(
    "axis", ["half_width=0.02", "compile_mode=max-autotune", "gpu_kind=H100,A100"]
)
def test_what_is_set_in_vain_is_refused(axis: str, request_of: Callable[..., SweepRequest]) -> None:
    """It is of adaptive timing, of what is compiled, of a GPU."""
    with pytest.raises(
        ConfigError, match=f"--set {axis.partition('=')[0]}: no cell of these has it"
    ):
        request_of(sets=[axis])
    assert request_of(
        sets=[axis, "timing=fixed,adaptive", "compile=eager,blocks", "device=cpu,cuda"]
    ).expansion.cells


EXCLUDING = f"{CONFIG}    exclude: [{{context_length: 64}}]\n    override: [{{when: {{context_length: 128}}, set: {{seed: 1}}}}]"


def test_what_matches_a_cell_of_the_config_may_match_none_of_what_is_asked_for(
    request_of: Callable[..., SweepRequest],
) -> None:
    assert len(request_of(EXCLUDING, sets=["context_length=16,256"]).expansion.cells) == 2
    assert len(request_of(EXCLUDING, wheres=["context_length=16"]).expansion.cells) == 1


def test_what_matches_no_cell_of_the_config_is_refused_and_yet_read_of_a_run(
    request_of: Callable[..., SweepRequest],
) -> None:
    go(request_of(EXCLUDING), FakeScheduler(outcome_of))
    idle = EXCLUDING.replace("exclude: [{context_length: 64}]", "exclude: [{context_length: 640}]")
    with pytest.raises(ConfigError, match=r"exclude\[0\]: matches no cell of the grid"):
        request_of(idle, sets=["context_length=640,16"])
    with open_for_writing(request_of(EXCLUDING).run) as writer:
        manifest = writer.read_manifest()
        manifest["config"]["grids"][0]["exclude"] = [{"context_length": 640}]
        writer.write_manifest(manifest)
    assert len(resolve_again(request_of(EXCLUDING).run).expansion.cells) == 4


def test_a_run_for_which_something_was_set_in_vain_can_still_be_read(
    request_of: Callable[..., SweepRequest],
) -> None:
    """An earlier program let it."""
    go(request_of(), FakeScheduler(outcome_of))
    with open_for_writing(request_of().run) as writer:
        writer.write_manifest(
            {**writer.read_manifest(), "selection": {"set": {"half_width": [0.02]}, "where": {}}}
        )
    assert len(resolve_again(request_of().run).expansion.cells) == 4


def test_the_manifest_says_who_ran_what(request_of: Callable[..., SweepRequest]) -> None:
    go(request_of(), FakeScheduler(outcome_of))
    manifest = Run(request_of().run.folder).read_manifest()
    assert manifest["name"] == "test"
    assert manifest["fingerprints"] == {"cpu": [CPU]}
    assert manifest["config"]["grids"][0]["axes"] == {"context_length": [16, 32, 64, 128]}
    assert (len(manifest["invocations"]), manifest["asked"]) == (1, 4)


KINDS = CONFIG.replace("fixed: {device: cpu,", "fixed: {device: cuda, gpu_kind: KIND,")


def gpus_here(*names: str) -> FakeScheduler:
    """A host for each kind of GPU."""
    scheduler = FakeScheduler(outcome_of)
    scheduler.kinds = tuple(name.split()[1] for name in names)
    scheduler.hosts = lambda: [  # type: ignore[method-assign]
        HostInfo(
            name=f"host of {name}",
            gpus=(GpuInfo(name, (80 - 40 * place) * 1024**3, name),),
            fingerprints={"cuda": [{"gpu": name}]},
        )
        for place, name in enumerate(names)
    ]
    return scheduler


@pytest.fixture
def unpredicted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Nothing is predicted. How many cells would have been, on what."""
    asked: list[tuple[int, str]] = []

    def predict(cells: Any, card: Any, paths: Any) -> dict[str, Prediction]:
        asked.append((len(cells), card.name))
        return {cell.id: unknown("not here") for cell in cells}

    monkeypatch.setattr("orchestrator.sweep.preparation.predict_memory", predict)
    return asked


def of_kinds(*kinds: str) -> str:
    """Each cell on each kind, the kinds in the order of the grid."""
    axes = f"axes: {{gpu_kind: [{', '.join(kinds)}], context_length: [16, 32]}}"
    return KINDS.replace("axes: {context_length: [16, 32, 64, 128]}", axes).replace(
        " gpu_kind: KIND,", ""
    )


def test_one_sweep_over_two_kinds_of_gpu(
    request_of: Callable[..., SweepRequest], unpredicted: list[tuple[int, str]]
) -> None:
    scheduler = gpus_here("NVIDIA H100", "NVIDIA A100")
    assert go(request_of(of_kinds("H100", "A100")), scheduler).statuses == {Status.OK: 4}
    assert {attempt.cell.params.gpu_kind for attempt in scheduler.begun} == {"H100", "A100"}
    assert sorted(unpredicted) == [
        (2, "NVIDIA A100"),
        (2, "NVIDIA H100"),
    ]  # each on its own, not on the smaller


def test_a_kind_that_is_not_here_is_left_for_another_run(
    request_of: Callable[..., SweepRequest], unpredicted: list[tuple[int, str]]
) -> None:
    said: list[str] = []
    request = request_of(of_kinds("H100", "B200"))
    summary = go(request, gpus_here("NVIDIA H100"), say=said.append)
    assert summary.statuses == {Status.OK: 2}
    assert (
        "left out: 2 cells ask for gpu_kind B200, and here there is NVIDIA H100. Given again with it, this command measures them"
        in said
    )
    with pytest.raises(
        PlatformError,
        match=r"2 cells ask for gpu_kind B200.*`ray start --address=…`.*--set gpu_kind=A100",
    ):
        go(request, gpus_here("NVIDIA H100"))
    assert go(request, gpus_here("NVIDIA H100", "NVIDIA B200")).statuses == {Status.OK: 2}


def test_a_command_that_left_cells_to_another_run_has_not_come_to_its_end(
    request_of: Callable[..., SweepRequest], unpredicted: list[tuple[int, str]]
) -> None:
    request, both = request_of(of_kinds("H100", "B200")), ("NVIDIA H100", "NVIDIA B200")
    go(request, gpus_here(*both))
    assert go(request, gpus_here("NVIDIA H100"), RunOptions(fresh=True)).statuses == {Status.OK: 2}
    for left in (2, 4):  # those of the B200, and when it is given once more all
        scheduler = gpus_here(*both)
        go(request, scheduler, RunOptions(fresh=True))
        assert len(scheduler.begun) == left


def test_two_configs_in_one_folder_keep_the_defaults_of_both(
    request_of: Callable[..., SweepRequest],
) -> None:
    go(request_of(), FakeScheduler(outcome_of))
    matmul = (
        CONFIG.replace("task: train_step", "task: matmul")
        .replace("context_length", "matrix_size")
        .replace(", size: tiny", "")
    )
    go(request_of(matmul), FakeScheduler(outcome_of))
    assert set(request_of().run.read_manifest()["defaults"]) == {"train_step", "matmul"}


def test_of_cells_that_name_no_kind_it_is_said_where_there_are_several(
    request_of: Callable[..., SweepRequest], unpredicted: list[tuple[int, str]]
) -> None:
    said: list[str] = []
    request = request_of(CONFIG.replace("device: cpu", "device: cuda"))
    go(request, gpus_here("NVIDIA H100", "NVIDIA A100"), say=said.append)
    assert said[0].startswith(
        "GPUs of several kinds, NVIDIA A100, NVIDIA H100: cells come to any of them"
    )
    assert unpredicted == [(4, "NVIDIA A100")]


def test_kinds_within_one_host_are_not_told_apart(request_of: Callable[..., SweepRequest]) -> None:
    scheduler = gpus_here("NVIDIA H100", "NVIDIA A100")
    first, second = scheduler.hosts()
    scheduler.hosts = lambda: [replace(first, gpus=first.gpus + second.gpus)]  # type: ignore[method-assign]
    with pytest.raises(
        PlatformError,
        match=r"host of NVIDIA H100 has GPUs of several kinds.*CUDA_VISIBLE_DEVICES",
    ):
        go(request_of(of_kinds("H100", "A100")), scheduler)


def test_where_every_cell_names_its_kind_out_of_memories_are_inferred_on_each(
    request_of: Callable[..., SweepRequest], unpredicted: list[tuple[int, str]]
) -> None:
    scheduler = gpus_here("NVIDIA H100", "NVIDIA A100")
    scheduler.measure = lambda one: outcome_of(
        one, Status.OOM if one.cell.params.gpu_kind == "A100" else Status.OK
    )
    summary = go(request_of(of_kinds("H100", "A100")), scheduler, RunOptions(infer_oom=True))
    assert summary.statuses == {Status.OK: 2, Status.OOM: 1, Status.OOM_INFERRED: 1}


def test_the_status_tells_of_cells_that_the_last_command_left_out(
    request_of: Callable[..., SweepRequest],
) -> None:
    ends = {16: Status.OK, 32: Status.FAILED, 64: Status.OK, 128: Status.OOM}
    go(
        request_of(),
        FakeScheduler(
            lambda attempt: outcome_of(
                attempt, ends[attempt.cell.params.values()["context_length"]]
            )
        ),
    )
    whole = list(describe_status(resolve_again(request_of().run)))
    assert not any("did not ask for" in line for line in whole)
    go(
        request_of(wheres=["context_length=16|256"], sets=["context_length=16,256"]),
        FakeScheduler(outcome_of),
    )
    narrowed = list(describe_status(resolve_again(request_of().run)))
    assert narrowed[:2] == [
        "     2 ok",
        "and 3 cells that the last command did not ask for: 1 failed, 1 ok, 1 oom",
    ]


def test_cells_are_counted_however_often_they_are_measured(
    request_of: Callable[..., SweepRequest],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep", "run", "c.yaml", "--repeat", "3"])

    def once(attempt: Attempt) -> Outcome:
        if attempt.number > 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        return outcome_of(attempt)

    summary = go(request_of(), FakeScheduler(once), RunOptions(repeat=3))
    assert (summary.cells, summary.left) == (4, 4)
    told = list(describe_status(resolve_again(request_of().run)))
    assert (
        told[1]
        == f"sweep run c.yaml --repeat 3 --out {request_of().run} would run 4 of 4 cells, 8 times in all"
    )
    summary = go(request_of(), FakeScheduler(outcome_of), RunOptions(repeat=3))
    assert summary.left == 0
    conclude(summary, request_of())
    assert (
        f"measured 4 cells, 8 times in all: 8 ok; kept in {request_of().run}\n"
        in capsys.readouterr().out
    )
    assert list(describe_status(resolve_again(request_of().run)))[-1].endswith(
        "would run 0 of 4 cells"
    )
