"""Find the cheapest changes of a cell that make it fit: single options first, then pairs.

Only changes that train the same are tried. Each is predicted; none is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from pydantic import ValidationError

from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.planning.prediction_requests import Predict, verdict_of
from tasks.prediction.records import Prediction
from tasks.spec.axes import Values
from tasks.spec.cell import Cell
from tasks.spec.registry import make_cell

MOST_PREDICTIONS = 20
# The cheapest first: what needs less memory at no cost, then what computes more.
_OPTIONS: tuple[Values, ...] = (
    {"attention": "sdpa"},
    {"optimizer_step": "in_backward"},
    {"loss": "chunked"},
    {"compile": "blocks"},
    {"checkpointing": "selective"},
    {"checkpointing": "blocks"},
)
_MOST_MICRO_BATCHES = 16


@dataclass(frozen=True)
class Change:
    """A cell with other options. more_flops: additional FLOPs, as a share of those of the cell.

    more_flops is None if it is unknown, as of own kernels and of a model without a count.
    """

    values: Values
    cell: Cell
    prediction: Prediction
    verdict: str | None
    more_flops: float | None

    @property
    def peak_bytes(self) -> float:
        """The predicted peak of the allocator; infinite if it is unknown."""
        peak = self.prediction.peak_bytes()
        return float("inf") if peak is None else peak

    @property
    def cost(self) -> tuple[float, float]:
        """The order of changes: few FLOPs, then a small peak."""
        return self.more_flops or 0.0, self.peak_bytes


def find_changes(cell: Cell, gpu: GpuModel | None, predict: Predict) -> list[Change]:
    """Return the changes that surely fit, the cheapest first; or else the one that comes nearest.

    At most MOST_PREDICTIONS are predicted. The list is empty if no option of the cell can change.
    """
    before = _flops(predict([cell])[cell.id])
    singles = _predicted(cell, before, list(_single_options(cell)), gpu, predict)
    if fitting := [one for one in singles if one.verdict == "fits"]:
        return sorted(fitting, key=lambda one: one.cost)
    smaller = sorted(singles, key=lambda one: one.peak_bytes)
    pairs = sorted(combinations(smaller, 2), key=lambda pair: sum(one.peak_bytes for one in pair))
    joined = [
        {**one.values, **other.values}
        for one, other in pairs
        if not one.values.keys() & other.values.keys()
    ]
    most = MOST_PREDICTIONS - 1 - len(singles)
    doubles = _predicted(cell, before, joined[:most], gpu, predict)
    if fitting := [one for one in doubles if one.verdict == "fits"]:
        return sorted(fitting, key=lambda one: one.cost)
    nearest = sorted([*singles, *doubles], key=lambda one: one.peak_bytes)
    return nearest[:1]


def _single_options(cell: Cell) -> Iterator[Values]:
    """Yield the options that a cell does not have yet, and micro-batches of the same tokens."""
    values = cell.params.values()
    yield from (
        change
        for change in _OPTIONS
        if all(name in values and values[name] != value for name, value in change.items())
    )
    sequences, count = values.get("batch_size", 1), values.get("gradient_accumulation")
    more = 2
    while count is not None and sequences % more == 0 and more <= _MOST_MICRO_BATCHES:
        yield {"batch_size": sequences // more, "gradient_accumulation": count * more}
        more *= 2


def _predicted(
    cell: Cell,
    flops: float | None,
    changes: Iterable[Values],
    gpu: GpuModel | None,
    predict: Predict,
) -> list[Change]:
    """Return the changes that there are, with their predictions. flops: of the cell."""
    cells = []
    for change in changes:
        try:
            cells.append((change, make_cell(cell.task, {**cell.params.non_default, **change})))
        except ValidationError:  # the task refuses it, such as checkpoints in a forward pass
            continue
    predictions = predict([one for _, one in cells])
    found = []
    for change, one in cells:
        prediction = predictions[one.id]
        if prediction.how:
            verdict = verdict_of(one, prediction, gpu)
            changed = _flops(prediction)
            more = changed / flops - 1 if changed and flops else None
            found.append(Change(change, one, prediction, verdict, more))
    return found


def _flops(prediction: Prediction) -> float | None:
    """Return the FLOPs of a step, with those that the backward pass computes again."""
    counts = [
        sample.value
        for sample in prediction.samples
        if sample.metric in ("flops", "recomputed_flops")
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
