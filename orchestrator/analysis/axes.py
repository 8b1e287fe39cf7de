"""Which axes of a run vary, and the order of their values."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import pandas as pd

from tasks.spec.parameters import TIMING_AXES
from tasks.spec.registry import value_order

Row = Any  # a row of `cells`: its values by the names of their columns, as `layouts.each` or pandas gives it
GIB, MIB = 1024**3, 1024**2
NOTHING = "–"
ALWAYS_SHOWN = ("size", "d_head", "context_length")


class CellTable(Protocol):
    """Cells with the names of their axes, such as `Results`."""

    @property
    def cells(self) -> pd.DataFrame: ...
    @property
    def axes(self) -> tuple[str, ...]: ...


def is_null(value: Any) -> bool:
    """Return pd.isna(value) for a scalar, in a fraction of its time."""
    return value is None or value is pd.NA or bool(value != value)


def has_value(row: Row, column: str) -> bool:
    return not is_null(row.get(column))


def key_axes(results: CellTable, without: tuple[str, ...] = ()) -> list[str]:
    """The axes that tell the rows of a table apart: those that vary, after those that everybody
    looks for.
    """
    shown = [
        axis for axis in ALWAYS_SHOWN if axis in results.axes and results.cells[axis].notna().any()
    ]
    return [axis for axis in dict.fromkeys([*shown, *varying_axes(results)]) if axis not in without]


def varying_axes(results: CellTable) -> list[str]:
    """Those in which cells of the same task differ."""
    cells = results.cells
    tasks = cells["task"] if "task" in cells and cells["task"].nunique() > 1 else None
    return [
        axis
        for axis in results.axes
        if _varies_within_a_task(cells[axis], axis in TIMING_AXES, tasks)
    ]


def _varies_within_a_task(
    values: pd.Series[Any], without_null: bool, tasks: pd.Series[str] | None
) -> bool:
    """A task that does not have an axis does not make it vary; nor does a null that the axis
    `timing` tells.

    tasks: of each value, where there are several.
    """
    if values.nunique(dropna=without_null) < 2:
        return False
    return tasks is None or bool((values.groupby(tasks).nunique(dropna=without_null) > 1).any())


def ordered_values(axis: str, values: Any) -> list[Any]:
    known_order = value_order(axis)
    present = [value for value in pd.unique(values) if not pd.isna(value)]
    rank = {value: place for place, value in enumerate(known_order)}
    return sorted(present, key=lambda value: (rank.get(value, len(rank)), str(type(value)), value))


def sort_cells(cells: pd.DataFrame, axes: list[str]) -> pd.DataFrame:
    ranks = pd.DataFrame(index=cells.index)
    for axis in axes:
        ranks[axis] = places_in_order(axis, cells[axis])
    return cells.loc[ranks.sort_values(axes, kind="stable").index] if axes else cells


def places_in_order(axis: str, values: pd.Series[Any]) -> pd.Series[int]:
    """Of each value among all; what is null stands before them."""
    place = {value: rank for rank, value in enumerate(ordered_values(axis, values))}
    return values.map(place, na_action="ignore").fillna(-1).astype(int)


def axis_texts(row: Row, axes: list[str]) -> list[str]:
    return [axis_text(row[axis]) for axis in axes]


@lru_cache(maxsize=4096, typed=True)
def axis_text(value: Any) -> str:
    """The same text for the same value, which stands in many rows of many tables."""
    return NOTHING if is_null(value) else str(value)
