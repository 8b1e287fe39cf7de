"""Several runs read as one: `sweep report RUN RUN`, `sweep.load(folder, folder)`, a publication.

A cell is named RUN:CELL in every table, and `run` becomes the first of its parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.common.text import and_more
from orchestrator.store.layout import RUN_SEPARATOR
from orchestrator.store.manifest import Manifest
from orchestrator.store.run import MissingRows, Run

if TYPE_CHECKING:
    import pandas as pd

_NAMES_IN_TITLE = 3


class RunCollection(Run):
    """Runs that are read as one. Only its report can be written."""

    def __init__(self, runs: Mapping[str, Run], folder: Path) -> None:
        """runs: by unique names. folder: the report of all of them is written into it."""
        super().__init__(folder)
        self._runs = runs

    @property
    def exists(self) -> bool:
        return True  # each of its runs was required

    @property
    def is_published(self) -> bool:
        return all(run.is_published for run in self._runs.values())

    @property
    def folders(self) -> list[Path]:
        return [run.folder for run in self._runs.values()]

    def read_manifest(self) -> Manifest:
        """Return what a report needs of the manifests: names, defaults, commands by time."""
        defaults: dict[str, dict[str, object]] = {}
        invocations: list[Mapping[str, object]] = []
        for run in self._runs.values():
            manifest = run.read_manifest()
            invocations += manifest.get("invocations", [])
            for task, values in manifest.get("defaults", {}).items():
                defaults[task] = {**defaults.get(task, {}), **values}
        return {
            "name": _title(list(self._runs)),
            "runs": list(self._runs),
            "defaults": defaults,
            "invocations": sorted(invocations, key=lambda one: str(one.get("time", ""))),
        }

    def read(
        self, table: str, columns: list[str] | None = None, categories: bool = False
    ) -> pd.DataFrame:
        import pandas as pd

        frames = []
        for name, run in self._runs.items():
            frames.append(_with_run(name, run.read(table, columns, categories)))
        whole = pd.concat(frames, ignore_index=True)
        if categories:
            # concat turns categories that differ between runs into text.
            for column, dtype in frames[0].dtypes.items():
                if isinstance(dtype, pd.CategoricalDtype):
                    whole[column] = whole[column].astype("category")
        return whole

    def table_versions(self, tables: Iterable[str]) -> list[object]:
        names = tuple(tables)
        return [(name, run.table_versions(names)) for name, run in self._runs.items()]

    def read_cells(self, key: str) -> tuple[pd.DataFrame, dict[str, Any]] | None:
        return None  # each of its runs has its file

    def incomplete_attempts(self) -> dict[tuple[str, int], MissingRows]:
        """Return the attempts whose rows are missing, by RUN:CELL and number."""
        incomplete = {}
        for name, run in self._runs.items():
            for (cell, number), missing in run.incomplete_attempts().items():
                incomplete[f"{name}{RUN_SEPARATOR}{cell}", number] = missing
        return incomplete

    def marks(self) -> dict[str, list[int]]:
        """Return the marks by RUN:CELL."""
        marks = {}
        for name, run in self._runs.items():
            for cell, numbers in run.marks().items():
                marks[f"{name}{RUN_SEPARATOR}{cell}"] = numbers
        return marks

    def unfinished(self) -> dict[str, tuple[int, int]]:
        unfinished = {}
        for name, run in self._runs.items():
            for counts in run.unfinished().values():
                unfinished[name] = counts
        return unfinished

    def attempt_folder(self, cell: str, number: int) -> Path:
        name, _, cell_id = cell.rpartition(RUN_SEPARATOR)
        return self._runs[name].attempt_folder(cell_id, number)

    def fetch_artifacts(self, cell: str = "") -> None:
        name, _, cell_id = cell.rpartition(RUN_SEPARATOR)
        for run in [self._runs[name]] if name else self._runs.values():
            run.fetch_artifacts(cell_id)


def _title(names: list[str]) -> str:
    title = ", ".join(names[:_NAMES_IN_TITLE])
    return f"{title}{and_more(len(names) - _NAMES_IN_TITLE)}"


def _with_run(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    prefix = f"{name}{RUN_SEPARATOR}"
    if "cell" in frame:
        cell = frame["cell"]
        if hasattr(cell, "cat"):
            cell = cell.cat.rename_categories(lambda one: f"{prefix}{one}")
        else:
            cell = prefix + cell
        frame = frame.assign(cell=cell)
    if "params" in frame:
        params = [json.dumps({"run": name, **json.loads(text)}) for text in frame["params"]]
        frame = frame.assign(params=params)
    return frame
