"""The shapes of tables of allocations: like those of cells, over the rows of what lived at the
peak, or when memory ran out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from orchestrator.analysis.axes import (
    GIB,
    NOTHING,
    Row,
    axis_texts,
    has_value,
    key_axes,
    sort_cells,
)
from orchestrator.analysis.results import Results
from orchestrator.report.tables.layouts import Header, Rows, each

MIB = 1024**2
ROLES = (
    "parameters",
    "buffers",
    "inputs",
    "gradients",
    "optimizer state",
    "autocast weight copies",
    "activations",
    "temporary",
    "workspace",
    "slack",
    "unlabelled",
)
_BY_PART = ("activations", "temporary", "unlabelled")
_OTHER_PARTS = "other parts"
_SMALL_PART = 0.005  # of the peak: such are taken together
_PREDICTED_AS = {"buffers": "inputs"}
_PREDICTED_APART = {"activations": ("activations", "attention_squares")}


@dataclass(frozen=True)
class Composition:
    """One row a cell and role, of activations and temporaries one a part of the model; they add up
    to what is allocated.
    """

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results)
        rows: Rows = []
        for cell, moment, allocations in _by_cell(results, axes):
            total_bytes = allocations["total_bytes"].sum()
            split = allocations.assign(part=_shown_parts(allocations, total_bytes))
            sums = split.groupby(["role", "part"], as_index=False)[["total_bytes", "count"]].sum()
            in_order = sums.assign(
                rank=sums["role"].map(ROLES.index), last=sums["part"] == _OTHER_PARTS
            )
            for row in each(
                in_order.sort_values(["rank", "last", "total_bytes"], ascending=[True, True, False])
            ):
                sizes = [
                    _gib(row["total_bytes"]),
                    f"{row['total_bytes'] / total_bytes:.1%}",
                    _count(row["count"]),
                ]
                rows.append(
                    [*axis_texts(cell, axes), moment, row["role"], row["part"] or NOTHING, *sizes]
                )
            whole = [_gib(total_bytes), f"{1:.1%}", _count(allocations["count"].sum())]
            rows.append([*axis_texts(cell, axes), moment, "in all", NOTHING, *whole])
        return [*axes, "moment", "role", "part", "GiB", "share", "allocations"], rows


@dataclass(frozen=True)
class LargestByRole:
    """One row a cell and role: its largest single allocation, and where that comes from."""

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results)
        rows: Rows = []
        for cell, moment, allocations in _by_cell(results, axes):
            largest = (
                _counted(allocations)
                .sort_values("size_bytes", ascending=False, kind="stable")
                .drop_duplicates("role")
            )
            for row in each(largest):
                alike = (
                    (allocations["role"] == row["role"])
                    & (allocations["size_bytes"] == row["size_bytes"])
                ).to_numpy()
                texts = [
                    row["role"],
                    _mib(row["size_bytes"]),
                    _count(allocations.loc[alike, "count"].sum()),
                    *_origin(row),
                ]
                rows.append([*axis_texts(cell, axes), moment, *texts])
        return [*axes, "moment", "role", "MiB", "as large", *_ORIGIN], rows


@dataclass(frozen=True)
class TopAllocations:
    """The allocations alike in size, place in the code, role and part that take the most of each
    cell's memory.
    """

    count: int

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results)
        rows: Rows = []
        for cell, moment, allocations in _by_cell(results, axes):
            total_bytes = allocations["total_bytes"].sum()
            for row in each(
                _counted(allocations)
                .sort_values("total_bytes", ascending=False, kind="stable")
                .head(self.count)
            ):
                sizes = [
                    _gib(row["total_bytes"]),
                    f"{row['total_bytes'] / total_bytes:.1%}",
                    _count(row["count"]),
                ]
                texts = [*sizes, _mib(row["size_bytes"]), row["role"], *_origin(row)]
                rows.append([*axis_texts(cell, axes), moment, *texts])
        return [*axes, "moment", "GiB", "share", "allocations", "MiB each", "role", *_ORIGIN], rows


@dataclass(frozen=True)
class PredictedRoles:
    """One row a cell and role: what was predicted to be there at the peak, and what was."""

    def lay_out(self, results: Results) -> tuple[Header, Rows]:
        axes = key_axes(results)
        rows: Rows = []
        for cell, moment, allocations in _by_cell(results, axes):
            if moment.startswith("peak") and has_value(cell, "predicted_of_parameters_bytes"):
                measured = allocations.groupby(allocations["role"].replace(_PREDICTED_AS))[
                    "total_bytes"
                ].sum()
                for role in [role for role in ROLES if role not in _PREDICTED_AS]:
                    texts = _held_against(
                        _predicted_bytes(cell, role), measured.get(role), measured.sum()
                    )
                    rows += [[*axis_texts(cell, axes), role, *texts]] if texts else []
        return [*axes, "role", "predicted GiB", "measured GiB", "off by, of the peak"], rows


_ORIGIN = ("part", "made in", "call chain")


def _origin(row: Row) -> list[str]:
    return [row["part"] or NOTHING, row["allocated_in"] or "before", row["call_chain"] or NOTHING]


def _by_cell(results: Results, axes: list[str]) -> Iterator[tuple[Row, str, pd.DataFrame]]:
    """Each cell of which there are allocations, a moment that they are of, and those."""
    of_cell = {str(cell): rows for cell, rows in results.allocations().groupby("cell")}
    for cell in each(sort_cells(results.cells, axes)):
        if cell["cell"] in of_cell:
            for moment, allocations in of_cell[cell["cell"]].groupby("moment", sort=False):
                phase = allocations["phase"].iloc[0]
                yield cell, f"{moment}, {phase}" if phase else str(moment), allocations


def _counted(allocations: pd.DataFrame) -> pd.DataFrame:
    """Without the slack, which is no allocation."""
    return allocations[allocations["count"] > 0]


def _shown_parts(allocations: pd.DataFrame, total_bytes: float) -> pd.Series[str]:
    """The parts that are rows of their own."""
    parts = allocations["part"].where(allocations["role"].isin(_BY_PART), "")
    of_part = allocations["total_bytes"].groupby([allocations["role"], parts]).transform("sum")
    return parts.where((parts == "") | (of_part >= _SMALL_PART * total_bytes), _OTHER_PARTS)


def _predicted_bytes(cell: Row, role: str) -> float | None:
    names = _PREDICTED_APART.get(role, (role.replace(" ", "_"),))
    columns = [
        f"predicted_of_{name}_bytes"
        for name in names
        if has_value(cell, f"predicted_of_{name}_bytes")
    ]
    return sum(cell[column] for column in columns) if columns else None


def _held_against(predicted: float | None, measured: float | None, peak_bytes: float) -> list[str]:
    if predicted is None and measured is None:
        return []
    texts = [NOTHING if nbytes is None else _gib(nbytes) for nbytes in (predicted, measured)]
    return [*texts, f"{((predicted or 0) - (measured or 0)) / peak_bytes:+.2%}"]


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3f}"


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.2f}"


def _count(count: float) -> str:
    return f"{count:.0f}" if count else NOTHING
