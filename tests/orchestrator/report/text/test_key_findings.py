"""Sentences of a report: they show the numbers of the cells, and there are none without numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis.results import Results
from orchestrator.report.text.key_findings import key_findings, shorten

BASE: dict[str, Any] = {
    "task": "train_step", "status": "ok", "size": "small", "context_length": 128, "precision": "fp32", "compile": "eager",
    "pass": "train_step", "warmup_steps": 5, "memory_limit_gib": None,
}  # fmt: skip
AXES = (
    "size",
    "context_length",
    "precision",
    "compile",
    "pass",
    "warmup_steps",
    "memory_limit_gib",
    "attention",
)


def cell(step_ms: float | None = 10.0, **values: Any) -> dict[str, Any]:
    status = "ok" if step_ms else "oom"
    times = {} if step_ms is None else {
        "step_ms_median": step_ms, "step_ms_ci_low": step_ms * 0.99, "step_ms_ci_high": step_ms * 1.01,
        "forward_ms_median": step_ms / 4, "backward_ms_median": step_ms / 2, "step_synced_ms_mean": step_ms,
        "step_synced_ms_sd": step_ms / 100,
    }  # fmt: skip
    return {**BASE, "status": status, **times, **values}


BACKWARD = "How long does the backward pass take, compared with the forward pass?"
VARIABILITY = "How much do step times vary, with and without warm-up?"
PRECISION = "From which context length is a narrower precision faster?"
COMPILING = "How much faster is a compiled step?"
ATTENTION = "How does attention grow with the context length?"
MEMORY = "At which context length does memory run out?"


def sentences(*cells: dict[str, Any], axes: tuple[str, ...] = AXES) -> dict[str, tuple[str, ...]]:
    """Return the sentences of the cells by their question."""
    frame = pd.DataFrame(list(cells)).convert_dtypes()
    present = tuple(axis for axis in axes if axis in frame)
    return {one.question: one.sentences for one in key_findings(Results(frame, present, {}))}


def test_a_run_without_cells_has_no_findings() -> None:
    assert key_findings(Results(pd.DataFrame({"cell": [], "status": []}), (), {})) == []


def test_backward_over_forward_by_precision() -> None:
    found = sentences(
        cell(precision="fp32"),
        cell(precision="bf16", backward_ms_median=7.5),
        cell(precision="bf16", size="xl"),
    )
    assert found[BACKWARD] == (
        "precision=fp32: the backward pass takes 2.00× as long as the forward pass (one cell)",
        "precision=bf16: the backward pass takes 2.50× as long as the forward pass "
        "(median of 2 cells, 2.00× to 3.00×)",
    )


def test_cells_that_are_not_cpu_bound_have_a_ratio_of_their_own() -> None:
    waiting = cell(device="cuda", backward_ms_median=4.0, cpu_bound=True)
    ahead = cell(device="cuda", size="xl", cpu_bound=False)
    (both,) = sentences(waiting, ahead)[BACKWARD]
    assert both.endswith("; without CPU-bound cells 2.00× (one cell)")
    for one in (waiting, ahead):
        assert sentences(one)[BACKWARD][0].endswith("as long as the forward pass (one cell)")


def test_variability_needs_two_numbers_of_warm_up_steps() -> None:
    assert VARIABILITY not in sentences(cell())
    found = sentences(cell(warmup_steps=0, step_synced_ms_sd=5.0), cell(warmup_steps=5))
    assert [sentence.partition(" (")[0] for sentence in found[VARIABILITY]] == [
        "warmup_steps=0: step times vary by 50.0%",
        "warmup_steps=5: step times vary by 1.0%",
    ]


def test_variability_is_of_the_same_cells_with_and_without_warm_up() -> None:
    without = cell(warmup_steps=0, step_synced_ms_sd=5.0)
    others = [
        cell(warmup_steps=5, size=size, step_synced_ms_sd=8.0) for size in ("medium", "large", "xl")
    ]
    assert VARIABILITY not in sentences(without, *others)
    # Cells without a counterpart do not count, nor does a number of steps that only they have.
    more = (*others, cell(warmup_steps=5), cell(warmup_steps=10, size="2.7B"))
    assert sentences(without, *more)[VARIABILITY] == (
        "warmup_steps=0: step times vary by 50.0% (standard deviation / mean, one cell)",
        "warmup_steps=5: step times vary by 1.0% (standard deviation / mean, one cell)",
    )
    large = [cell(warmup_steps=steps, size="large", step_synced_ms_sd=2.0) for steps in (0, 5)]
    basis = "(standard deviation / mean, median of the same 2 cells)"
    assert sentences(without, cell(warmup_steps=5), *large)[VARIABILITY] == (
        f"warmup_steps=0: step times vary by 35.0% {basis}",
        f"warmup_steps=5: step times vary by 10.5% {basis}",
    )


@pytest.mark.parametrize(
    ("bf16_ms", "sentence"),
    [
        (
            {128: 11, 512: 12, 1024: 50},
            "bf16 is faster than fp32 from context 1024 on; 2.00× at context 1024",
        ),
        (
            {128: 5, 512: 12, 1024: 50},
            "bf16 is faster than fp32 from context 128 on (the shortest measured), "
            "but not clearly different at 512; 2.00×",
        ),
        (
            {128: 5, 512: 15, 1024: 100},
            "bf16 is faster than fp32 from context 128 on (the shortest measured), "
            "but slower at 512 and not clearly different at 1024; ",
        ),
        (
            {128: 11, 512: 40, 1024: 110},
            "bf16 is not faster than fp32 at any measured context (128, 512, 1024)",
        ),
        (
            {128: 9.95, 512: 40, 1024: 101},
            "bf16 does not differ clearly from fp32 at context 128, 1024; it is slower at 512",
        ),
        (
            {128: 9.95, 512: 12, 1024: 101},
            "bf16 does not differ clearly from fp32 at context 128, 512, 1024",
        ),
    ],
)
def test_a_precision_is_faster_from_the_first_context_where_it_wins(
    bf16_ms: dict[int, float], sentence: str
) -> None:
    fp32 = {128: 10, 512: 12, 1024: 100}
    cells = [
        cell(ms, precision=p, context_length=n)
        for p, series in (("fp32", fp32), ("bf16", bf16_ms))
        for n, ms in series.items()
    ]
    (found,) = sentences(*cells)[PRECISION]
    assert found.startswith(f"size=small: {sentence}")


def test_a_precision_is_compared_between_cells_that_are_equal_in_all_other_axes() -> None:
    # It is slower with one implementation of attention and faster with the other.
    cells = [
        cell(ms, precision=p, context_length=n, attention=way)
        for way, bf16_ms in (("naive", 15), ("flash", 5))
        for p, ms in (("fp32", 10), ("bf16", bf16_ms))
        for n in (128, 1024)
    ]
    assert sentences(*cells)[PRECISION] == (
        "size=small attention=naive: "
        "bf16 is not faster than fp32 at any measured context (128, 1024)",
        "size=small attention=flash: "
        "bf16 is faster than fp32 from context 128 on (the shortest measured); 2.00× at context 1024",
    )


def test_a_label_names_the_run_and_the_axes_that_vary_within_it() -> None:
    # Not the axes that differ only between the runs: the steps and, for one run, the attention.
    cells = [
        cell(
            ms,
            run=run,
            precision=p,
            context_length=1024,
            size=size,
            warmup_steps=steps,
            attention=way,
        )
        for run, size, steps, way in (
            ("wide", "small", 5, "naive"),
            ("wide", "xl", 5, "naive"),
            ("deep", "small", 9, "naive"),
            ("deep", "small", 9, "flash"),
        )
        for p, ms in (("fp32", 10), ("bf16", 5))
    ]
    found = sentences(*cells, axes=(*AXES, "run"))[PRECISION]
    assert [sentence.partition(": ")[0] for sentence in found] == [
        "run=wide size=small",
        "run=deep size=small attention=naive",
        "run=deep size=small attention=flash",
        "run=wide size=xl",
    ]


def test_compiled_steps_are_compared_with_eager_ones_of_the_same_cell() -> None:
    found = sentences(
        cell(10, compile="eager"), cell(8, compile="blocks"), cell(5, compile="model"),
        cell(90, compile="eager", size="xl", context_length=512), cell(10, compile="blocks", size="xl", context_length=1024),
    )  # fmt: skip
    assert found[COMPILING] == (
        "size=small: a compiled step (blocks) is 1.25× as fast as an eager one (one cell)",
        "size=small: a compiled step (model) is 2.00× as fast as an eager one (one cell)",
    )


def test_attention_grows_with_the_exponent_of_its_implementation() -> None:
    lengths = (256, 1024, 2048, 4096)  # the first is too short to count
    naive = [
        cell(
            7.0 if n == 256 else 1e-6 * n**2,
            task="attention",
            size=None,
            attention="naive",
            context_length=n,
            peak_allocated_bytes=3 * n**2,
        )
        for n in lengths
    ]
    flash = [
        cell(
            1e-3 * n,
            task="attention",
            size=None,
            attention="flash",
            context_length=n,
            peak_allocated_bytes=n,
        )
        for n in lengths
    ]
    assert sentences(*naive, *flash)[ATTENTION] == (
        "attention=naive: time grows as length^2.00, from 1024 to 4096 tokens",
        "attention=naive: peak memory grows as length^2.00, from 1024 to 4096 tokens",
        "attention=flash: time grows as length^1.00, from 1024 to 4096 tokens",
        "attention=flash: peak memory grows as length^1.00, from 1024 to 4096 tokens",
    )


def test_cpu_bound_lengths_count_for_the_memory_of_attention_only() -> None:
    attention = {"task": "attention", "size": None, "attention": "naive", "device": "cuda"}

    def series(*waiting: int) -> list[dict[str, Any]]:
        return [
            cell(
                max(10.0, 1e-6 * n**2),
                **attention,
                context_length=n,
                peak_allocated_bytes=n**2,
                cpu_bound=n in waiting,
            )
            for n in (1024, 2048, 4096, 8192)
        ]

    memory = "All cells: peak memory grows as length^2.00, from 1024 to 8192 tokens"
    assert sentences(*series(1024, 2048))[ATTENTION] == (
        "All cells: time grows as length^2.00, from 4096 to 8192 tokens",
        memory,
    )
    assert sentences(*series(1024, 2048, 4096))[ATTENTION] == (memory,)


def test_exponents_of_several_series_are_one_sentence() -> None:
    # Equal exponents are one number, different ones the lowest, the median and the highest.
    attention = {"task": "attention", "size": None, "attention": "naive"}
    powers = {16: 1.5, 32: 1.6, 64: 1.9}
    cells = [
        cell(1e-6 * n**power, **attention, d_head=width, context_length=n, peak_allocated_bytes=n)
        for width, power in powers.items()
        for n in (1024, 2048, 4096)
    ]
    longer = [
        cell(1e-6 * n, **attention, d_head=64, context_length=n, precision="bf16")
        for n in (8192, 16384, 32768)
    ]
    found = sentences(*cells, *longer, axes=(*AXES, "d_head"))
    assert found[ATTENTION] == (
        "precision=fp32: time grows as length^1.50 to 1.90 "
        "(median 1.60; lowest with d_head=16, highest with d_head=64), "
        "from 1024 to 4096 tokens, in 3 series",
        "precision=fp32: peak memory grows as length^1.00, from 1024 to 4096 tokens, in 3 series",
        "precision=bf16: time grows as length^1.00, from 8192 to 32768 tokens",
    )


def test_a_shortened_finding_has_sentences_of_each_precision_and_counts_the_rest() -> None:
    sizes = [f"size{number}" for number in range(30)]
    cells = [
        cell(ms, size=size, precision=precision)
        for precision, ms in (("fp32", 10.0), ("tf32", 5.0), ("bf16", 4.0), ("fp16", 3.0))
        for size in sizes[: 2 if precision == "fp16" else None]
    ]
    found = key_findings(Results(pd.DataFrame(cells), AXES[:-1], {}))
    (whole,) = (finding for finding in found if finding.question == PRECISION)
    assert len(whole.sentences) == 62
    *some, last = shorten(whole, "report/answers.md").sentences
    assert last == "… and 38 more: report/answers.md"
    assert Counter(sentence.split()[1] for sentence in some) == {"tf32": 11, "bf16": 11, "fp16": 2}
    assert some == [sentence for sentence in whole.sentences if sentence in some]
    few = replace(whole, sentences=whole.sentences[:24])
    assert shorten(few, "report/answers.md") == few


def test_memory_runs_out_at_the_first_context_that_failed() -> None:
    cells = [
        cell(None if n > 256 else 1.0, context_length=n, size=size, memory_limit_gib=24.5)
        for n in (128, 256, 512)
        for size in ("small", "xl")
    ]
    cells[1] = cell(None, context_length=128, size="xl", memory_limit_gib=24.5)
    assert sentences(*cells)[MEMORY] == (
        "size=small memory_limit_gib=24.5: runs out of memory at context 512; context 256 fits",
        "size=xl memory_limit_gib=24.5: runs out of memory at context 128, the shortest measured",
    )
    assert sentences(cell(context_length=512))[MEMORY] == (
        "No cell ran out of memory, up to context 512",
    )


def test_cells_that_ran_out_of_cpu_memory_are_counted_separately() -> None:
    of_host = cell(None, context_length=256) | {"status": "host_oom"}
    on_host = "1 of 2 cells ran out of CPU memory, from context 256 on"
    assert sentences(cell(context_length=128), of_host)[MEMORY] == (on_host,)
    found = sentences(cell(context_length=128), of_host, cell(None, context_length=512))
    assert found[MEMORY] == (
        on_host.replace("of 2", "of 3"),
        "All cells: runs out of memory at context 512; context 128 fits",
    )
