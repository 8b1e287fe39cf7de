"""The cells of one chart: those that differ only in the axes that it shows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import MAIN, NOTHING, RUN, has_value
from orchestrator.report.text.cell_names import COMPILED, NAME, NAMING, PASSES
from orchestrator.report.text.pairs import preferring
from tasks.spec.parameters import TIMING_AXES

_NAMING = tuple(axis for axis, _ in NAMING)
_UNNAMED = ("seed", "pass", *TIMING_AXES)  # that a caption does not mention, or names otherwise
_NAMED = (
    ("precision", "{}"),
    ("compile", "{}"),
    ("batch_size", "batch {}"),
    ("attention", "{} attention"),
    ("memory_limit_gib", "limit {:g} GiB"),
)
_NUMBERS = ("context_length", "batch_size", "num_layers", "d_model", "d_head")


def choose_slice(
    cells: pd.DataFrame, axes: Sequence[str], shown: Collection[str]
) -> tuple[pd.DataFrame, str]:
    """Return cells that are equal in all axes but the shown ones, and what they share as a text.

    Of each other axis the usual value is taken, or the one with most cells.
    """
    is_shown = {*shown, *(_NAMING if NAME in shown else ())}
    others = [axis for axis in axes if axis not in is_shown and axis in cells]
    others.sort(key=lambda axis: axis != RUN)  # stable: the run is chosen first
    cells = preferring(cells, {axis: MAIN[axis] for axis in MAIN if axis in others})
    for axis in others:
        texts = cells[axis].astype("string").fillna(NOTHING)
        if texts.nunique() > 1:
            own = cells[list(shown)].astype("string").assign(chosen=texts).drop_duplicates()
            cells = cells[texts == own["chosen"].value_counts().index[0]]
    repeated = cells[list(shown)].astype("string").fillna(NOTHING).duplicated(keep="last")
    cells = cells[~repeated]
    return cells, shared_settings(cells, is_shown) if len(cells) else ""


def shared_settings(cells: pd.DataFrame, shown: Collection[str]) -> str:
    """Return the settings that all cells share, such as `training step, eager, batch 4`."""
    row = cells.iloc[0]
    parts = []
    if has_value(row, "pass") and "pass" not in shown:
        parts.append(PASSES.get(str(row["pass"]), str(row["pass"])))
    for axis, form in _NAMED:
        is_shared = axis in cells and axis not in shown and cells[axis].nunique(dropna=False) == 1
        if is_shared and has_value(row, axis):
            parts.append(form.format(COMPILED.get(row[axis], row[axis])))
    return ", ".join(parts)


def horizontal_axis(cells: pd.DataFrame) -> str:
    """Return the axis with numbers that varies most prominently; empty if none varies."""
    for axis in _NUMBERS:
        if axis in cells and cells[axis].nunique() > 1:
            return axis
    return ""


def panel_axis(cells: pd.DataFrame, axes: Sequence[str], taken: Collection[str]) -> str:
    """Return the axis whose values are panels: the model, or else another axis that varies."""
    if cells[NAME].nunique() > 1:
        return NAME
    skipped = {*taken, *_NAMING, *_UNNAMED, *MAIN, RUN, "precision"}
    for axis in axes:
        if axis not in skipped and axis in cells and cells[axis].astype("string").nunique() > 1:
            return axis
    return NAME


def evenly(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` values, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]
