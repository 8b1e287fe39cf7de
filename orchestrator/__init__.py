"""Everything around a cell: what to measure, where, how it ended, where it is kept, and what is made of it.

`import orchestrator as sweep` and `sweep.load("results/full")` gives a run as pandas frames: see `api`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.api import LoadedRun


def load(*folders: str | Path) -> LoadedRun:
    """A results folder as pandas frames, or several side by side. Raises RunError where one holds no run."""
    from orchestrator import api  # what it needs takes longer to import than most commands take

    return api.load(*folders)
