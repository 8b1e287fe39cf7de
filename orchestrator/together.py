"""Several runs read as one, their cells side by side: `sweep report RUN RUN`, `sweep.load(folder, folder)`.

runs ─each table─ cell → run:cell, an axis `run` among the parameters ─→ one table
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import RunError
from orchestrator.store import Run

if TYPE_CHECKING:
    import pandas as pd

_MARK = ":"


class Together(Run):
    """To read alone. A run is called by its folder's name, by more of its path where two have the same.

    Its report is written into a folder within that of the first.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = dict(zip(_names([run.folder for run in runs]), runs, strict=True))
        _, *others = self._runs
        super().__init__(runs[0].folder / "-".join(["with", *others]).replace("/", "-"))

    @property
    def exists(self) -> bool:
        return True  # each of them is

    def read_manifest(self) -> dict[str, Any]:
        """What a report says of its run: the names of all, and whatever was invoked, in the order of time."""
        manifests = {name: run.read_manifest() for name, run in self._runs.items()}
        defaults: dict[str, dict[str, Any]] = {}
        for manifest in manifests.values():
            for task, values in manifest.get("defaults", {}).items():
                defaults[task] = {**defaults.get(task, {}), **values}
        invocations = [one for manifest in manifests.values() for one in manifest.get("invocations", [])]
        return {
            "name": ", ".join(manifests),
            "defaults": defaults,
            "invocations": sorted(invocations, key=lambda one: str(one.get("time", ""))),
        }

    def read(self, table: str, columns: list[str] | None = None, categories: bool = False) -> pd.DataFrame:
        import pandas as pd

        frames = [_named(name, run.read(table, columns, categories)) for name, run in self._runs.items()]
        whole = pd.concat(frames, ignore_index=True)
        for column in frames[0].columns if categories else ():
            if isinstance(frames[0][column].dtype, pd.CategoricalDtype):  # concat makes texts of categories that differ
                whole[column] = whole[column].astype("category")
        return whole

    def attempt_folder(self, cell: str, number: int) -> Path:
        name, _, own = cell.rpartition(_MARK)
        return self._runs[name].attempt_folder(own, number)


def open_runs(folders: Sequence[Path]) -> Run:
    """One, or several as one. Raises RunError for a folder that holds no run, and for one that is named twice."""
    runs = [Run(folder).require() for folder in folders]
    return runs[0] if len(runs) == 1 else Together(runs)


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many as it takes. Raises RunError for the same folder twice."""
    paths = [folder.resolve() for folder in folders]
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise RunError(f"{twice[0]}: is named twice", "Name different runs")
    most = max(len(path.parts) for path in paths)
    for length in range(1, most + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _named(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Its cells called by the run as well; the run is the first of a cell's parameters."""
    if "cell" in frame:
        cell = frame["cell"]
        named = cell.cat.rename_categories(lambda one: f"{name}{_MARK}{one}") if hasattr(cell, "cat") else name + _MARK + cell
        frame = frame.assign(cell=named)
    if "params" in frame:
        frame = frame.assign(params=[json.dumps({"run": name, **json.loads(params)}) for params in frame["params"]])
    return frame
