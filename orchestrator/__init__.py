"""Everything around a cell: what to measure, where, how it ended, where it is kept, and what is
made of it.

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


def _import_what_lies_beside() -> None:
    """Before anything else does: a folder `tasks` or `model` where one is, or on PYTHONPATH, is
    somebody else's.
    """
    here = str(Path(__file__).resolve().parent.parent)
    sys.path.insert(0, here)
    try:
        for package in ("model", "tasks"):
            import_module(package)
    finally:
        sys.path.remove(here)


_import_what_lies_beside()


def load(*folders: str | Path) -> LoadedRun:
    """A results folder as pandas frames, or several side by side. Raises RunError where one holds
    no run.
    """
    from orchestrator import api  # what it needs takes longer to import than most commands take

    return api.load(*folders)
