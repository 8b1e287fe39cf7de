"""A published folder: runs next to each other, and publication.json with all files' digests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from orchestrator.common.errors import RunError
from orchestrator.common.hashing import file_digest
from orchestrator.common.reference_devices import ALL, DEVICES
from orchestrator.common.run_location import RunLocation, is_address
from orchestrator.common.text import and_more
from orchestrator.store.layout import CELLS_FILE, PUBLICATION_FILE
from orchestrator.store.manifest import Manifest
from orchestrator.store.run import Run
from orchestrator.store.run_collection import RunCollection
from orchestrator.store.tables import read_cells_file
from orchestrator.store.untrusted_files import (
    DAMAGED,
    is_plain,
    is_plain_name,
    read_json,
    require_plain,
)

if TYPE_CHECKING:
    import pandas as pd


class Publication(RunCollection):
    """The runs of a published folder, whose report is in the folder itself.

    Raise RunError if a file is missing, a link or not what was published, RunMismatch if a newer
    program published it.
    """

    def __init__(self, folder: Path) -> None:
        self.contents = _read_contents(folder)
        require_plain(folder)
        runs = {}
        for name in self.contents.runs:
            require_plain(folder / name)
            runs[name] = Run(folder / name)
        super().__init__(runs, folder)
        self.reference = self.contents.against

    def read_cells(self, key: str) -> tuple[pd.DataFrame, dict[str, Any]] | None:
        return read_cells_file(self.folder, self.contents.files.get(CELLS_FILE, ""), key)

    def read_manifest(self) -> Manifest:
        return {**super().read_manifest(), "left_out": self.contents.left_out}


def is_publication(location: RunLocation) -> bool:
    return not is_address(location) and (Path(location) / PUBLICATION_FILE).exists()


def require_listed(folder: Path) -> None:
    """Raise RunError or RunMismatch if the publication that a run belongs to is damaged.

    folder: of the run. The digests of other runs are not compared.
    """
    _read_contents(folder.parent, only=f"{folder.name}/")


class _Contents(BaseModel):
    """The content of publication.json."""

    model_config = ConfigDict(strict=True, extra="forbid")

    schema_version: int = 0
    runs: list[str]
    against: str | None = None
    left_out: list[str] = []
    files: dict[str, str]


def _read_contents(folder: Path, only: str = "") -> _Contents:
    """Return the checked content of publication.json.

    only: compare the digests of files whose names begin so.
    """
    file = folder / PUBLICATION_FILE
    remedy = f"Copy {folder} again, or `git checkout` it"
    if not is_plain(file, folder):
        raise RunError(f"{file}: is a link or no file", remedy)
    _, checked = read_json(file, _Contents, str(file), remedy)
    for problem in _problems(folder, checked):
        raise RunError(f"{file}: {DAMAGED}: {problem}", remedy)
    digests = {name: one for name, one in checked.files.items() if name.startswith(only)}
    _require_files(folder, digests, remedy)
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


def _require_files(folder: Path, digests: Mapping[str, str], remedy: str) -> None:
    missing = [name for name in digests if not is_plain(folder / name, folder)]
    if missing:
        names = f"{missing[0]}{and_more(len(missing) - 1)}"
        raise RunError(f"{folder}: {names} of what was published is missing, or a link", remedy)
    for name, digest in digests.items():
        if file_digest(folder / name) != digest:
            raise RunError(f"{folder / name}: is torn, or not what was published", remedy)
