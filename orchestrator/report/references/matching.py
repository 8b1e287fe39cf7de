"""Which cells of ours a published number is of.

What a write-up does not say is left open: every cell of ours that fits is then beside the number, and the table says what
was open. Whose hardware it was on is not compared: that is what the comparison is for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

from model.config import SIZES, VOCAB_SIZE, Dimensions
from orchestrator.analysis.axes import Row, has_value
from orchestrator.report.references.records import Number

WARM = 5  # steps of warm-up, from which on more of them change nothing
_NAMING = {  # by task, the axes without which a cell is not named
    "train_step": (
        "size",
        "context_length",
        "batch_size",
        "precision",
        "compile",
        "pass",
        "optimizer",
        "warmup_steps",
    ),
    "attention": (
        "d_head",
        "context_length",
        "batch_size",
        "precision",
        "compile",
        "attention",
        "causal",
        "projections",
    ),
    "accumulation": ("accumulator", "addend", "upcast", "value", "count"),
}
_SHAPE = (
    "size",
    "d_head",
    "context_length",
)  # without one of these a number is of no cell in particular
_NOT_COMPARED = ("measured_steps",)
_SAME_PHASE = {  # passes of which a phase is the same, whatever follows it
    "forward": {"forward_grad", "forward_backward", "train_step"},
    "backward": {"forward_backward", "train_step"},
}
_WITH_A_FORWARD = {"forward_backward", "train_step"}  # and with a graph for the backward pass
_SPELLED = ("d_model", "d_ff", "num_layers", "num_heads")


def matches(numbers: Iterable[Number], rows: Iterable[Row]) -> Iterator[tuple[Number, Row]]:
    """Each number with each cell of ours that it may be of."""
    by_length: dict[Any, list[Row]] = {}
    for row in rows:
        by_length.setdefault(
            (row["task"], row["context_length"] if has_value(row, "context_length") else None), []
        ).append(row)
    for number in numbers:
        length = number.one("context_length")
        for (task, own), candidates in by_length.items():
            if task == number.task and (length is None or own == length):
                yield from ((number, row) for row in candidates if fits(number, row))


def fits(number: Number, row: Row) -> bool:
    """Whether a cell of ours may be the one that a number is of.

    The course's sizes go with the course's vocabulary and, where nothing else is said, with its own attention.
    """
    if has_value(row, "vocab_size") and row["vocab_size"] != VOCAB_SIZE:
        return False
    if (
        number.task == "train_step"
        and "attention" not in number.params
        and has_value(row, "attention")
        and row["attention"] != "naive"
    ):
        return False
    compared = (axis for axis in number.params if axis not in _NOT_COMPARED)
    return all(_agrees(axis, number.params[axis], number, row) for axis in compared)


def is_first_forward(number: Number, row: Row) -> bool:
    """Whether a peak of a forward pass that keeps a graph is beside a cell of ours that goes on after it: its first step has the
    same until then, without gradients or a state of the optimizer.
    """
    return (
        number.metric == "peak"
        and number.one("pass") == "forward_grad"
        and row.get("pass") in _WITH_A_FORWARD
        and has_value(row, "first_forward_peak_allocated_bytes")
    )


def left_open(number: Number) -> str:
    """What the write-up does not say of a cell, or leaves between several; empty where it says all."""
    several = {
        axis: number.params.get(axis, ())
        for axis in _NAMING[number.task]
        if number.one(axis) is None
    }
    alike = _SAME_PHASE.get(number.phase, set())
    if alike:
        several.pop("optimizer", None)
    if set(several.get("pass", ("none",))) <= alike:
        several.pop("pass")
    words = [
        f"{axis} ({' or '.join(map(str, values))})" if values else axis
        for axis, values in several.items()
    ]
    said = (
        f"Not said, and whatever of ours fits stands beside it: {', '.join(words)}."
        if words
        else ""
    )
    return said if names_a_shape(number) else f"{said} Without a ratio: it may be of another shape."


def names_a_shape(number: Number) -> bool:
    """Whether size and length are said: else a ratio to a cell of ours would say nothing."""
    return all(number.one(axis) is not None for axis in _SHAPE if axis in _NAMING[number.task])


def _agrees(axis: str, allowed: tuple[Any, ...], number: Number, row: Row) -> bool:
    if axis == "size":
        return dimensions_of(row) in [SIZES[number.year][size] for size in allowed]
    if axis not in row:
        return True  # of a run from before that axis was one
    if axis == "warmup_steps" and has_value(row, "timing") and row["timing"] == "adaptive":
        return any(theirs >= WARM for theirs in allowed)  # it ends when steps are steady
    if not has_value(row, axis):
        return False
    ours = row[axis]
    if axis == "warmup_steps":
        return any(ours == theirs or min(ours, theirs) >= WARM for theirs in allowed)
    if axis == "pass" and is_first_forward(number, row):
        return True
    if axis == "pass" and ours in (alike := _SAME_PHASE.get(number.phase, set())):
        return bool(alike & set(allowed))
    return any(
        math.isclose(ours, theirs) if isinstance(theirs, float) else ours == theirs
        for theirs in allowed
    )


def dimensions_of(row: Row) -> Dimensions | None:
    """Of a model that is ours; by its size or spelled out."""
    if has_value(row, "size"):
        year = int(row["year"]) if has_value(row, "year") else min(SIZES)
        return SIZES[year].get(row["size"])
    if all(has_value(row, name) for name in _SPELLED):
        return Dimensions(*(int(row[name]) for name in _SPELLED))
    return None


def siblings(
    rows: Iterable[Row], axes: Iterable[str], axis: str, base: str, without: tuple[str, ...] = ()
) -> dict[str, Row]:
    """By the id of a cell, the one that differs from it in `axis` alone, where it has `base`; `without`: axes of no matter."""
    others = [name for name in axes if name != axis and name not in without]
    listed = list(rows)
    bases = {_key(row, others): row for row in listed if has_value(row, axis) and row[axis] == base}
    return {row["cell"]: bases[_key(row, others)] for row in listed if _key(row, others) in bases}


def _key(row: Row, axes: Iterable[str]) -> tuple[str, ...]:
    return (row["task"], *("" if pd.isna(row[axis]) else str(row[axis]) for axis in axes))
