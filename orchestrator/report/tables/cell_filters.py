"""Which cells a table is about: functions from a frame of cells to some of its rows."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

Selection = Callable[[pd.DataFrame], pd.DataFrame]


def of_task(name: str) -> Selection:
    return lambda cells: cells[cells["task"] == name] if "task" in cells else cells


def varying(name: str, axis: str) -> Selection:
    """The cells of a task, if at least two values of an axis are among them."""

    def choose(cells: pd.DataFrame) -> pd.DataFrame:
        own = of_task(name)(cells)
        if axis not in own:
            return own.iloc[:0]
        known = own[own[axis].notna()]
        return known if known[axis].nunique() > 1 else known.iloc[:0]

    return choose


def both(first: Selection, second: Selection) -> Selection:
    return lambda cells: second(first(cells))


def with_baseline(axis: str, baseline: str, modes: tuple[str, ...]) -> Selection:
    """The training cells of which `axis` varies; the baseline, which knows no `modes`, stands beside each of them. None where no
    cell is of the baseline.
    """

    def choose(cells: pd.DataFrame) -> pd.DataFrame:
        own = varying("train_step", axis)(cells)
        if not len(own) or not (own[axis] == baseline).any():
            return own.iloc[:0]
        known_modes = [mode for mode in modes if mode in own]
        modes_seen = own.loc[own[axis] != baseline, known_modes].drop_duplicates()
        if modes_seen.empty or not known_modes:
            return own
        baselines = (
            own[own[axis] == baseline].drop(columns=known_modes).merge(modes_seen, how="cross")
        )
        return pd.concat([baselines, own[own[axis] != baseline]], ignore_index=True)

    return choose


def having(*columns: str) -> Selection:
    """The cells that have a value in one of these columns."""

    def choose(cells: pd.DataFrame) -> pd.DataFrame:
        present = [column for column in columns if column in cells]
        return cells[cells[present].notna().any(axis=1)] if present else cells.iloc[:0]

    return choose


def marked(column: str) -> Selection:
    """The cells of which that is known to be true."""
    return lambda cells: (
        cells[cells[column].fillna(False).astype(bool)] if column in cells else cells.iloc[:0]
    )
