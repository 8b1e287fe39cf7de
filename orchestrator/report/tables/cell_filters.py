"""Filters that choose the cells of a table: functions from a frame of cells to some of its rows."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

CellFilter = Callable[[pd.DataFrame], pd.DataFrame]


def of_task(name: str) -> CellFilter:
    """Return a filter for the cells of one task."""
    return lambda cells: cells[cells["task"] == name] if "task" in cells else cells


def varying(name: str, axis: str) -> CellFilter:
    """Return a filter for the cells of a task, if they have at least two values of an axis."""

    def choose(cells: pd.DataFrame) -> pd.DataFrame:
        return differing(of_task(name)(cells), axis)

    return choose


def differing(cells: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Return the cells that have the axis, or none if all of them have the same value."""
    if axis not in cells:
        return cells.iloc[:0]
    known = cells[cells[axis].notna()]
    return known if known[axis].nunique() > 1 else known.iloc[:0]


def both(first: CellFilter, second: CellFilter) -> CellFilter:
    """Return a filter that applies two filters."""
    return lambda cells: second(first(cells))


def with_baseline(axis: str, baseline: str, modes: tuple[str, ...]) -> CellFilter:
    """Return a filter for training cells that are compared with a baseline.

    The baseline has no values in the axes `modes`: eager cells have no `compile_mode`. A copy of it
    is therefore added for each combination of modes. Without a baseline no cell is chosen.
    """

    def choose(cells: pd.DataFrame) -> pd.DataFrame:
        own = varying("train_step", axis)(cells)
        if own.empty:
            return own
        is_baseline = own[axis] == baseline
        if not is_baseline.any():
            return own.iloc[:0]
        present = [mode for mode in modes if mode in own]
        combinations = own.loc[~is_baseline, present].drop_duplicates()
        if combinations.empty or not present:
            return own
        copies = own[is_baseline].drop(columns=present).merge(combinations, how="cross")
        return pd.concat([copies, own[~is_baseline]], ignore_index=True)

    return choose


def having(*columns: str) -> CellFilter:
    """Return a filter for the cells that have a value in at least one of these columns."""

    def choose(cells: pd.DataFrame) -> pd.DataFrame:
        present = [column for column in columns if column in cells]
        return cells[cells[present].notna().any(axis=1)] if present else cells.iloc[:0]

    return choose


def marked(column: str) -> CellFilter:
    """Return a filter for the cells in which a column is true. Null counts as false."""

    def choose(cells: pd.DataFrame) -> pd.DataFrame:
        if column not in cells:
            return cells.iloc[:0]
        return cells[cells[column].fillna(False).astype(bool)]

    return choose
