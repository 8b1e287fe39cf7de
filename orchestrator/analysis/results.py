"""What a report is made of: a run's cells as one frame, which of its columns are axes, and where it
all came from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pandas as pd

from orchestrator.analysis.cells import derive_cells
from orchestrator.common.errors import ConfigError, RunError, suggestion
from orchestrator.common.files import trim_memory
from orchestrator.store.run import Run
from tasks.traces.classes import UNKNOWN, classify

_NO_AXES = ("task", "run", "status")  # by which cells are chosen too


@dataclass(frozen=True)
class Results:
    """cells: one row a cell (see derive). axes: the names of its parameters, in the order of the
    tasks.

    read_kernels, read_allocations, read_live: give the rows of the whole run, which may be
    millions: read where a table asks for them. bare: how many cells ended well of which no sample
    is there.
    """

    cells: pd.DataFrame
    axes: tuple[str, ...]
    manifest: Mapping[str, Any]
    read_kernels: Callable[[], pd.DataFrame] = pd.DataFrame
    read_allocations: Callable[[], pd.DataFrame] = pd.DataFrame
    read_live: Callable[[], pd.DataFrame] = pd.DataFrame
    cells_without_samples: int = 0

    def kernels(self) -> pd.DataFrame:
        """The kernels of these cells, of the attempts that count. `ms`: the total of a step, of the
        whole trace where the number of steps is unknown.
        """
        rows = self._valid_rows(self.read_kernels())
        return rows.assign(ms=rows["total_ns"] / rows["steps"].fillna(1) / 1e6)

    def allocations(self) -> pd.DataFrame:
        """What of the device's memory lived at one moment of these cells, of the attempts that count."""
        return self._valid_rows(self.read_allocations())

    def live(self) -> pd.DataFrame:
        """How much of it lived when."""
        return self._valid_rows(self.read_live())

    def _valid_rows(self, rows: pd.DataFrame) -> pd.DataFrame:
        return rows.merge(self.cells[["cell", "attempt"]], on=["cell", "attempt"])


def load_results(run: Run, every_version: bool = False) -> Results:
    """Reads the parts, never a file that is itself derived: after a kill, the parts are what is
    true.

    A row that was written before a parameter existed has that one's default, as its cell's identity
    has. every_version: also of cells that an older version of their task measured, and a newer one
    too.
    """
    results, samples = load_with_samples(run, every_version)
    del samples
    trim_memory()
    return results


def load_with_samples(run: Run, every_version: bool = False) -> tuple[Results, pd.DataFrame]:
    """The same, and the samples of the whole run that its cells are made of, with texts as
    categories.
    """
    attempts, manifest = run.read("attempts"), run.read_manifest()
    defaults: Mapping[str, Mapping[str, Any]] = manifest.get("defaults", {})
    rows = [
        {**defaults.get(task, {}), **json.loads(params)}
        for task, params in zip(attempts["task"], attempts["params"], strict=True)
    ]
    attempts["params"] = [json.dumps(params) for params in rows]
    names = dict.fromkeys(name for params in rows for name in params)
    if not every_version and attempts.groupby("task")["task_version"].nunique().gt(1).any():
        attempts = _of_latest_version(
            attempts, [json.dumps(params, sort_keys=True) for params in rows]
        )
    samples = run.read("samples", categories=True)
    cells_without_samples = len(
        set(attempts.loc[attempts["status"] == "ok", "cell"]).difference(
            samples["cell"].cat.categories
        )
    )
    cells = derive_cells(attempts, samples, run.read("predictions"))
    read = {f"read_{table}": cache(partial(run.read, table)) for table in ("allocations", "live")}
    return Results(
        cells,
        tuple(names),
        manifest,
        cache(partial(_read_kernels, run)),
        **read,
        cells_without_samples=cells_without_samples,
    ), samples


def _of_latest_version(attempts: pd.DataFrame, params: Sequence[str]) -> pd.DataFrame:
    """Without cells that are measured otherwise today, and were: nothing else tells those from what
    was measured of late.
    """
    alike = attempts.groupby(
        [attempts["task"], pd.Series(params, index=attempts.index, dtype=object)]
    )
    return attempts[attempts["task_version"] == alike["task_version"].transform("max")]


def _read_kernels(run: Run) -> pd.DataFrame:
    """`kernel_class`: by what is known of names today, else as it was written."""
    rows = run.read("kernels")
    names = zip(rows["name"], rows["operator"], rows["kernel_class"], strict=True)
    kinds = [
        written if (known := classify(name, operator)) == UNKNOWN else known
        for name, operator, written in names
    ]
    return rows.assign(kernel_class=kinds)


def choose_cells(results: Results, prefixes: Sequence[str]) -> Results:
    """Only the cells whose ids begin so. Raises RunError for a beginning that is of no cell."""
    cells = results.cells
    for prefix in prefixes:
        if not cells["cell"].str.startswith(prefix).any():
            raise RunError(
                f"there is no cell {prefix} in this run", suggestion(prefix, cells["cell"])
            )
    return replace(results, cells=cells[cells["cell"].str.startswith(tuple(prefixes))])


def choose_where(results: Results, conditions: Mapping[str, Sequence[Any]]) -> Results:
    """Only the cells that have one of these values of each parameter, or of `task`, `run` or
    `status`.

    Raises ConfigError for a name that is none of these, RunError where no cell is left.
    """
    cells, known = (
        results.cells,
        [name for name in (*results.axes, *_NO_AXES) if name in results.cells],
    )
    for name, wanted in conditions.items():
        if name not in known:
            raise ConfigError(
                f"--where {name}: these cells have no such parameter", suggestion(name, known)
            )
        cells = cells[
            [None in wanted if pd.isna(value) else value in wanted for value in cells[name]]
        ]
    if cells.empty:
        raise RunError(
            "no cell of these matches --where",
            "`sweep report --table timings` names what they differ in",
        )
    return replace(results, cells=cells)
