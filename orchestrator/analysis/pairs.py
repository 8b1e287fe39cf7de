"""Pairs of cells that differ in one axis, with the ratio of their times and its interval.

The interval of a ratio comes from the ends of the intervals of both medians, so it is wide rather
than narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from orchestrator.analysis.axes import (
    COMPILE_AXES,
    NOTHING,
    Row,
    axis_texts,
    has_several_values,
)
from orchestrator.analysis.cpu_bound import BoundBy, bound_by
from orchestrator.analysis.results import Results

TIME, LOW, HIGH = "step_ms_median", "step_ms_ci_low", "step_ms_ci_high"
COVERAGE = "step_ms_coverage"
MIN_COVERAGE = 0.95  # fewer than six steps have no interval at 95 %
BASE = "_base"  # suffix of the columns of the baseline
_READ = (
    "cell", "task", TIME, LOW, HIGH, COVERAGE,
    "step_kernel_time_ms_median", "peak_allocated_bytes", "peak_rss_bytes",
)  # fmt: skip


def measured(results: Results, task: str, *columns: str) -> pd.DataFrame:
    """Return the cells of a task that have a number above 0 in each of the columns."""
    cells = results.cells
    if not {"task", *columns} <= set(cells):
        return cells.iloc[:0]
    # By column: a frame of all of them takes three times as long.
    is_measured = (cells["task"] == task).fillna(False).to_numpy(dtype=bool)
    for column in columns:
        numbers = pd.to_numeric(cells[column], errors="coerce")
        values = numbers.to_numpy(dtype="float64", na_value=np.nan)
        is_measured = is_measured & np.isfinite(values) & (values > 0)
    return select(cells, is_measured)


def preferring(cells: pd.DataFrame, preferred: Mapping[str, object]) -> pd.DataFrame:
    """Return the cells with each preferred value; a value that no cell has is ignored.

    A preferred None selects the cells without a value.
    """
    chosen = np.ones(len(cells), dtype=bool)
    for axis, value in preferred.items():
        if axis in cells:
            has_value = cells[axis].isna() if value is None else cells[axis] == value
            own = chosen & has_value.fillna(False).to_numpy(dtype=bool)
            chosen = own if own.any() else chosen
    return select(cells, chosen)


def select(cells: pd.DataFrame, mask: pd.Series[bool] | NDArray[np.bool_]) -> pd.DataFrame:
    """Return the cells of a mask; the frame itself if it has all of them.

    A copy of several hundred columns takes 10 ms, even of no cell.
    """
    if mask.all():
        return cells
    selected: pd.DataFrame = cells[mask] if mask.any() else cells.iloc[:0]
    return selected


def combinations(cells: pd.DataFrame, keys: Sequence[str]) -> pd.Series[int]:
    """Return a number for each cell, equal for cells that agree in all keys; null is a value."""
    # Of dozens of keys, a few vary.
    varying = [key for key in keys if has_several_values(cells[key])]
    if not varying:
        return pd.Series(0, cells.index)
    texts = cells[varying].astype("string").fillna(NOTHING)
    return texts.groupby(varying, sort=False).ngroup()


def counterpart_among(rows: Iterable[Row], axes: list[str]) -> Callable[[Row], Row | None]:
    """Return a function from a row to the first one of `rows` that agrees with it in these axes."""
    first: dict[tuple[str, ...], Row] = {}
    for row in rows:
        first.setdefault(tuple(axis_texts(row, axes)), row)
    return lambda row: first.get(tuple(axis_texts(row, axes)))


def pairs(
    cells: pd.DataFrame, axes: Sequence[str], axis: str, values: Sequence[str]
) -> pd.DataFrame:
    """Return the cells with one of the other values of an axis, each paired with that of the first.

    axes: in which both cells are equal. Columns of the counterpart end in `BASE`; `ratio`, `low`
    and `high` say how many times as fast the cell is as its counterpart, `coverage` the confidence
    of the less certain time; `is_cpu_bound` is true if a CPU limits one of the two.
    """
    if not _has_pair(cells, axis, values):
        return cells.iloc[:0].assign(ratio=0.0, low=0.0, high=0.0, coverage=1.0)
    # An eager cell has no way to compile, and with these axes it would be in no pair.
    without = COMPILE_AXES if axis == "compile" else ()
    compared = [name for name in axes if name not in without]
    keys = [name for name in compared if name != axis and name in cells]
    # Of several hundred columns only these are read. Joining all of them took a second.
    shown = cells.filter(items=list(dict.fromkeys((*compared, *_READ))))
    shown = shown.assign(bound=bound_by(cells), _key=combinations(cells, keys))
    base, *found = [shown[shown[axis] == value] for value in values]
    joined = [other.merge(base, on="_key", suffixes=("", BASE)) for other in found]
    return _with_ratios(pd.concat(joined, ignore_index=True)) if joined else cells.iloc[:0]


def _has_pair(cells: pd.DataFrame, axis: str, values: Sequence[str]) -> bool:
    """Return True if cells have times, one of them the first value of an axis and one another."""
    if axis not in cells or any(name not in cells for name in (TIME, LOW, HIGH)):
        return False
    base, *others = values
    found = set(cells[axis].dropna().unique())
    return base in found and not found.isdisjoint(others)


def _with_ratios(joined: pd.DataFrame) -> pd.DataFrame:
    """Return the pairs with the ratio of their times, its interval, and what limits them."""
    times = joined[[TIME, LOW, HIGH]].astype(float)
    base_times = joined[[TIME + BASE, LOW + BASE, HIGH + BASE]].astype(float)
    return joined.assign(
        ratio=base_times[TIME + BASE] / times[TIME],
        low=base_times[LOW + BASE] / times[HIGH],
        high=base_times[HIGH + BASE] / times[LOW],
        coverage=joined.filter(regex=f"^{COVERAGE}").astype(float).min(axis=1).fillna(1.0),
        is_cpu_bound=(joined[["bound", "bound" + BASE]] == BoundBy.CPU).any(axis=1),
    )


def is_clear(found: pd.DataFrame) -> pd.Series[bool]:
    """Return for each pair if the interval of its ratio has enough confidence and excludes 1."""
    return (found["coverage"] >= MIN_COVERAGE) & ((found["low"] > 1) | (found["high"] < 1))


def is_gpu_bound(found: pd.DataFrame) -> pd.Series[bool]:
    """Return for each pair if no CPU limits either of its cells.

    On a CPU the question does not arise, so these pairs count.
    """
    on_cpu = found["device"] == "cpu" if "device" in found else pd.Series(False, found.index)
    return ~found["is_cpu_bound"] | on_cpu
