"""The orchestrator: what to measure, where, how each attempt ended, and reports of the results.

`import orchestrator as sweep` and `sweep.load("results/full")` gives a run as pandas frames: see
`api`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.api import LoadedRun


def _import_own_packages() -> None:
    # Before anything else: the current folder or PYTHONPATH may hold a user's own package of the
    # name `model` or `tasks`, which would be found first.
    root = str(Path(__file__).resolve().parent.parent)
    sys.path.insert(0, root)
    try:
        for package in ("model", "tasks"):
            import_module(package)
    finally:
        sys.path.remove(root)


_import_own_packages()


def load(*folders: str | Path) -> LoadedRun:
    """Return the run in a results folder as pandas frames, or several runs in the same frames.

    Raises RunError if a folder holds no run.
    """
    # pandas and pyarrow take longer to import than most commands run.
    from orchestrator import api

    return api.load(*folders)
