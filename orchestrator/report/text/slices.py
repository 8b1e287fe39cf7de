"""The cells of one chart, map or matrix: those that differ only in the axes that it shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import COMPILE_AXES, MAIN, NOTHING, RUN, axis_text, is_null
from orchestrator.analysis.results import Results
from orchestrator.report.text.cell_names import NAME, NAMING, names_of, ordered, setting_text
from tasks.spec.parameters import TIMING_AXES

_NAMED = ("pass", "precision", "compile", "batch_size", "attention", "memory_limit_gib")
# Axes that some cells do not have: their null is no other value.
_OPTIONAL = (
    *COMPILE_AXES,
    *TIMING_AXES,
    "bucket_mb",
    "bucket_view",
    "reshard",
    "wire",
    "nccl_algo",
)
# Axes that no map or chart shows: the name of a model stands for some, repetitions for others.
NOT_SHOWN = (*dict(NAMING), "seed", RUN)


def usual_value(axis: str, texts: Iterable[str] | Mapping[str, int]) -> str:
    """Return the value that a slice has of an axis: that of MAIN, or else the most common one.

    texts: the value of each cell, or how often each value occurs.
    """
    counts = Counter(texts)
    main = axis_text(MAIN[axis]) if axis in MAIN else ""
    return main if main in counts else counts.most_common(1)[0][0]


def choose_slice(
    cells: pd.DataFrame, axes: Sequence[str], shown: Collection[str]
) -> tuple[pd.DataFrame, str]:
    """Return cells that are equal in all axes but the shown ones, and what they share as a text."""
    is_shown = {*shown, *(axis for axis, _ in NAMING if NAME in shown)}
    others = [axis for axis in axes if axis not in is_shown and axis in cells]
    # Rows are chosen once: each choice copies several hundred columns.
    columns = list(dict.fromkeys((*shown, *others)))
    left = cells[columns].astype("string").fillna(NOTHING).reset_index(drop=True)
    sliced = []
    # The run before axes without a main value: others repeat some of its cells.
    for axis in sorted(others, key=lambda axis: (axis not in MAIN, axis != RUN)):
        is_open = axis in _OPTIONAL
        own = left[left[axis] != NOTHING] if is_open else left
        if own[axis].nunique() > 1:
            # Each combination of shown values counts once, however often it was measured.
            usual = usual_value(axis, own[[*shown, axis]].drop_duplicates()[axis])
            left = left[(left[axis] == usual) | (is_open & (left[axis] == NOTHING))]
            sliced.append(axis)
    left = left[~left.duplicated(list(shown), keep="last")]
    cells = cells.iloc[left.index]
    return cells, shared_settings(cells, is_shown, sliced) if len(cells) else ""


def main_cells(results: Results) -> tuple[pd.DataFrame, str]:
    """Return the cells of training steps, or else of attention, and the axis of rows for a grid."""
    cells = results.cells
    for task in ("train_step", "attention"):
        own = cells[cells["task"] == task] if "task" in cells else cells.iloc[:0]
        if len(own):
            varies = task == "attention" and own["attention"].nunique() > 1
            return own.assign(**{NAME: names_of(own)}), "attention" if varies else NAME
    return cells.iloc[:0], NAME


def shared_settings(
    cells: pd.DataFrame, shown: Collection[str], sliced: Collection[str] = ()
) -> str:
    """Return the settings that all cells share, such as `training step, eager, batch 4`.

    sliced: axes to name besides the usual ones, since other cells have other values.
    """
    parts = []
    for axis in dict.fromkeys((*_NAMED, *sliced)):
        if axis in shown or axis not in cells:
            continue
        values = cells[axis].dropna() if axis in _OPTIONAL else cells[axis]
        if values.nunique(dropna=False) == 1 and (axis in sliced or not is_null(values.iloc[0])):
            parts.append(setting_text(axis, values.iloc[0]))
    return ", ".join(parts)


def free_axes(cells: pd.DataFrame, axes: Iterable[str]) -> list[str]:
    """Return the axes that tell cells apart, without those that follow from the ones before."""
    free, group = [], pd.Series(0, cells.index)
    for axis in dict.fromkeys(axes):
        if axis not in cells or cells[axis].nunique(dropna=axis in _OPTIONAL) < 2:
            continue
        texts = cells[axis].astype("string")
        if texts.groupby(group).nunique(dropna=axis in _OPTIONAL).max() > 1:
            free.append(axis)
            group = texts.fillna(NOTHING).groupby([group, texts.fillna(NOTHING)]).ngroup()
    return free


def axis_values(axis: str, cells: pd.DataFrame) -> list[Any]:
    """Return the distinct values of an axis in their order; None first if a cell has no value."""
    return [None] * bool(cells[axis].isna().any()) + ordered(axis, cells)


def evenly(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` values, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]
