"""A run as pandas frames: `import orchestrator as sweep; sweep.load("results/full").cells`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import pandas as pd

from orchestrator.analysis.column_docs import describe_columns
from orchestrator.analysis.results import Results, load_results
from orchestrator.common.errors import RunError
from orchestrator.common.reference_devices import find_device
from orchestrator.common.text import cell_count
from orchestrator.report.formats.files import typed_columns
from orchestrator.report.references.tables import reference_tables
from orchestrator.report.tables.registry import TABLES, lay_out
from orchestrator.store.open import open_runs
from orchestrator.store.run import Run


class LoadedRun:
    """The frames of a results folder. Each is read when it is first used, without torch or a GPU.

    cells: one wide row per cell with nullable dtypes, the same as cells.parquet.
    columns: meaning and unit of each column of `cells`.
    samples: every measured number of every attempt.
    kernels: one row per kernel, operator, phase and module; times in ns, and `ms` for one step.
    allocations: device memory that was live at the peak of a step, or when memory ran out.
    live: bytes of each role during the recorded step, by time in ms.
    predictions: predicted memory of each cell in bytes, by step and phase.
    manifest: run.json.

    Kernels, allocations and live are those of the latest valid attempt of each cell.
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
        """One row per column of `cells`: column, unit, meaning."""
        described = describe_columns(map(str, self.cells))
        return pd.DataFrame(
            [(one.name, one.unit, one.doc) for one in described],
            columns=["column", "unit", "meaning"],
        )

    @property
    def manifest(self) -> Mapping[str, object]:
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
        """Return a table of the report, as `--format csv` has it. It is empty without rows.

        Raise ConfigError for an unknown table or device.

        reference: a device, for the table `reference` of the numbers that others published.
        """
        published = reference_tables(find_device(reference) if reference else None)
        for page in lay_out(self._results, [name], (*TABLES, *published)):
            frame: pd.DataFrame = pd.DataFrame(typed_columns(page))
            return frame.convert_dtypes()
        return pd.DataFrame()

    def __repr__(self) -> str:
        return f"LoadedRun({str(self._run)!r}, {cell_count(len(self.cells))})"


def load(*folders: str | Path) -> LoadedRun:
    """Return one run, or several together; then the column `run` of `cells` names the run.

    folders: folders, or addresses such as s3://bucket/folder. Raise RunError if there is no run.
    """
    if not folders:
        raise RunError(
            "no run is named", "Name a folder that `sweep run` wrote, such as results/demo"
        )
    return LoadedRun(open_runs(folders))
