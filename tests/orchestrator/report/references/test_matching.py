"""Tests of which cells a published number is compared with."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from orchestrator.report.references.matching import matches, unstated
from orchestrator.report.references.records import ReferenceNumber

STATED: dict[str, tuple[Any, ...]] = {
    "size": ("xl",),
    "context_length": (512,),
    "batch_size": (4,),
    "precision": ("fp32", "tf32"),
    "compile": ("eager",),
    "pass": ("forward_backward",),
}
OURS = {
    "cell": "a",
    "task": "train_step",
    "size": "xl",
    "year": 2025,
    "context_length": 512,
    "batch_size": 4,
    "precision": "fp32",
    "compile": "eager",
    "pass": "forward_backward",
    "optimizer": "course",
    "warmup_steps": 5,
    "vocab_size": 10_000,
    "d_model": None,
}
NUMBER = ReferenceNumber(
    writeup="w",
    table="t",
    title="T",
    task="train_step",
    device="h100",
    year=2025,
    axes=STATED,
    labels={},
    metric="duration",
    phase="step",
    statistic="mean",
    variant="",
    value=Decimal("1.5"),
    unit="s",
)


def fits(number: ReferenceNumber, row: dict[str, Any]) -> bool:
    return list(matches([number], [row])) == [(number, row)]


def stated(**changes: Any) -> ReferenceNumber:
    axes = {axis: values for axis, values in {**STATED, **changes}.items() if values is not None}
    return replace(NUMBER, axes=axes)


@pytest.mark.parametrize(
    ("changes", "fit"),
    [
        ({}, True),
        ({"precision": "tf32"}, True),
        ({"precision": "bf16"}, False),
        ({"context_length": 256}, False),
        ({"context_length": None}, False),
        ({"size": "large"}, False),
        ({"year": 2026}, False),  # another xl
        ({"size": "2.7B"}, False),
        ({"size": None, "d_model": 1600, "d_ff": 6400, "num_layers": 48, "num_heads": 25}, True),
        ({"size": None, "model": "mine:Model"}, False),
        ({"vocab_size": 50_000}, False),
        ({"vocab_size": 128_256}, False),  # that of another model
        ({"compile": "blocks"}, False),
        ({"pass": "train_step"}, False),
        ({"optimizer": "fused"}, True),  # not stated
        ({"attention": "naive"}, True),
        ({"attention": "flash"}, False),  # an unstated attention is the course's
    ],
    ids=str,
)
def test_a_cell_fits_if_it_agrees_with_every_stated_axis(
    changes: dict[str, Any], fit: bool
) -> None:
    assert fits(NUMBER, {**OURS, **changes}) is fit


def test_unstated_axes_fit_any_value_and_are_named() -> None:
    number = stated(batch_size=None, context_length=None)
    assert fits(number, {**OURS, "batch_size": 32, "context_length": 128})
    assert unstated(number) == (
        "Not stated: context_length, batch_size, precision (fp32 or tf32), optimizer, warmup_steps. "
        "No ratio, because shapes may differ."
    )
    assert unstated(NUMBER) == "Not stated: precision (fp32 or tf32), optimizer, warmup_steps."


@pytest.mark.parametrize(
    ("theirs", "ours", "fit"),
    [(5, 5, True), (10, 5, True), (0, 0, True), (0, 5, False), (5, 1, False)],
)
def test_numbers_of_warm_up_steps_from_five_on_are_equivalent(
    theirs: int, ours: int, fit: bool
) -> None:
    assert fits(stated(warmup_steps=(theirs,)), {**OURS, "warmup_steps": ours}) is fit


def test_adaptive_timing_counts_as_warm() -> None:
    adaptive = {**OURS, "timing": "adaptive", "warmup_steps": None, "measured_steps": None}
    assert fits(stated(warmup_steps=(5,), measured_steps=(10,)), adaptive)
    assert not fits(stated(warmup_steps=(0,)), adaptive)


def test_a_phase_of_a_training_step_is_that_of_forward_and_backward() -> None:
    forward = replace(NUMBER, phase="forward")
    assert fits(forward, {**OURS, "pass": "train_step"})
    assert "pass" not in unstated(
        replace(forward, axes={**STATED, "pass": ("forward_backward", "train_step")})
    )
    assert not fits(forward, {**OURS, "pass": "forward"})  # inference
    either = replace(forward, axes={**STATED, "pass": ("forward", "forward_grad")})
    assert fits(either, {**OURS, "pass": "forward"})
    assert fits(either, {**OURS, "pass": "train_step"})
    assert "pass (forward or forward_grad)" in unstated(either)
    inference = replace(forward, axes={**STATED, "pass": ("forward",)})
    assert not fits(inference, {**OURS, "pass": "train_step"})


def test_a_run_without_the_axis_fits() -> None:
    assert fits(stated(attention=("naive",)), OURS)
    assert not fits(stated(attention=("naive",)), {**OURS, "attention": "flash"})


def test_the_number_of_measured_steps_is_not_compared() -> None:
    assert fits(stated(measured_steps=(5,)), {**OURS, "measured_steps": 10})


def test_each_number_is_compared_with_every_cell_of_its_task() -> None:
    rows = [
        OURS,
        {**OURS, "cell": "b", "precision": "tf32"},
        {**OURS, "cell": "c", "task": "attention"},
    ]
    numbers = [NUMBER, replace(NUMBER, phase="optimizer")]
    found = [(number.phase, row["cell"]) for number, row in matches(numbers, rows)]
    assert found == [("step", "a"), ("step", "b"), ("optimizer", "a"), ("optimizer", "b")]


TWO = {**OURS, "device": "cuda", "gpus": 2, "parallel": "naive", "pass": "train_step"}
OF_TWO = {"gpus": (2,), "parallel": ("naive",), "pass": ("train_step",)}


@pytest.mark.parametrize(
    ("axes", "row", "fit"),
    [
        (OF_TWO, TWO, True),
        (OF_TWO, {**TWO, "gpus": 4}, False),
        (OF_TWO, {**TWO, "parallel": "ddp"}, False),
        (OF_TWO, {**TWO, "gpus": 1}, False),
        (OF_TWO, {**OURS, "device": "cuda", "pass": "train_step"}, False),  # older than the axis
        (OF_TWO, {**TWO, "device": "cpu", "gpus": None, "processes": 2}, False),
        # A number of one GPU is not that of several.
        ({"pass": ("train_step",)}, TWO, False),
        ({"pass": ("train_step",)}, {**TWO, "gpus": 1, "parallel": "none"}, True),
    ],
    ids=str,
)
def test_a_number_of_several_gpus_belongs_to_cells_with_as_many(
    axes: dict[str, Any], row: dict[str, Any], fit: bool
) -> None:
    assert fits(stated(**axes), row) is fit


@pytest.mark.parametrize(
    ("theirs", "ours", "fit"),
    [(1048.576, 1000.0, True), (1073.741824, 1000.0, True), (1000.0, 100.0, False)],
)
def test_a_gigabyte_of_2_30_bytes_is_one_of_10_9(theirs: float, ours: float, fit: bool) -> None:
    axes = {"collective": ("all_reduce",), "size_mb": (theirs,), "gpus": (2,)}
    number = replace(NUMBER, task="collectives", axes=axes, metric="call")
    row = {"task": "collectives", "device": "cuda", "gpus": 2, "collective": "all_reduce"}
    assert fits(number, {**row, "size_mb": ours}) is fit
    assert unstated(number) == "Not stated: dtype, call."


def test_a_strategy_that_is_left_open_is_named() -> None:
    of_some = stated(**OF_TWO, optimizer=("course",), warmup_steps=(5,), precision=("fp32",))
    assert unstated(of_some) == ""
    either = replace(of_some, axes={**of_some.axes, "parallel": ("zero1", "zero1_torch")})
    assert unstated(either) == "Not stated: parallel (zero1 or zero1_torch)."
