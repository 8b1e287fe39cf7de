"""Which cells of ours a number is of: the same in all that is said, whatever in what is not."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pandas as pd
import pytest

from orchestrator.report.references.matching import fits, left_open, matches, siblings
from orchestrator.report.references.records import Number

SAID: dict[str, tuple[Any, ...]] = {
    "size": ("xl",), "context_length": (512,), "batch_size": (4,), "precision": ("fp32", "tf32"), "compile": ("eager",),
    "pass": ("forward_backward",),
}  # fmt: skip
OURS = {
    "cell": "a", "task": "train_step", "size": "xl", "year": 2025, "context_length": 512, "batch_size": 4, "precision": "fp32",
    "compile": "eager", "pass": "forward_backward", "optimizer": "course", "warmup_steps": 5, "vocab_size": 10_000,
    "d_model": None,
}  # fmt: skip
NUMBER = Number(
    "w", "t", "T", "timings", "train_step", "h100", 2025, SAID, {}, "duration", "step", "mean", "", Decimal("1.5"), "s"
)  # fmt: skip


def said(**changes: Any) -> Number:
    params = {axis: values for axis, values in {**SAID, **changes}.items() if values is not None}
    return replace(NUMBER, params=params)


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
        ({"compile": "blocks"}, False),
        ({"pass": "train_step"}, False),
        ({"optimizer": "fused"}, True),  # not said
        ({"attention": "naive"}, True),
        ({"attention": "flash"}, False),  # what is not said is the course's own
    ],
    ids=str,
)
def test_a_cell_is_the_same_in_all_that_is_said(changes: dict[str, Any], fit: bool) -> None:
    assert fits(NUMBER, {**OURS, **changes}) is fit


def test_what_is_not_said_is_left_open_and_named() -> None:
    unsaid = said(batch_size=None, context_length=None)
    assert fits(unsaid, {**OURS, "batch_size": 32, "context_length": 128})
    assert (
        "context_length, batch_size, precision (fp32 or tf32), optimizer, warmup_steps. Without a ratio"
        in left_open(unsaid)
    )
    assert "Without a ratio" not in left_open(NUMBER)
    assert "batch_size" not in left_open(NUMBER)


@pytest.mark.parametrize(
    ("theirs", "ours", "fit"),
    [(5, 5, True), (10, 5, True), (0, 0, True), (0, 5, False), (5, 1, False)],
)
def test_warm_is_warm(theirs: int, ours: int, fit: bool) -> None:
    assert fits(said(warmup_steps=(theirs,)), {**OURS, "warmup_steps": ours}) is fit


def test_warm_by_rule_is_warm() -> None:
    adaptive = {**OURS, "timing": "adaptive", "warmup_steps": None, "measured_steps": None}
    assert fits(said(warmup_steps=(5,), measured_steps=(10,)), adaptive)
    assert not fits(said(warmup_steps=(0,)), adaptive)


def test_phases_of_a_training_step_are_those_of_both_passes() -> None:
    forward = replace(NUMBER, phase="forward")
    assert fits(forward, {**OURS, "pass": "train_step"})
    assert "pass" not in left_open(
        replace(forward, params={**SAID, "pass": ("forward_backward", "train_step")})
    )
    assert not fits(forward, {**OURS, "pass": "forward"})  # of inference
    either = replace(forward, params={**SAID, "pass": ("forward", "forward_grad")})
    assert fits(either, {**OURS, "pass": "forward"})
    assert fits(either, {**OURS, "pass": "train_step"})
    assert "pass (forward or forward_grad)" in left_open(either)
    assert not fits(
        replace(forward, params={**SAID, "pass": ("forward",)}), {**OURS, "pass": "train_step"}
    )


def test_a_run_from_before_an_axis_fits() -> None:
    assert fits(said(attention=("naive",)), OURS)
    assert not fits(said(attention=("naive",)), {**OURS, "attention": "flash"})


def test_how_many_steps_were_measured_is_no_matter() -> None:
    assert fits(said(measured_steps=(5,)), {**OURS, "measured_steps": 10})


def test_each_number_meets_each_cell_of_its_task() -> None:
    rows = [
        OURS,
        {**OURS, "cell": "b", "precision": "tf32"},
        {**OURS, "cell": "c", "task": "attention"},
    ]
    found = [
        (number.phase, row["cell"])
        for number, row in matches([NUMBER, replace(NUMBER, phase="optimizer")], rows)
    ]
    assert found == [("step", "a"), ("step", "b"), ("optimizer", "a"), ("optimizer", "b")]


def test_a_sibling_differs_in_one_axis_alone() -> None:
    axes = ("precision", "compile", "compile_mode", "context_length")
    eager = {
        "cell": "e",
        "task": "t",
        "precision": "fp32",
        "compile": "eager",
        "compile_mode": None,
        "context_length": 128,
    }
    compiled = {**eager, "cell": "m", "compile": "model", "compile_mode": "default"}
    longer = {**compiled, "cell": "l", "context_length": 256}
    found = siblings([eager, compiled, longer], axes, "compile", "eager", ("compile_mode",))
    assert {cell: base["cell"] for cell, base in found.items()} == {"e": "e", "m": "e"}


def test_a_cell_of_a_task_without_the_axis_is_no_base() -> None:
    """As beside sums and norms, which are not compiled."""
    axes = ("compile", "context_length")
    rows = [{"cell": "n", "task": "norms", "compile": pd.NA, "context_length": pd.NA}]
    eager = {"cell": "e", "task": "t", "compile": "eager", "context_length": 128}
    assert set(
        siblings(
            [*rows, eager, {**eager, "cell": "m", "compile": "model"}], axes, "compile", "eager"
        )
    ) == {"e", "m"}
