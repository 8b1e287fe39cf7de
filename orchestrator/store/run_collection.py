"""Several runs read as one, their cells side by side: `sweep report RUN RUN`, `sweep.load(folder, folder)`.

runs ─each table─ cell → run:cell, an axis `run` among the parameters ─→ one table

So are the runs of a publication, which `sweep publish` put into one folder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.common.errors import RunError, RunMismatch
from orchestrator.common.hashing import file_digest, text_digest
from orchestrator.store.remote.address import Where, is_address
from orchestrator.store.remote.remote_run import open_run
from orchestrator.store.run import PUBLICATION_FILE, SCHEMA_VERSION, Run

if TYPE_CHECKING:
    import pandas as pd

_IN_A_TITLE = 3  # names of runs
_LONGEST_NAME = 60  # letters, of up to 4 bytes; file systems take 255 bytes
MARK = ":"  # between the name of a run and the id of its cell


class Together(Run):
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

    def missing(self) -> int:
        return sum(run.missing() for run in self._runs.values())

    @property
    def is_published(self) -> bool:
        return all(run.is_published for run in self._runs.values())

    def unmeasured(self) -> dict[str, str]:
        return {
            name: said for name, run in self._runs.items() for said in run.unmeasured().values()
        }

    def attempt_folder(self, cell: str, number: int) -> Path:
        name, _, own = cell.rpartition(MARK)
        return self._runs[name].attempt_folder(own, number)

    def bring_artifacts(self, cell: str = "") -> None:
        name, _, own = cell.rpartition(MARK)
        for run in [self._runs[name]] if name else self._runs.values():
            run.bring_artifacts(own)


def _as_title(names: list[str]) -> str:
    shown, more = names[:_IN_A_TITLE], len(names) - _IN_A_TITLE
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


class Publication(Together):
    """The runs that a folder was published of. The report is within that folder, and says what it was published with.

    Raises RunError for what is missing of it, torn, or not what was published, and RunMismatch for one of a newer program.
    """

    def __init__(self, folder: Path) -> None:
        self.contents = _read_contents(folder)
        super().__init__({name: Run(folder / name) for name in self.contents["runs"]}, folder)

    @property
    def against(self) -> str | None:
        """Whose numbers stand beside its own in its report (`sweep report --against`)."""
        found: str | None = self.contents.get("against")
        return found

    def read_manifest(self) -> dict[str, Any]:
        return {**super().read_manifest(), "left_out": self.contents.get("left_out", [])}


def open_runs(folders: Sequence[Where]) -> Run:
    """One, or several as one. Raises RunError for a folder that holds no run, and for one that is named twice."""
    if len(folders) == 1 and is_publication(folders[0]):
        return Publication(Path(folders[0]))
    runs = list(named_runs(folders).values())
    return runs[0] if len(runs) == 1 else together(runs)


def together(runs: Sequence[Run]) -> Together:
    """Raises RunError for the same twice."""
    named = dict(zip(_names([run.folder for run in runs]), runs, strict=True))
    first, *others = named
    return Together(
        named, named[first].folder / _short("-".join(["with", *others]).replace("/", "-"))
    )


def _short(name: str) -> str:
    """A name that every file system takes, of as many runs as there may be."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{text_digest(name)[:8]}"


def named_runs(folders: Sequence[Where]) -> dict[str, Run]:
    """Each by a name of its own, the runs of a publication one by one. Raises RunError as `open_runs` does."""
    within = [
        Publication(Path(folder)).folders if is_publication(folder) else [folder]
        for folder in folders
    ]
    runs = [open_run(folder).require() for found in within for folder in found]
    return dict(zip(_names([run.folder for run in runs]), runs, strict=True))


def published_against(run: Run) -> str | None:
    """Of a publication, whose numbers its report has beside its own; None of any other run."""
    return run.against if isinstance(run, Publication) else None


def is_publication(folder: Where) -> bool:
    return not is_address(folder) and (Path(folder) / PUBLICATION_FILE).exists()


def _read_contents(folder: Path) -> dict[str, Any]:
    listed = folder / PUBLICATION_FILE
    again = f"Copy {folder} again, or `git checkout` it"
    try:
        contents = json.loads(listed.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{listed}: cannot be read: {error}", again) from error
    if not isinstance(contents, dict):
        raise RunError(f"{listed}: is no list of what was published", again)
    if contents.get("schema_version", 0) > SCHEMA_VERSION:
        version = contents["schema_version"]
        raise RunMismatch(
            f"{folder}: was published with schema {version}, newer than {SCHEMA_VERSION}", "Update"
        )
    if not {"runs", "files"} <= set(contents):
        raise RunError(f"{listed}: is no list of what was published", again)
    missing = [name for name in contents["files"] if not (folder / name).exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise RunError(f"{folder}: {missing[0]}{more} of what was published is missing", again)
    for name, known in contents["files"].items():
        if file_digest(folder / name) != known:
            raise RunError(f"{folder / name}: is torn, or not what was published", again)
    return contents


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
        named = (
            cell.cat.rename_categories(lambda one: f"{name}{MARK}{one}")
            if hasattr(cell, "cat")
            else name + MARK + cell
        )
        frame = frame.assign(cell=named)
    if "params" in frame:
        frame = frame.assign(
            params=[json.dumps({"run": name, **json.loads(params)}) for params in frame["params"]]
        )
    return frame
