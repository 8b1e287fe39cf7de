"""Several runs read as one, their cells side by side: `sweep report RUN RUN`, `sweep.load(folder, folder)`.

runs ─each table─ cell → run:cell, an axis `run` among the parameters ─→ one table

So are the runs of a publication, which `sweep publish` put into one folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.store.layout import RUN_SEPARATOR
from orchestrator.store.run import Run

if TYPE_CHECKING:
    import pandas as pd

_IN_A_TITLE = 3  # names of runs


class RunCollection(Run):
    """To read alone. A run is called by its folder's name, by more of its path where two have the same.

    Its report is written into a folder within that of the first.
    """

    def __init__(self, runs: Mapping[str, Run], folder: Path) -> None:
        """runs: by name. folder: for what is written of them together."""
        super().__init__(folder)
        self._runs = runs

    @property
    def exists(self) -> bool:
        return True  # each of them is

    def read_manifest(self) -> dict[str, Any]:
        """What a report says of its run: the names of the first and of all, and whatever was invoked, in the order of time."""
        manifests = {name: run.read_manifest() for name, run in self._runs.items()}
        defaults: dict[str, dict[str, Any]] = {}
        for manifest in manifests.values():
            for task, values in manifest.get("defaults", {}).items():
                defaults[task] = {**defaults.get(task, {}), **values}
        invocations = [
            one for manifest in manifests.values() for one in manifest.get("invocations", [])
        ]
        return {
            "name": _as_title(list(manifests)),
            "runs": list(manifests),
            "defaults": defaults,
            "invocations": sorted(invocations, key=lambda one: str(one.get("time", ""))),
        }

    @property
    def folders(self) -> list[Path]:
        return [run.folder for run in self._runs.values()]

    def read(
        self, table: str, columns: list[str] | None = None, categories: bool = False
    ) -> pd.DataFrame:
        import pandas as pd

        frames = [
            _named(name, run.read(table, columns, categories)) for name, run in self._runs.items()
        ]
        whole = pd.concat(frames, ignore_index=True)
        for column in frames[0].columns if categories else ():
            if isinstance(
                frames[0][column].dtype, pd.CategoricalDtype
            ):  # concat makes texts of categories that differ
                whole[column] = whole[column].astype("category")
        return whole

    def unfinished_count(self) -> int:
        return sum(run.unfinished_count() for run in self._runs.values())

    @property
    def is_published(self) -> bool:
        return all(run.is_published for run in self._runs.values())

    def unfinished_runs(self) -> dict[str, str]:
        return {
            name: said
            for name, run in self._runs.items()
            for said in run.unfinished_runs().values()
        }

    def attempt_folder(self, cell: str, number: int) -> Path:
        name, _, own = cell.rpartition(RUN_SEPARATOR)
        return self._runs[name].attempt_folder(own, number)

    def fetch_artifacts(self, cell: str = "") -> None:
        name, _, own = cell.rpartition(RUN_SEPARATOR)
        for run in [self._runs[name]] if name else self._runs.values():
            run.fetch_artifacts(own)


def _as_title(names: list[str]) -> str:
    shown, more = names[:_IN_A_TITLE], len(names) - _IN_A_TITLE
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _named(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Its cells called by the run as well; the run is the first of a cell's parameters."""
    if "cell" in frame:
        cell = frame["cell"]
        named = (
            cell.cat.rename_categories(lambda one: f"{name}{RUN_SEPARATOR}{one}")
            if hasattr(cell, "cat")
            else name + RUN_SEPARATOR + cell
        )
        frame = frame.assign(cell=named)
    if "params" in frame:
        frame = frame.assign(
            params=[json.dumps({"run": name, **json.loads(params)}) for params in frame["params"]]
        )
    return frame
