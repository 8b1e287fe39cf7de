"""A run as pandas frames: `import orchestrator as sweep; run = sweep.load("results/full");
run.cells`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import NOTHING
from orchestrator.analysis.results import Results, load_results
from orchestrator.common.errors import RunError
from orchestrator.report.column_docs import describe_columns
from orchestrator.report.formats.markdown import lay_out, written_out
from orchestrator.report.references.devices import find_device
from orchestrator.report.references.tables import reference_tables
from orchestrator.report.tables.registry import TABLES
from orchestrator.store.open import open_runs
from orchestrator.store.run import Run


class LoadedRun:
    """What a results folder holds, read once when it is first asked for. Reading needs neither
    torch nor a GPU.

    cells: one wide row a cell, nullable dtypes; the same as cells.parquet. columns: what each of
    its columns is, and its unit. samples: every number as it was measured, of every attempt:
    instrument, mode, phase, metric, unit, step, value. kernels: one row a kernel, operator, phase
    and module, of the attempts that count; times in ns, and `ms` a step. allocations: what of the
    device's memory lived at the peak of a step, or when it ran out, of the attempts that count:
    role, part, call chain, bytes of each, how many. live: how many bytes of each role lived when,
    in ms into that step. predictions: what was foreseen of each cell's memory, in bytes, by step
    and phase. manifest: run.json.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    @cached_property
    def _results(self) -> Results:
        return load_results(self._run)

    @property
    def cells(self) -> pd.DataFrame:
        return self._results.cells

    @property
    def columns(self) -> pd.DataFrame:
        """What each column of `cells` is, and its unit: column, unit, meaning."""
        described = describe_columns(map(str, self.cells))
        return pd.DataFrame(
            [(one.name, one.unit, one.doc) for one in described],
            columns=["column", "unit", "meaning"],
        )

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self._results.manifest

    @cached_property
    def samples(self) -> pd.DataFrame:
        return self._run.read("samples")

    @cached_property
    def kernels(self) -> pd.DataFrame:
        return self._results.kernels()

    @cached_property
    def allocations(self) -> pd.DataFrame:
        return self._results.allocations()

    @cached_property
    def live(self) -> pd.DataFrame:
        return self._results.live()

    @cached_property
    def predictions(self) -> pd.DataFrame:
        return self._run.read("predictions")

    def table(self, name: str, reference: str | None = None) -> pd.DataFrame:
        """A table of the report as it is printed, null where it prints nothing; a column of plain
        numbers, also of 12,313, has numbers. The last columns say which times of a row have the
        mark `†`.

        reference: a device, for the table `reference` of what others published for it (`sweep
        report --reference`). Raises ConfigError for a name that is no table and a device that is
        none. Empty where the run has nothing for it.
        """
        published = reference_tables(find_device(reference) if reference else None)
        for page in lay_out(self._results, [name], (*TABLES, *published)):
            header, rows = written_out(page)
            printed = pd.DataFrame(rows, columns=header, dtype="string").replace(NOTHING, pd.NA)
            return printed.apply(_numbers)
        return pd.DataFrame()

    def __repr__(self) -> str:
        return f"LoadedRun({str(self._run)!r}, {len(self.cells)} cells)"


def load(*folders: str | Path) -> LoadedRun:
    """One run, or several side by side, of which `run` among the columns of `cells` says which:
    folders, or addresses such as s3://bucket/folder. Raises RunError for no run.
    """
    if not folders:
        raise RunError(
            "no run is named", "Name a folder that `sweep run` wrote, such as results/demo"
        )
    return LoadedRun(open_runs(folders))


def _numbers(column: pd.Series[Any]) -> pd.Series[Any]:
    """As numbers, if all of it is plain numbers."""
    numeric = pd.to_numeric(column, errors="coerce")
    return numeric.convert_dtypes() if numeric.notna().equals(column.notna()) else column
