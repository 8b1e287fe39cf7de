"""From outcomes to tables: the numbers are those of the samples, an OOM is a value, and order is the course's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from orchestrator.errors import ConfigError
from orchestrator.report.frames import Results, load_results
from orchestrator.report.gpus import known_gpus, smallest_fitting
from orchestrator.report.render import lay_out, to_markdown
from orchestrator.report.tables import TABLES
from orchestrator.store import Run
from tasks.harness.records import Attempt, Outcome, Sample, Settings, Status
from tasks.harness.registry import make_cell

GIB = 1024**3


def outcome(
    step_ms: Iterable[float] = (10.0, 11.0, 12.0),
    status: Status = Status.OK,
    peak_gib: float | None = None,
    pipelined: Iterable[float] = (),
    number: int = 1,
    **params: Any,
) -> Outcome:
    values = {"device": "cpu", "size": "tiny", **params}
    attempt = Attempt(make_cell("train_step", values), number, "/nowhere", Settings())
    samples = [
        Sample("timing", "duration", "ms", ms * share, mode, phase, step)
        for mode, series in (("synced", step_ms), ("pipelined", pipelined))
        for step, ms in enumerate(series)
        for phase, share in (("forward", 0.25), ("backward", 0.5), ("optimizer", 0.25), ("step", 1.0))
    ]
    for mode, share in (("first", 0.5), ("steady", 1.0)):
        if peak_gib:
            samples += [
                Sample("memory", f"peak_{kind}_bytes", "bytes", peak_gib * GIB * share * part * more, mode, phase)
                for kind, more in (("allocated", 1.0), ("reserved", 1.1))
                for phase, part in (("forward", 0.9), ("backward", 1.0))
            ]
    evidence = {} if status is Status.OK else {"message": f"it was {status}\nmore", "asked_bytes": 2 * GIB}
    facts = {"gpu": "Test GPU", "torch": "2.13.0", "tokens": 1000, "flops": {"forward": 10**9, "backward": 2 * 10**9}}
    kept = tuple(samples) if status is Status.OK else ()
    return Outcome(attempt, status, "", "", evidence, facts, kept, 1.7e9, 2.5)


@pytest.fixture
def results_of(tmp_path: Path) -> Callable[..., Results]:
    def make(*outcomes: Outcome) -> Results:
        run = Run(tmp_path / "run")
        with run.opened_for_writing() as writer:
            writer.write_manifest({"name": "test"})
            for one in outcomes:
                writer.append(one, "abc")
            writer.write_cells(load_results(writer).cells)
        return load_results(run)

    return make


def table(results: Results, name: str) -> pd.DataFrame:
    (page,) = lay_out(results, [name])
    return pd.DataFrame(page.rows, columns=page.header)


def test_the_numbers_are_those_of_the_samples(results_of: Callable[..., Results]) -> None:
    steps = [12.0, 10.0, 11.0, 30.0, 10.5, 10.7, 10.9]
    row = results_of(outcome(steps)).cells.iloc[0]
    assert row["step_ms_mean"] == pytest.approx(statistics.fmean(steps))
    assert row["step_ms_sd"] == pytest.approx(statistics.stdev(steps))
    assert row["step_ms_median"] == statistics.median(steps)
    assert (row["step_ms_ci_low"], row["step_ms_ci_high"], row["step_ms_n"]) == (10.0, 30.0, 7)
    assert row["forward_ms_median"] == statistics.median(steps) / 4
    assert row["tokens_per_s"] == pytest.approx(1000 / (statistics.median(steps) / 1e3))
    assert row["achieved_tflops"] == pytest.approx(3e9 / (statistics.median(steps) / 1e3) / 1e12)


def test_the_whole_step_is_pipelined_where_there_is_such(results_of: Callable[..., Results]) -> None:
    cells = results_of(outcome([10.0], pipelined=[8.0]), outcome([20.0], seed=1)).cells.set_index("seed").sort_index()
    assert list(cells["step_ms_median"]) == [8.0, 20.0]
    assert list(cells["step_synced_ms_median"]) == [10.0, 20.0]


def test_peaks_are_of_the_step_and_of_each_phase(results_of: Callable[..., Results]) -> None:
    row = results_of(outcome(peak_gib=4.0)).cells.iloc[0]
    assert row["peak_allocated_bytes"] == 4 * GIB
    assert row["forward_peak_allocated_bytes"] == pytest.approx(3.6 * GIB)
    assert row["first_peak_reserved_bytes"] == pytest.approx(2.2 * GIB)


def test_the_attempt_that_counts(results_of: Callable[..., Results]) -> None:
    results = results_of(
        outcome([10.0]), outcome([12.0], number=2), outcome(status=Status.CRASHED, number=3), outcome(status=Status.LOST, seed=1),
        outcome(status=Status.OOM, seed=2), outcome(status=Status.LOST, number=2, seed=2),
    ).cells.set_index("seed").sort_index()  # fmt: skip
    assert list(results["status"]) == ["ok", "lost", "oom"]
    assert (results.loc[0, "attempt"], results.loc[0, "attempts"], results.loc[0, "step_ms_median"]) == (2, 3, 12.0)


def test_an_oom_is_a_value(results_of: Callable[..., Results]) -> None:
    results = results_of(
        outcome(context_length=128, peak_gib=20.0, size="xl"),
        outcome(context_length=256, status=Status.OOM, size="xl"),
        outcome(context_length=128, peak_gib=2.0, size="small"),
    )
    assert list(table(results, "timings")["total"]) == ["11.00 ± 1.000", "11.00 ± 1.000", "OOM"]
    plan = table(results, "oom-map").set_index("size")
    assert plan.loc["xl", "128"] == "22.0 GiB: 24 GB (RTX 4090, 3090)"
    assert plan.loc["xl", "256"] == "OOM (asked 2.00 GiB more)"
    assert plan.loc["small", "256"] == "–"
    assert list(table(results, "failures")["why"]) == ["it was oom"]


def test_what_failed_after_some_samples_is_no_result(results_of: Callable[..., Results]) -> None:
    half = replace(outcome([1.0], precision="fp32"), status=Status.FAILED)
    results = results_of(half, outcome([50.0], precision="bf16"))
    assert list(table(results, "timings")["total"]) == ["failed", "50.00 ± –"]
    rows = table(results, "precision")
    assert list(rows["fp32 ms"]) == ["failed"]
    assert "bf16 speed-up" not in rows


def test_a_column_of_ooms_is_a_finding_and_stays(results_of: Callable[..., Results]) -> None:
    results = results_of(
        *(outcome(status=Status.OOM, context_length=n) for n in (64, 128)),
        *(outcome(compile="blocks", context_length=n) for n in (64, 128)),
    )
    rows = table(results, "compile")
    assert list(rows["eager ms"]) == ["OOM", "OOM"]
    assert list(rows["blocks ms"]) == ["11.00", "11.00"]


def test_comparisons_have_their_baseline_first(results_of: Callable[..., Results]) -> None:
    results = results_of(
        outcome([40.0], precision="bf16"), outcome([100.0], precision="fp32"), outcome([50.0], precision="tf32"),
        outcome([70.0], precision="fp32", seed=1), outcome(status=Status.OOM, precision="bf16", seed=1),
    )  # fmt: skip
    rows = table(results, "precision").set_index("seed")
    assert [name for name in rows if name.endswith("ms")] == ["fp32 ms", "tf32 ms", "bf16 ms"]
    assert list(rows.loc["0", ["tf32 speed-up", "bf16 speed-up"]]) == ["2.00×", "2.50×"]
    assert list(rows.loc["1", ["tf32 speed-up", "bf16 ms", "bf16 speed-up"]]) == ["–", "OOM", "OOM"]


def test_compile_and_warm_up(results_of: Callable[..., Results]) -> None:
    results = results_of(outcome([30.0, 30.0]), outcome([15.0, 15.0], compile="blocks"), outcome([300.0, 30.0], warmup_steps=0))
    assert list(table(results, "compile")["blocks speed-up"]) == ["2.00×"]
    assert list(table(results, "warmup")["0 std/mean"]) == ["115.71%"]


def test_growth(results_of: Callable[..., Results]) -> None:
    results = results_of(*(outcome([ms], context_length=n) for n, ms in ((128, 10.0), (256, 20.0), (512, 80.0))))
    assert list(table(results, "scaling")["exponent of step ms"]) == ["–", "1.00", "2.00"]


def test_every_table_carries_its_provenance(results_of: Callable[..., Results]) -> None:
    pages = lay_out(results_of(outcome(), outcome(status=Status.FAILED, seed=1)))
    assert {"timings", "phases", "failures"} <= {page.table.name for page in pages}
    for page in pages:
        text = to_markdown(page)
        assert page.table.read in text
        assert "run test · Test GPU · torch 2.13.0 · batch 4 · 5 + 10 steps · commit abc · 2023-11-14" in text
        assert all(len(row) == len(page.header) for row in page.rows)


@pytest.mark.parametrize("statuses", [[], [Status.FAILED], [Status.OOM, Status.TIMEOUT], [Status.LOST]])
def test_runs_without_a_success_have_a_report(results_of: Callable[..., Results], statuses: list[Status]) -> None:
    results = results_of(*(outcome(status=status, seed=seed) for seed, status in enumerate(statuses)))
    assert ("failures" in {page.table.name for page in lay_out(results)}) == bool(statuses)


def test_unknown_table(results_of: Callable[..., Results]) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'timings'"):
        lay_out(results_of(), ["timing"])


def test_names_of_tables_are_unique() -> None:
    assert len({one.name for one in TABLES}) == len(TABLES)


def test_gpus_ascend_and_leave_room_for_the_context() -> None:
    sizes = [gpu.usable_bytes for gpu in known_gpus()]
    assert sizes == sorted(sizes)
    assert smallest_fitting(31.9 * GIB).startswith("40 GB")
    assert smallest_fitting(31.0 * GIB).startswith("32 GB")
    assert smallest_fitting(1e15) == "none known"


def test_pandas_reads_what_was_written(results_of: Callable[..., Results], tmp_path: Path) -> None:
    results_of(outcome([10.0, 10.0]), outcome(status=Status.OOM, seed=1, memory_limit_gib=32.0))
    cells = pd.read_parquet(tmp_path / "run" / "cells.parquet")
    assert list(cells.columns[:3]) == ["cell", "task", "device"]
    assert {"size", "context_length", "precision", "compile", "pass", "status"} <= set(cells.columns)
    kinds = {"context_length": "Int64", "memory_limit_gib": "Float64", "step_ms_median": "Float64", "size": "string"}
    assert {name: str(cells[name].dtype) for name in kinds} == kinds
    assert cells["step_ms_median"].isna().sum() == 1
