"""A sweep stores, resumes, refuses and stops, with a function as its scheduler."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pandas as pd
import pytest

from orchestrator.cli.text.plan import describe_plan
from orchestrator.common.errors import (
    ConfigError,
    PlatformError,
    RunError,
    RunMismatch,
    RunUnwritable,
)
from orchestrator.common.provenance import program_source
from orchestrator.hardware.host import GpuInfo, HostInfo
from orchestrator.planning.cell_decisions import plan_request
from orchestrator.planning.invocation import ExecutionOptions, RunOptions
from orchestrator.planning.request import SweepRequest, resolve_again
from orchestrator.store import batch_writer
from orchestrator.store.cell_state import read_states
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.store.run_writer import RunWriter
from orchestrator.store.stored_tables import to_line
from orchestrator.sweep import pipeline
from tasks.prediction.records import Prediction, unknown
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tests.conftest import ROOT
from tests.support.fake_sweep import (
    CONFIG,
    CPU,
    FakeScheduler,
    go,
    journalled,
    length_of,
    lengths_of,
    out_of_memory_from,
    outcome_of,
    request_for,
    status_lines,
)


@pytest.fixture
def request_of(write_config: Callable[..., Path], tmp_path: Path) -> Callable[..., SweepRequest]:
    return lambda text=CONFIG, sets=(), wheres=(): request_for(
        write_config(text), sets, wheres, tmp_path / "out"
    )


def test_each_cell_is_measured_once_and_stored(request_of: Callable[..., SweepRequest]) -> None:
    scheduler = FakeScheduler(outcome_of)
    result = go(request_of(), scheduler, summary=True)
    assert result.counts == {Status.OK: 4}
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
    assert not go(request_of(), again).counts
    assert not again.begun


def test_the_run_has_the_config_of_a_named_model(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its cells can be measured again where the folder or the hub is gone."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    model = tmp_path / "nets" / "mine" / "config.json"
    model.parent.mkdir(parents=True)
    model.write_text('{"model_type": "llama"}')
    config = write_config(
        "name: a\ngrids: [{task: train_step, axes: {model: ['hf:./nets/mine', 'hf:gpt2']}}]"
    )
    request = request_for(config, ["device=cpu"], out=tmp_path / "out")
    go(request, FakeScheduler(outcome_of))
    copy = request.run.folder / "models" / "nets" / "mine" / "config.json"
    assert copy.read_bytes() == model.read_bytes()
    sources = request.model_sources()
    assert list(sources) == ["hf:./nets/mine"]
    model.unlink()
    assert request.model_sources() == sources
    model.write_text('{"model_type": "qwen2"}')
    assert request.model_sources() != sources


def test_failed_cells_are_repeated_up_to_the_limit(
    request_of: Callable[..., SweepRequest],
) -> None:
    def measure(attempt: Attempt) -> Outcome:
        ends = {16: Status.OK, 32: Status.OOM, 64: Status.CRASHED, 128: Status.SKIPPED}
        return outcome_of(attempt, ends[length_of(attempt)])

    numbers = []
    for _ in range(4):
        scheduler = FakeScheduler(measure)
        go(request_of(), scheduler)
        numbers.append(lengths_of(scheduler))
    assert numbers == [[16, 32, 64, 128], [64], [], []]
    scheduler = FakeScheduler(outcome_of)
    go(request_of(), scheduler, RunOptions(retry=frozenset({"oom"})))
    assert lengths_of(scheduler) == [32]


def test_repetitions_alternate_between_cells_and_skip_failed_ones(
    request_of: Callable[..., SweepRequest],
) -> None:
    def measure(attempt: Attempt) -> Outcome:
        return outcome_of(
            attempt,
            Status.OOM if length_of(attempt) == 128 else Status.OK,
        )

    request, scheduler = request_of(), FakeScheduler(measure)
    result = go(request, scheduler, RunOptions(repeat=2))
    assert lengths_of(scheduler) == [16, 32, 64, 128, 16, 32, 64]
    assert [attempt.number for attempt in scheduler.begun] == [1, 1, 1, 1, 2, 2, 2]
    assert (result.counts, result.queue.remaining) == ({Status.OK: 6, Status.OOM: 1}, 0)
    assert sum(go(request, FakeScheduler(measure), RunOptions(repeat=2)).counts.values()) == 0


def test_cells_that_need_more_than_an_oom_cell_are_inferred(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = FakeScheduler(out_of_memory_from(32))
    result = go(request_of(), scheduler, RunOptions(infer_oom=True))
    assert lengths_of(scheduler) == [16, 32]
    assert (result.counts, result.queue.remaining) == (
        {Status.OK: 1, Status.OOM: 1, Status.OOM_INFERRED: 2},
        0,
    )
    attempts = request_of().run.read("attempts").set_index("status")
    witness = attempts.loc["oom", "cell"]
    assert set(
        attempts.loc["oom_inferred", "evidence"].map(lambda text: json.loads(text)["witness"])
    ) == {witness}
    again = FakeScheduler(out_of_memory_from(32))
    assert not go(request_of(), again, RunOptions(infer_oom=True)).counts
    assert status_lines(request_of().run)[-1] == "nothing is left to measure of 4 cells"
    monkeypatch.setattr(sys, "argv", ["sweep", "run", "c.yaml", "--infer-oom"])
    go(request_of(sets=["context_length=16,32,64,128,256"]), again, RunOptions(infer_oom=True))
    assert status_lines(request_of().run)[-1] == "nothing is left to measure of 5 cells"
    assert go(request_of(), again).counts == {
        Status.OOM: 2
    }  # without --infer-oom, inferred cells are measured


@pytest.mark.parametrize(
    "again", [{"retry": frozenset({"oom"})}, {"fresh": True}], ids=["retry", "fresh"]
)
def test_a_cell_to_retry_is_not_inferred_from_itself(
    again: dict[str, Any], request_of: Callable[..., SweepRequest]
) -> None:
    go(request_of(), FakeScheduler(out_of_memory_from(64)))
    scheduler = FakeScheduler(outcome_of)  # such as on a GPU with more memory
    plan = plan_request(replace(request_of(), options=RunOptions(infer_oom=True, **again)))
    assert (len(plan.to_measure), plan.inferred) == (2 if "retry" in again else 4, {})
    result = go(request_of(), scheduler, RunOptions(infer_oom=True, **again))
    assert result.counts == {Status.OK: len(plan.to_measure)}


INFERRING = RunOptions(infer_oom=True)


def test_inferred_cells_are_measured_once_their_witness_fits(
    request_of: Callable[..., SweepRequest],
) -> None:
    go(request_of(), FakeScheduler(out_of_memory_from(32)), INFERRING)
    scheduler = FakeScheduler(outcome_of)
    go(request_of(), scheduler, RunOptions(infer_oom=True, retry=frozenset({"oom"})))
    assert lengths_of(scheduler) == [32, 64, 128]
    assert not go(request_of(), scheduler, INFERRING).counts


@pytest.mark.parametrize("status", ["oom_inferred", "ok"])
@pytest.mark.parametrize("asked", ["retry", "only"])
def test_a_cell_that_fitted_or_is_selected_is_not_inferred(
    status: str, asked: str, request_of: Callable[..., SweepRequest]
) -> None:
    ran_out = FakeScheduler(
        lambda one: outcome_of(one, Status.OOM if length_of(one) == 32 else Status.OK)
    )
    go(request_of(), ran_out, INFERRING)
    if status == "ok":  # 64 fits, although it was inferred to run out of memory
        inferred = RunOptions(only=frozenset({"oom_inferred"}))
        go(request_of(wheres=["context_length=64"]), ran_out, inferred)
    again = FakeScheduler(outcome_of)
    result = go(
        request_of(wheres=["context_length=32|64"]),
        again,
        RunOptions(infer_oom=True, **{asked: frozenset({status})}),
    )
    assert lengths_of(again) == [64]
    assert result.counts == {Status.OK: 1}


def test_inferred_cells_can_be_measured_as_a_check(
    request_of: Callable[..., SweepRequest], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    go(request_of(), FakeScheduler(out_of_memory_from(32)), INFERRING)
    inferred = RunOptions(only=frozenset({"oom_inferred"}), infer_oom=True)
    half = request_for(write_config(CONFIG), out=tmp_path / "out", sample=0.5)
    scheduler = FakeScheduler(out_of_memory_from(128))
    go(half, scheduler, inferred)
    assert lengths_of(scheduler) == [
        length
        for length in (64, 128)
        if length in {cell.params.values()["context_length"] for cell in half.expansion.cells}
    ]
    go(request_of(), scheduler, inferred)
    assert sorted(lengths_of(scheduler)) == [64, 128]
    statuses = {cell: one.status for cell, one in read_states(request_of().run).items()}
    assert sorted(statuses.values()) == ["ok", "ok", "oom", "oom"]


def test_a_measured_out_of_memory_is_not_replaced_by_an_inferred_one(
    request_of: Callable[..., SweepRequest],
) -> None:
    go(request_of(), FakeScheduler(out_of_memory_from(64)))
    again = FakeScheduler(out_of_memory_from(64))
    assert go(request_of(), again, RunOptions(infer_oom=True, retry=frozenset({"oom"}))).counts == {
        Status.OOM: 2
    }
    assert lengths_of(again) == [64, 128]


def test_cells_that_failed_too_often_are_counted(
    request_of: Callable[..., SweepRequest],
) -> None:
    failing = FakeScheduler(
        lambda one: outcome_of(one, Status.FAILED if length_of(one) == 16 else Status.OK)
    )
    for _ in range(request_of().config.limits.attempts):
        result = go(request_of(), failing)
        assert (result.given_up, result.counts[Status.FAILED]) == ({}, 1)
    result = go(request_of(), failing)
    assert (result.given_up, result.counts) == ({"failed": 1}, {})


@pytest.mark.parametrize("end", [Status.FAILED, Status.OOM])
def test_a_failing_repetition_is_tried_up_to_the_limit(
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


def test_a_plan_lists_the_cells_to_infer(request_of: Callable[..., SweepRequest]) -> None:
    request = request_of(sets=["context_length=16,32,64,128"])
    go(request_of(wheres=["context_length=16|32"]), FakeScheduler(out_of_memory_from(32)))
    plan = plan_request(replace(request, options=RunOptions(infer_oom=True)))
    witness = next(
        cell.id for cell in request.expansion.cells if cell.params.values()["context_length"] == 32
    )
    assert (plan.to_measure, set(plan.inferred.values())) == (
        [],
        {next(c for c in request.expansion.cells if c.id == witness)},
    )
    messages = list(
        describe_plan(plan, lambda cell: str(cell.params.values()["context_length"]), "", shown=99)
    )
    assert messages[1] == "0 to run, and 2 are inferred to run out of memory"
    assert [line.split(maxsplit=2)[::2] for line in messages[2:4]] == [
        [
            "infer",
            f"{length}  (needs at least as much memory as {witness}, which ran out of memory)",
        ]
        for length in (64, 128)
    ]
    assert len(plan_request(replace(request, options=RunOptions())).to_measure) == 2


def test_nothing_is_inferred_across_kinds_of_gpu(request_of: Callable[..., SweepRequest]) -> None:
    two = FakeScheduler(outcome_of, {"gpu": "A100", "torch": "2.13.0"})
    marks = [{"gpu": gpu} for gpu in ("A100", "H100")]
    two.hosts = lambda: [HostInfo(fingerprints={"cuda": marks})]  # type: ignore[method-assign]
    request = request_of(CONFIG.replace("device: cpu", "device: cuda"))
    with pytest.raises(PlatformError, match="A100, H100"):
        go(request, two, RunOptions(infer_oom=True), allow_mixed=True)


def test_a_narrower_selection_joins_the_same_run(request_of: Callable[..., SweepRequest]) -> None:
    go(request_of(wheres=["context_length=16"]), FakeScheduler(outcome_of))
    scheduler = FakeScheduler(outcome_of)
    go(request_of(), scheduler)
    assert len(scheduler.begun) == 3
    assert len(resolve_again(request_of().run).expansion.cells) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_loses_no_finished_cell(
    request_of: Callable[..., SweepRequest], number: int
) -> None:
    def measure(attempt: Attempt) -> Outcome:
        if length_of(attempt) == 64:
            os.kill(os.getpid(), number)
            time.sleep(5)
        return outcome_of(attempt)

    before = signal.getsignal(number)
    scheduler = FakeScheduler(measure)
    result = go(request_of(), scheduler, summary=True)
    assert (result.stop_reason, result.queue.remaining, result.counts) == (
        signal.Signals(number).name,
        2,
        {Status.OK: 2},
    )
    assert scheduler.closed
    assert signal.getsignal(number) == before
    assert len(pd.read_parquet(request_of().run.folder / "cells.parquet")) == 2
    assert go(request_of(), FakeScheduler(outcome_of)).counts == {Status.OK: 2}


def test_further_signals_do_not_interrupt_the_saving(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(attempt: Attempt) -> Outcome:
        if attempt.number == 1 and length_of(attempt) == 64:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        return outcome_of(attempt)

    real = RunWriter.write_cells

    def write_cells(writer: RunWriter, *arguments: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # in impatience
            os.kill(os.getpid(), number)
        real(writer, *arguments)

    monkeypatch.setattr(RunWriter, "write_cells", write_cells)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    result = go(request_of(), FakeScheduler(measure), summary=True)
    assert (result.stop_reason, result.queue.remaining) == ("SIGTERM", 2)
    assert len(pd.read_parquet(request_of().run.folder / "cells.parquet")) == 2
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


_STRUCK_WHILE_PANDAS_IS_IMPORTED = """
import os, signal, sys
from orchestrator.sweep.interruption import Interruption

def strike(event, arguments):
    if event == "import" and arguments[0] == "pandas._libs.interval" and armed:
        armed.clear()
        os.kill(os.getpid(), signal.SIGTERM)

armed = []
sys.addaudithook(strike)
assert "pandas" not in sys.modules
with Interruption(None) as interruption, interruption.stops_here():
    armed.append(True)
    import pandas
    os.kill(os.getpid(), signal.SIGTERM)
import pandas
print(interruption.reason, pandas.DataFrame({"a": [1]}).a[0])
"""


def test_a_signal_at_the_first_use_of_pandas_leaves_it_usable() -> None:
    # Compiled modules cannot be imported again after an interrupted import.
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
    """Half a line is in the log: the next run stores the attempt from its journal."""

    def write_half(rows: Any) -> bytes:
        monkeypatch.undo()
        log = next(request_of().run.folder.glob("*.log"))
        log.write_bytes(to_line(rows)[:100])
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        raise AssertionError

    monkeypatch.setattr(batch_writer, "to_line", write_half)
    result = go(request_of(), FakeScheduler(journalled))
    assert (result.stop_reason, result.queue.remaining) == ("SIGINT", 4)
    scheduler = FakeScheduler(journalled)
    result = go(request_of(), scheduler)
    assert result.recovered == 1
    assert len(scheduler.begun) == 3
    assert len(request_of().run.read("attempts")) == 4
    assert len(request_of().run.read("samples")) == 4


def test_a_recovered_attempt_has_the_facts_of_its_command_in_a_moved_folder(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(attempt: Attempt) -> Outcome:
        journalled(attempt)
        raise RuntimeError("the driver's power went")

    monkeypatch.setattr("orchestrator.planning.request.git_commit", lambda: "then")
    request = request_of()
    with pytest.raises(RuntimeError):
        go(request, FakeScheduler(die))
    moved = request.run.folder.rename(request.run.folder.parent / "moved")
    monkeypatch.setattr("orchestrator.planning.request.git_commit", lambda: "now")
    assert go(replace(request, run=Run(moved)), FakeScheduler(outcome_of)).recovered == 1
    rows = Run(moved).read("attempts")
    facts = [json.loads(text) for text in rows["facts"]]
    assert sorted(rows["commit"]) == ["now", "now", "now", "then"]
    stored = [(one["env"], one["instruments"], one["program_source"]) for one in facts]
    assert stored == [(facts[0]["env"], facts[0]["instruments"], program_source())] * 4


def test_a_removed_results_folder_ends_the_sweep(request_of: Callable[..., SweepRequest]) -> None:
    """The run ends in one line, and the next one recovers the cell that ran during the removal."""

    def measure(attempt: Attempt) -> Outcome:
        if length_of(attempt) == 32:
            shutil.rmtree(request_of().run.folder)
        return journalled(attempt)

    scheduler = FakeScheduler(measure)
    with pytest.raises(
        RunUnwritable, match=r"cannot be written: No such file or directory.*run again"
    ):
        go(request_of(), scheduler)
    assert scheduler.closed
    result = go(request_of(), FakeScheduler(journalled), summary=True)
    assert (result.recovered, result.counts) == (1, {Status.OK: 3})
    assert len(pd.read_parquet(request_of().run.folder / "cells.parquet")) == 4


def test_a_torn_row_is_reported_and_its_cell_measured_again(
    request_of: Callable[..., SweepRequest],
) -> None:
    request = request_of()
    shutil.copytree(ROOT / "tests" / "data" / "parts", request.run.folder, dirs_exist_ok=True)
    torn = request.run.folder / "attempts" / "c8e8af5d4a64-1.parquet"  # of an older version
    others = [path for path in torn.parent.iterdir() if path != torn]
    untouched = {part: part.read_bytes() for part in others}
    torn.write_bytes(torn.read_bytes()[:-100])
    scheduler = FakeScheduler(outcome_of)
    with pytest.raises(RunError, match=rf"{torn.name}: cannot be read: .*move it away"):
        go(request, scheduler)
    assert not scheduler.begun
    torn.unlink()
    assert go(request, scheduler, summary=True).counts == {Status.OK: 1}
    assert {part: part.read_bytes() for part in others} == untouched
    assert len(pd.read_parquet(request.run.folder / "cells.parquet")) == 5


def test_torn_samples_are_reported_before_anything_is_measured(
    request_of: Callable[..., SweepRequest],
) -> None:
    request = request_of()
    shutil.copytree(ROOT / "tests" / "data" / "parts", request.run.folder, dirs_exist_ok=True)
    torn = request.run.folder / "samples" / "c8e8af5d4a64-1.parquet"
    torn.write_bytes(torn.read_bytes()[:-50])
    scheduler = FakeScheduler(outcome_of)
    with pytest.raises(RunError, match=rf"{torn.name}: cannot be read: .*move it away"):
        go(request, scheduler, RunOptions(fresh=True))
    assert not scheduler.begun
    torn.unlink()
    assert go(request, scheduler, summary=True).counts == {Status.OK: 1}
    cells = pd.read_parquet(request.run.folder / "cells.parquet")
    assert set(cells["step_ms_median"]) == {5.0, 5.5}  # measured now and before


def test_the_number_of_an_interrupted_attempt_is_not_used_again(
    request_of: Callable[..., SweepRequest],
) -> None:
    request = request_of()
    cut = request.run.attempt_folder(request.expansion.cells[0].id, 1)
    cut.mkdir(parents=True)
    scheduler = FakeScheduler(outcome_of)
    assert go(request, scheduler).recovered == 0
    assert [attempt.number for attempt in scheduler.begun] == [2, 1, 1, 1]


def test_the_time_limit_skips_cells_that_would_not_end(
    request_of: Callable[..., SweepRequest],
) -> None:
    # Five of eight seconds are for saving. After a cell of 2.9 s, no other would end in time.

    def measure(attempt: Attempt) -> Outcome:
        time.sleep(0.5)
        return outcome_of(attempt, wall_s=2.9)

    scheduler = FakeScheduler(measure)
    result = go(request_of(), scheduler, time_limit_s=8)
    assert (
        len(scheduler.begun),
        result.queue.skipped_for_time,
        result.queue.remaining,
        result.stop_reason,
    ) == (1, 3, 3, None)


def test_the_time_limit_ends_running_cells(request_of: Callable[..., SweepRequest]) -> None:
    def measure(attempt: Attempt) -> Outcome:
        time.sleep(20)
        return outcome_of(attempt)

    began = time.monotonic()
    result = go(request_of(), FakeScheduler(measure), time_limit_s=6)
    assert (result.stop_reason, result.queue.remaining) == ("time limit", 4)
    assert time.monotonic() - began < 6


def test_other_hardware_is_refused_without_mixed(
    request_of: Callable[..., SweepRequest],
) -> None:
    go(request_of(wheres=["context_length=16"]), FakeScheduler(outcome_of))
    other = FakeScheduler(outcome_of, {**CPU, "torch": "2.11.0"})
    with pytest.raises(RunMismatch, match=r"torch 2\.13\.0 \(here 2\.11\.0\).*--out.*--mixed"):
        go(request_of(), other)
    assert other.closed
    assert not other.begun
    assert go(request_of(), other, allow_mixed=True).counts == {Status.OK: 3}
    assert len(request_of().run.read_manifest()["fingerprints"]["cpu"]) == 2


def test_a_grid_for_two_devices_may_be_measured_one_after_the_other(
    request_of: Callable[..., SweepRequest], prediction_requests: list[tuple[int, str]]
) -> None:
    text = CONFIG.replace("context_length: [16, 32, 64, 128]", "device: [cpu, cuda]").replace(
        "device: cpu, ", ""
    )
    scheduler = FakeScheduler(outcome_of)
    scheduler.more = {"cuda": [{"gpu": "Test GPU"}]}
    assert go(request_of(text, wheres=["device=cpu"]), scheduler).counts == {Status.OK: 1}
    assert go(request_of(text), scheduler).counts == {Status.OK: 1}


def test_a_missing_device_is_reported(request_of: Callable[..., SweepRequest]) -> None:
    with pytest.raises(
        PlatformError,
        match=r"device cuda is not available \(available: cpu\).*--set device=cpu",
    ):
        go(request_of(CONFIG.replace("device: cpu", "device: cuda")), FakeScheduler(outcome_of))


def test_a_refused_sweep_leaves_no_new_folder(
    request_of: Callable[..., SweepRequest], tmp_path: Path
) -> None:
    """Folders and files that existed before stay."""
    request = request_of(CONFIG.replace("device: cpu", "device: cuda"))

    def left_in(folder: Path) -> list[str]:
        with pytest.raises(PlatformError, match="device cuda is not available"):
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
def test_an_axis_that_no_cell_has_is_refused(
    axis: str, request_of: Callable[..., SweepRequest]
) -> None:
    """The axes belong to adaptive timing, compiled cells and GPUs."""
    with pytest.raises(
        ConfigError, match=f"--set {axis.partition('=')[0]}: has no effect on the selected cells"
    ):
        request_of(sets=[axis])
    assert request_of(
        sets=[axis, "timing=fixed,adaptive", "compile=eager,blocks", "device=cpu,cuda"]
    ).expansion.cells


EXCLUDING = (
    f"{CONFIG}    exclude: [{{context_length: 64}}]\n"
    "    override: [{when: {context_length: 128}, set: {seed: 1}}]"
)


def test_an_exclude_may_match_no_selected_cell(
    request_of: Callable[..., SweepRequest],
) -> None:
    assert len(request_of(EXCLUDING, sets=["context_length=16,256"]).expansion.cells) == 2
    assert len(request_of(EXCLUDING, wheres=["context_length=16"]).expansion.cells) == 1


def test_an_exclude_that_matches_no_cell_is_refused_but_read_from_a_run(
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


def test_a_run_with_an_axis_that_no_cell_has_can_be_read(
    request_of: Callable[..., SweepRequest],
) -> None:
    # An earlier program allowed it.
    go(request_of(), FakeScheduler(outcome_of))
    with open_for_writing(request_of().run) as writer:
        writer.write_manifest(
            {**writer.read_manifest(), "selection": {"set": {"half_width": [0.02]}, "where": {}}}
        )
    assert len(resolve_again(request_of().run).expansion.cells) == 4


def test_the_manifest_records_config_and_command(request_of: Callable[..., SweepRequest]) -> None:
    go(request_of(), FakeScheduler(outcome_of))
    manifest = Run(request_of().run.folder).read_manifest()
    assert manifest["name"] == "test"
    assert manifest["fingerprints"] == {"cpu": [CPU]}
    assert manifest["config"]["grids"][0]["axes"] == {"context_length": [16, 32, 64, 128]}
    assert (len(manifest["invocations"]), manifest["asked"]) == (1, 4)


KINDS = CONFIG.replace("fixed: {device: cpu,", "fixed: {device: cuda, gpu_kind: KIND,")


def gpus_here(*names: str) -> FakeScheduler:
    """Return a scheduler with a host for each kind of GPU."""
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


@pytest.mark.parametrize(
    ("asked", "started", "lines"),
    [(None, "spawn", 1), (None, "fork", 0), ("spawn", "spawn", 0)],
)
def test_cells_that_cannot_be_forked_are_noted_once(
    request_of: Callable[..., SweepRequest], asked: str | None, started: str, lines: int
) -> None:
    messages, facts = list[str](), {"start_method": started}
    scheduler = FakeScheduler(lambda attempt: replace(outcome_of(attempt), facts=facts))
    go(request_of(), scheduler, messages=messages, start_method=asked)
    notes = [line for line in messages if "the fork server cannot fork here" in line]
    assert len(notes) == lines
    assert all(note.endswith(str(scheduler.begun[0].path / "log.txt")) for note in notes)


@pytest.mark.parametrize(("device", "begun"), [("cuda", 1), ("cpu", 0)])
def test_predictors_import_torch_while_a_scheduler_opens(
    make_attempt: Callable[..., Attempt],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    begun: int,
) -> None:
    calls = Mock()
    for name in ("begin_predicting", "SerialScheduler"):
        monkeypatch.setattr(pipeline, name, getattr(calls, name))
    attempt = make_attempt(1, device=device)
    with pipeline.open_scheduler(ExecutionOptions(scheduler="serial"), attempt, print):
        assert calls.begin_predicting.call_count == begun
        assert calls.mock_calls[-1] == call.SerialScheduler(print, attempt)


@pytest.fixture
def prediction_requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Predict nothing. Return how many cells would have been predicted on which GPU."""
    asked: list[tuple[int, str]] = []

    def predict(cells: Any, card: Any, paths: Any) -> dict[str, Prediction]:
        asked.append((len(cells), card.name if card else ""))
        return {cell.id: unknown("not here") for cell in cells}

    monkeypatch.setattr("orchestrator.sweep.pipeline.predict_memory", predict)
    return asked


def of_kinds(*kinds: str) -> str:
    """Return a config with each cell on each kind, the kinds in the order of the grid."""
    axes = f"axes: {{gpu_kind: [{', '.join(kinds)}], context_length: [16, 32]}}"
    return KINDS.replace("axes: {context_length: [16, 32, 64, 128]}", axes).replace(
        " gpu_kind: KIND,", ""
    )


def test_one_sweep_over_two_kinds_of_gpu(
    request_of: Callable[..., SweepRequest], prediction_requests: list[tuple[int, str]]
) -> None:
    scheduler = gpus_here("NVIDIA H100", "NVIDIA A100")
    assert go(request_of(of_kinds("H100", "A100")), scheduler).counts == {Status.OK: 4}
    assert {attempt.cell.params.gpu_kind for attempt in scheduler.begun} == {"H100", "A100"}
    assert sorted(prediction_requests) == [
        (2, "NVIDIA A100"),
        (2, "NVIDIA H100"),
    ]  # each kind on its GPU, not on the smaller one


def test_a_missing_kind_of_gpu_is_left_for_another_run(
    request_of: Callable[..., SweepRequest], prediction_requests: list[tuple[int, str]]
) -> None:
    messages: list[str] = []
    request = request_of(of_kinds("H100", "B200"))
    result = go(request, gpus_here("NVIDIA H100"), messages=messages)
    assert result.counts == {Status.OK: 2}
    assert (
        "skipped: 2 cells need gpu_kind B200, which no host has (available: NVIDIA H100)."
        " The same command measures them on such a host"
    ) in messages
    with pytest.raises(
        PlatformError,
        match=r"2 cells need gpu_kind B200.*`ray start --address=…`.*--set gpu_kind=A100",
    ):
        go(request, gpus_here("NVIDIA H100"))
    assert go(request, gpus_here("NVIDIA H100", "NVIDIA B200")).counts == {Status.OK: 2}


def test_a_command_that_deferred_cells_is_not_complete(
    request_of: Callable[..., SweepRequest], prediction_requests: list[tuple[int, str]]
) -> None:
    request, both = request_of(of_kinds("H100", "B200")), ("NVIDIA H100", "NVIDIA B200")
    go(request, gpus_here(*both))
    assert go(request, gpus_here("NVIDIA H100"), RunOptions(fresh=True)).counts == {Status.OK: 2}
    for left in (2, 4):  # the cells of the B200; the same command again measures all
        scheduler = gpus_here(*both)
        go(request, scheduler, RunOptions(fresh=True))
        assert len(scheduler.begun) == left


def test_a_folder_has_the_defaults_of_both_its_configs(
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


def test_several_kinds_of_gpu_are_reported_if_cells_name_none(
    request_of: Callable[..., SweepRequest], prediction_requests: list[tuple[int, str]]
) -> None:
    messages: list[str] = []
    request = request_of(CONFIG.replace("device: cpu", "device: cuda"))
    go(request, gpus_here("NVIDIA H100", "NVIDIA A100"), messages=messages)
    assert messages[0].startswith("there are GPUs of several kinds (NVIDIA A100, NVIDIA H100)")
    assert prediction_requests == [(4, "NVIDIA A100")]


def test_several_kinds_of_gpu_in_one_host_are_refused(
    request_of: Callable[..., SweepRequest],
) -> None:
    scheduler = gpus_here("NVIDIA H100", "NVIDIA A100")
    first, second = scheduler.hosts()
    scheduler.hosts = lambda: [replace(first, gpus=first.gpus + second.gpus)]  # type: ignore[method-assign]
    with pytest.raises(
        PlatformError,
        match=r"host of NVIDIA H100 has GPUs of several kinds.*CUDA_VISIBLE_DEVICES",
    ):
        go(request_of(of_kinds("H100", "A100")), scheduler)


def test_oom_is_inferred_for_each_kind_of_gpu(
    request_of: Callable[..., SweepRequest], prediction_requests: list[tuple[int, str]]
) -> None:
    scheduler = gpus_here("NVIDIA H100", "NVIDIA A100")
    scheduler.measure = lambda one: outcome_of(
        one, Status.OOM if one.cell.params.gpu_kind == "A100" else Status.OK
    )
    result = go(request_of(of_kinds("H100", "A100")), scheduler, RunOptions(infer_oom=True))
    assert result.counts == {Status.OK: 2, Status.OOM: 1, Status.OOM_INFERRED: 1}


def test_a_command_that_finds_every_cell_measured_is_the_last_one(
    request_of: Callable[..., SweepRequest],
) -> None:
    go(request_of(), FakeScheduler(outcome_of))
    go(request_of(sets=["context_length=256"]), FakeScheduler(outcome_of))
    run = request_of().run
    fingerprints = run.read_manifest()["fingerprints"]
    assert "and 4 cells that the last command did not ask for: 4 ok" in status_lines(run)
    for _ in range(2):  # the second one adds no entry
        go(request_of(), FakeScheduler(outcome_of))
        assert "and 1 cell that the last command did not ask for: 1 ok" in status_lines(run)
    manifest = run.read_manifest()
    assert len(manifest["invocations"]) == 3
    assert manifest["fingerprints"] == fingerprints
    assert manifest["asked"] == 4


def test_the_status_has_the_command_for_cells_that_failed_too_often(
    request_of: Callable[..., SweepRequest],
) -> None:
    for _ in range(3):
        go(request_of(), FakeScheduler(lambda attempt: outcome_of(attempt, Status.FAILED)))
    last = status_lines(request_of().run)[-1]
    start = "nothing is left to measure of 4 cells; 4 cells failed too often. To try again: sweep"
    assert last.startswith(start)
    assert last.endswith(f" --retry failed --out {request_of().run}")


def test_the_status_counts_cells_that_the_last_command_did_not_select(
    request_of: Callable[..., SweepRequest],
) -> None:
    ends = {16: Status.OK, 32: Status.FAILED, 64: Status.OK, 128: Status.OOM}
    go(
        request_of(),
        FakeScheduler(lambda attempt: outcome_of(attempt, ends[length_of(attempt)])),
    )
    whole = status_lines(request_of().run)
    assert not any("did not ask for" in line for line in whole)
    go(
        request_of(wheres=["context_length=16|256"], sets=["context_length=16,256"]),
        FakeScheduler(outcome_of),
    )
    narrowed = status_lines(request_of().run)
    assert narrowed[:2] == [
        "     2 ok",
        "and 3 cells that the last command did not ask for: 1 failed, 1 ok, 1 oom",
    ]


def test_repetitions_do_not_change_the_number_of_cells(
    request_of: Callable[..., SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep", "run", "c.yaml", "--repeat", "3"])

    def once(attempt: Attempt) -> Outcome:
        if attempt.number > 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        return outcome_of(attempt)

    result = go(request_of(), FakeScheduler(once), RunOptions(repeat=3))
    assert (len(result.measured), result.queue.remaining) == (4, 4)
    status = status_lines(request_of().run)
    assert status[1] == (
        "left to measure: 4 of 4 cells, 8 times in all. To continue: "
        f"sweep run c.yaml --repeat 3 --out {request_of().run}"
    )
    result = go(request_of(), FakeScheduler(outcome_of), RunOptions(repeat=3))
    assert (len(result.measured), result.counts, result.queue.remaining) == (4, {Status.OK: 8}, 0)
    assert status_lines(request_of().run)[-1] == "nothing is left to measure of 4 cells"
