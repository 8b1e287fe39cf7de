"""Values that charts show: cells with the columns `shown`, `low` and `high`, and their model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from orchestrator.analysis.axes import each, ranks_text
from orchestrator.analysis.pairs import BASE, HIGH, LOW, TIME, measured, pairs
from orchestrator.analysis.results import Results
from orchestrator.report.text.cell_names import NAME, cell_keys, names_of

KEY = "key"  # RUN:ID of a cell
_IS_READ = re.compile(
    r"(cell|task|device|status|cpu_bound|busy_timed|mfu|step_(kernel_time_)?ms_.*|peak_allocated_bytes)$"
    r"|predicted_of_|busbw_gb_s$|link_peak_gb_s$|compute_ms$|exposed_.*_ms$|overlap_idle_ms$"
)
Points = Callable[[Results], pd.DataFrame]


def of_column(
    task: str, column: str, interval: tuple[str, str] = ("", ""), scale: float = 1.0
) -> Points:
    """Return a function of the cells of a task with a positive number in a column."""

    def points(results: Results) -> pd.DataFrame:
        cells = measured(replace(results, cells=_named(results)), task, column)
        values = {"shown": column, "low": interval[0], "high": interval[1]}
        for name, source in values.items():
            if source in cells:
                cells = cells.assign(**{name: cells[source].astype(float) * scale})
        return cells

    return points


def step_times(task: str) -> Points:
    """Return a function of the step times of a task, with their intervals."""
    return of_column(task, TIME, (LOW, HIGH))


def bandwidths(results: Results) -> pd.DataFrame:
    """Return the collectives with their bus bandwidth, and the peak of their link as a rule."""
    cells = of_column("collectives", "busbw_gb_s")(results)
    cells = cells.assign(ranks=list(map(ranks_text, each(cells))))
    # `ranks` stands for two of these, and no collective depends on the third.
    cells = cells.drop(columns=["gpus", "processes", "precision"], errors="ignore")
    return cells.rename(columns={"link_peak_gb_s": "rule"})


def ratios(axis: str, base: str, others: tuple[str, ...]) -> Points:
    """Return a function of the speed-ups over the base value of an axis."""

    def points(results: Results) -> pd.DataFrame:
        cells = _named(results)
        cells = cells[cells["task"] == "train_step"]
        found = pairs(cells, results.axes, axis, (base, *others))
        if found.empty:
            return found
        found = found.merge(cells[["cell", KEY, NAME]], on="cell")
        # A pair may have no times, where only memory was measured.
        found = found[found["ratio"] > 0]
        is_known = found[["bound", "bound" + BASE]].notna().all(axis=1)
        is_bound = found["is_cpu_bound"].astype("boolean").where(is_known)
        return found.rename(columns={"ratio": "shown"}).assign(cpu_bound=is_bound)

    return points


def _named(results: Results) -> pd.DataFrame:
    cells = results.cells
    if "task" not in cells:
        return cells.assign(**{"task": "", NAME: "", KEY: ""}).iloc[:0]
    # Of several hundred columns only these are read, and choosing rows copies all of them.
    chosen = [name for name in cells if name in results.axes or _IS_READ.match(str(name))]
    return cells[chosen].assign(**{NAME: names_of(cells), KEY: cell_keys(results)})
