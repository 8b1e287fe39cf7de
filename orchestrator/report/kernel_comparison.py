"""Comparison of the kernels of two cells, which may be of different runs or imported traces."""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.axes import has_value
from orchestrator.analysis.comparison import cell_labels
from orchestrator.analysis.results import Results, load_results
from orchestrator.common.errors import RunError
from orchestrator.report.tables.kernel_tables import difference_between
from orchestrator.report.tables.registry import TABLES
from orchestrator.report.tables.table import RenderedTable
from orchestrator.store.run import Run, find_cell

KERNEL_DIFF = "kernel-diff"
_LISTED = 8


def compare_kernels(a: Run, b: Run, cells: tuple[str, str] = ("", "")) -> RenderedTable:
    """Return the kernels that differ most between two cells.

    cells: how the id of each cell begins; empty for the only one of its run that has kernels.
    Raise RunError if a run has several, or if milliseconds of a step are known of one cell only.
    """
    table = next(one for one in TABLES if one.name == KERNEL_DIFF)
    sides: list[pd.DataFrame] = []
    names: list[str] = []
    for side, run, prefix in zip("AB", (a, b), cells, strict=True):
        results = load_results(run.require())
        cell, kernels = _kernels(results, run, prefix)
        sides.append(kernels)
        names.append(f"{side}: {_described(results, cell)}, cell {cell} of {run}")
    known = [bool(kernels["steps"].notna().all()) for kernels in sides]
    if known[0] != known[1]:
        unknown = (a, b)[known.index(False)]
        problem = f"{unknown}: the number of steps in its trace is not known"
        raise RunError(problem, "Import it again with --steps N")
    grid = difference_between(sides, ["A", "B"])
    return RenderedTable(table, grid, ". ".join(names))


def _described(results: Results, cell: str) -> str:
    row = results.cells.set_index("cell").loc[cell].to_dict()
    files = [str(row[name]) for name in ("file", "rank") if has_value(row, name) and row[name]]
    return " ".join([cell_labels(results)[cell], *files])


def _kernels(results: Results, run: Run, prefix: str) -> tuple[str, pd.DataFrame]:
    kernels = results.kernels()
    present = sorted(set(kernels["cell"].astype(str)))
    if not present:
        raise RunError(f"{run}: has no cell with kernels", "Measure with --instrument kernels")
    if not prefix and len(present) > 1:
        listed = ", ".join(present[:_LISTED])
        raise RunError(f"{run}: has {len(present)} cells with kernels", f"Name RUN:CELL: {listed}")
    cell = find_cell(prefix, present, run, "cell with kernels")
    return cell, kernels[kernels["cell"] == cell]
