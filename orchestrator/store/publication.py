"""A published folder: runs next to each other, and publication.json with all files' digests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.common.errors import RunError, RunMismatch
from orchestrator.common.hashing import file_digest
from orchestrator.store.layout import PUBLICATION_FILE
from orchestrator.store.manifest import Manifest
from orchestrator.store.remote_address import RunLocation, is_address
from orchestrator.store.run import Run
from orchestrator.store.run_collection import RunCollection
from orchestrator.store.tables import SCHEMA_VERSION


class Publication(RunCollection):
    """The runs of a published folder, whose report is in the folder itself.

    Raise RunError if a file is missing or differs from what was published, RunMismatch if a newer
    program published it.
    """

    def __init__(self, folder: Path) -> None:
        self.contents = _read_contents(folder)
        super().__init__({name: Run(folder / name) for name in self.contents["runs"]}, folder)

    @property
    def reference(self) -> str | None:
        """The device whose published numbers its report compares with."""
        found: str | None = self.contents.get("against")
        return found

    def read_manifest(self) -> Manifest:
        return {**super().read_manifest(), "left_out": self.contents.get("left_out", [])}


def is_publication(location: RunLocation) -> bool:
    return not is_address(location) and (Path(location) / PUBLICATION_FILE).exists()


def _read_contents(folder: Path) -> dict[str, Any]:
    file = folder / PUBLICATION_FILE
    remedy = f"Copy {folder} again, or `git checkout` it"
    try:
        contents = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{file}: cannot be read: {error}", remedy) from error
    if not isinstance(contents, dict):
        raise RunError(f"{file}: is no list of what was published", remedy)
    version = contents.get("schema_version", 0)
    if version > SCHEMA_VERSION:
        raise RunMismatch(
            f"{folder}: was published with schema {version}, newer than {SCHEMA_VERSION}", "Update"
        )
    if not {"runs", "files"} <= set(contents):
        raise RunError(f"{file}: is no list of what was published", remedy)
    _require_files(folder, contents["files"], remedy)
    return contents


def _require_files(folder: Path, digests: Mapping[str, str], remedy: str) -> None:
    missing = [name for name in digests if not (folder / name).exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise RunError(f"{folder}: {missing[0]}{more} of what was published is missing", remedy)
    for name, digest in digests.items():
        if file_digest(folder / name) != digest:
            raise RunError(f"{folder / name}: is torn, or not what was published", remedy)
