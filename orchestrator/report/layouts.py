"""The shapes a table can have. Each turns cells into a header and rows of text; `tables` says which and of what."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pandas as pd

from orchestrator.report.frames import Results
from orchestrator.report.values import NOTHING, Row, Value, absent, known

Header = list[str]
Rows = list[list[str]]

ALWAYS_SHOWN = ("size", "context_length")
ORDERED: dict[str, list[Any]] = {
    "size": ["tiny", "mini", "small", "medium", "large", "xl", "2.7B", "10B"],
    "precision": ["fp32", "tf32", "bf16", "fp16", "bf16_pure"],
    "compile": ["eager", "blocks", "model"],
    "pass": ["forward", "forward_grad", "forward_backward", "train_step"],
    "optimizer": ["course", "foreach", "fused"],
}


class Layout(Protocol):
    def lay_out(self, results: Results) -> tuple[Header, Rows]: ...


def key_axes(results: Results, without: tuple[str, ...] = ()) -> list[str]:
    """The axes that tell the rows of a table apart: those that vary, after those that everybody looks for."""
    cells = results.cells
    varying = [axis for axis in results.axes if cells[axis].nunique(dropna=False) > 1]
    shown = [axis for axis in ALWAYS_SHOWN if axis in results.axes and cells[axis].notna().any()]
    return [axis for axis in dict.fromkeys([*shown, *varying]) if axis not in without]


def ordered_values(axis: str, values: Any) -> list[Any]:
    known_order = ORDERED.get(axis, [])
    present = [value for value in pd.unique(values) if not pd.isna(value)]
    rank = {value: place for place, value in enumerate(known_order)}
    return sorted(present, key=lambda value: (rank.get(value, len(rank)), str(type(value)), value))


def sort_cells(cells: pd.DataFrame, axes: list[str]) -> pd.DataFrame:
    ranks = pd.DataFrame(index=cells.index)
    for axis in axes:
        place = {value: rank for rank, value in enumerate(ordered_values(axis, cells[axis]))}
        ranks[axis] = cells[axis].map(place, na_action="ignore").fillna(-1).astype(int)
    return cells.loc[ranks.sort_values(axes, kind="stable").index] if axes else cells


def axis_texts(row: Row, axes: list[str]) -> list[str]:
    return [NOTHING if pd.isna(row[axis]) else str(row[axis]) for axis in axes]


def each(cells: pd.DataFrame) -> Iterator[Row]:
    return iter(cells.to_dict("records"))


@dataclass(frozen=True)
class Listing:
    """One row a cell."""

    columns: tuple[tuple[str, Value], ...]

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results)
        cells = sort_cells(results.cells, axes)
        rows = [[*axis_texts(row, axes), *(value(row) for _, value in self.columns)] for row in each(cells)]
        return [*axes, *(title for title, _ in self.columns)], rows


@dataclass(frozen=True)
class ByPhase:
    """One row a cell and phase."""

    phases: tuple[tuple[str, str], ...]  # as in the names of the columns, and for people
    columns: tuple[tuple[str, Callable[[str], Value]], ...]

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results)
        rows: Rows = []
        for row in each(sort_cells(results.cells, axes)):
            phases = [phase for phase in self.phases if known(row, f"{phase[0]}_ms_median")]
            for phase, name in phases or [(NOTHING, NOTHING)]:
                rows.append([*axis_texts(row, axes), name, *(value(phase)(row) for _, value in self.columns)])
        return [*axes, "phase", *(title for title, _ in self.columns)], rows


@dataclass(frozen=True)
class Across:
    """One row a combination of the other axes, one group of columns a value of `axis`, ratios to its baseline.

    columns: what is shown for each value. speed_up: the column whose ratio baseline / value is appended, if any.
    extra: shown for each value but the baseline.
    """

    axis: str
    columns: tuple[tuple[str, Value], ...]
    speed_up: str | None = None
    extra: tuple[tuple[str, Value], ...] = ()

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results, without=(self.axis,))
        values = ordered_values(self.axis, results.cells[self.axis])
        header = [*axes, *(title for value in values for title in self._titles(value, values[0]))]
        rows: Rows = []
        for _, group in _groups(sort_cells(results.cells, axes), axes):
            by_value = {row[self.axis]: row for row in each(group)}
            if len(by_value) < 2:
                continue
            baseline = by_value.get(values[0])
            texts = [text for value in values for text in self._texts(by_value.get(value), baseline, value == values[0])]
            rows.append([*axis_texts(next(iter(by_value.values())), axes), *texts])
        return header, rows

    def _titles(self, value: Any, baseline: Any) -> Iterator[str]:
        for title, _ in self.columns:
            yield f"{value} {title}".strip()
        if value != baseline:
            if self.speed_up:
                yield f"{value} speed-up"
            for title, _ in self.extra:
                yield f"{value} {title}"

    def _texts(self, row: Row | None, baseline: Row | None, is_baseline: bool) -> Iterator[str]:
        for _, show in self.columns:
            yield show(row) if row else NOTHING
        if is_baseline:
            return
        if self.speed_up:
            yield _speed_up(row, baseline, self.speed_up)
        for _, show in self.extra:
            yield show(row) if row else NOTHING


@dataclass(frozen=True)
class Matrix:
    """Sizes and the other axes down, context length across."""

    value: Value
    across: str = "context_length"

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results, without=(self.across,))
        values = ordered_values(self.across, results.cells[self.across])
        rows: Rows = []
        for _, group in _groups(sort_cells(results.cells, axes), axes):
            by_value = {row[self.across]: row for row in each(group)}
            texts = [self.value(by_value[value]) if value in by_value else NOTHING for value in values]
            rows.append([*axis_texts(next(iter(by_value.values())), axes), *texts])
        return [*axes, *(str(value) for value in values)], rows


@dataclass(frozen=True)
class Growth:
    """How columns grow along an axis: the value, and the local exponent log(y2/y1) / log(x2/x1) from the row above."""

    along: str
    columns: tuple[tuple[str, str, Value], ...]  # title, column, how to print it

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results, without=(self.along,))
        rows: Rows = []
        for _, group in _groups(sort_cells(results.cells, [*axes, self.along]), axes):
            previous: Row | None = None
            if len(group) < 2:
                continue
            for row in each(group):
                texts = [t for _, column, show in self.columns for t in (show(row), self._exponent(row, previous, column))]
                rows.append([*axis_texts(row, axes), str(row[self.along]), *texts])
                previous = row
        titles = [title for name, _, _ in self.columns for title in (name, f"exponent of {name}")]
        return [*axes, self.along, *titles], rows

    def _exponent(self, row: Row, previous: Row | None, column: str) -> str:
        if previous is None or not (known(row, column) and known(previous, column)):
            return NOTHING
        growth = math.log(row[column] / previous[column])
        return f"{growth / math.log(row[self.along] / previous[self.along]):.2f}"


def _speed_up(row: Row | None, baseline: Row | None, column: str) -> str:
    if not row or not baseline:
        return NOTHING
    if not known(row, column) or not known(baseline, column):
        return absent(row) if not known(row, column) else NOTHING
    return f"{baseline[column] / row[column]:.2f}×"


def _groups(cells: pd.DataFrame, axes: list[str]) -> Iterator[tuple[Any, pd.DataFrame]]:
    if not axes:
        yield (), cells
        return
    yield from cells.groupby(axes, sort=False, dropna=False, observed=True)
