"""Filters that choose the cells of a table: functions from a frame of cells to some of its rows."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from orchestrator.analysis.axes import COMPILE_AXES
from orchestrator.analysis.pairs import select

CellFilter = Callable[[pd.DataFrame], pd.DataFrame]


def of_task(*names: str) -> CellFilter:
    """Return a filter for the cells of one or several tasks."""
    return lambda cells: select(cells, cells["task"].isin(names)) if "task" in cells else cells


def varying(axis: str, *tasks: str) -> CellFilter:
    """Return a filter for the cells of tasks with an axis, if it has at least two values."""

    def choose(cells: pd.DataFrame) -> pd.DataFrame:
        known = both(of_task(*tasks), having(axis))(cells)
        return known if known.empty or known[axis].nunique() > 1 else known.iloc[:0]

    return choose


def both(first: CellFilter, second: CellFilter) -> CellFilter:
    """Return a filter that applies two filters."""
    return lambda cells: second(first(cells))


def having(*columns: str) -> CellFilter:
    """Return a filter for the cells that have a value in at least one of these columns."""
    return lambda cells: select(cells, cells.filter(items=columns).notna().any(axis=1))


def compiled_with_eager(cells: pd.DataFrame) -> pd.DataFrame:
    """Return compiled cells, with a copy of the eager cells for each way of compiling."""
    cells = having("compile")(of_task("train_step", "attention")(cells))
    if cells.empty:
        return cells
    is_eager = cells["compile"] == "eager"
    # Eager cells have no compile_mode and no compile_cache. Without copies they would differ from
    # the compiled cells in these axes too, and would be compared with none of them.
    modes = [axis for axis in COMPILE_AXES if axis in cells]
    combinations = cells.loc[~is_eager, modes].drop_duplicates()
    if combinations.empty or not modes:
        return cells if len(combinations) else cells.iloc[:0]
    copies = cells[is_eager].drop(columns=modes).merge(combinations, how="cross")
    return pd.concat([copies, cells[~is_eager]], ignore_index=True)
