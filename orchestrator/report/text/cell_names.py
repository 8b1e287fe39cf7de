"""Names of cells for readers: the model, the settings that readers look for, and the link."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import (
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
    for axis, prefix in NAMING:
        if has_value(row, axis):
            return " ".join([f"{prefix}{row[axis]}", *_arguments(row)]) + _ranks_text(row)
    return str(row.get("task", "cell")).replace("_", " ") + _ranks_text(row)


def _ranks_text(row: Row) -> str:
    """Return how several ranks share the work of a cell, empty for one."""
    if ranks_of(row) == 1:
        return ""
    way = f" by {row['parallel']}" if has_value(row, "parallel") else ""
    return f" on {ranks_text(row)}{way}"


def _arguments(row: Row) -> list[str]:
    """Return the arguments of the user's model, such as `n_experts=8`, that a row has."""
    names = [name for name in row.keys() if str(name).startswith(MODEL_ARGS)]  # noqa: SIM118
    return [
        f"{name.removeprefix(MODEL_ARGS)}={row[name]}" for name in names if has_value(row, name)
    ]


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
    parts = [name_of(row)]
    # The name of the cell has the arguments of its model.
    named = (*SCOPE_COLUMNS, NAME)
    more = [axis for axis in others if axis not in named and not axis.startswith(MODEL_ARGS)]
    for axis in (LENGTH, *more, "precision", "compile", "pass"):
        if has_value(row, axis):
            parts.append(setting_text(axis, row[axis]))
    return ", ".join(parts)


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
