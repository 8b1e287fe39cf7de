"""Each sentence below a question of the page, against the cells that it speaks of."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.text.leads import counts_by_status, headline, lead
from tests.orchestrator.report.text.test_answers import AXES, step

NO_KERNELS = pd.DataFrame(columns=["cell", "attempt", "total_ns", "steps", "kernel_class"])


def results_of(*cells: dict[str, Any], kernels: pd.DataFrame = NO_KERNELS) -> Results:
    rows = [{"cell": f"id{index}", "attempt": 1, **cell} for index, cell in enumerate(cells)]
    frame = pd.DataFrame(rows)
    axes = tuple(axis for axis in AXES if axis in frame)
    return Results(frame, axes, {"name": "mine"}, lambda table: kernels)


def lead_of(section: str, *cells: dict[str, Any]) -> str:
    return lead(section, results_of(*cells))


def test_time_names_the_shortest_and_the_longest_step_and_the_cpu_bound_ones() -> None:
    cells = [step(80.04, cpu_bound=True), step(1140, size="xl"), step(95, context_length=1024)]
    assert lead_of("time", *cells) == (
        "The shortest of 3 steps takes 80.0 ms (small, context 512, fp32, eager, training step),"
        " the longest 1,140 ms (xl, context 512, fp32, eager, training step)."
        " 1 is CPU-bound (hollow points): the GPU waits for the CPU to launch its kernels."
        " Here that takes 80.0 ms, on another machine another time."
    )


def test_time_speaks_of_the_steps_in_the_chart_not_of_another_attention() -> None:
    lengths = (128, 256, 512)
    cells = [step(100, context_length=length, attention="naive") for length in lengths]
    assert "shortest of 3 steps takes 100 ms" in lead_of(
        "time", *cells, step(20, attention="flash")
    )


def test_the_text_on_busy_time_names_both_extremes_and_the_matrix_product_share() -> None:
    kernels = pd.DataFrame(
        {"cell": ["id0", "id0", "id1"], "attempt": 1, "total_ns": [6e6, 4e6, 5e6],
         "steps": 1, "kernel_class": ["GEMM", "copy", "GEMM"]}
    )  # fmt: skip
    cells = (step(80, busy_timed=0.25), step(100, precision="bf16", busy_timed=0.995))
    assert lead("where", results_of(*cells, kernels=kernels)) == (
        "GPU kernels run for 25% of the step in small, context 512, fp32, eager, training step,"
        " and for 100% in small, context 512, bf16, eager, training step."
        " The rest is waiting for the CPU."
        " Matrix products are 100% in bf16, 60% in fp32 of the profiled kernel time."
    )
    on_cpu = [{**cell, "device": "cpu"} for cell in cells]
    assert "of the profiled time of operators" in lead(
        "where", results_of(*on_cpu, kernels=kernels)
    )


def test_compiling_counts_faster_slower_and_equal_steps() -> None:
    pairs = {128: (100.0, 50.0), 256: (100.0, 150.0), 512: (100.0, 100.5)}
    cells = []
    for length, (eager, compiled) in pairs.items():
        cells.append(step(eager, context_length=length))
        cells.append(
            step(compiled, context_length=length, compile="blocks", compile_cost_ms=5000.0)
        )
    assert lead_of("compile", *cells) == (
        "3 compiled steps: 1 faster than the same eager one, 1 slower, 1 without a clear difference."
        " Compiling takes 5.00 s once (median of 3)."
    )


def test_memory_counts_where_it_ran_out_and_how_well_it_was_predicted() -> None:
    peaks = {"peak_allocated_bytes": 10 * GIB, "predicted_peak_allocated_bytes": 10.1 * GIB}
    cells = [step(10, **peaks, phase=""), step(10, context_length=128, **peaks, phase="")]
    out = {**step(float("nan")), "status": "oom"}
    cells += [
        {**out, "phase": "forward"},
        {**out, "phase": "forward"},
        {**out, "phase": "backward"},
    ]
    assert lead_of("memory", *cells) == (
        "3 cells ran out of memory: 2 in forward, 1 in backward."
        " The predicted peak is within 1.0% of the measured one in 95% of 2 eager cells."
    )


def test_attention_names_the_fastest_and_the_smallest_at_the_longest_context() -> None:
    def cell(name: str, length: int, ms: float, gib: float) -> dict[str, Any]:
        own = {"attention": name, "peak_allocated_bytes": gib * GIB, "d_head": 64}
        return {**step(ms, context_length=length, **own), "task": "attention"}

    cells = [
        *(cell("naive", length, 20.0 * length, 8.0) for length in (512, 1024)),
        *(cell("flash", length, 0.004 * length, 2.0) for length in (512, 1024)),
        *(cell("math", length, 0.02 * length, 1.5) for length in (512, 1024)),
    ]
    assert lead_of("attention", *cells) == (
        "At context 1,024, flash attention takes the least time (4.10 ms) and math the least memory"
        " (1.50 GiB)."
    )
    assert lead_of("attention", *cells[:2]) == ""


def test_failures_are_counted_by_status_if_something_was_measured() -> None:
    failed = [{**step(float("nan")), "status": status} for status in ("oom", "oom", "crashed")]
    assert lead_of("failures", *failed) == ""  # the table of reasons is open then
    assert lead_of("failures", step(10), *failed) == (
        "3 cells ended without a result: 2 out of memory, 1 failed."
    )


def test_trust_counts_each_reason_for_doubt() -> None:
    cells = [
        step(10, cpu_bound=True, concurrent_attempts=2.0, interval_wide=True, power_capped_ns=0),
        step(10, cpu_bound=False, concurrent_attempts=0.0, interval_wide=False, power_capped_ns=5),
        step(10, cpu_bound=None, concurrent_attempts=0.0, interval_wide=False, power_capped_ns=0),
    ]
    assert lead_of("trust", *cells) == (
        "3 steps were timed."
        " 1 GPU-bound: another machine with this GPU agrees."
        " 1 CPU-bound: their times hold for this CPU only."
        " 1 with an interval wider than 5% of the median."
        " 1 measured while the power limit lowered the clock."
        " 1 CPU-bound and measured while other cells ran."
    )


@pytest.mark.parametrize("section", ["time", "where", "compile", "memory", "attention", "trust"])
def test_a_section_without_data_says_nothing(section: str) -> None:
    failed = {**step(float("nan")), "status": "failed", "phase": "forward"}
    assert lead_of(section, failed) == ""
    assert lead(section, Results(pd.DataFrame(), (), {})) == ""


def test_the_headline_says_what_was_measured_on_what() -> None:
    peak = {"peak_allocated_bytes": GIB, "gpu": "NVIDIA H200"}
    cells = (step(10, **peak), {**step(float("nan"), **peak), "status": "oom"})
    training = "Training Transformers on one NVIDIA H200: time, memory, limits"
    assert headline(results_of(*cells)) == training
    on_a_cpu = step(10, device="cpu", task="accumulation")
    assert headline(results_of({**on_a_cpu, "step_ms_median": None})) == "Accumulation on a CPU"
    own = step(1, model="my_package.gpt:GPT", device="cpu")
    assert headline(results_of(own)) == "Training my_package.gpt:GPT on a CPU: time"
    two = headline(results_of(step(1, gpu="A100"), step(1, gpu="H200")))
    assert two == "Training Transformers on 2 kinds of GPU: time"
    assert headline(Results(pd.DataFrame(), (), {"name": "mine"})) == (
        "mine: nothing is measured yet"
    )


def test_statuses_are_counted_and_only_failures_are_bad() -> None:
    statuses = ["ok"] * 1200 + ["oom", "oom_inferred", "skipped", "crashed"]
    cells = pd.DataFrame({"status": statuses})
    assert counts_by_status(Results(cells, (), {}), pending=7) == [
        ("1,200 measured", "ok"), ("2 out of memory", "bad"), ("1 failed", "bad"),
        ("1 impossible", "quiet"), ("7 not measured", "quiet"),
    ]  # fmt: skip
