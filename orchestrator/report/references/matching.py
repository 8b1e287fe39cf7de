"""Which cells of a run a published number may belong to.

An axis that the write-up does not state is left open: the number is compared with every cell
that fits, and a note names the open axes. The hardware is not compared, because it is what the
comparison is about.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from model.config import SIZES, VOCAB_SIZE, VOCABULARIES, Dimensions
from orchestrator.analysis.axes import Row, has_value, is_null, ranks_of
from orchestrator.report.references.records import DIMENSIONS, ReferenceNumber

# From 5 warm-up steps on, further ones did not change the times of a step on an H200.
WARM = 5
# The axes that identify a cell of each task. The table names those that a write-up leaves open.
_IDENTIFYING = {
    "train_step": (
        "size", "context_length", "batch_size", "precision", "compile", "pass", "optimizer",
        "warmup_steps",
    ),
    "attention": (
        "d_head", "context_length", "batch_size", "precision", "compile", "attention", "causal",
        "projections",
    ),
    "collectives": ("collective", "size_mb", "dtype", "call"),
    "accumulation": ("accumulator", "addend", "upcast", "value", "count"),
}  # fmt: skip
# A ratio is meaningless unless both cells have the same shape.
_SHAPE = ("size", "d_head", "context_length", "size_mb")
# Sizes of messages are powers of 2 in one place and of 10 in the other: 1 GB by 7 %.
_SAME_MESSAGE = 1.08
_RANKS = {"gpus": "cuda", "processes": "cpu"}  # the devices that have these axes
_NOT_COMPARED = {"measured_steps"}
# The passes in which a phase is the same, whatever runs after it.
_SAME_PHASE = {
    "forward": {"forward_grad", "forward_backward", "train_step"},
    "backward": {"forward_backward", "train_step"},
}
_CONTINUES_AFTER_FORWARD = {"forward_backward", "train_step"}


def matches(
    numbers: Iterable[ReferenceNumber], rows: Iterable[Row]
) -> Iterator[tuple[ReferenceNumber, Row]]:
    """Yield each number with each of our cells that it may belong to."""
    rows_of_task: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        rows_of_task[row["task"]].append(row)
    # Indices of rows by condition: thousands of numbers have a few dozen conditions in common.
    agreeing: dict[tuple[object, ...], set[int]] = {}
    for number in numbers:
        candidates = rows_of_task[number.task]
        fitting = set(range(len(candidates)))
        for axis in set(number.axes) - _NOT_COMPARED:
            condition: tuple[object, ...] = (number.task, axis, number.axes[axis], number.year)
            if axis == "pass":
                condition += (number.phase, number.metric)
            if condition not in agreeing:
                agreeing[condition] = {
                    index for index, row in enumerate(candidates) if _agrees(axis, number, row)
                }
            fitting &= agreeing[condition]
        for index in sorted(fitting):
            if _has_usual_setting(number, candidates[index]):
                yield number, candidates[index]


def _has_usual_setting(number: ReferenceNumber, row: Row) -> bool:
    """Return True if the cell has the vocabulary of its model and, unless the number states others,
    the course's attention and a single rank.
    """
    if ranks_of(row) > 1 and not _RANKS.keys() & number.axes.keys():
        return False
    vocabulary = VOCABULARIES.get(str(row.get("size")), VOCAB_SIZE)
    if has_value(row, "vocab_size") and row["vocab_size"] != vocabulary:
        return False
    has_other_attention = has_value(row, "attention") and row["attention"] != "naive"
    states_none = number.task == "train_step" and "attention" not in number.axes
    return not (states_none and has_other_attention)


def _agrees(axis: str, number: ReferenceNumber, row: Row) -> bool:
    """Return True if the cell has one of the values that the number allows for an axis."""
    allowed, ours = number.axes[axis], row.get(axis)
    if axis == "size":
        return dimensions_of(row) in [SIZES[number.year][size] for size in allowed]
    if axis in _RANKS:
        return row["device"] == _RANKS[axis] and ranks_of(row) in allowed
    if axis not in row:
        return True  # the run is older than the axis
    if axis == "warmup_steps" and has_value(row, "timing") and row["timing"] == "adaptive":
        ours = WARM  # adaptive timing warms up until the steps are steady
    if is_null(ours):
        return False
    if axis == "warmup_steps":
        return min(ours, WARM) in [min(theirs, WARM) for theirs in allowed]
    if axis == "pass":
        same = _SAME_PHASE.get(number.phase, set())
        passes = same.union(allowed) if same & set(allowed) else allowed
        return ours in passes or is_first_forward(number, row)
    if axis == "size_mb":
        return any(max(ours / mb, mb / ours) < _SAME_MESSAGE for mb in allowed)
    return any(
        math.isclose(ours, one) if isinstance(one, float) else ours == one for one in allowed
    )


def is_first_forward(number: ReferenceNumber, row: Row) -> bool:
    """Return True if a peak of a forward pass is compared with the first step of a longer one of
    ours.

    Until its backward pass, the first step has neither gradients nor optimizer state, so that
    its peak is that of a forward pass alone.
    """
    return (
        number.metric == "peak"
        and number.only("pass") == "forward_grad"
        and row.get("pass") in _CONTINUES_AFTER_FORWARD
        and has_value(row, "first_forward_peak_allocated_bytes")
    )


def states_shape(number: ReferenceNumber) -> bool:
    """Return True if the write-up states size and length."""
    needed = [axis for axis in _SHAPE if axis in _IDENTIFYING[number.task]]
    return all(number.only(axis) is not None for axis in needed)


def unstated(number: ReferenceNumber) -> str:
    """Return a sentence with the axes that the write-up leaves open; empty without any."""
    axes = _IDENTIFYING[number.task]
    if number.task == "train_step" and "gpus" in number.axes:
        axes = (*axes, "parallel")
    unclear = [axis for axis in axes if number.only(axis) is None]
    same = _SAME_PHASE.get(number.phase, set())
    if same and "optimizer" in unclear:
        unclear.remove("optimizer")  # it runs after the phase
    if "pass" in unclear and set(number.axes.get("pass", ("unknown",))) <= same:
        unclear.remove("pass")
    words = []
    for axis in unclear:
        values = " or ".join(map(str, number.axes.get(axis, ())))
        words.append(f"{axis} ({values})" if values else axis)
    sentence = f"Not stated: {', '.join(words)}." if words else ""
    return sentence if states_shape(number) else f"{sentence} No ratio, because shapes may differ."


def dimensions_of(row: Row) -> Dimensions | None:
    """Return the dimensions of a cell's model, or None if the model is not one of ours."""
    is_tied = has_value(row, "tie_embeddings") and row["tie_embeddings"]
    if is_tied or has_value(row, "num_kv_heads"):
        return None  # no published table has these
    if has_value(row, "size"):
        year = int(row["year"]) if has_value(row, "year") else min(SIZES)
        return SIZES[year].get(row["size"])
    if all(has_value(row, name) for name in DIMENSIONS):
        d_model, d_ff, num_layers, num_heads = (int(row[name]) for name in DIMENSIONS)
        return Dimensions(d_model, d_ff, num_layers, num_heads)
    return None
