"""Each sentence of the answers, against the cells that it speaks of."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis.results import Results
from orchestrator.cli.main import main
from orchestrator.common.text import counted
from orchestrator.common.units import GIB
from orchestrator.planning.invocation import QUALITY_FLAGS
from orchestrator.report.findings.finding import Finding
from orchestrator.report.findings.registry import findings, first_screen
from orchestrator.report.formats.files import findings_to_markdown
from orchestrator.report.text.memory_failures import memory_failures
from orchestrator.report.text.numbers import interval, number, percent, ratio

AXES = (
    "device", "size", "context_length", "precision", "compile", "attention", "pass",
    "memory_limit_gib", "d_head", "run",
    "checkpointing", "warmup_steps", "model", "model_args.experts", "model_args.hidden",
    "model_args.layers",
)  # fmt: skip


def step(ms: float, spread: float = 0.01, **values: Any) -> dict[str, Any]:
    """Return a measured training step whose interval is `spread` to both sides."""
    return {
        "task": "train_step", "device": "cuda", "size": "small", "context_length": 512,
        "precision": "fp32", "compile": "eager", "pass": "train_step", "status": "ok",
        "cpu_bound": False, "step_ms_median": ms, "step_ms_ci_low": ms * (1 - spread),
        "step_ms_ci_high": ms * (1 + spread), **values,
    }  # fmt: skip


def results_of(*cells: dict[str, Any]) -> Results:
    rows = [{"cell": f"id{index}", "attempt": 1, **cell} for index, cell in enumerate(cells)]
    frame = pd.DataFrame(rows)
    axes = tuple(axis for axis in AXES if axis in frame)
    return Results(frame, axes, {"name": "mine"})


def found(*cells: dict[str, Any]) -> list[Finding]:
    return findings(results_of(*cells))


def answer(label: str, *cells: dict[str, Any]) -> Finding:
    """Return the only finding whose label has this text."""
    (only,) = [one for one in found(*cells) if label in one.label]
    return only


@pytest.mark.parametrize(
    ("value", "text"),
    [(78.71, "78.7"), (574.6, "575"), (2279.2, "2,279"), (0.1573, "0.157"), (9.996, "10.0"),
     (99.96, "100"), (0, "0"), (None, "–"), (float("nan"), "–"), (-3.14159, "-3.14")],
)  # fmt: skip
def test_a_number_has_three_digits(value: Any, text: str) -> None:
    assert number(value) == text


def test_ratios_intervals_shares_and_counts_as_texts() -> None:
    assert (ratio(3.958), ratio(35.97), ratio(None)) == ("3.96×", "36.0×", "–")
    assert (interval(0.674, 0.85), percent(0.254)) == ("[0.67, 0.85]", "25%")
    assert (counted(1, "cell"), counted(1333, "cell")) == ("1 cell", "1,333 cells")


def test_a_gain_and_a_loss_of_a_narrow_precision_are_two_answers() -> None:
    cells = [
        step(80, size="small", step_kernel_time_ms_median=60),
        step(100, size="small", precision="bf16", cpu_bound=True, step_kernel_time_ms_median=25),
        step(2000, size="xl"),
        step(500, size="xl", precision="bf16"),
        step(1500, size="xl", compile="blocks"),
        step(250, size="xl", compile="blocks", precision="bf16"),
    ]
    gain, loss = [one for one in found(*cells) if "bf16" in one.label]
    assert (gain.number, gain.interval) == ("4.00×", "[3.92, 4.08]")
    assert gain.conclusion == "bf16 makes 1 of 2 training steps faster, 1 slower."
    assert gain.detail.startswith(
        "A training step of xl at context 512 takes 500 ms in bf16 and 2,000 ms in fp32."
    )
    assert "Compiled: 250 ms in bf16 and 1,500 ms in fp32 (6.00×)." in gain.detail
    assert not gain.is_cpu_bound
    assert (loss.number, loss.conclusion) == (
        "0.80×",
        "bf16 is slower for small, context 512, bf16, eager, training step.",
    )
    assert (
        "GPU kernels run for 25% of the step and the CPU limits it: a faster GPU would not help."
        " The kernels alone are 2.40× as fast." in loss.detail
    )
    assert loss.is_cpu_bound


def test_the_largest_gain_is_of_a_gpu_bound_pair_if_there_is_one() -> None:
    cells = [
        step(100),
        step(10, precision="bf16", cpu_bound=True),
        step(300, context_length=1024),
        step(100, context_length=1024, precision="bf16"),
    ]
    assert answer("bf16 over", *cells).number == "3.00×"
    bound = [{**cell, "cpu_bound": True} for cell in cells]
    only = answer("bf16 over", *bound)
    assert (only.number, only.is_cpu_bound, only.marked_number) == ("10.0×", True, "10.0×†")


def test_an_interval_that_includes_1_is_no_clear_difference() -> None:
    only = answer("bf16 over", step(100, 0.1), step(95, 0.1, precision="bf16"))
    assert only.conclusion == "bf16 makes no clear difference."
    assert (only.marked_number, only.gain) == ("1.05×~", 0.0)
    compiled = answer("compiled", step(100, 0.1), step(95, 0.1, compile="blocks"))
    assert compiled.conclusion == "Compiling makes no clear difference."
    assert (compiled.marked_number, compiled.gain) == ("1.05×~", 0.0)


def test_few_steps_have_no_interval_at_95_percent_and_so_no_clear_difference() -> None:
    few = {"step_ms_coverage": 0.5}
    only = answer("bf16 over", step(100, **few), step(50, precision="bf16", **few))
    assert only.conclusion == "bf16 makes no clear difference."
    assert (only.marked_number, only.interval) == ("2.00×~", "[1.96, 2.04] (50%)")
    longest = answer("longest step", step(100, **few), step(50, context_length=64, **few))
    assert longest.interval == "[99.0, 101] ms (50%)"


def test_compiling_is_a_median_of_gpu_bound_pairs_by_precision() -> None:
    cells = []
    for length, eager in ((128, 100), (256, 200), (512, 300)):
        for precision, gain in (("fp32", 1.1), ("bf16", 2 + length / 512)):
            values = {"context_length": length, "precision": precision}
            cells += [step(eager, **values), step(eager / gain, compile="blocks", **values)]
    only = answer("compiled", *cells)
    assert (only.number, only.interval) == ("1.68×", "1.10 to 3.00")
    assert only.conclusion == "Compiling makes all 6 steps faster."
    in_each = "of the same 3 in each precision: fp32 1.10×, bf16 2.50×"
    assert only.detail == f"Median of 6 GPU-bound pairs; {in_each}."
    slow = {"context_length": 64, "precision": "bf16"}
    cells += [step(60, cpu_bound=True, **slow), step(40, compile="blocks", **slow)]
    # Measured in one precision only: it is not compared with other precisions.
    with_other = answer("compiled", *cells).detail
    assert with_other == f"Median of 6 GPU-bound pairs; {in_each}; 1 CPU-bound pair 1.50×."
    # A compiled step that the GPU limits makes no GPU-bound pair with an eager one of the CPU.
    only_slow = answer("compiled", *cells[-2:], *(dict(one, size="xl") for one in cells[-2:]))
    assert only_slow.detail == "Median of 2 pairs."


@pytest.mark.parametrize(("cpu_bound", "is_marked"), [(True, True), (False, False), (None, False)])
def test_only_cpu_bound_pairs_mark_the_gain_of_compiling(
    cpu_bound: bool | None, is_marked: bool
) -> None:
    """A run on a CPU has no GPU that waits."""
    device = "cpu" if cpu_bound is None else "cuda"
    values = {"device": device, "cpu_bound": cpu_bound}
    only = answer("compiled", step(60, **values), step(40, compile="blocks", **values))
    assert only.is_cpu_bound is is_marked


def test_not_every_precision_gains_by_compiling() -> None:
    cells = [step(100), step(125, compile="blocks")]
    cells += [step(100, precision="bf16"), step(50, precision="bf16", compile="blocks")]
    assert answer("compiled", *cells).conclusion == "Compiling makes 1 of 2 steps faster, 1 slower."


def test_a_slower_compiled_step_is_slower() -> None:
    only = answer("compiled", step(100), step(200, compile="blocks"))
    assert (only.number, only.conclusion) == ("0.50×", "Compiling makes a step slower.")


def waiting(*waits: tuple[float | None, ...], **values: Any) -> list[Finding]:
    """Return the findings on a late rank, by the waits in ms of each cell's ranks in a step of 100."""
    two = {"gpus": len(waits[0]), "parallel": "ddp", "overlap_step_ms": 100.0, **values}
    results = results_of(*(step(90.0, **two) for _ in waits))
    rows = [
        {"cell": f"id{cell}", "attempt": 1, "rank": rank, "wait_ms": ms}
        for cell, own in enumerate(waits)
        for rank, ms in enumerate(own)
    ]
    results = replace(results, read_table=lambda name: pd.DataFrame(rows))
    return [one for one in findings(results) if "is late" in one.label]


def test_a_rank_that_the_others_wait_for_is_named_with_how_long() -> None:
    [only] = waiting((8.0, 1.0), (25.0, 0.5), (2.0, 2.1))
    assert (only.label, only.number, only.interval) == (
        "rank 1 is late",
        "24.5 ms",
        "24% of a step",
    )
    assert only.conclusion == (
        "The other ranks wait for rank 1: 24.5 ms of a step of 100 ms under the profiler."
    )
    assert only.detail == "It is the one that comes last in 2 of 3 cells."
    assert only.basis == [("id1",)]
    [of_four] = waiting((9.0, 10.0, 0.0, 12.0))
    assert (of_four.label, of_four.number) == ("rank 2 is late", "9.00 ms")


@pytest.mark.parametrize(
    "waits",
    [
        [(2.0, 0.0)],  # less than steps differ by
        [(20.0, 10.0)],  # each waits for the other
        [(20.0, 0.0), (0.0, 20.0)],  # not always the same one
        [(20.0, 0.0, 0.0, 20.0)],  # two are late
        [(20.0, None)],  # a rank that was not measured
        [(None, None)],
    ],
)
def test_no_rank_is_late_if_the_data_do_not_say_so(waits: list[tuple[float | None, ...]]) -> None:
    assert waiting(*waits) == []


def test_an_older_run_does_not_know_how_long_ranks_waited() -> None:
    results = results_of(step(90.0, gpus=2, parallel="ddp", overlap_step_ms=100.0))
    rows = pd.DataFrame([{"cell": "id0", "attempt": 1, "rank": rank} for rank in range(2)])
    found = findings(replace(results, read_table=lambda name: rows))
    assert not [one for one in found if "late" in one.sentence]


def test_a_bus_bandwidth_is_compared_with_the_peak_of_the_link() -> None:
    own = {"task": "collectives", "collective": "all_reduce", "size_mb": 1000.0, "call_ms": 3.051}
    own |= {"busbw_gb_s": 327.7, "gpus": 2}
    plain = answer("all-reduce", step(61.0, **own))
    assert plain.detail == "One call takes 3.05 ms."
    link = {"link": "NVLink 4 × 18", "link_peak_gb_s": 450.0, "of_link": 327.7 / 450}
    assert answer("all-reduce", step(61.0, **own, **link)).detail == (
        "That is 73% of the 450 GB/s of the link (NVLink 4 × 18), one way. One call takes 3.05 ms."
    )


@pytest.mark.parametrize(
    ("dtype", "gpus", "formula"),
    [("torch.float32", "3.50", "tokens × W / 2C"), ("torch.bfloat16", "6.00", "tokens × W / C")],
)
def test_the_exchange_of_gradients_is_hidden_up_to_some_gpus(
    dtype: str, gpus: str, formula: str
) -> None:
    """The number is that of problem data_parallel_calcs: 1 + B·W/C for gradients of two bytes."""
    link = {"task": "collectives", "collective": "all_reduce", "size_mb": 100.0, "call_ms": 0.4}
    link |= {"busbw_gb_s": 250.0, "gpus": 2, "gpu": "H100"}
    one = {"tokens": 8000.0, "achieved_tflops": 400.0, "parameter_dtype": dtype, "gpus": 1}
    one |= {"gpu": "H100"}
    two = {**one, "gpus": 2, "achieved_tflops": 700.0}
    other = {**one, "gpu": "B200", "achieved_tflops": 900.0}
    cells = [step(7.0, **link), step(90.0, **one), step(50.0, **two), step(40.0, **other)]
    found_one = answer("hidden exchange", *cells)
    assert found_one.number == f"{gpus} GPUs"
    assert found_one.conclusion.startswith(
        "With 8,000 tokens a micro-batch, a backward pass can hide"
    )
    assert f"1 + {formula}, with" in found_one.detail
    assert "W = 250 GB/s of an all-reduce and C = 400 TFLOP/s" in found_one.detail
    assert found_one.basis == [("id1",), ("id0",)]


def test_only_the_last_micro_batch_of_a_whole_step_hides_an_exchange() -> None:
    link = {"task": "collectives", "collective": "all_reduce", "size_mb": 100.0, "call_ms": 0.4}
    link |= {"busbw_gb_s": 250.0, "gpus": 2, "gpu": "H100"}
    one = {"tokens": 8000.0, "achieved_tflops": 400.0, "gpus": 1, "gpu": "H100"}
    one |= {"parameter_dtype": "torch.float32", "gradient_accumulation": 4}
    faster = {**one, "achieved_tflops": 600.0, "pass": "forward"}
    found = answer("hidden exchange", step(7.0, **link), step(90.0, **one), step(9.0, **faster))
    assert (found.number, found.interval) == ("1.62 GPUs", "2,000 tokens")


@pytest.mark.parametrize("missing", ["device", "size_mb", "achieved_tflops", "gpu"])
def test_nothing_is_said_of_hiding_without_both_rates(missing: str) -> None:
    link = {"task": "collectives", "collective": "all_reduce", "size_mb": 100.0, "call_ms": 0.4}
    link |= {"busbw_gb_s": 250.0, "gpus": 2}
    one = {"tokens": 8000.0, "achieved_tflops": 400.0, "gpus": 1}
    change: dict[str, dict[str, Any]] = {
        "device": {"device": "cpu", "processes": 2},
        "size_mb": {"size_mb": 1.0},  # the cost of a call is no bandwidth
        "achieved_tflops": {},
        "gpu": {"gpu": "B200"},
    }
    if missing == "achieved_tflops":
        del one["achieved_tflops"]
    cells = [step(7.0, **{**link, **change[missing]}), step(90.0, **one)]
    assert not [one for one in found(*cells) if "hidden" in one.label]


def test_memory_counts_what_runs_out_under_each_limit() -> None:
    cells = [
        step(100, memory_limit_gib=limit, context_length=length,
             phase="forward", status="oom" if length * 10 > limit else "ok")
        for limit in (24.0, 80.0)
        for length in (1, 4, 9)
    ]  # fmt: skip
    cells += [step(100, memory_limit_gib=None, context_length=9, peak_allocated_bytes=90 * GIB)]
    only = answer("out of memory", *cells)
    assert (only.number, only.interval) == ("2/3", "of the steps fail in 24 GiB")
    assert only.conclusion == "In 24 GiB, 2 of 3 steps run out of memory."
    assert only.detail.startswith(
        "By phase: 3 in forward. Of the same 3: 2 in 24 GiB, 1 in 80 GiB. Of the 1 of them that was"
        " also measured without a limit, 1 ran. The largest peak is 90.0 GiB"
    )
    assert only.table.header == ("model", "24 GiB", "80 GiB")
    assert only.table.rows == [["small", "1 / 4", "4 / 9"]]
    assert only.table.caption.startswith("Longest context that fits / first that fails: training")


def test_a_model_without_limits_has_its_phase_and_its_first_context() -> None:
    out = {"status": "oom", "phase": "optimizer"}
    cells = [step(100, memory_limit_gib=limit, **out) for limit in (24.0, 80.0)]
    limits, others = memory_failures(results_of(*cells, step(100, size="10B", **out)))
    assert limits.rows == [["small", "2 of 2", "– / 512", "– / 512"]]
    assert others.header == ("out of memory", "cells", "ran out in", "first context that fails")
    assert others.rows == [["10B", "1 of 1", "1 optimizer", "512"]]
    assert memory_failures(results_of(step(100))) == []


def test_a_cell_that_ran_out_before_any_phase_has_its_stage() -> None:
    out = {"status": "oom", "phase": "", "stage": "build"}
    cells = [step(100, **out), step(100, context_length=128, **out | {"phase": "forward"})]
    (table,) = memory_failures(results_of(*cells))
    assert table.rows == [["small", "2 of 2", "1 build, 1 forward", "128"]]
    only = answer("out of memory", *cells)
    assert only.detail.startswith("By phase: 1 in build, 1 in forward.")


def test_a_model_that_always_fits_or_never_has_a_dash() -> None:
    values = {"memory_limit_gib": 24.0, "context_length": 128}
    cells = [step(100, size="xl", status="oom", **values), step(100, size="small", **values)]
    assert answer("out of memory", *cells).table.rows == [["small", "128 / –"], ["xl", "– / 128"]]


def test_the_table_of_limits_is_part_of_the_answers_in_markdown() -> None:
    cells = [step(100, size="xl", status="oom", memory_limit_gib=24.0, context_length=128)]
    text = findings_to_markdown([answer("out of memory", *cells)], "measured on it")
    assert "  | model | 24 GiB |\n  | --- | ---: |\n  | xl | – / 128 |\n" in text


def test_memory_without_a_limit_names_the_largest_peak_or_what_ran_out() -> None:
    fits = step(100, peak_allocated_bytes=4 * GIB, predicted_peak_allocated_bytes=4.1 * GIB)
    only = answer("largest peak", fits)
    assert (only.number, only.conclusion) == ("4.00", "No cell ran out of memory.")
    assert only.detail.endswith("predicted 4.10 GiB.")
    out = {**fits, "status": "oom", "context_length": 1024}
    only = answer("out of memory", fits, out)
    assert (only.number, only.conclusion) == ("1", "1 cell ran out of memory.")
    assert only.detail.startswith("The shortest context that fails is 1,024")


def attention(ms: float, name: str, length: int) -> dict[str, Any]:
    values = {"size": None, "d_head": 64, "task": "attention", "attention": name}
    peak = GIB * (10 if name == "naive" else 0.5)
    return step(ms, context_length=length, peak_allocated_bytes=peak, **values)


def test_attention_is_compared_with_the_naive_one_at_the_longest_context() -> None:
    times = (("naive", 100), ("flash", 10), ("math", 120))
    cells = [attention(ms * length, name, length) for name, ms in times for length in (1, 2)]
    only = answer("over naive", *cells)
    assert (only.label, only.number) == ("flash over naive", "10.0×")
    assert only.conclusion == "flash attention is fastest."
    assert only.detail == (
        "At context 2, a training step in fp32 takes 20.0 ms, with naive attention 200 ms."
        " It needs 9.50 GiB less memory (0.500 GiB and 10.0 GiB)."
    )


def test_attention_is_compared_where_most_implementations_were_measured() -> None:
    cells = [attention(ms, name, 2) for name, ms in (("naive", 8), ("flash", 4), ("cudnn", 2))]
    cells += [attention(ms, name, 9) for name, ms in (("naive", 90), ("flash", 3))]
    only = answer("over naive", *cells)
    assert (only.label, only.number) == ("cudnn over naive", "4.00×")
    assert only.detail.endswith("At 9, where fewer were measured, flash is 30.0× as fast as naive.")


def test_attention_time_grows_with_an_exponent() -> None:
    values = {"size": None, "d_head": 64, "task": "attention", "attention": "naive"}
    lengths = (1024, 2048, 4096)
    only = answer(
        "attention time", *(step(n * n / 1e5, context_length=n, **values) for n in lengths)
    )
    assert (only.number, only.scope) == ("n^2.00", "context 1,024 to 4,096")
    # A section of the page shows the sentence without the number.
    assert only.conclusion == "Attention time grows with the context to the power of 2.00."


def test_the_backward_pass_is_compared_with_the_forward_pass() -> None:
    cells = [
        step(30 * n, context_length=n, forward_ms_median=10.0, backward_ms_median=10.0 * ratio)
        for n, ratio in ((1, 1.9), (2, 2.0), (3, 2.1))
    ]
    only = answer("backward", *cells)
    assert (only.number, only.interval) == ("2.00×", "1.90 to 2.10")
    assert only.detail == "Median of 3 GPU-bound cells."


def test_a_run_that_compares_nothing_has_the_time_of_its_longest_step() -> None:
    only = answer("step", step(97.6))
    assert (only.number, only.interval) == ("97.6", "[96.6, 98.6] ms")
    assert only.sentence == "A training step of small at context 512 takes 97.6 ms."
    longest = answer("longest", step(97.6), step(200, context_length=1024))
    assert longest.sentence.endswith(
        "takes 200 ms. It is the longest of 2; the shortest takes 97.6 ms"
        " (small, context 512, fp32, eager, training step)."
    )


def test_failures_are_counted_by_status_and_nothing_else_is_claimed() -> None:
    cells = [{"task": "train_step", "status": status} for status in ("failed", "failed", "timeout")]
    (only,) = found(*cells)
    assert (only.number, only.conclusion) == ("3", "3 cells failed.")
    assert only.detail == "By status: 2 failed, 1 timeout."
    cells[0]["message"] = cells[1]["message"] = "no kernel image\nsecond line"
    (only,) = found(*cells)
    assert only.detail.endswith("1 timeout. Most often (2): no kernel image")
    assert found({"task": "train_step", "status": "skipped"}) == []
    (alike,) = found(*cells[:2])  # the label of the answer says how they ended
    assert (alike.label, alike.number, alike.interval) == ("failed", "2", "of 2 cells")
    assert (alike.scope, alike.detail) == ("", "Most often (2): no kernel image")
    (other,) = found(cells[2])
    assert (other.scope, other.detail) == ("1 timeout", "By status: 1 timeout.")


KERNELS = {"attempt": 1, "attributed_to_phase": 1.0}  # of a cell that has kernels


def kernels_of(*rows: tuple[str, str, str, float]) -> pd.DataFrame:
    """Return kernels of one step: cell, class, module and ms of each."""
    columns = ["cell", "kernel_class", "module", "ms"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.assign(
        attempt=1, phase="forward", name="kernel", steps=1, count=1, total_ns=frame["ms"] * 1e6,
        mean_ns=0.0, median_ns=0.0, min_ns=0.0, max_ns=0.0, sd_ns=0.0,
    ).drop(columns="ms")  # fmt: skip


def test_the_share_of_matrix_products_is_of_cells_that_every_precision_has() -> None:
    cells = [step(80), step(60, precision="bf16"), step(10, size="xl")]
    kernels = kernels_of(
        ("id0", "GEMM", "", 6.0), ("id0", "copy", "", 4.0),
        ("id1", "GEMM", "", 1.0), ("id1", "elementwise", "", 2.0), ("id1", "copy", "", 1.0),
        ("id2", "GEMM", "", 9.0), ("id2", "copy", "", 0.0),
    )  # fmt: skip
    results = results_of(*({**KERNELS, **cell} for cell in cells))
    shown = findings(replace(results, read_table=lambda table: kernels))
    (only,) = [one for one in shown if one.label == "matrix products"]
    assert only.conclusion == ("Matrix products take 60% of the kernel time in fp32, 25% in bf16.")
    assert only.detail == "Of the rest, most is elementwise (50% in bf16)."
    assert sorted(only.basis) == [("id0",), ("id1",)]


def test_the_softmax_is_compared_with_the_products_around_it() -> None:
    kernels = kernels_of(
        ("id0", "GEMM", "scores", 1.0), ("id0", "GEMM", "attention output", 1.0),
        ("id0", "reduction", "softmax", 3.0), ("id0", "GEMM", "ffn", 5.0),
    )  # fmt: skip
    results = results_of({**KERNELS, **step(80)})
    shown = findings(replace(results, read_table=lambda table: kernels))
    (only,) = [one for one in shown if one.label.startswith("softmax")]
    assert (only.number, only.detail) == (
        "1.50×",
        "1.50× as long, and 30% of the forward pass, in small, context 512, fp32, eager, training"
        " step.",
    )


def test_the_gpu_that_waits_most_and_least() -> None:
    cells = (step(80, busy_timed=0.25, cpu_bound=True), step(100, size="xl", busy_timed=0.995))
    only = answer("GPU busy", *cells)
    assert (only.marked_number, only.interval, round(only.gain, 3)) == ("25%†", "to 100%", 0.75)
    assert only.sentence == (
        "The GPU waits for the CPU in 75% of the step of small, context 512, fp32, eager, training"
        " step. Kernels run for 20.0 of its 80.0 ms. In xl, context 512, fp32, eager, training step,"
        " kernels run for 100% of the step."
    )


def test_an_option_names_what_it_saves_and_what_it_costs() -> None:
    peaks = ((512, "none", 8.0, 100), (512, "block", 4.0, 130), (256, "none", 4.0, 50),
             (256, "block", 3.0, 60))  # fmt: skip
    cells = [
        step(ms, checkpointing=option, context_length=length, peak_allocated_bytes=gib * GIB)
        for length, option, gib, ms in peaks
    ]
    only = answer("checkpointing", *cells)
    assert (only.label, only.number, only.gain) == ("checkpointing: block", "4.00 GiB", 0.5)
    assert only.sentence == (
        "Checkpointing block saves 50% of the peak. A training step of small at context 512 peaks at"
        " 4.00 GiB instead of 8.00 GiB, and takes 130 ms instead of 100 ms, 30% longer."
        " The largest saving of 2 pairs."
    )
    assert only.interval == "saved; step 1.30× as long"


@pytest.mark.parametrize(
    ("gib", "shown", "conclusion"),
    [
        (7.98, "no memory saved", "saves no memory"),
        (8.01, "no memory saved", "saves no memory"),
        (10.0, "2.00 GiB more", "costs 25% of the peak"),
    ],
)
def test_an_option_that_saves_nothing_says_so(gib: float, shown: str, conclusion: str) -> None:
    cells = [
        step(ms, checkpointing=option, peak_allocated_bytes=peak * GIB)
        for option, peak, ms in (("none", 8.0, 100), ("blocks", gib, 150))
    ]
    only = answer("checkpointing", *cells)
    assert f"{only.number} {only.interval}" == f"{shown}; step 1.50× as long"
    assert only.conclusion == f"Checkpointing blocks {conclusion}."


def test_arguments_of_an_own_model_are_compared_and_named() -> None:
    values = {"size": None, "model": "mine:Moe", "model_args.layers": 2}
    cells = [
        step(ms, **values, **{"model_args.experts": experts, "model_args.hidden": width})
        for experts, width, ms in (
            (2, 64, 10),
            (4, 64, 19),
            (8, 64, 40),
            (2, 128, 30),
            (8, 128, 90),
        )
    ]
    only = answer("experts=8 over", *cells)
    assert (only.number, only.interval) == ("3.50×", "3.00 to 4.00")
    assert only.conclusion == "A step takes 3.50× as long with experts=8 as with experts=2."
    few = [{**cell, "step_ms_coverage": 0.75} for cell in cells]
    assert answer("experts=8 over", *few).sentence == (
        "experts=8 and experts=2 show no clear difference. Median of 2 pairs; fewer than 6 steps"
        " give no interval at 95%."
    )
    longest = answer("longest step", *cells)
    assert longest.scope.startswith("mine:Moe experts=8 hidden=128,")  # layers is the same in all


def test_warm_up_is_enough_when_steps_are_as_steady_as_after_the_longest() -> None:
    spreads = {0: 50.0, 1: 1.2, 5: 1.0}
    cells = [
        step(100, warmup_steps=count, step_synced_ms_mean=100.0, step_synced_ms_sd=spread * factor,
             context_length=length)
        for count, spread in spreads.items()
        for length, factor in ((64, 1.0), (128, 1.1))
    ]  # fmt: skip
    cells.append(step(100, warmup_steps=0, step_synced_ms_mean=100.0, step_synced_ms_sd=90.0,
                      context_length=999))  # fmt: skip
    only = answer("warm-up", *cells)
    assert (only.number, only.conclusion) == ("1", "1 warm-up step is enough.")
    assert only.detail == (
        "Standard deviation over mean of a step, median of 2 cells: 52% after 0, 1.3% after 1,"
        " 1.1% after 5."
    )
    # Each length counts once, after its longest warm-up.
    assert "It is the longest of 3;" in answer("longest step", *cells).sentence


def test_trust_counts_each_reason_for_doubt() -> None:
    cells = [
        step(10, cpu_bound=True, concurrent_attempts=2.0, interval_wide=True, power_capped_ns=0),
        step(10, cpu_bound=False, concurrent_attempts=0.0, interval_wide=False, power_capped_ns=5),
        step(10, cpu_bound=None, concurrent_attempts=0.0, interval_wide=False, power_capped_ns=0),
    ]
    shown = {one.label: one for one in found(*cells) if one.section == "trust"}
    assert {name: one.sentence.split(".")[0] for name, one in shown.items()} == {
        "wide intervals": "1 of 3 timed cells is so unsteady that the interval is wider than 5% of"
        " the median",
        "disturbed": "1 of 3 timed cells is disturbed by other processes or cells on the same CPU",
        "GPU-bound": "1 of 3 timed cells is GPU-bound: another machine with this GPU agrees",
        "CPU-bound": "1 of 3 timed cells is CPU-bound: such a time holds for this CPU only",
        "power-limited": "1 of 3 timed cells is slowed down by the power limit, which lowered the"
        " clock",
    }
    assert shown["disturbed"].gain == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("doubts", "options"),
    [
        ({"cpu_contended": True}, {"--retry cpu-contended"}),
        ({"cpu_bound": True, "concurrent_attempts": 2.0}, {"--scheduler serial --fresh"}),
        (
            {"cpu_contended": True, "cpu_bound": True, "concurrent_attempts": 2.0},
            {"--retry cpu-contended", "--scheduler serial --fresh"},
        ),
        ({"interval_wide": True}, {"--retry interval-wide"}),
    ],
)
def test_the_commands_of_doubts_are_valid_and_measure_these_cells(
    doubts: dict[str, object], options: set[str]
) -> None:
    advice = " ".join(one.detail for one in found(step(10, **doubts)) if one.section == "trust")
    commands = re.findall(r"`sweep run CONFIG ([^`]+)`", advice)
    assert set(commands) == options
    for command in commands:
        words = ["configs/demo.yaml", *command.split()]
        with main.commands["run"].make_context("run", words) as context:  # type: ignore[attr-defined]
            asked = context.params
        retried = {QUALITY_FLAGS[name] for name in asked["retry"]}
        assert retried <= doubts.keys()
        assert bool(retried) is not asked["fresh"]


def test_predictions_are_compared_with_the_peaks_of_the_same_cells() -> None:
    peaks = {"peak_allocated_bytes": 10 * GIB, "predicted_peak_allocated_bytes": 10.1 * GIB}
    only = answer("predicted peak", step(10, **peaks), step(10, context_length=128, **peaks))
    assert only.conclusion == (
        "The predicted peak is within 1.0% of the measured one in 95% of 2 eager cells."
    )
    exact = step(10, peak_allocated_bytes=GIB, predicted_peak_allocated_bytes=GIB)
    assert "is within 0.1% of" in answer("predicted peak", exact).conclusion


def test_parts_of_the_peak_have_the_words_of_the_charts_and_none_is_0_percent() -> None:
    parts = {"parameters": 60.0, "attention_squares": 40.0, "slack": 0.1}
    values = {f"predicted_of_{name}_bytes": gib * GIB for name, gib in parts.items()}
    only = answer("parameters", step(10, **values))
    assert only.detail == ("By the prediction, parameters 60%, attention scores 40% of 100 GiB.")


def test_what_a_reader_can_recover_comes_first_and_no_section_fills_the_first_screen() -> None:
    cells = [
        step(100, context_length=length, precision=precision) if precision == "fp32"
        else step(ms, context_length=length, precision=precision)
        for length in (1, 2)
        for precision, ms in (("fp32", 100), ("bf16", 20), ("tf32", 50), ("fp16", 25))
    ]  # fmt: skip
    cells += [step(60, context_length=1, compile="blocks")]
    shown = found(*cells)
    assert [one.gain for one in shown] == sorted((one.gain for one in shown), reverse=True)
    labels = [one.label for one in first_screen(shown, 3)]
    assert labels == ["bf16 over fp32", "fp16 over fp32", "compiled over eager"]


def test_a_run_without_data_has_no_finding_and_a_rule_that_fails_costs_no_other() -> None:
    assert findings(Results(pd.DataFrame(), (), {})) == []

    def about_nothing(results: Results) -> Any:
        raise ZeroDivisionError("by zero")

    (only,) = findings(results_of(step(10)), {about_nothing: ""})
    assert only.sentence.startswith("The finding on nothing cannot be made: ZeroDivisionError: by")


def test_cells_without_a_result_are_counted_by_status_if_others_have_one() -> None:
    failed = [{**step(float("nan")), "status": status} for status in ("oom", "oom", "crashed")]
    assert [one for one in found(*failed) if one.label == "without a result"] == []
    only = answer("without a result", step(10), *failed)
    assert only.sentence == "3 cells ended without a result: 2 out of memory, 1 failed."
    skipped = {**step(float("nan")), "status": "skipped", "reason": "flash needs bf16"}
    assert answer("without a result", step(10), skipped).sentence == (
        "1 cell ended without a result: 1 impossible. Most often impossible (1): flash needs bf16"
    )
