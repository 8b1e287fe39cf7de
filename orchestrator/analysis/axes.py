"""Axes of a run that vary, and the order of their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import pandas as pd

from tasks.spec.parameters import TIMING_AXES
from tasks.spec.registry import value_order

# A row of `cells`: values by column, as `layouts.each` or pandas gives it.
Row = Any
NOTHING = "–"
RUN = "run"  # the axis that distinguishes the runs of a collection
# Readers look for these even where they do not vary.
ALWAYS_SHOWN = ("size", "d_head", "context_length")
# The settings with which a report begins: whole steps as the course trains. Other cells repeat them
# in other settings.
MAIN: Mapping[str, object] = {
    "pass": "train_step",
    "compile": "eager",
    "memory_limit_gib": None,
    "attention": "naive",
}
# Ways to compile, which an eager cell does not have.
# Axes in which a cell on one GPU differs from one that does the same on several.
RANK_AXES = (
    "gpus", "processes", "parallel", "batch", "bucket_mb", "bucket_view", "reshard", "wire",
    "nccl_algo",
)  # fmt: skip
COMPILE_AXES = ("compile_mode", "compile_cache")

_FEW_CELLS = 64
_FOLLOWING = {*TIMING_AXES, "attention"}


class CellTable(Protocol):
    """Cells with the names of their axes, such as `Results`."""

    def __hash__(self) -> int: ...
    @property
    def cells(self) -> pd.DataFrame: ...
    @property
    def axes(self) -> tuple[str, ...]: ...


def is_null(value: object) -> bool:
    """Return pd.isna(value) for a scalar, in a fraction of its time."""
    return value is None or value is pd.NA or bool(value != value)


def has_value(row: Row, column: str) -> bool:
    """Return True if the row has the column and a value in it."""
    return not is_null(row.get(column))


def number_in(row: Row, column: str) -> float | None:
    """Return the number in a column of the row, or None without the column or a value in it."""
    return float(row[column]) if has_value(row, column) else None


def ranks_of(row: Row) -> int:
    """Return the number of ranks of a cell: of its GPUs, or of its processes on the CPU."""
    axis = {"cuda": "gpus", "cpu": "processes"}.get(str(row.get("device")), "")
    return int(row[axis]) if axis and has_value(row, axis) else 1


def ranks_text(row: Row) -> str:
    """Return the ranks of a cell in words, such as `2 GPUs`."""
    return f"{ranks_of(row)} {'GPUs' if row.get('device') == 'cuda' else 'processes'}"


def key_axes(results: CellTable, without: tuple[str, ...] = ()) -> list[str]:
    """Return the axes that identify a row of a table: ALWAYS_SHOWN, then those that vary."""
    keys = []
    for axis in ALWAYS_SHOWN:
        if axis in results.axes and results.cells[axis].notna().any():
            keys.append(axis)
    keys += varying_axes(results)
    return [axis for axis in dict.fromkeys(keys) if axis not in without]


@lru_cache(maxsize=1)  # a layout asks for the order of the cells, and for the keys of the rows
def varying_axes(results: CellTable) -> tuple[str, ...]:
    """Return the axes in which cells of the same task differ."""
    cells = results.cells
    # Cells without a column for the task count as cells of one task.
    tasks = cells["task"] if "task" in cells else pd.Series("", index=cells.index)
    varying = []
    for axis in results.axes:
        if not has_several_values(cells[axis]):
            continue
        # A task without an axis does not make it vary, nor does a null that follows from `timing`
        # or from a model that computes its attention itself.
        by_task = cells[axis].groupby(tasks).nunique(dropna=axis in _FOLLOWING)
        if (by_task > 1).any():
            varying.append(axis)
    return tuple(varying)


def has_several_values(values: pd.Series) -> bool:
    """Return True if a column has at least two values; null is one."""
    # Dozens of columns are asked, and of a few cells pandas takes ten times as long. In a column of
    # objects, None and NaN would be two.
    if len(values) <= _FEW_CELLS and values.dtype != object:
        return len(set(values.tolist())) > 1
    return values.nunique(dropna=False) > 1


def ordered_values(axis: str, values: pd.Series) -> list[Any]:
    """Return the distinct values, in the declared order of the axis, others sorted behind them."""
    rank = _indices(value_order(axis))
    # Values of one axis may be of different types, which cannot be compared.
    return sorted(
        values.dropna().unique(),
        key=lambda value: (rank.get(value, len(rank)), str(type(value)), value),
    )


def value_ranks(axis: str, values: pd.Series) -> list[int]:
    """Return the index of each value in the order of the axis; null comes first."""
    ranks = _indices(ordered_values(axis, values))
    return [ranks.get(value, -1) for value in values.tolist()]


def _indices(values: Sequence[object]) -> dict[object, int]:
    return {value: index for index, value in enumerate(values)}


def sort_cells(cells: pd.DataFrame, axes: list[str]) -> pd.DataFrame:
    """Return the cells in the order of the values of their axes."""
    return cells.iloc[sorted_positions(cells, axes)]


def sorted_positions(cells: pd.DataFrame, axes: list[str]) -> list[int]:
    """Return the positions of the rows in the order of the values of their axes."""
    # In pandas, a copy of all columns or a frame of ranks would take most of the time.
    ranks = list(zip(*(value_ranks(axis, cells[axis]) for axis in axes), strict=True))
    return sorted(range(len(cells)), key=ranks.__getitem__ if axes else None)


def axis_texts(row: Row, axes: list[str]) -> list[str]:
    """Return the text of each axis of a row."""
    return [axis_text(row[axis]) for axis in axes]


# The same values stand in many rows of many tables.
@lru_cache(maxsize=4096, typed=True)
def axis_text(value: object) -> str:
    """Return the text of one value of an axis."""
    return NOTHING if is_null(value) else str(value)


class _ColumnLists(dict[str, list[Any]]):
    """The columns of a frame as lists."""

    def __init__(self, cells: pd.DataFrame) -> None:
        self.names = dict.fromkeys(map(str, cells))
        self._cells = cells

    def __missing__(self, name: str) -> list[Any]:
        # A table uses a few of several hundred columns, and `to_dict("records")` converts all.
        self[name] = self._cells[name].tolist()
        return self[name]


class _FrameRow:
    """One row of a frame as a mapping of column names to values."""

    __slots__ = ("_columns", "_index")

    def __init__(self, columns: _ColumnLists, index: int) -> None:
        self._columns = columns
        self._index = index

    def __getitem__(self, name: str) -> Any:
        return self._columns[name][self._index]

    def __contains__(self, name: object) -> bool:
        return name in self._columns.names

    def keys(self) -> Iterable[str]:
        return self._columns.names

    def get(self, name: str, default: Any = None) -> Any:
        return self._columns[name][self._index] if name in self._columns.names else default


def each(cells: pd.DataFrame, axes: Sequence[str] = ()) -> Iterator[Row]:
    """Return the rows of a frame as mappings, in the order of the values of these axes."""
    columns = _ColumnLists(cells)
    return (_FrameRow(columns, index) for index in sorted_positions(cells, list(axes)))
