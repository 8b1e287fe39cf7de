"""A published folder: runs that `sweep publish` put side by side, with the digests of their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator.common.errors import RunError, RunMismatch
from orchestrator.common.hashing import file_digest
from orchestrator.store.layout import PUBLICATION_FILE
from orchestrator.store.remote.address import RunLocation, is_address
from orchestrator.store.run import Run
from orchestrator.store.run_collection import RunCollection
from orchestrator.store.tables import SCHEMA_VERSION


class Publication(RunCollection):
    """The runs that a folder was published of. The report is within that folder, and says what it was published with.

    Raises RunError for what is missing of it, torn, or not what was published, and RunMismatch for one of a newer program.
    """

    def __init__(self, folder: Path) -> None:
        self.contents = _read_contents(folder)
        super().__init__({name: Run(folder / name) for name in self.contents["runs"]}, folder)

    @property
    def reference(self) -> str | None:
        """The device whose published numbers its report compares with."""
        found: str | None = self.contents.get("against")
        return found

    def read_manifest(self) -> dict[str, Any]:
        return {**super().read_manifest(), "left_out": self.contents.get("left_out", [])}


def is_publication(folder: RunLocation) -> bool:
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
