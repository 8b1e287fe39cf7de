"""What a report is made of: a run's cells as one frame, which of its columns are axes, and where it all came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from orchestrator.report.derive import derive_cells

if TYPE_CHECKING:
    from orchestrator.store import Run


@dataclass(frozen=True)
class Results:
    """cells: one row a cell (see derive). axes: the names of its parameters, in the order of the tasks."""

    cells: pd.DataFrame
    axes: tuple[str, ...]
    manifest: Mapping[str, Any]


def load_results(run: Run) -> Results:
    """Reads the parts, never a file that is itself derived: after a kill, the parts are what is true.

    A row that was written before a parameter existed has that one's default, as its cell's identity has.
    """
    attempts, manifest = run.read("attempts"), run.read_manifest()
    defaults: Mapping[str, Mapping[str, Any]] = manifest.get("defaults", {})
    rows = [
        {**defaults.get(task, {}), **json.loads(params)}
        for task, params in zip(attempts["task"], attempts["params"], strict=True)
    ]
    attempts["params"] = [json.dumps(params) for params in rows]
    names = dict.fromkeys(name for params in rows for name in params)
    cells = derive_cells(attempts, run.read("samples"), run.read("predictions"))
    return Results(cells, tuple(names), manifest)
