"""What a report says in words: the numbers of the cells, and nothing where there are none."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis.results import Results
from orchestrator.report.text.key_findings import answers, first_sentences

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


def said(*cells: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    frame = pd.DataFrame(list(cells)).convert_dtypes()
    axes = tuple(axis for axis in AXES if axis in frame)
    return {answer.question: answer.sentences for answer in answers(Results(frame, axes, {}))}


def test_nothing_is_said_of_nothing() -> None:
    assert answers(Results(pd.DataFrame({"cell": [], "status": []}), (), {})) == []


def test_backward_over_forward_by_precision() -> None:
    found = said(
        cell(precision="fp32"),
        cell(precision="bf16", backward_ms_median=7.5),
        cell(precision="bf16", size="xl"),
    )
    assert found["How long is the backward pass, against the forward pass?"] == (
        "precision=fp32: the backward pass takes 2.00× (one cell) as long as the forward pass",
        "precision=bf16: the backward pass takes 2.50× (median of 2 cells, 2.00× to 3.00×) as long as the forward pass",
    )


def test_what_waits_for_its_host_is_told_from_what_does_not() -> None:
    waiting = cell(device="cuda", backward_ms_median=4.0, cpu_bound=True)
    ahead = cell(device="cuda", size="xl", cpu_bound=False)
    question = "How long is the backward pass, against the forward pass?"
    (told,) = said(waiting, ahead)[question]
    assert told.endswith("as long as the forward pass; where not CPU-bound 2.00× (one cell)")
    assert all(
        said(one)[question][0].endswith("as long as the forward pass") for one in (waiting, ahead)
    )


def test_variability_needs_two_numbers_of_warm_up_steps() -> None:
    question = "How much does a step vary, with and without warm-up?"
    assert question not in said(cell())
    found = said(cell(warmup_steps=0, step_synced_ms_sd=5.0), cell(warmup_steps=5))
    assert [sentence[:46] for sentence in found[question]] == [
        "warmup_steps=0: a step varies by 50.0% (std/me", "warmup_steps=5: a step varies by 1.0% (std/mea",
    ]  # fmt: skip


def test_variability_is_of_the_same_cells_with_and_without_warm_up() -> None:
    """Not of many cells with it against others without; nor is that of one that has no counterpart."""
    without = cell(warmup_steps=0, step_synced_ms_sd=5.0)
    others = [
        cell(warmup_steps=5, size=size, step_synced_ms_sd=8.0) for size in ("medium", "large", "xl")
    ]
    question = "How much does a step vary, with and without warm-up?"
    assert question not in said(without, *others)
    assert said(without, *others, cell(warmup_steps=5), cell(warmup_steps=10, size="2.7B"))[
        question
    ] == (
        "warmup_steps=0: a step varies by 50.0% (std/mean, one cell)",
        "warmup_steps=5: a step varies by 1.0% (std/mean, one cell)",
    )
    large = [cell(warmup_steps=steps, size="large", step_synced_ms_sd=2.0) for steps in (0, 5)]
    assert said(without, cell(warmup_steps=5), *large)[question] == (
        "warmup_steps=0: a step varies by 35.0% (std/mean, median of the same 2 cells)",
        "warmup_steps=5: a step varies by 10.5% (std/mean, median of the same 2 cells)",
    )


@pytest.mark.parametrize(
    ("bf16_ms", "sentence"),
    [
        (
            {128: 11, 512: 12, 1024: 50},
            "bf16 is faster than fp32 from context 1024 on; 2.00× at 1024",
        ),
        (
            {128: 5, 512: 12, 1024: 50},
            "bf16 is faster than fp32 at context 128, the shortest that was tried, but not told apart at 512; 2.00×",
        ),
        (
            {128: 5, 512: 15, 1024: 100},
            "bf16 is faster than fp32 at context 128, the shortest that was tried, but slower at 512 and ",
        ),
        (
            {128: 11, 512: 40, 1024: 110},
            "bf16 is nowhere faster than fp32 (contexts 128, 512, 1024)",
        ),
        (
            {128: 9.95, 512: 40, 1024: 101},
            "bf16 is not told apart from fp32 at context 128, 1024, and slower at 512",
        ),
        (
            {128: 9.95, 512: 12, 1024: 101},
            "bf16 is not told apart from fp32 at context 128, 512, 1024",
        ),
    ],
)
def test_where_a_narrow_precision_pays(bf16_ms: dict[int, float], sentence: str) -> None:
    fp32 = {128: 10, 512: 12, 1024: 100}
    cells = [
        cell(ms, precision=p, context_length=n)
        for p, series in (("fp32", fp32), ("bf16", bf16_ms))
        for n, ms in series.items()
    ]
    (found,) = said(*cells)["Where does a narrower precision start to pay?"]
    assert found.startswith(f"size=small: {sentence}")


def test_where_it_pays_is_said_of_cells_alike_in_all_else() -> None:
    """Slower throughout with one way to attend, faster throughout with the other: no sentence mixes them."""
    cells = [
        cell(ms, precision=p, context_length=n, attention=way)
        for way, bf16_ms in (("naive", 15), ("flash", 5))
        for p, ms in (("fp32", 10), ("bf16", bf16_ms))
        for n in (128, 1024)
    ]
    assert said(*cells)["Where does a narrower precision start to pay?"] == (
        "size=small attention=naive: bf16 is nowhere faster than fp32 (contexts 128, 1024)",
        "size=small attention=flash: bf16 is faster than fp32 at context 128, the shortest that was tried; 2.00× at 1024",
    )


def test_of_several_runs_the_name_comes_first_and_then_what_differs_within_it() -> None:
    """What all cells of a run have, here the steps and, of one, the way to attend, is in no sentence."""
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
    frame = pd.DataFrame(cells).convert_dtypes()
    found = {
        answer.question: answer.sentences for answer in answers(Results(frame, (*AXES, "run"), {}))
    }
    assert [
        one.partition(": ")[0] for one in found["Where does a narrower precision start to pay?"]
    ] == [
        "run=wide size=small",
        "run=deep size=small attention=naive",
        "run=deep size=small attention=flash",
        "run=wide size=xl",
    ]


def test_the_gain_of_compiling_is_of_cells_alike_in_all_else() -> None:
    found = said(
        cell(10, compile="eager"), cell(8, compile="blocks"), cell(5, compile="model"),
        cell(90, compile="eager", size="xl", context_length=512), cell(10, compile="blocks", size="xl", context_length=1024),
    )  # fmt: skip
    assert found["What does compiling gain, by size?"] == (
        "size=small: compiled (blocks) a step is 1.25× (one cell) as fast as eager",
        "size=small: compiled (model) a step is 2.00× (one cell) as fast as eager",
    )


def test_the_exponent_of_attention() -> None:
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
    assert said(*naive, *flash)["How does attention grow with length?"] == (
        "attention=naive: time as length^2.00, from 1024 to 4096",
        "attention=naive: peak memory as length^2.00, from 1024 to 4096",
        "attention=flash: time as length^1.00, from 1024 to 4096",
        "attention=flash: peak memory as length^1.00, from 1024 to 4096",
    )


def test_a_length_that_waits_for_its_host_says_nothing_of_attention() -> None:
    """Its time is the host's, whatever the length; its memory is its own."""
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

    question = "How does attention grow with length?"
    memory = "All cells: peak memory as length^2.00, from 1024 to 8192"
    assert said(*series(1024, 2048))[question] == (
        "All cells: time as length^2.00, from 4096 to 8192",
        memory,
    )
    assert said(*series(1024, 2048, 4096))[question] == (memory,)


def test_exponents_of_what_was_varied_beside_are_one_sentence() -> None:
    """Of widths that grow alike one number stands, of others the least, the middle and the most, and of which they are."""
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
    frame = pd.DataFrame([*cells, *longer]).convert_dtypes()
    found = {
        answer.question: answer.sentences
        for answer in answers(Results(frame, (*AXES, "d_head"), {}))
    }
    assert found["How does attention grow with length?"] == (
        "precision=fp32: time as length^1.50 to 1.90 (median 1.60; least with d_head=16, most with d_head=64), from 1024 to 4096"
        ", in 3 series",
        "precision=fp32: peak memory as length^1.00, from 1024 to 4096, in 3 series",
        "precision=bf16: time as length^1.00, from 8192 to 32768",
    )


def test_on_a_terminal_each_precision_has_its_turn() -> None:
    """And what is left out is counted."""
    sizes = [f"size{number}" for number in range(30)]
    cells = [
        cell(ms, size=size, precision=precision)
        for precision, ms in (("fp32", 10.0), ("tf32", 5.0), ("bf16", 4.0), ("fp16", 3.0))
        for size in sizes[: 2 if precision == "fp16" else None]
    ]
    (whole,) = (
        answer
        for answer in answers(Results(pd.DataFrame(cells), AXES[:-1], {}))
        if "precision" in answer.question
    )
    assert len(whole.sentences) == 62
    *some, last = first_sentences(whole, "report/answers.md").sentences
    assert last == "… and 38 more: report/answers.md"
    assert Counter(sentence.split()[1] for sentence in some) == {"tf32": 11, "bf16": 11, "fp16": 2}
    assert some == [sentence for sentence in whole.sentences if sentence in some]
    few = replace(whole, sentences=whole.sentences[:24])
    assert first_sentences(few, "report/answers.md") == few


def test_where_memory_ends() -> None:
    question = "At which context does memory run out?"
    cells = [
        cell(None if n > 256 else 1.0, context_length=n, size=size, memory_limit_gib=24.5)
        for n in (128, 256, 512)
        for size in ("small", "xl")
    ]
    cells[1] = cell(None, context_length=128, size="xl", memory_limit_gib=24.5)
    assert said(*cells)[question] == (
        "size=small memory_limit_gib=24.5: runs out of memory at context 512, and has enough for 256",
        "size=xl memory_limit_gib=24.5: runs out of memory at context 128, the shortest that was tried",
    )
    assert said(cell(context_length=512))[question] == (
        "Nothing ran out of memory, up to context 512",
    )


def test_what_ran_out_of_the_memory_of_its_host_did_not_fit() -> None:
    question = "At which context does memory run out?"
    of_host = cell(None, context_length=256) | {"status": "host_oom"}
    told = "1 of 2 cells ran out of the memory of their host, from context 256 on"
    assert said(cell(context_length=128), of_host)[question] == (told,)
    found = said(cell(context_length=128), of_host, cell(None, context_length=512))[question]
    assert found == (
        told.replace("of 2", "of 3"),
        "All cells: runs out of memory at context 512, and has enough for 128",
    )
