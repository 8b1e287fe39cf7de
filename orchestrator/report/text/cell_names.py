"""Cells as readers see them: their names and settings, and those of one chart, map or matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import (
    COMPILE_AXES,
    MAIN,
    NOTHING,
    RUN,
    Row,
    axis_text,
    has_value,
    is_null,
    ordered_values,
    ranks_of,
    ranks_text,
)
from orchestrator.analysis.results import Results
from orchestrator.common.text import KEY_NAME, short_names
from tasks.spec.parameters import TIMING_AXES

PASSES = {
    "train_step": "training step",
    "forward_backward": "forward and backward pass",
    "forward": "forward pass",
    "forward_grad": "forward pass with gradients",
}
COMPILED = {"blocks": "compiled", "model": "compiled whole"}
LENGTH = "context_length"
NAME = "model_name"  # column with the name of a cell's model, which charts and maps add
# Axes that name a model, and the word in front of their values.
NAMING = (("size", ""), ("model", ""), ("d_head", "head width "))
MODEL_ARGS = "model_args."
NAME_COLUMNS = (*dict(NAMING), "task", "device", "gpus", "processes", "parallel")
SCOPE_COLUMNS = (*NAME_COLUMNS, LENGTH, "precision", "compile", "pass")
# Axes whose values say of what they are.
_PLAIN = (NAME, "task", "precision", "compile", "pass", "collective", "ranks", "parallel")
_TITLES = {
    NAME: "model",
    "memory_limit_gib": "memory limit",
    "compile": "code",
    "size_mb": "size in MB",
}


def name_of(row: Row) -> str:
    """Return the name of a cell's model: its size, the model of the user, or the head width."""
    words = [str(row.get("task", "cell")).replace("_", " ")]
    named = [f"{prefix}{row[axis]}" for axis, prefix in NAMING if has_value(row, axis)]
    if named:
        # With the arguments of the user's model that a row has, such as `n_experts=8`.
        names = [name for name in row.keys() if str(name).startswith(MODEL_ARGS)]  # noqa: SIM118
        known = [name for name in names if has_value(row, name)]
        words = [named[0], *(f"{name.removeprefix(MODEL_ARGS)}={row[name]}" for name in known)]
    if ranks_of(row) > 1:
        words.append(f"on {ranks_text(row)}")
        words += [f"by {row['parallel']}"] if has_value(row, "parallel") else []
    return " ".join(words)


def names_of(cells: pd.DataFrame) -> pd.Series[Any]:
    """Return the name of each cell's model."""
    # By column: with `name_of` on each row, 10,000 names take six times as long.
    names = cells.get("task", pd.Series("", cells.index)).astype(object).str.replace("_", " ")
    for axis, prefix in reversed(NAMING):
        if axis in cells:
            names = names.mask(cells[axis].notna(), prefix + cells[axis].astype(str))
    return names


def ordered(axis: str, cells: pd.DataFrame) -> list[Any]:
    """Return the distinct values of an axis or of the names of models, in their order."""
    if axis != NAME:
        return ordered_values(axis, cells[axis])
    names = list(dict.fromkeys(names_of(cells)))
    for name, prefix in reversed(NAMING):
        if name in cells:
            own = [f"{prefix}{value}" for value in ordered_values(name, cells[name])]
            names = sorted(names, key=lambda one: own.index(one) if one in own else len(own))
    return names


def sort_by(cells: pd.DataFrame, axes: Sequence[str]) -> pd.DataFrame:
    """Return the cells in the order of the values of some axes or of the names of models."""
    ranks = pd.DataFrame({axis: cells[axis].map(ordered(axis, cells).index) for axis in axes})
    return cells.loc[ranks.sort_values(list(axes), kind="stable").index]


def fullest_context(cells: pd.DataFrame, column: str) -> Any:
    """Return the longest of the contexts in which a column has most values."""
    counts = cells.groupby(LENGTH)[column].nunique()
    return counts[counts == counts.max()].index.max()


def axis_title(axis: str) -> str:
    """Return the words for an axis; the key of a mapping as the user wrote it."""
    short = short_names([axis], KEY_NAME)[axis]
    return _TITLES.get(axis, axis.replace("_", " ")) if short == axis else short


def value_text(axis: str, value: object) -> str:
    """Return the value of an axis for a heading, such as `1,024`."""
    return f"{value:,}" if axis == LENGTH and not is_null(value) else axis_text(value)


def setting_text(axis: str, value: object) -> str:
    """Return the value of an axis for a caption, such as `no limit`, `compiled` or `width 64`."""
    if axis == "memory_limit_gib":
        return "no limit" if is_null(value) else f"limit {value:g} GiB"
    if axis in _PLAIN:
        return PASSES.get(str(value), COMPILED.get(str(value), str(value)))
    if axis == "size_mb":
        return f"{value:g} MB"
    if axis == "attention":
        return f"{axis_text(value)} attention"
    words = {LENGTH: "context", "batch_size": "batch"}.get(axis, axis_title(axis))
    return f"{words} {value_text(axis, value)}"


def scope_of(row: Row, others: Collection[str] = ()) -> str:
    """Return the settings of a cell that readers look for, such as `xl, context 512, bf16`.

    others: axes that are named too, where the cell has a value.
    """
    # The name of the cell has the arguments of its model.
    named = (*SCOPE_COLUMNS, NAME)
    more = [axis for axis in others if axis not in named and not axis.startswith(MODEL_ARGS)]
    axes = (LENGTH, *more, "precision", "compile", "pass")
    settings = [setting_text(axis, row[axis]) for axis in axes if has_value(row, axis)]
    return ", ".join([name_of(row), *settings])


def scopes_of(cells: pd.DataFrame, others: Collection[str] = ()) -> list[str]:
    """Return the settings of each cell that readers look for. others: see `scope_of`."""
    rows = cells.filter(items=list(dict.fromkeys((*SCOPE_COLUMNS, *others)))).to_dict("records")
    return [scope_of(row, others) for row in rows]


def cell_keys(results: Results) -> pd.Series[str]:
    """Return `RUN:ID` of each cell, which names it in the address of the page."""
    cells = results.cells["cell"].astype(str)
    if RUN in results.cells and results.cells[RUN].notna().any():
        return cells  # several runs: ids begin with the name of their run
    return f"{results.manifest.get('name', 'run')}:" + cells


_NAMED = ("pass", "precision", "compile", "batch_size", "attention", "memory_limit_gib")
# Axes that some cells do not have: their null is no other value.
_OF_STRATEGIES = ("bucket_mb", "bucket_view", "reshard", "wire", "nccl_algo")
_OPTIONAL = (*COMPILE_AXES, *TIMING_AXES, *_OF_STRATEGIES)
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
