"""From outcomes to tables: the numbers are those of the samples, an OOM is a value, and order is the course's."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import orchestrator
from orchestrator.analysis.cells import TIME_SPENT
from orchestrator.analysis.results import Results, load_results
from orchestrator.common.errors import ConfigError
from orchestrator.hardware.gpu_catalog import known_gpus, smallest_fitting
from orchestrator.report.charts.registry import PLOTS
from orchestrator.report.findings.registry import findings
from orchestrator.report.formats.files import to_csv, to_markdown
from orchestrator.report.tables.formatters import why_failed
from orchestrator.report.tables.registry import TABLES, lay_out
from orchestrator.report.tables.views import view_of
from orchestrator.report.text.provenance import provenance
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.sweep.outcome_log import store_cells
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.outcome import Outcome
from tasks.spec.parameters import default_values
from tasks.spec.registry import all_tasks, make_cell
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.conftest import watched, with_samples
from tests.support.tables import texts_of

GIB = 1024**3


def outcome(
    step_ms: Iterable[float] = (10.0, 11.0, 12.0),
    status: Status = Status.OK,
    peak_gib: float | None = None,
    pipelined: Iterable[float] = (),
    number: int = 1,
    lead_ms: float | None = None,
    **params: Any,
) -> Outcome:
    values = {"device": "cpu", "size": "tiny", **params}
    attempt = Attempt(make_cell("train_step", values), number, "/nowhere", Settings())
    samples = [
        Sample("timing", "duration", "ms", ms * share, mode, phase, step)
        for mode, series in (("synced", step_ms), ("pipelined", pipelined))
        for step, ms in enumerate(series)
        for phase, share in (
            ("forward", 0.25),
            ("backward", 0.5),
            ("optimizer", 0.25),
            ("step", 1.0),
        )
    ]
    samples += (
        [Sample("timing", "lead", "ms", lead_ms, "pipelined", "backward")]
        if lead_ms is not None
        else []
    )
    for mode, share in (("first", 0.5), ("steady", 1.0)):
        if peak_gib:
            samples += [
                Sample(
                    "memory",
                    f"peak_{kind}_bytes",
                    "bytes",
                    peak_gib * GIB * share * part * more,
                    mode,
                    phase,
                )
                for kind, more in (("allocated", 1.0), ("reserved", 1.1))
                for phase, part in (("forward", 0.9), ("backward", 1.0))
            ]
    evidence = (
        {} if status is Status.OK else {"message": f"it was {status}\nmore", "asked_bytes": 2 * GIB}
    )
    facts = {
        "gpu": "Test GPU",
        "torch": "2.13.0",
        "tokens": 1000,
        "flops": {"forward": 10**9, "backward": 2 * 10**9},
    }
    kept = tuple(samples) if status is Status.OK else ()
    return Outcome(attempt, status, "", "", evidence, facts, kept, 1.7e9, 2.5)


@pytest.fixture
def results_of(tmp_path: Path) -> Callable[..., Results]:
    def make(*outcomes: Outcome) -> Results:
        run = Run(tmp_path / "run")
        with open_for_writing(run) as writer:
            writer.write_manifest({"name": "test"})
            highest = writer.highest_attempts()
            for one in outcomes:
                number = max(one.attempt.number, highest.get(one.attempt.cell.id, 0) + 1)
                writer.append(replace(one, attempt=replace(one.attempt, number=number)), "abc")
        return load_results(run)

    return make


def table(results: Results, name: str) -> pd.DataFrame:
    (page,) = lay_out(results, [name])
    return pd.DataFrame(texts_of(page), columns=page.header)


def test_files_name_axes_and_flags_as_the_cells_do(results_of: Callable[..., Results]) -> None:
    own = {"size": None, "model": "package:Model", "context_length": 16}
    results = results_of(
        outcome(pipelined=[10.0], lead_ms=0.1, model_args={"n_experts": 4}, **own),
        outcome(pipelined=[29.0], lead_ms=9.0, model_args={"n_experts": 8}, **own),
        outcome(pipelined=[15.0], model_args={"n_experts": 16}, **own),  # without a lead
    )
    cells = results.cells.set_index("model_args.n_experts")["cpu_bound"]
    (page,) = lay_out(results, ["timings"])
    read = pd.read_csv(StringIO(to_csv(page))).set_index("model_args.n_experts")["cpu_bound"]
    for column in (cells, read):
        known = {args: None if pd.isna(bound) else bool(bound) for args, bound in column.items()}
        assert known == {4: True, 8: False, 16: None}


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


UNSEEN = Sample("kernel_time", "kernel_time", "ms", None, note="only a GPU has kernel times")


def test_the_kernel_time_of_a_step_has_a_median_and_an_interval(
    results_of: Callable[..., Results],
) -> None:
    timed = outcome([10.0] * 6)
    results = results_of(
        with_samples(timed, *watched([4.0, 4.1, 4.3, 4.2, 3.9, 4.4])),
        with_samples(outcome([10.0] * 6, seed=1), *watched([900.0, 910.0])),
        replace(outcome(seed=2), samples=(*outcome([10.0] * 6).samples, UNSEEN)),
    )
    alone, few, never = (row for _, row in results.cells.sort_values("seed").iterrows())
    assert [alone[f"step_kernel_time_ms_{name}"] for name in ("median", "ci_low", "ci_high")] == [
        4.15,
        3.9,
        4.4,
    ]
    assert alone["busy_timed"] == pytest.approx(0.415)
    assert few["step_kernel_time_ms_coverage"] == 0.5
    assert pd.isna(never["step_kernel_time_ms_median"])
    assert [column for column in results.cells if column.endswith("kernel_time_ms_coverage")] == [
        "step_kernel_time_ms_coverage"
    ]
    shown_table = table(results, "bound")
    assert shown_table["kernels"].tolist() == [
        "4.150 [3.900, 4.400]",
        "905.0 [900.0, 910.0] (50%)",
    ]
    assert shown_table["busy"].tolist() == ["41.5%", "9050.0%"]


def test_kernel_time_of_a_profiled_step_excludes_what_ran_outside_its_phases(
    results_of: Callable[..., Results],
) -> None:
    """Without what ran outside of its phases. On the CPU, whose operators hold each other, there is none, nor of a trace of
    nobody knows how many steps."""
    ms = {"forward": 3.0, "backward": 5.0, "outside": 7.0}
    timed, busy = outcome([10.0] * 6), Sample("kernels", "busy", "ratio", 0.9)
    trace = [
        Sample("kernels", "kernel_time", "ms", value, phase=phase) for phase, value in ms.items()
    ]
    profiled = [*trace, Sample("kernels", "profiled_step", "ms", 12.0)]
    on_gpu = with_samples(timed, *profiled, busy)
    row = results_of(on_gpu).cells.iloc[0]
    assert (row["step_kernel_time_ms_median"], row["busy_timed"]) == (8.0, 0.8)
    assert (row["forward_kernel_time_ms_median"], row["backward_kernel_time_ms_median"]) == (
        3.0,
        5.0,
    )
    assert table(results_of(on_gpu), "bound")["kernels"].item() == "8.000"
    both = results_of(with_samples(on_gpu, *watched([4.0] * 6)))
    assert table(both, "bound")["kernels"].item() == "4.000 [4.000, 4.000]"
    for seed, samples in enumerate((profiled, [*trace, busy]), 1):
        found = results_of(replace(outcome(seed=seed), samples=tuple(samples))).cells
        assert found.loc[found["seed"] == seed, "step_kernel_time_ms_median"].isna().item()


def test_that_a_cell_was_measured_more_than_once_is_said(
    results_of: Callable[..., Results],
) -> None:
    """Not of one that was tried again because it had failed."""
    once = results_of(outcome(status=Status.CRASHED), outcome(number=2))
    assert (once.cells["attempts"].item(), once.cells["repetitions"].item()) == (2, 1)
    assert "times measured" not in provenance(once)
    again = results_of(outcome([20.0], number=3))
    assert "the last of up to 2 times measured" in provenance(again)
    assert again.cells["step_ms_median"].item() == 20.0


def test_an_interval_is_wide_or_not_where_there_is_one(results_of: Callable[..., Results]) -> None:
    results = results_of(
        outcome([10.0, 10.4]),
        outcome([10.0, 10.6], seed=1),
        outcome([10.0], seed=2),
        outcome([], seed=3),
    )
    assert results.cells.set_index("seed")["interval_wide"].dropna().to_dict() == {
        0: False,
        1: True,
    }


def test_a_table_has_no_row_of_what_it_says_nothing_of(results_of: Callable[..., Results]) -> None:
    """A cell whose memory alone was measured is none among times; one that failed is, whatever it was for."""
    results = results_of(
        outcome(),
        outcome([], peak_gib=1.0, context_length=64, memory_limit_gib=2.0),
        outcome(status=Status.OOM, seed=1),
    )
    shown_table = table(results, "timings")
    assert sorted(shown_table["total"]) == ["11.00 ± 1.000", "OOM"]
    assert "memory_limit_gib" not in shown_table
    assert sorted(table(results, "memory")["context_length"]) == ["512", "64"]
    for phase in ("total", "forward", "backward", "optimizer step"):
        assert f"{phase} median [95 % interval]" in shown_table


def test_the_seconds_of_an_attempt_are_told_apart(results_of: Callable[..., Results]) -> None:
    """Of one that an older program measured nothing is known."""
    stages = {
        "start": 0.125,
        "build": 0.25,
        "warm-up": 0.5,
        "timing synced": 0.75,
        "memory": 0.125,
        "kernels": 0.5,
        "process": 0.25,
    }
    made = outcome()
    results = results_of(replace(made, facts={**made.facts, "stage_s": stages}), outcome(seed=1))
    spent = table(results, "time-spent")
    assert list(spent.iloc[0])[-6:] == ["2.50", "0.25", "0.38", "0.50", "0.75", "0.62"]
    assert len(spent) == 1
    columns = [f"time_{what}_s" for what in TIME_SPENT]
    cells = results.cells.set_index("seed")
    assert cells.loc[0, columns].sum() == 2.5
    assert cells.loc[1, columns].isna().all()


def test_pipelined_step_times_take_precedence_over_synced_step_times(
    results_of: Callable[..., Results],
) -> None:
    cells = (
        results_of(outcome([10.0], pipelined=[8.0]), outcome([20.0], seed=1))
        .cells.set_index("seed")
        .sort_index()
    )
    assert list(cells["step_ms_median"]) == [8.0, 20.0]
    assert list(cells["step_synced_ms_median"]) == [10.0, 20.0]


def test_peaks_are_of_the_step_and_of_each_phase(results_of: Callable[..., Results]) -> None:
    row = results_of(outcome(peak_gib=4.0)).cells.iloc[0]
    assert row["peak_allocated_bytes"] == 4 * GIB
    assert row["forward_peak_allocated_bytes"] == pytest.approx(3.6 * GIB)
    assert row["first_peak_reserved_bytes"] == pytest.approx(2.2 * GIB)


def test_a_later_crash_or_loss_does_not_replace_the_result_of_a_cell(
    results_of: Callable[..., Results],
) -> None:
    results = results_of(
        outcome([10.0]), outcome([12.0], number=2), outcome(status=Status.CRASHED, number=3), outcome(status=Status.LOST, seed=1),
        outcome(status=Status.OOM, seed=2), outcome(status=Status.LOST, number=2, seed=2),
    ).cells.set_index("seed").sort_index()  # fmt: skip
    assert list(results["status"]) == ["ok", "lost", "oom"]
    assert (
        results.loc[0, "attempt"],
        results.loc[0, "attempts"],
        results.loc[0, "step_ms_median"],
    ) == (2, 3, 12.0)


def test_an_oom_is_a_value(results_of: Callable[..., Results]) -> None:
    results = results_of(
        outcome(context_length=128, peak_gib=20.0, size="xl"),
        outcome(context_length=256, status=Status.OOM, size="xl"),
        outcome(context_length=128, peak_gib=2.0, size="small"),
    )
    assert list(table(results, "timings")["total"]) == ["11.00 ± 1.000", "11.00 ± 1.000", "OOM"]
    plan = table(results, "oom-map").set_index("size")
    assert plan.loc["xl", "context 128"] == "22.0 GiB: 24 GB (RTX 4090, 3090)"
    assert plan.loc["xl", "context 256"] == "OOM (asked 2.00 GiB more)"
    assert plan.loc["small", "context 256"] == "–"
    assert list(table(results, "failures")["why"]) == ["out of memory: asked for 2 GiB"]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("it ran out\nof this", "it ran out"),
        ("x" * 160, "x" * 160),
        ("x" * 161, "x" * 159 + "…"),
        (None, "–"),
    ],
)
def test_a_reason_that_is_cut_ends_in_an_ellipsis(message: str | None, shown: str) -> None:
    assert str(why_failed({"message": message})) == shown


def test_a_cell_that_failed_after_some_samples_has_no_result(
    results_of: Callable[..., Results],
) -> None:
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


def test_times_of_cpu_bound_steps_are_marked(results_of: Callable[..., Results]) -> None:
    results = results_of(
        outcome(pipelined=[10.0], lead_ms=0.1, context_length=64),
        outcome(pipelined=[29.0], lead_ms=9.0, context_length=128),
        outcome(pipelined=[15.0], context_length=256),  # without a lead nothing is known
        outcome(status=Status.OOM, context_length=512),
    )
    cells = results.cells.set_index("context_length")
    assert cells["cpu_bound"].dropna().to_dict() == {64: True, 128: False}
    (page,) = lay_out(results, ["bound"])
    column = page.header.index("pipelined")
    marks = {row[column].split()[0]: row[column][-1] for row in texts_of(page)}
    assert (marks["10.00"], marks["29.00"], marks["15.00"]) == ("†", ")", ")")
    assert "1 of 4 cells are CPU-bound (†)" in provenance(results)
    read = pd.read_csv(StringIO(to_csv(page)))
    assert sorted(read["cpu_bound"].dropna()) == [False, True]
    assert "†" not in to_csv(page)


def leading(leads: Mapping[str, float]) -> list[Sample]:
    """How far the host is ahead at the end of each phase, in ms."""
    return [Sample("timing", "lead", "ms", ms, "pipelined", phase) for phase, ms in leads.items()]


@pytest.mark.parametrize(
    ("forward", "backward", "optimizer", "waits"),
    [
        (0.1, 0.1, 20.0, 0.75),
        (9.0, 9.0, 0.1, 0.25),
        (2.6, 0.1, 2.6, 0.5),
        (9.0, 9.0, 9.0, 0.0),
        (0.1, 0.1, 0.1, 1.0),
    ],
)
def test_a_step_waits_for_its_host_in_its_phases(
    results_of: Callable[..., Results],
    forward: float,
    backward: float,
    optimizer: float,
    waits: float,
) -> None:
    """However far the host is ahead at the end of another one. The phases take 25, 50 and 25 ms, the step 100."""
    leads = {
        "forward": forward,
        "backward": backward,
        "optimizer": optimizer,
        "step": max(forward, backward, optimizer),
    }
    cell = results_of(with_samples(outcome(pipelined=[100.0]), *leading(leads))).cells.iloc[0]
    assert (cell["cpu_bound_share"], cell["cpu_bound"]) == (waits, waits > 0.1)
    assert (cell["forward_lead_ms"], cell["host_lead_ms"]) == (forward, leads["step"])


@pytest.mark.parametrize(("lead", "waits"), [(14.0, True), (16.0, False)])
def test_a_long_phase_with_a_host_lead_of_16_ms_is_not_cpu_bound(
    results_of: Callable[..., Results], lead: float, waits: bool
) -> None:
    """Since full queues of small kernels let the host be no further ahead of it."""
    cell = results_of(outcome(pipelined=[400.0], lead_ms=lead)).cells.iloc[0]
    assert (cell["backward_pipelined_ms_median"], cell["cpu_bound"]) == (200.0, waits)


def test_on_a_cpu_nobody_waits_for_a_host(results_of: Callable[..., Results]) -> None:
    assert {"cpu_bound_share", "cpu_bound"}.isdisjoint(results_of(outcome([10.0])).cells)


def test_a_phase_that_hardly_counts_does_not_make_a_step_wait(
    results_of: Callable[..., Results],
) -> None:
    samples = [
        Sample("timing", metric, "ms", ms, "pipelined", phase)
        for metric, phase, ms in (
            ("lead", "loss", 0.0),
            ("duration", "loss", 9.0),
            ("lead", "rest", 30.0),
            ("duration", "rest", 91.0),
        )
    ]
    measured = outcome()
    cell = results_of(with_samples(measured, *samples)).cells.iloc[0]
    assert (cell["cpu_bound_share"], cell["cpu_bound"]) == (pytest.approx(0.09), False)


def test_comparisons_have_their_baseline_first(results_of: Callable[..., Results]) -> None:
    results = results_of(
        outcome([40.0], precision="bf16"), outcome([100.0], precision="fp32"), outcome([50.0], precision="tf32"),
        outcome([70.0], precision="fp32", seed=1), outcome(status=Status.OOM, precision="bf16", seed=1),
    )  # fmt: skip
    rows = table(results, "precision").set_index("seed")
    assert [name for name in rows if name.endswith("ms")] == ["fp32 ms", "tf32 ms", "bf16 ms"]
    assert list(rows.loc["0", ["tf32 speed-up", "bf16 speed-up"]]) == ["2.00×", "2.50×"]
    assert list(rows.loc["1", ["tf32 speed-up", "bf16 ms", "bf16 speed-up"]]) == ["–", "OOM", "OOM"]


def test_the_speed_up_of_kernels_is_shown_beside_that_of_the_step(
    results_of: Callable[..., Results],
) -> None:
    fp32 = with_samples(outcome([100.0]), *watched([30.0] * 6))
    results = results_of(
        fp32,
        with_samples(outcome([110.0], precision="bf16"), *watched([10.0] * 6)),
        outcome([50.0], precision="tf32"),
        with_samples(
            outcome([90.0], compile="blocks"), *watched([29.0, 29.0, 29.0, 31.0, 31.0, 31.0])
        ),
    )
    waiting = replace(results, cells=results.cells.assign(cpu_bound=True))
    row = table(waiting, "precision").iloc[0]
    assert (row["bf16 speed-up"], row["bf16 speed-up of kernels"]) == ("0.91×†", "3.00×")
    assert "tf32 speed-up of kernels" not in row
    assert table(waiting, "compile").iloc[0]["blocks speed-up of kernels"] == "1.00×~"


def test_without_kernel_times_no_cell_that_failed_makes_a_column_of_them(
    results_of: Callable[..., Results],
) -> None:
    results = results_of(outcome([100.0]), outcome(status=Status.OOM, precision="bf16"))
    assert [name for name in table(results, "precision") if "kernels" in name] == []


def test_a_time_that_the_host_decides_is_marked_and_a_ratio_of_it(
    results_of: Callable[..., Results],
) -> None:
    measured = results_of(
        outcome([40.0], precision="bf16"), outcome([100.0], precision="fp32"), outcome([50.0], precision="tf32"),
        outcome([1070.0], precision="fp32", seed=1), outcome(status=Status.OOM, precision="bf16", seed=1),
        outcome([107.0], precision="tf32", seed=1),
    )  # fmt: skip
    waits = (
        (measured.cells["step_ms_median"].isin([50.0, 1070.0]))
        .astype("boolean")
        .where(measured.cells["status"] == "ok")
    )
    results = replace(measured, cells=measured.cells.assign(cpu_bound=waits))
    rows = table(results, "precision").set_index("seed")[
        ["fp32 ms", "tf32 ms", "tf32 speed-up", "bf16 ms", "bf16 speed-up"]
    ]
    assert list(rows.loc["0"]) == ["100.0", "50.00†", "2.00×†", "40.00", "2.50×"]
    assert list(rows.loc["1"]) == ["1070.0†", "107.0", "10.00×†", "OOM", "OOM"]
    timings = table(results, "timings").set_index("precision").loc["tf32"].iloc[0]
    assert (timings["forward"], timings["total"], timings["backward / forward"]) == (
        "12.50 ± –†",
        "50.00 ± –†",
        "2.00",
    )
    (page,) = lay_out(results, ["precision"])
    assert "2 of 6 cells are CPU-bound (†)" in page.provenance
    read = pd.read_csv(StringIO(to_csv(page)))
    assert read["fp32_cpu_bound"].tolist() == [False, True]
    assert read["tf32_cpu_bound"].tolist() == [True, True]  # the ratio, or its time too
    assert read["bf16_status"].tolist() == ["ok", "oom"]
    assert read["fp32_ms"].tolist() == [100.0, 1070.0]
    assert "†" not in to_csv(page)


def test_a_speed_up_within_noise_is_marked(results_of: Callable[..., Results]) -> None:
    """The mark stands next to that of a CPU-bound step; the baseline itself has none."""
    steps = {"fp32": (9.0, 10.0, 11.0), "tf32": (8.0, 9.5, 10.5), "bf16": (5.0, 5.1, 5.2)}
    results = results_of(*(outcome(ms, precision=precision) for precision, ms in steps.items()))
    (page,) = lay_out(results, ["precision"])
    titles = ("tf32 speed-up", "bf16 speed-up")
    assert [texts_of(page)[0][page.header.index(title)] for title in titles] == ["1.05×~", "1.96×"]
    assert "~: within noise" in view_of(page).caption
    without_bf16 = replace(results, cells=results.cells[results.cells["precision"] != "bf16"])
    (only,) = [one for one in findings(without_bf16) if one.label == "tf32 over fp32"]
    assert (only.conclusion, only.is_clear) == ("tf32 makes no clear difference.", False)
    bound = replace(results, cells=results.cells.assign(cpu_bound=True))
    (page,) = lay_out(bound, ["precision"])
    assert [texts_of(page)[0][page.header.index(title)] for title in titles] == [
        "1.05×~†",
        "1.96×†",
    ]
    (read,) = pd.read_csv(StringIO(to_csv(page))).to_dict("records")
    assert read["tf32_speed_up"] == pytest.approx(10.0 / 9.5, rel=1e-5)
    assert read["tf32_speed_up_low"] < 1 < read["tf32_speed_up_high"]  # within noise
    assert 1 < read["bf16_speed_up_low"] < read["bf16_speed_up"] < read["bf16_speed_up_high"]
    assert read["bf16_cpu_bound"]
    ladder = results_of(
        outcome(steps["fp32"], attention="naive"), outcome(steps["tf32"], attention="flash")
    )
    shown = table(ladder, "attention").set_index("attention")
    assert shown.loc["flash", "over naive"] == "1.05×~"
    assert set(shown.loc["naive", "over naive"]) == {"1.00×"}  # the baseline has no mark


def outcome_of(
    task: str, facts: dict[str, Any], samples: Iterable[Sample], **params: Any
) -> Outcome:
    attempt = Attempt(make_cell(task, {"device": "cpu", **params}), 1, "/nowhere", Settings())
    return Outcome(
        attempt, Status.OK, "", "", {}, {"gpu": "NVIDIA H200", **facts}, tuple(samples), 1.7e9, 2.5
    )


def steps(ms: float, mode: str = "synced") -> list[Sample]:
    return [Sample("timing", "duration", "ms", ms, mode, phase, 0) for phase in ("forward", "step")]


def test_utilisation_is_of_the_peak_of_that_precision_and_of_the_runs_ceiling(
    results_of: Callable[..., Results],
) -> None:
    flops = {"flops": {"forward": 10**12}}
    results = (
        results_of(
            *(
                outcome_of("matmul", flops, steps(ms), precision=p)
                for p, ms in (("fp32", 20.0), ("bf16", 2.0))
            ),
            *(
                outcome_of("train_step", flops, steps(40.0), size="tiny", precision=p)
                for p in ("fp32", "tf32", "bf16", "bf16_pure")
            ),
            outcome_of(
                "train_step",
                {**flops, "gpu": "A GPU of next year"},
                steps(40.0),
                size="tiny",
                seed=1,
            ),
        )
        .cells.set_index(["task", "seed", "precision"])
        .sort_index()
    )
    reached = 1e12 / 40e-3 / 1e12  # TFLOP/s
    row = results.loc["train_step", 0]
    assert row["mfu"].to_dict() == pytest.approx(
        {
            "fp32": reached / 67.0,
            "tf32": reached / 494.5,
            "bf16": reached / 989.0,
            "bf16_pure": reached / 989.0,
        }
    )
    assert row.loc["fp32", "ceiling_share"] == pytest.approx(0.5)
    assert (
        row.loc["bf16", "ceiling_share"]
        == row.loc["bf16_pure", "ceiling_share"]
        == pytest.approx(0.05)
    )
    assert pd.isna(row.loc["tf32", "ceiling_share"])
    unknown = results.loc["train_step", 1].iloc[0]
    assert pd.isna(unknown["mfu"])
    assert pd.isna(unknown["ceiling_share"])


def test_a_ceiling_is_of_the_same_run_where_several_are_read_together(tmp_path: Path) -> None:
    flops = {"flops": {"forward": 10**12}}
    outcomes = {
        "one": outcome_of("matmul", flops, steps(20.0)),
        "other": outcome_of("train_step", flops, steps(40.0), size="tiny"),
    }
    for name, measured in outcomes.items():
        with open_for_writing(Run(tmp_path / name)) as writer:
            writer.write_manifest({"name": name})
            writer.append(measured, "abc")
    cells = orchestrator.load(tmp_path / "one", tmp_path / "other").cells.set_index("task")
    assert cells.loc["matmul", "ceiling_share"] == 1.0
    assert pd.isna(cells.loc["train_step", "ceiling_share"])


def test_compilation_breaks_even_after_its_cost_over_its_gain(
    results_of: Callable[..., Results],
) -> None:
    facts = {"compile_graphs": 1, "compile_graph_breaks": 0, "compile_cache_seen": "cold"}
    graphs = [
        Sample("timing", "duration", "ms", 1000.0, "compile", phase, n)
        for n in (1, 2)
        for phase in ("forward", "step")
    ]
    results = results_of(
        outcome_of("train_step", {}, steps(100.0), size="tiny"),
        outcome_of("train_step", facts, [*steps(60.0), *steps(8060.0, "compile")], size="tiny", compile="blocks"),
        outcome_of(
            "train_step", facts, [*steps(50.0), *steps(8050.0, "compile"), *graphs],
            size="tiny", compile="blocks", compile_mode="reduce-overhead",
        ),
        outcome_of("train_step", facts, [*steps(101.0), *steps(9000.0, "compile")], size="tiny", compile="model"),
    )  # fmt: skip
    rows = table(results, "compile").set_index("compile_mode")
    assert list(
        rows.loc["default", ["eager ms", "blocks breaks even after", "model breaks even after"]]
    ) == [
        "100.0",
        "200",
        "never",
    ]
    assert (
        rows.loc["reduce-overhead", "blocks breaks even after"] == "198"
    )  # (8050 + 2 × 1000 - 3 × 50) / 50
    assert rows.loc["default", "blocks until ready s"] == "8.1"
    assert rows.loc["reduce-overhead", "blocks until ready s"] == "10.1"
    assert rows.loc["default", "model until ready s"] == "9.0"


def test_a_warm_cache_says_nothing_of_when_compiling_pays(
    results_of: Callable[..., Results],
) -> None:
    facts = {"compile_graphs": 1, "compile_cache_seen": "warm"}
    results = results_of(
        outcome_of("train_step", {}, steps(100.0), size="tiny"),
        outcome_of(
            "train_step",
            facts,
            [*steps(60.0), *steps(800.0, "compile")],
            size="tiny",
            compile="blocks",
        ),
    )
    rows = table(results, "compile")
    assert list(rows["blocks cache"]) == ["warm"]
    assert "blocks breaks even after" not in rows


def test_without_an_eager_cell_no_speed_up_of_compiling_is_shown(
    results_of: Callable[..., Results],
) -> None:
    results = results_of(
        outcome([10.0], compile="blocks"),
        outcome([8.0], compile="model"),
        outcome([9.0], compile="model", seed=1),
    )
    assert not [title for title in table(results, "compile") if "speed-up" in title]
    assert "compile-speed-up" not in {plot.name for plot in PLOTS if plot.layout(results)}


def test_of_a_cell_that_is_measured_otherwise_today_the_latest_version_counts(
    results_of: Callable[..., Results],
) -> None:
    """As in a folder that an older program began, of which only a part was measured again."""
    cells = [outcome([ms], context_length=length) for ms, length in ((10.0, 16), (20.0, 32))]
    before = [replace(one.attempt.cell, version=one.attempt.cell.version - 1) for one in cells]
    old = [
        replace(one, attempt=replace(one.attempt, cell=cell))
        for one, cell in zip(cells, before, strict=True)
    ]
    results = results_of(*old, cells[0])
    assert sorted(results.cells["cell"]) == sorted([cells[0].attempt.cell.id, before[1].id])
    assert lay_out(results)


def test_rows_from_before_an_axis_have_its_default(
    results_of: Callable[..., Results], tmp_path: Path
) -> None:
    """They stand beside new ones, and where no run says what the default is they can still be shown."""
    old, new = outcome([20.0], precision="fp32"), outcome([10.0], precision="bf16")
    results_of(old, outcome([15.0], compile="blocks"), new)
    run = Run(tmp_path / "run")
    before = {"attention", "compile_mode", "compile_cache"}

    def without(params: str) -> str:
        return json.dumps(
            {name: value for name, value in json.loads(params).items() if name not in before}
        )

    class OldRun(Run):
        def read(
            self, table: str, columns: list[str] | None = None, categories: bool = False
        ) -> pd.DataFrame:
            frame = super().read(table, columns, categories)
            if table == "attempts":
                fp32 = frame["params"].map(lambda params: json.loads(params)["precision"] == "fp32")
                frame.loc[fp32, "params"] = frame.loc[fp32, "params"].map(without)
            return frame

    assert len(run.read("attempts")) == 3
    with open_for_writing(run) as writer:
        writer.write_manifest(
            {
                "name": "test",
                "defaults": {"train_step": default_values(all_tasks()["train_step"].params)},
            }
        )
    rows = table(load_results(OldRun(run.folder)), "precision")
    assert list(rows["bf16 speed-up"]) == ["2.00×"]
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "test"})
    assert lay_out(load_results(OldRun(run.folder)))


def test_compiled_attention_is_compared_with_eager_at_each_context_length(
    results_of: Callable[..., Results],
) -> None:
    ways = [("eager", "fp32", 10.0), ("model", "fp32", 5.0), ("model", "tf32", 4.0)]
    results = results_of(
        *(outcome_of("attention", {}, steps(ms * n / 256), context_length=n, compile=c, precision=p)
          for c, p, ms in ways for n in (256, 512))
    )  # fmt: skip
    rows = table(results, "attention").set_index(["context_length", "precision", "compile"])
    for precision, compiled, ms in (("fp32", "eager", "20.00"), ("tf32", "model", "8.000")):
        assert rows.loc[("512", precision, compiled), "forward median"].startswith(ms)
    # There is no eager cell in tf32, so that it is compared with fp32.
    gains = {("fp32", "eager"): "1.00×", ("fp32", "model"): "2.00×", ("tf32", "model"): "2.50×"}
    for (precision, compiled), gain in gains.items():
        assert rows.loc[("256", precision, compiled), "over eager"] == gain
    growth = table(results, "scaling")
    assert list(growth["exponent of forward ms"]) == ["–", "1.00"] * 3


def test_compiled_attention_is_compared_with_eager_whatever_its_cache(
    results_of: Callable[..., Results],
) -> None:
    outcomes = [outcome_of("attention", {}, steps(10.0), compile="eager")]
    for cache in ("shared", "cold"):
        compiled = {"compile": "model", "compile_cache": cache}
        outcomes.append(outcome_of("attention", {}, steps(5.0), **compiled))
    rows = table(results_of(*outcomes), "attention")
    assert list(rows["over eager"]) == ["1.00×", "2.00×", "2.00×"]


def test_the_ladder_holds_each_rung_against_the_first(results_of: Callable[..., Results]) -> None:
    def rung(name: str, ms: float, squares: int, seen: str | None, **params: Any) -> Outcome:
        saved = Sample("memory", "saved_squares", "tensors", squares, "steady")
        held = Sample("memory", "held_allocated_bytes", "bytes", squares * GIB, "steady", "forward")
        return outcome_of(
            "attention",
            {"attention_seen": seen},
            [*steps(ms), saved, held],
            attention=name,
            **params,
        )

    results = results_of(
        rung("flash", 2.0, 0, "flash"),
        rung("naive", 20.0, 2, None),
        rung("torch_softmax", 10.0, 1, "unfused"),
    )
    rows = table(results, "attention")
    without_naive = results_of(
        rung("flash", 2.0, 0, "flash", d_head=128), rung("math", 20.0, 1, "none known", d_head=128)
    )
    alone = table(without_naive, "attention").set_index("d_head")
    assert list(alone.loc["128", "over naive"]) == ["–", "–"]
    assert list(rows["attention"]) == ["naive", "torch_softmax", "flash"]
    assert list(rows["over naive"]) == ["1.00×", "2.00×", "10.00×"]
    assert list(rows["squares saved"]) == ["2", "1", "0"]
    assert list(rows["before backward GiB"]) == ["2.00", "1.00", "0.00"]
    assert list(rows["backend seen"]) == ["–", "unfused", "flash"]


def test_findings_have_a_table_with_all_their_digits(results_of: Callable[..., Results]) -> None:
    found = [
        Sample("finding", "sum", "1", 10.000133514404297),
        Sample("finding", "error", "1", 0.000133514404297),
    ]
    results = results_of(
        outcome_of("accumulation", {}, found), outcome_of("accumulation", {}, found, addend="fp16")
    )
    rows = table(results, "accumulation")
    assert list(rows["sum"]) == ["10.000133514"] * 2
    assert list(rows["addend"]) == ["fp32", "fp16"]


def test_tables_show_the_speed_up_of_compiling_and_the_spread_of_warm_up(
    results_of: Callable[..., Results],
) -> None:
    results = results_of(
        outcome([30.0, 30.0]),
        outcome([15.0, 15.0], compile="blocks"),
        outcome([300.0, 30.0], warmup_steps=0),
    )
    assert list(table(results, "compile")["blocks speed-up"]) == ["2.00×"]
    assert list(table(results, "warmup")["0 std/mean"]) == ["115.71%"]


def test_facts_of_adaptive_timing_add_no_columns_to_the_table_of_timings(
    results_of: Callable[..., Results],
) -> None:
    """What is null with one timing and a number with the other tells nothing beyond it."""
    timing_facts = {
        "timing_warmup_steps": 1,
        "timing_stopped_by": "half-width",
        "timing_half_width": 0.004,
    }
    fixed, cold, adaptive = outcome(), outcome(warmup_steps=0), outcome(timing="adaptive")
    results = results_of(fixed, cold, replace(adaptive, facts={**adaptive.facts, **timing_facts}))
    (page,) = lay_out(results, ["timings"])
    assert page.header[:4] == ["size", "context_length", "timing", "warmup_steps"]
    assert "0, 5 warm-up + 10 measured and adaptive steps" in to_markdown(
        view_of(page, max_rows=None, max_columns=None)
    )
    assert {column: list(results.cells[column].dropna()) for column in timing_facts} == {
        name: [fact] for name, fact in timing_facts.items()
    }
    warm_up = table(results, "warmup")
    assert [title for title in warm_up if "std/mean" in title] == ["0 std/mean", "5 std/mean"]
    assert len(warm_up) == 1
    assert "· adaptive steps ·" in provenance(
        replace(results, cells=results.cells[results.cells["timing"] == "adaptive"])
    )


@pytest.mark.parametrize(("asked", "line"), [(1, "1 of 2 cells are from an earlier"), (2, "")])
def test_provenance_counts_the_cells_of_an_earlier_config(
    asked: int, line: str, results_of: Callable[..., Results]
) -> None:
    results = results_of(outcome(), outcome(context_length=16))
    text = provenance(replace(results, manifest={"name": "x", "asked": asked}))
    assert ("from an earlier config or selection" in text) == bool(line)
    assert line in text


def test_caption_says_which_columns_use_medians(results_of: Callable[..., Results]) -> None:
    """A thousand tokens: the mean of 21.5 ms has a slow step in it, the median of 10 has not."""
    (page,) = lay_out(results_of(outcome(step_ms=(10.0, 10.0, 10.0, 56.0))), ["timings"])
    shown = dict(zip(page.header, texts_of(page)[0], strict=True))
    assert (shown["total"].split()[0], shown["tokens/s"]) == ("21.50", "100,000")
    assert "Tokens/s: by the median of the total" in view_of(page).caption


def test_the_growth_exponent_compares_successive_context_lengths(
    results_of: Callable[..., Results],
) -> None:
    results = results_of(
        *(outcome([ms], context_length=n) for n, ms in ((128, 10.0), (256, 20.0), (512, 80.0)))
    )
    assert list(table(results, "scaling")["exponent of step ms"]) == ["–", "1.00", "2.00"]


def test_every_table_carries_its_provenance(results_of: Callable[..., Results]) -> None:
    pages = lay_out(results_of(outcome(), outcome(status=Status.FAILED, seed=1)))
    assert {"timings", "failures"} <= {page.table.name for page in pages}
    for page in pages:
        text = to_markdown(view_of(page, max_rows=None, max_columns=None))
        assert page.table.read in text
        assert (
            "run test · Test GPU · torch 2.13.0 · batch 4 · 5 warm-up + 10 measured steps · 1 of 2 cells with an interval wider than 5 %"
            in text
        )
        assert "commit abc · 2023-11-14" in text
        assert all(len(row) == len(page.header) for row in texts_of(page))


@pytest.mark.parametrize(
    "statuses", [[], [Status.FAILED], [Status.OOM, Status.TIMEOUT], [Status.LOST]]
)
def test_runs_without_a_success_have_a_report(
    results_of: Callable[..., Results], statuses: list[Status]
) -> None:
    results = results_of(
        *(outcome(status=status, seed=seed) for seed, status in enumerate(statuses))
    )
    assert ("failures" in {page.table.name for page in lay_out(results)}) == bool(statuses)


def test_a_table_of_axes_alone_is_left_out(results_of: Callable[..., Results]) -> None:
    """As where only memory was measured."""
    memory = [Sample("memory", "peak_rss_bytes", "bytes", GIB, "steady", "forward")]
    names = {
        page.table.name
        for page in lay_out(results_of(outcome_of("attention", {}, memory, d_head=8)))
    }
    assert "memory" in names
    assert "attention" not in names


def test_unknown_table(results_of: Callable[..., Results]) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'timings'"):
        lay_out(results_of(), ["timing"])
    with pytest.raises(
        ConfigError, match=r"no table 'nope'\. Allowed: timings, warmup, "
    ) as far:  # nowhere near `compile`
        lay_out(results_of(), ["nope"])
    assert "Did you mean" not in str(far.value)


def test_names_of_tables_are_unique() -> None:
    assert len({one.name for one in TABLES}) == len(TABLES)


@pytest.mark.render
@pytest.mark.xdist_group("every kind")
def test_no_table_has_a_name_twice_whatever_varies(results_of_every_kind: Results) -> None:
    """Who reads it by the names of its columns, as pandas does, would else have one for the other."""
    axes = tuple(
        dict.fromkeys(name for task in all_tasks().values() for name in default_values(task.params))
    )
    cells = results_of_every_kind.cells.reindex(
        columns=[*dict.fromkeys([*results_of_every_kind.cells, *axes])]
    )
    first, second = (
        cells.assign(**{axis: _filled(cells[axis], other) for axis in axes})
        for other in (False, True)
    )
    results = replace(
        results_of_every_kind, cells=pd.concat([first, second], ignore_index=True), axes=axes
    )
    headers = {}
    for one in TABLES:
        grid = one.layout(replace(results, cells=one.cells(results.cells)))
        headers[one.name] = [column.full_name for column in grid.columns]
    assert {"optimizer", "attention"} <= set(headers["timings"]) & set(headers["kernel-classes"])
    assert {
        name: twice
        for name, header in headers.items()
        if (twice := {one for one in header if header.count(one) > 1})
    } == {}


def _filled(values: pd.Series[Any], other: bool) -> pd.Series[Any]:
    """A value in each row; `other`: another than without."""
    if pd.api.types.is_bool_dtype(values):
        return values.fillna(False) ^ other
    if pd.api.types.is_numeric_dtype(values):
        return values.fillna(1) + other
    return values.astype("string").fillna("") + ("other" if other else "")


def test_gpus_ascend_and_leave_room_for_the_context() -> None:
    sizes = [gpu.usable_bytes for gpu in known_gpus()]
    assert sizes == sorted(sizes)
    assert smallest_fitting(31.9 * GIB).startswith("40 GB")
    assert smallest_fitting(31.0 * GIB).startswith("32 GB")
    assert smallest_fitting(1e15) == "none known"


@pytest.mark.parametrize(
    ("precision", "card"),
    [
        ("fp32", "T4"),
        ("fp16", "T4"),
        ("tf32", "RTX 4080"),
        ("bf16", "RTX 4080"),
        ("bf16_pure", "RTX 4080"),
    ],
)
def test_the_smallest_gpu_has_the_precision(
    precision: str, card: str, results_of: Callable[..., Results]
) -> None:
    """A T4 has neither tf32 nor bf16. What fits into less memory has a card that has all."""
    assert card in smallest_fitting(13 * GIB, precision)
    assert "RTX 3080" in smallest_fitting(8 * GIB, precision)
    (row,) = table(results_of(outcome(peak_gib=11.8, precision=precision)), "oom-map").to_dict(
        "records"
    )
    assert any(text.startswith("13.0 GiB: ") and card in text for text in row.values())


def test_pandas_reads_what_was_written(tmp_path: Path) -> None:
    failed = outcome(status=Status.OOM, seed=1, memory_limit_gib=32.0)
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "test"})
        for one in (outcome([10.0, 10.0]), failed):
            writer.append(one, "abc")
        store_cells(writer)
    cells = pd.read_parquet(tmp_path / "run" / "cells.parquet")
    assert list(cells.columns[:3]) == ["cell", "task", "device"]
    assert {"size", "context_length", "precision", "compile", "pass", "status"} <= set(
        cells.columns
    )
    kinds = {
        "context_length": "Int64",
        "memory_limit_gib": "Float64",
        "step_ms_median": "Float64",
        "size": "string",
    }
    assert {name: str(cells[name].dtype) for name in kinds} == kinds
    assert cells["step_ms_median"].isna().sum() == 1
