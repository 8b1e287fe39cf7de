"""The key of derived cells in the user's cache: what they are derived from, and by which code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pandas as pd

from orchestrator.common.hashing import text_digest
from orchestrator.common.provenance import SOURCE_ROOT
from tasks.spec.source_digest import digest_of, python_files

if TYPE_CHECKING:
    from orchestrator.store.run import Run

_TABLES = ("attempts", "samples", "predictions")
# The packages whose code derives cells: those that this one imports.
CODE = (
    "model",
    "tasks/spec",
    "tasks/traces",
    "orchestrator/analysis",
    "orchestrator/common",
    "orchestrator/hardware",
    "orchestrator/store",
)


def cells_key(run: Run, every_version: bool) -> str:
    """Return the key of the derived cells of a run.

    every_version: see `load_results`. Raise RunError for a damaged part of a measured table.
    """
    versions = set(run.rows("attempts", ["task", "task_version"]))
    has_older_versions = len(versions) > len({task for task, _ in versions})
    identity = [
        run.table_versions(_TABLES),
        # The status of these cells depends on further tables.
        sorted((*key, str(missing)) for key, missing in run.incomplete_attempts().items()),
        run.read_manifest().get("defaults", {}),
        every_version and has_older_versions,
        pd.__version__,
        _code_digest(),
    ]
    return text_digest(json.dumps(identity))


def _code_digest() -> str:
    # 90 files, 3 ms.
    files = [file for package in CODE for file in python_files(SOURCE_ROOT / package)]
    files.append(SOURCE_ROOT / "orchestrator/hardware/gpus.toml")
    return digest_of((file.name, file) for file in files)
