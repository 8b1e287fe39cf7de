"""Options of a training step, and pairs of cells that differ in one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pandas as pd

from orchestrator.analysis.axes import Row, axis_text, each, key_axes
from orchestrator.analysis.pairs import counterpart_among
from orchestrator.analysis.results import Results

# Each option, with its values in cells that do without it: the first of them is compared with.
WITHOUT: dict[str, tuple[object, ...]] = {
    "checkpointing": ("none",),
    "gradient_accumulation": (1,),
    "optimizer": ("course", "fused", "foreach", "loop"),
    "optimizer_step": ("after",),
    "loss": ("cross_entropy",),
    "lora": (None,),
}
OPTIMIZER_ARGS = "optimizer_args."
_SEQUENCES = "sequences_in_a_step"


def option_pairs(results: Results) -> Iterator[tuple[str, Row, Row]]:
    """Yield each option with a cell that uses it, and the cell that differs in this option alone."""
    axes = key_axes(results)
    for option in WITHOUT:
        if option not in axes:
            continue
        cells, others = _matched(results, axes, option)
        rows = list(each(cells, [*others, option]))
        baseline_of = counterpart_among(_baselines(rows, option), others)
        for row in rows:
            baseline = baseline_of(row)
            if baseline is not None and axis_text(row[option]) not in texts_without(option):
                yield option, row, baseline


def _matched(results: Results, axes: list[str], option: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the cells, and the axes in which a cell agrees with its baseline."""
    cells = results.cells
    others = [axis for axis in axes if axis != option]
    if option == "gradient_accumulation":
        # Micro-batches are compared with one batch of as many sequences.
        sequences = cells["batch_size"] * cells["gradient_accumulation"]
        cells = cells.assign(**{_SEQUENCES: sequences})
        others = [axis for axis in others if axis != "batch_size"] + [_SEQUENCES]
    if option == "optimizer":
        others = [axis for axis in others if not axis.startswith(OPTIMIZER_ARGS)]
    return cells, others


def texts_without(option: str) -> list[str]:
    """Return the texts of the values of cells that do without an option."""
    return list(map(axis_text, WITHOUT.get(option, ())))


def _baselines(rows: Iterable[Row], option: str) -> list[Row]:
    """Return the rows that do without an option, those with its first value first."""
    texts = texts_without(option)
    without = [row for row in rows if axis_text(row[option]) in texts]
    return sorted(without, key=lambda row: texts.index(axis_text(row[option])))
