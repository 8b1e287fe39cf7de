"""Each sentence of the answers, against the cells that it speaks of."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis.results import Results
from orchestrator.common.text import counted
from orchestrator.common.units import GIB
from orchestrator.report.formats.markdown import answers_to_markdown
from orchestrator.report.text.answers import Answer, answers
from orchestrator.report.text.memory_failures import memory_failures
from orchestrator.report.text.numbers import interval, number, percent, ratio

AXES = (
    "device", "size", "context_length", "precision", "compile", "attention", "pass",
    "memory_limit_gib", "d_head", "run",
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
    frame = pd.DataFrame([{"cell": f"id{index}", **cell} for index, cell in enumerate(cells)])
    axes = tuple(axis for axis in AXES if axis in frame)
    return Results(frame, axes, {})


def found(*cells: dict[str, Any]) -> list[Answer]:
    return answers(results_of(*cells))


def answer(section: str, *cells: dict[str, Any]) -> Answer:
    (only,) = [one for one in found(*cells) if one.section == section]
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
    assert gain.conclusion == "bf16 is faster on large models."
    assert gain.detail.startswith(
        "A training step of xl at context 512 takes 500 ms in bf16 and 2,000 ms in fp32."
    )
    assert "Compiled: 250 ms in bf16 and 1,500 ms in fp32 (6.00×)." in gain.detail
    assert not gain.has_mark
    assert (loss.number, loss.conclusion) == ("0.80×", "bf16 is slower on small models.")
    assert (
        "GPU kernels run for 25% of the step and the CPU limits it: a faster GPU would not help."
        " The kernels alone are 2.40× as fast." in loss.detail
    )
    assert loss.has_mark


def test_the_largest_gain_is_of_a_gpu_bound_pair_if_there_is_one() -> None:
    cells = [
        step(100),
        step(10, precision="bf16", cpu_bound=True),
        step(300, context_length=1024),
        step(100, context_length=1024, precision="bf16"),
    ]
    assert answer("time", *cells).number == "3.00×"
    bound = [{**cell, "cpu_bound": True} for cell in cells]
    assert (answer("time", *bound).number, answer("time", *bound).has_mark) == ("10.0×", True)


def test_an_interval_that_includes_1_is_no_clear_difference() -> None:
    only = answer("time", step(100, 0.1), step(95, 0.1, precision="bf16"))
    assert only.conclusion == "bf16 makes no clear difference."
    assert "The interval of the ratio includes 1." in only.detail
    compiled = answer("compile", step(100, 0.1), step(95, 0.1, compile="blocks"))
    assert compiled.conclusion == "Compiling makes no clear difference."
    assert "includes 1" in compiled.detail


def test_compiling_is_a_median_of_gpu_bound_pairs_by_precision() -> None:
    cells = []
    for length, eager in ((128, 100), (256, 200), (512, 300)):
        for precision, gain in (("fp32", 1.1), ("bf16", 2 + length / 512)):
            values = {"context_length": length, "precision": precision}
            cells += [step(eager, **values), step(eager / gain, compile="blocks", **values)]
    only = answer("compile", *cells)
    assert (only.number, only.interval) == ("2.50×", "2.25 to 3.00")
    assert only.conclusion == "Compiling makes a step faster, most in bf16."
    assert only.detail == "Median of 3 GPU-bound pairs in bf16; fp32 1.10× (3 pairs)."
    slow = {"context_length": 64, "precision": "bf16"}
    cells += [step(60, cpu_bound=True, **slow), step(40, compile="blocks", **slow)]
    assert answer("compile", *cells).detail.endswith("(3 pairs); 1 CPU-bound pair 1.50×.")


@pytest.mark.parametrize(("cpu_bound", "is_marked"), [(True, True), (False, False), (None, False)])
def test_only_cpu_bound_pairs_mark_the_gain_of_compiling(
    cpu_bound: bool | None, is_marked: bool
) -> None:
    """A run on a CPU has no GPU that waits."""
    device = "cpu" if cpu_bound is None else "cuda"
    values = {"device": device, "cpu_bound": cpu_bound}
    only = answer("compile", step(60, **values), step(40, compile="blocks", **values))
    assert only.has_mark is is_marked


def test_not_every_precision_gains_by_compiling() -> None:
    cells = [step(100), step(125, compile="blocks")]
    cells += [step(100, precision="bf16"), step(50, precision="bf16", compile="blocks")]
    assert answer("compile", *cells).conclusion == "Compiling gains most in bf16."


def test_a_slower_compiled_step_is_slower() -> None:
    only = answer("compile", step(100), step(200, compile="blocks"))
    assert (only.number, only.conclusion) == ("0.50×", "Compiling makes a step slower.")


def test_memory_counts_what_runs_out_under_each_limit() -> None:
    cells = [
        step(100, memory_limit_gib=limit, context_length=length,
             phase="forward", status="oom" if length * 10 > limit else "ok")
        for limit in (24.0, 80.0)
        for length in (1, 4, 9)
    ]  # fmt: skip
    cells += [step(100, memory_limit_gib=None, context_length=9, peak_allocated_bytes=90 * GIB)]
    only = answer("memory", *cells)
    assert (only.number, only.interval) == ("2/3", "of the steps fail in 24 GiB")
    assert only.detail.startswith("Without a limit none fails. The largest peak is 90.0 GiB")
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


def test_a_model_that_always_fits_or_never_has_a_dash() -> None:
    values = {"memory_limit_gib": 24.0, "context_length": 128}
    cells = [step(100, size="xl", status="oom", **values), step(100, size="small", **values)]
    assert answer("memory", *cells).table.rows == [["small", "128 / –"], ["xl", "– / 128"]]


def test_the_table_of_limits_is_part_of_the_answers_in_markdown() -> None:
    cells = [step(100, size="xl", status="oom", memory_limit_gib=24.0, context_length=128)]
    text = answers_to_markdown([answer("memory", *cells)], "measured on it")
    assert "  | model | 24 GiB |\n  | --- | ---: |\n  | xl | – / 128 |\n" in text


def test_memory_without_a_limit_names_the_largest_peak_or_what_ran_out() -> None:
    fits = step(100, peak_allocated_bytes=4 * GIB, predicted_peak_allocated_bytes=4.1 * GIB)
    only = answer("memory", fits)
    assert (only.number, only.conclusion) == ("4.00", "No cell ran out of memory.")
    assert only.detail.endswith("predicted 4.10 GiB.")
    out = {**fits, "status": "oom", "context_length": 1024}
    only = answer("memory", fits, out)
    assert (only.number, only.conclusion) == ("1", "1 cell ran out of memory.")
    assert only.detail.startswith("The shortest context that fails is 1,024")


def attention(ms: float, name: str, length: int) -> dict[str, Any]:
    values = {"size": None, "d_head": 64, "task": "attention", "attention": name}
    peak = GIB * (10 if name == "naive" else 0.5)
    return step(ms, context_length=length, peak_allocated_bytes=peak, **values)


def test_attention_is_compared_with_the_naive_one_at_the_longest_context() -> None:
    times = (("naive", 100), ("flash", 10), ("math", 120))
    cells = [attention(ms * length, name, length) for name, ms in times for length in (1, 2)]
    only = answer("attention", *cells)
    assert (only.label, only.number) == ("flash over naive", "10.0×")
    assert only.conclusion == "flash attention is fastest."
    assert only.detail == (
        "At context 2, a training step in fp32 takes 20.0 ms, with naive attention 200 ms."
        " It needs 9.50 GiB less memory (0.500 GiB and 10.0 GiB)."
    )


def test_attention_is_compared_where_most_implementations_were_measured() -> None:
    cells = [attention(ms, name, 2) for name, ms in (("naive", 8), ("flash", 4), ("cudnn", 2))]
    cells += [attention(ms, name, 9) for name, ms in (("naive", 90), ("flash", 3))]
    only = answer("attention", *cells)
    assert (only.label, only.number) == ("cudnn over naive", "4.00×")
    assert only.detail.endswith("At 9, where fewer were measured, flash is 30.0× as fast as naive.")


def test_attention_time_grows_with_an_exponent() -> None:
    values = {"size": None, "d_head": 64, "task": "attention", "attention": "naive"}
    lengths = (1024, 2048, 4096)
    only = answer("attention", *(step(n * n / 1e5, context_length=n, **values) for n in lengths))
    assert (only.number, only.scope) == ("n^2.00", "context 1,024 to 4,096")


def test_the_backward_pass_is_compared_with_the_forward_pass() -> None:
    cells = [
        step(30 * n, context_length=n, forward_ms_median=10.0, backward_ms_median=10.0 * ratio)
        for n, ratio in ((1, 1.9), (2, 2.0), (3, 2.1))
    ]
    only = answer("where", *cells)
    assert (only.number, only.interval) == ("2.00×", "1.90 to 2.10")
    assert only.detail == "Median of 3 GPU-bound cells: 2.00× in fp32."


def test_a_run_that_compares_nothing_has_the_time_of_its_longest_step() -> None:
    only = answer("time", step(97.6))
    assert (only.number, only.interval) == ("97.6", "[96.6, 98.6] ms")
    assert only.sentence == "A training step of small at context 512 takes 97.6 ms."
    longest = answer("time", step(97.6), step(200, context_length=1024))
    assert longest.sentence.endswith("at context 1,024 takes 200 ms. It is the longest of 2.")


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
