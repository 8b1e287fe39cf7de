"""Layouts of tables of allocations: rows made from what was live at the peak of a cell.

A cell that ran out of memory has the allocations of that moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pandas as pd

from orchestrator.analysis.axes import Row
from orchestrator.analysis.results import Results
from orchestrator.report.tables.entries import MISSING, Entry, quantity
from orchestrator.report.tables.formatters import to_gib, to_mib
from orchestrator.report.tables.layouts import each, each_cell, grid_of
from orchestrator.report.tables.table import TableGrid, TableLayout
from tasks.spec.tables import ROLES

_BY_PART = ("activations", "temporary", "unlabelled")
_OTHER_PARTS = "other parts"
_SMALL_PART = 0.005  # share of the peak; smaller parts share a row
_TOTAL = "in all"


def composition(results: Results) -> TableGrid:
    """Return one row per cell and role; activations and the like have one per part of the model."""
    found = []
    for cell, moment, allocations in _by_cell(results):
        total_bytes = allocations["total_bytes"].sum()
        for row in each(_sums_by_part(allocations)):
            names = [Entry(moment), Entry(row["role"]), _name(row["part"])]
            found.append((cell, [*names, *_sizes(row, total_bytes)]))
    keys = ["moment", "role", "part"]
    return grid_of(results, keys, ("GiB", "share", "allocations"), found)


@dataclass(frozen=True)
class TopAllocations:
    """The allocations that take most of each cell's memory, and the largest one of each role.

    A row stands for allocations of the same size, role, part and place in the code; slack has one.
    """

    count: int

    def __call__(self, results: Results) -> TableGrid:
        found = []
        for cell, moment, allocations in _by_cell(results):
            total_bytes = allocations["total_bytes"].sum()
            in_order = allocations.sort_values("total_bytes", ascending=False, kind="stable")
            largest = in_order.sort_values("size_bytes", ascending=False, kind="stable")
            shown = {*in_order.index[: self.count], *largest.drop_duplicates("role").index}
            for row in each(in_order[in_order.index.isin(shown)]):
                # Slack is no allocation: nothing made it.
                is_slack = not row["count"]
                each_mib = MISSING if is_slack else to_mib(row["size_bytes"], ".2f")
                made_in = row["allocated_in"] or ("" if is_slack else "before")
                names = (row["role"], row["part"], made_in, row["call_chain"])
                gib, share, count = _sizes(row, total_bytes)
                role, part, made, chain = map(_name, names)
                entries = [gib, share, role, part, made, count, each_mib, chain]
                found.append((cell, [Entry(moment), *entries]))
        titles = ("GiB", "share", "role", "part", "made in", "allocations", "MiB each")
        return grid_of(results, ["moment"], [*titles, "call chain"], found)


@dataclass(frozen=True)
class WithMeasuredParts:
    """Another layout, of cells with a column for the measured bytes of each role at the peak."""

    layout: TableLayout

    def __call__(self, results: Results) -> TableGrid:
        recorded = results.allocations()
        recorded = recorded[recorded["moment"] == "peak"]
        sums = recorded.pivot_table("total_bytes", "cell", "role", "sum", observed=True)
        names = sums.columns.astype(str).str.replace(" ", "_")
        sums.columns = "measured_of_" + names + "_bytes"
        cells = results.cells.join(sums, on="cell")
        return self.layout(replace(results, cells=cells))


def _by_cell(results: Results) -> Iterator[tuple[Row, str, pd.DataFrame]]:
    """Yield each cell with the allocations of each moment, such as `peak, backward`."""
    by_cell = dict(iter(results.allocations().groupby("cell")))
    for cell in each_cell(results):
        if cell["cell"] in by_cell:
            for moment, allocations in by_cell[cell["cell"]].groupby("moment", sort=False):
                phase = allocations["phase"].iloc[0]
                yield cell, f"{moment}, {phase}" if phase else str(moment), allocations


def _sums_by_part(allocations: pd.DataFrame) -> pd.DataFrame:
    """Return bytes and number of allocations by role and part in the order of ROLES, and in all."""
    parts = allocations["part"].where(allocations["role"].isin(_BY_PART), "")
    of_part = allocations["total_bytes"].groupby([allocations["role"], parts]).transform("sum")
    is_small = of_part < _SMALL_PART * allocations["total_bytes"].sum()
    split = allocations.assign(part=parts.mask(is_small & (parts != ""), _OTHER_PARTS))
    sums = split.groupby(["role", "part"], as_index=False)[["total_bytes", "count"]].sum()
    sums = sums.assign(rank=sums["role"].map(list(ROLES).index), last=sums["part"] == _OTHER_PARTS)
    sums = sums.sort_values(["rank", "last", "total_bytes"], ascending=[True, True, False])
    total = sums[["total_bytes", "count"]].sum().to_frame().T.assign(role=_TOTAL, part="")
    return pd.concat([sums, total], ignore_index=True)


def _sizes(row: Row, total_bytes: float) -> list[Entry]:
    share = quantity(row["total_bytes"] / total_bytes, ".1%")
    count = quantity(row["count"], ".0f") if row["count"] else MISSING
    return [to_gib(row["total_bytes"], ".3f"), share, count]


def _name(text: str) -> Entry:
    return Entry(text) if text else MISSING
