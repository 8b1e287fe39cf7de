"""Names of cells for readers: the model, the settings that readers look for, and the link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import RUN, Row, has_value, ordered_values
from orchestrator.analysis.results import Results

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
NAME_COLUMNS = (*dict(NAMING), "task")
SCOPE_COLUMNS = (*NAME_COLUMNS, LENGTH, "precision", "compile", "pass")


def name_of(row: Row) -> str:
    """Return the name of a cell's model: its size, the model of the user, or the head width."""
    for axis, prefix in NAMING:
        if has_value(row, axis):
            return " ".join([f"{prefix}{row[axis]}", *_arguments(row)])
    return str(row.get("task", "cell")).replace("_", " ")


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


def scope_of(row: Row) -> str:
    """Return the settings of a cell that readers look for, such as `xl, context 512, bf16`."""
    parts = [name_of(row)]
    if has_value(row, LENGTH):
        parts.append(f"context {row[LENGTH]:,}")
    for axis in ("precision", "compile", "pass"):
        if has_value(row, axis):
            text = str(row[axis])
            parts.append(PASSES.get(text, COMPILED.get(text, text)))
    return ", ".join(parts)


def scopes_of(cells: pd.DataFrame) -> list[str]:
    """Return the settings of each cell that readers look for."""
    return list(map(scope_of, cells.filter(items=SCOPE_COLUMNS).to_dict("records")))


def cell_keys(results: Results) -> pd.Series[str]:
    """Return `RUN:ID` of each cell, which names it in the address of the page."""
    cells = results.cells["cell"].astype(str)
    if RUN in results.cells and results.cells[RUN].notna().any():
        return cells  # several runs: ids begin with the name of their run
    return f"{results.manifest.get('name', 'run')}:" + cells
