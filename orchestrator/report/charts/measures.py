"""Values that charts show: cells with the columns `shown`, `low` and `high`, and their model."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pandas as pd

from orchestrator.analysis.results import Results
from orchestrator.report.text.cell_names import NAME, cell_keys, names_of
from orchestrator.report.text.pairs import HIGH, LOW, TIME, pairs

KEY = "key"  # RUN:ID of a cell
_IS_READ = re.compile(
    r"(cell|task|device|status|cpu_bound|busy_timed|mfu|step_(kernel_time_)?ms_.*|peak_allocated_bytes)$"
    r"|predicted_of_"
)
Points = Callable[[Results], pd.DataFrame]


def of_column(
    task: str, column: str, interval: tuple[str, str] = ("", ""), scale: float = 1.0
) -> Points:
    """Return a function of the cells of a task with a positive number in a column."""

    def points(results: Results) -> pd.DataFrame:
        cells = _named(results)
        cells = cells[cells["task"] == task]
        if column not in cells or cells.empty:
            return cells.iloc[:0].assign(shown=0.0)
        values = {"shown": column, "low": interval[0], "high": interval[1]}
        for name, source in values.items():
            if source in cells:
                cells = cells.assign(**{name: cells[source].astype(float) * scale})
        is_shown = np.isfinite(cells["shown"]) & (cells["shown"] > 0)
        shown: pd.DataFrame = cells[is_shown]
        return shown

    return points


def step_times(task: str) -> Points:
    """Return a function of the step times of a task, with their intervals."""
    return of_column(task, TIME, (LOW, HIGH))


def ratios(axis: str, base: str, others: tuple[str, ...], without: tuple[str, ...] = ()) -> Points:
    """Return a function of the speed-ups over the base value of an axis.

    without: axes in which the cells of a pair may differ.
    """

    def points(results: Results) -> pd.DataFrame:
        cells = _named(results)
        cells = cells[cells["task"] == "train_step"]
        found = pairs(cells, results.axes, axis, (base, *others), without)
        if found.empty:
            return found
        found = found.merge(cells[["cell", KEY, NAME]], on="cell")
        is_bound = (found["bound"] == "CPU-bound") | (found["bound_base"] == "CPU-bound")
        is_known = found["bound"].notna() & found["bound_base"].notna()
        found = found.rename(columns={"ratio": "shown"})
        return found.assign(cpu_bound=is_bound.astype("boolean").where(is_known))

    return points


def _named(results: Results) -> pd.DataFrame:
    cells = results.cells
    if "task" not in cells:
        return cells.assign(**{"task": "", NAME: "", KEY: ""}).iloc[:0]
    # Of several hundred columns only these are read, and choosing rows copies all of them.
    chosen = [name for name in cells if name in results.axes or _IS_READ.match(str(name))]
    return cells[chosen].assign(**{NAME: names_of(cells), KEY: cell_keys(results)})
