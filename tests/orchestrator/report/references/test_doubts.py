"""What is computed to be impossible: each check on numbers made for it, and on the published ones that it is there for."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from model.accounting import forward_flops, parameter_count
from model.config import SIZES
from orchestrator.report.references.doubts import computed_doubts, implied_tflops, least_flops
from orchestrator.report.references.records import Number, published

GIB = 1024**3
LARGE = {
    "size": ("large",),
    "context_length": (512,),
    "batch_size": (4,),
    "precision": ("fp32", "tf32"),
    "pass": ("train_step",),
}
ATTENTION = {
    "attention": ("naive",),
    "d_head": (64,),
    "context_length": (8192,),
    "batch_size": (8,),
    "precision": ("fp32",),
}


def number(value: float, phase: str = "step", params: Any = LARGE, **changes: Any) -> Number:
    plain = Number(
        "w", "t", "T", "timings", "train_step", "h100", 2025, params, {}, "duration", phase, "mean", "", Decimal(str(value)), "s"
    )  # fmt: skip
    return replace(plain, **changes)


def doubts(one: Number, *others: Number) -> str:
    return " ".join(computed_doubts(one, (one, *others)))


def test_what_a_time_implies_is_of_the_closed_form() -> None:
    flops = 3 * forward_flops(SIZES[2025]["large"], 4, 512)
    assert least_flops(number(1.0)) == flops
    assert implied_tflops(number(0.5)) == pytest.approx(flops / 0.5 / 1e12)
    assert least_flops(number(1.0, "forward")) == flops // 3
    assert least_flops(number(1.0, "backward")) == 2 * flops // 3


@pytest.mark.parametrize("axis", ["size", "context_length", "batch_size"])
def test_nothing_is_implied_of_a_cell_that_is_not_named(axis: str) -> None:
    left_open = {name: values for name, values in LARGE.items() if name != axis}
    assert implied_tflops(number(0.001, params=left_open)) is None
    assert doubts(number(0.001, params=left_open)) == ""


def test_the_least_of_the_possible_passes_counts() -> None:
    assert least_flops(
        number(1.0, params={**LARGE, "pass": ("forward", "train_step")})
    ) == least_flops(number(1.0, "forward"))


def test_faster_than_fp32_can_be_is_tf32() -> None:
    """The H100 has 67 TFLOP/s in fp32 and 494.5 in tf32; the step has 12.3 TFLOP."""
    assert doubts(number(0.4438)) == ""
    assert "67 TFLOP/s in fp32: it is tf32, or was not waited for" in doubts(number(0.1628))
    assert "More than 90% of the 67 TFLOP/s" in doubts(number(0.1900))
    assert "or is narrower than it says" in doubts(number(0.0100))
    assert doubts(number(0.1628, params={**LARGE, "precision": ("bf16",)})) == ""
    assert doubts(number(0.1628, device="macbook-air")) == ""  # of which no peak is known


def test_attention_cannot_outrun_the_memory() -> None:
    """Four squares of 8 × 8192² × 4 bytes at 3350 GB/s: 2.56 ms."""
    fast, slow = (
        number(ms, "forward", ATTENTION, unit="ms", task="attention") for ms in (2.5, 2.6)
    )
    assert "at 3350 GB/s: it was not waited for, or attention is fused" in doubts(fast)
    assert "GB/s" not in doubts(slow)
    unsaid = number(0.25, "forward", ATTENTION, task="attention", over=100, or_unit="ms")
    assert "Taken as ms" in doubts(unsaid)
    assert "Taken as ms" not in doubts(replace(unsaid, value=Decimal("2.6")))


def test_a_negative_time() -> None:
    assert "less than nothing" in doubts(number(-0.001))
    assert "less than nothing" not in doubts(number(0.0, statistic="sd"))


def test_a_scatter_larger_than_its_mean() -> None:
    mean = number(0.5)
    assert "deviation exceeds" in doubts(mean, replace(mean, statistic="sd", value=Decimal("0.6")))
    assert "deviation exceeds" not in doubts(
        mean, replace(mean, statistic="sd", value=Decimal("0.4"))
    )
    assert "deviation exceeds" not in doubts(
        mean, replace(mean, statistic="sd", value=Decimal("0.6"), row=1)
    )


def test_a_whole_and_its_parts() -> None:
    forward, backward = number(0.2111, "forward"), number(0.4222, "backward")
    assert (
        doubts(number(0.6334), forward, backward) == ""
    )  # by the last digit, which is rounded three times
    assert "do not add up" in doubts(number(0.6343), forward, backward)
    assert "Shorter than its own forward pass" in doubts(number(0.19), number(0.2, "forward"))


def test_memory_has_a_lower_and_an_upper_bound() -> None:
    """AdamW's step holds its parameters four times."""
    whole = 16 * parameter_count(SIZES[2025]["large"]) / GIB
    enough, little = (number(whole + more, "", metric="peak", unit="GiB") for more in (0.1, -0.1))
    assert doubts(enough) == ""
    assert "Less memory than parameters" in doubts(little)
    assert doubts(replace(little, params={**LARGE, "pass": ("forward", "train_step")})) == ""
    assert "More memory than the H100 80 GB has" in doubts(
        number(80.5, "", metric="peak", unit="GiB")
    )


def test_memory_that_falls_with_the_length() -> None:
    def held(length: int, gib: float) -> Number:
        return number(
            gib,
            "forward",
            {**ATTENTION, "context_length": (length,)},
            metric="held",
            unit="GiB",
            task="attention",
        )

    assert "More memory than a longer context" in doubts(held(256, 0.164), held(1024, 0.144))
    assert doubts(held(1024, 0.144), held(256, 0.164)) == ""


def test_two_tables_about_one_cell() -> None:
    other = number(0.8, table="other", title="Other")
    assert "`Other` of the same write-up" in doubts(number(0.5), other)
    assert doubts(number(0.7), other) == ""
    assert doubts(number(0.5), replace(other, writeup="another")) == ""
    assert (
        doubts(number(0.5), replace(other, params={**LARGE, "warmup_steps": (0,)})) == ""
    )  # cold, which is no contradiction


def found(writeup: str, table: str, sentence: str) -> list[Number]:
    numbers = [one for one in published() if (one.writeup, one.table) == (writeup, table)]
    return [one for one in numbers if any(sentence in doubt for doubt in computed_doubts(one))]


def test_compiled_with_float32_on_the_h100_is_tf32() -> None:
    flagged = found("yyin-dev", "training-compiled", "it is tf32, or was not waited for")
    assert {one.variant for one in flagged} == {"with float32"}
    assert {(one.one("size"), one.one("context_length")) for one in flagged} >= {
        ("2.7B", 512),
        ("xl", 512),
        ("2.7B", 256),
    }


def test_float32_on_the_rtx_pro_6000_is_tf32() -> None:
    assert len(found("assignment report", "attention", "126 TFLOP/s in fp32: it is tf32")) == 13
    assert [
        one.one("size")
        for one in found("assignment report", "timings-compiled", "126 TFLOP/s in fp32: it is tf32")
    ] == ["2.7B"]
    (near,) = found("assignment report", "timings", "TFLOP/s")
    assert (near.phase, near.one("size")) == ("forward", "2.7B")


def test_a_backward_pass_by_subtraction() -> None:
    (impossible,) = found("assignment report", "timings-compiled", "narrower than it says")
    assert (impossible.phase, impossible.one("size")) == ("backward", "medium")
    (negative,) = found("assignment report", "timings-no-warm-up", "less than nothing")
    assert (negative.phase, negative.one("size")) == ("backward", "small")
    (shorter,) = found(
        "assignment report", "timings-no-warm-up", "Shorter than its own forward pass"
    )
    assert shorter.phase == "step"


def test_the_unit_that_a_write_up_does_not_say_is_not_ms() -> None:
    assert len(found("yyin-dev", "attention", "Taken as ms, the time would be less")) == 12
    assert not found("yyin-dev", "attention", "The time is less than")


def test_what_is_within_the_limits_is_not_doubted() -> None:
    """The eager timings of the H100, and the plain fp32 of a GPU without a name."""
    assert not [
        one
        for one in published()
        if one.table == "training-compiled"
        and one.one("compile") == "eager"
        and computed_doubts(one)
    ]
    assert not found("answer.md", "timings", "TFLOP/s")
