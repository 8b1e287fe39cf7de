"""Predicted memory of one rank of several, compared with what was measured.

    python benchmarks/prediction_ranks.py
    python benchmarks/prediction_ranks.py --only fsdp2

Needs no GPU. Predicts the peaks of the first steps of the cells in prediction_ranks.toml, which also
has the measured ones, and prints a row for each step. For steps of DDP there may be two predictions,
because NCCL may hold what was sent: the row has the nearer one, and which it is. Exit code 1 if a
steady peak, or the highest one, differs by more than 1%, or that of the first or second step by more
than 3%.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tabulate import tabulate

from tasks.prediction.allocator import CachingAllocator, cublas_workspace_bytes
from tasks.prediction.predictor import STEADY_STEPS, track
from tasks.prediction.replay import Replay, Trace, held_by_nccl, highest, replay
from tasks.prediction.resizing import trace_by_layers
from tasks.training.parameters import TrainStepParams

MEASURED = Path(__file__).with_suffix(".toml")
GIB = 1024**3
BOUNDS = {"first": 0.03, "second": 0.03, "steady": 0.01, "highest": 0.01}
# Axes whose values need no name, and those that most cells share.
NAMED = ("size", "model", "parallel")
COMMON = ("device", "precision", "optimizer", "context_length", "batch", "batch_size")
HELD, RELEASED, BETWEEN = "held by NCCL", "released", "between both"


@dataclass(frozen=True)
class Cell:
    """A cell with its measured peaks in GiB, by step. differs: it was another program."""

    source: str
    values: dict[str, Any]
    peaks_gib: dict[str, float]
    differs: bool


@dataclass(frozen=True)
class Comparison:
    """A predicted and a measured peak in GiB. note: which of two predictions it is."""

    cell: Cell
    step: str
    predicted_gib: float
    measured_gib: float
    note: str

    @property
    def ratio(self) -> float:
        return self.predicted_gib / self.measured_gib

    @property
    def is_within(self) -> bool:
        """True if the prediction is as exact as it should be, or the program was another one."""
        is_either = self.cell.differs or self.note == BETWEEN
        return is_either or abs(self.ratio - 1) <= BOUNDS[self.step]


def main() -> None:
    """Predict, compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="STRATEGY", help="cells of one strategy  [all]")
    options = parser.parse_args()
    found: list[Comparison] = []
    has_transformers = find_spec("transformers") is not None
    for cell in measured_cells():
        if "model" in cell.values and not has_transformers:
            print(f"not compared: {cell.values['model']}, which needs transformers")
        elif options.only in (None, cell.values.get("parallel")):
            found += compare(cell)
    print(tabulate(map(row_of, found), headers="keys", floatfmt=("", "", "", ".2f", ".2f", ".3f")))
    if not all(one.is_within for one in found):
        sys.exit(1)


def measured_cells() -> Iterator[Cell]:
    """Yield the cells that were measured."""
    content = tomllib.loads(MEASURED.read_text())
    for source in content["source"]:
        for values in source["cells"]:
            peaks = {step: values.pop(step) for step in BOUNDS if step in values}
            whole = {**content["defaults"], **source.get("defaults", {}), **values}
            if "model" in whole:
                del whole["size"]
            yield Cell(source["name"], whole, peaks, source.get("differs", False))


def compare(cell: Cell) -> Iterator[Comparison]:
    """Yield a comparison for each step that was measured."""
    held, released = predicted(TrainStepParams.model_validate(cell.values))
    for step, measured in cell.peaks_gib.items():
        choices = [(held[step], "")]
        if held[step] != released[step]:
            choices = [(held[step], HELD), (released[step], RELEASED)]
        peak, note = min(choices, key=lambda choice: abs(choice[0] - measured))
        if released[step] < measured < held[step]:
            note = BETWEEN
        yield Comparison(cell, step, peak, measured, note)


def predicted(params: TrainStepParams) -> tuple[dict[str, float], dict[str, float]]:
    """Return the peaks in GiB by step, if NCCL holds the first step's buckets and if it does not."""
    gc.collect()
    trace_whole = partial(track, workspace_bytes=cublas_workspace_bytes(9.0))
    trace = trace_by_layers(params, trace_whole) or trace_whole(params)
    return peaks_of(held_by_nccl(trace)), peaks_of(trace)


def peaks_of(trace: Trace) -> dict[str, float]:
    """Return the predicted peaks in GiB by step; the highest one of all is the step `highest`."""
    once, peaks = (replay(trace, CachingAllocator(), steps) for steps in (1, STEADY_STEPS))
    second = highest_bytes(once, "second" if trace.spans["second"] else "steady")
    found = {"first": highest_bytes(peaks, "first"), "second": second}
    found["steady"] = highest_bytes(peaks, "steady")
    found["highest"] = max(found.values())
    return {step: nbytes / GIB for step, nbytes in found.items()}


def highest_bytes(peaks: Replay, step: Any) -> int:
    """Return the highest peak of a step."""
    return highest(peaks, step)[1].allocated


def row_of(one: Comparison) -> dict[str, object]:
    """Return a row of the table."""
    values = one.cell.values
    words = [
        str(value) if name in NAMED else f"{name}={value}"
        for name, value in values.items()
        if name not in COMMON
    ]
    verdict = "" if one.is_within else "BEYOND THE BOUND"
    return {
        "source": one.cell.source,
        "cell": " ".join(words),
        "step": one.step,
        "predicted": one.predicted_gib,
        "measured": one.measured_gib,
        "ratio": one.ratio,
        "note": ", ".join(filter(None, (one.note, verdict))),
    }


if __name__ == "__main__":
    main()
