"""Several runs read as one: `sweep report RUN RUN`, `sweep.load(folder, folder)`, a publication.

A cell is named RUN:CELL in every table, and `run` becomes the first of its parameters. A published
folder has runs next to each other, and publication.json with the digests of all files.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from orchestrator.common.errors import RunError
from orchestrator.common.hashing import file_digest
from orchestrator.common.reference_devices import ALL, DEVICES
from orchestrator.common.run_location import RunLocation, is_address
from orchestrator.common.text import first_of
from orchestrator.store.layout import CELLS_FILE, PUBLICATION_FILE, RUN_SEPARATOR
from orchestrator.store.manifest import Manifest
from orchestrator.store.run import Run
from orchestrator.store.untrusted_files import (
    DAMAGED,
    is_plain,
    is_plain_name,
    read_json,
    require_plain,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


class RunCollection(Run):
    """Runs that are read as one. Only its report can be written."""

    def __init__(self, runs: Mapping[str, Run], folder: Path) -> None:
        """runs: by unique names. folder: the report of all of them is written into it."""
        super().__init__(folder)
        self.runs = runs

    @property
    def exists(self) -> bool:
        return True  # each of its runs was required

    @property
    def is_published(self) -> bool:
        return all(run.is_published for run in self.runs.values())

    def read_manifest(self) -> Manifest:
        """Return what a report needs of the manifests: names, defaults, commands by time."""
        defaults: dict[str, dict[str, object]] = {}
        invocations: list[Mapping[str, object]] = []
        for run in self.runs.values():
            manifest = run.read_manifest()
            invocations += manifest.get("invocations", [])
            for task, values in manifest.get("defaults", {}).items():
                defaults[task] = {**defaults.get(task, {}), **values}
        names = list(self.runs)
        return {
            "name": first_of(names),
            "runs": names,
            "defaults": defaults,
            "invocations": sorted(invocations, key=lambda one: str(one.get("time", ""))),
        }

    def table(
        self, table: str, columns: list[str] | None = None, categories: bool = False
    ) -> pa.Table:
        import pyarrow as pa

        parts = []
        for name, run in self.runs.items():
            parts.append(_with_run(name, run.table(table, columns, categories)))
        return pa.concat_tables(parts, promote_options="permissive")

    def table_versions(self, tables: Collection[str]) -> list[object]:
        return [(name, run.table_versions(tables)) for name, run in self.runs.items()]

    def incomplete_attempts(self) -> dict[tuple[str, int], str]:
        incomplete = {}
        for name, run in self.runs.items():
            for (cell, number), missing in run.incomplete_attempts().items():
                incomplete[f"{name}{RUN_SEPARATOR}{cell}", number] = missing
        return incomplete

    def marks(self) -> dict[str, list[int]]:
        marks = {}
        for name, run in self.runs.items():
            for cell, numbers in run.marks().items():
                marks[f"{name}{RUN_SEPARATOR}{cell}"] = numbers
        return marks

    def unfinished(self) -> dict[str, tuple[int, int]]:
        unfinished = {}
        for name, run in self.runs.items():
            for counts in run.unfinished().values():
                unfinished[name] = counts
        return unfinished

    def attempt_folder(self, cell: str, number: int) -> Path:
        name, _, cell_id = cell.rpartition(RUN_SEPARATOR)
        return self.runs[name].attempt_folder(cell_id, number)

    def fetch_artifacts(self, cell: str = "") -> None:
        name, _, cell_id = cell.rpartition(RUN_SEPARATOR)
        for run in [self.runs[name]] if name else self.runs.values():
            run.fetch_artifacts(cell_id)


class Publication(RunCollection):
    """The runs of a published folder, whose report is in the folder itself.

    Raise RunError if a file is missing, a link or not what was published, RunMismatch if a newer
    program published it.
    """

    def __init__(self, folder: Path) -> None:
        self.contents = read_contents(folder)
        require_plain(folder)
        runs = {}
        for name in self.contents.runs:
            require_plain(folder / name)
            runs[name] = Run(folder / name)
        super().__init__(runs, folder)
        self.reference = self.contents.against

    def read_cells(self, key: str) -> tuple[pd.DataFrame, dict[str, Any]] | None:
        from orchestrator.store.tables import read_cells_file

        return read_cells_file(self.folder, self.contents.files.get(CELLS_FILE, ""), key)

    def read_manifest(self) -> Manifest:
        return {**super().read_manifest(), "left_out": self.contents.left_out}


def is_publication(location: RunLocation) -> bool:
    return not is_address(location) and (Path(location) / PUBLICATION_FILE).exists()


class _Contents(BaseModel):
    """The content of publication.json."""

    model_config = ConfigDict(strict=True, extra="forbid")

    schema_version: int = 0
    runs: list[str]
    against: str | None = None
    left_out: list[str] = []
    files: dict[str, str]


def read_contents(folder: Path, only: str = "") -> _Contents:
    """Return the content of publication.json. Raise RunError or RunMismatch if it is damaged.

    only: compare the digests of files whose names begin so, which are those of one run.
    """
    file = folder / PUBLICATION_FILE
    remedy = f"Copy {folder} again, or `git checkout` it"
    if not is_plain(file, folder):
        raise RunError(f"{file}: is a link or no file", remedy)
    _, checked = read_json(file.read_bytes(), _Contents, str(file), remedy)
    for problem in _problems(folder, checked):
        raise RunError(f"{file}: {DAMAGED}: {problem}", remedy)
    for name, digest in checked.files.items():
        if not name.startswith(only):
            continue
        if not is_plain(folder / name, folder):
            raise RunError(f"{folder / name}: was published, and is missing or a link", remedy)
        if file_digest(folder / name) != digest:
            raise RunError(f"{folder / name}: is torn, or not what was published", remedy)
    for name in () if only else checked.runs:
        if not (folder / name).is_dir():
            raise RunError(f"{file}: {DAMAGED}: it lists {name!r}, which is missing", remedy)
    return checked


def _problems(folder: Path, contents: _Contents) -> Iterator[str]:
    """Yield what is wrong with values that have the right type."""
    for index, name in enumerate(contents.runs):
        # A symbolic link could lead out of the publication.
        if not is_plain_name(name) or (folder / name).is_symlink():
            yield f"runs[{index}] {name!r} is not a folder of this publication"
    if not contents.runs:
        yield "runs: there is none"
    if len(set(contents.runs)) < len(contents.runs):
        yield "runs: a name is listed twice"
    for name in contents.files:
        if not all(map(is_plain_name, name.split("/"))):
            yield f"files: {name!r} is not a file of this publication"
    if contents.against not in (None, ALL, *DEVICES):
        yield f"against {contents.against!r} is not a device with published numbers"


def _with_run(name: str, rows: pa.Table) -> pa.Table:
    """Return rows with RUN:CELL as their cells, and the run as their first parameter."""
    import pyarrow as pa
    import pyarrow.compute as pc  # takes 20 ms, which no plan or status needs

    found = {column: rows[column] for column in rows.column_names}
    if "cell" in found:
        cells = found["cell"].cast(pa.string())
        cells = pc.binary_join_element_wise(f"{name}{RUN_SEPARATOR}", cells, "")
        found["cell"] = cells.cast(rows["cell"].type)
    if "params" in found:
        params = [{"run": name, **json.loads(text)} for text in found["params"].to_pylist()]
        found["params"] = pa.array(map(json.dumps, params), pa.string())
    return pa.table(found)
