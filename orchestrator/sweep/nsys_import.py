"""Import a trace of Nsight Systems into a run, as an attempt with its kernels."""

from __future__ import annotations

import time
from pathlib import Path

from orchestrator.common.hashing import file_digest
from orchestrator.execution.nsys import read_report
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.parameters import ImportedParams
from tasks.spec.status import Status
from tasks.traces.attribution import attribute
from tasks.traces.summary import to_rows, to_samples

TASK = "nsys"


def import_nsys(file: Path, run: Run) -> str:
    """Add a trace to the run as a cell and return its id. Raise RunError or PlatformError.

    A file that is imported again becomes another attempt at its cell. The cell includes the digest
    of the file, so that another file of the same name becomes another cell.
    """
    started_at, started_s = time.time(), time.monotonic()
    timeline = read_report(file)
    works = attribute(timeline)
    cell = Cell(TASK, 1, ImportedParams(file=file.name, content=file_digest(file)[:12]))
    with open_for_writing(run) as writer:
        earlier = writer.read("attempts", ["cell", "attempt"]).query("cell == @cell.id")
        number = 1 + int(earlier["attempt"].max() if len(earlier) else 0)
        if not run.exists:
            writer.write_manifest({"name": run.folder.name})
        outcome = Outcome(
            Attempt(cell, number, str(run.attempt_folder(cell.id, number)), Settings()),
            Status.OK,
            stage="",
            phase="",
            evidence={},
            facts={},
            samples=tuple(to_samples(works, None, on_device=True)),
            started_at=started_at,
            wall_s=time.monotonic() - started_s,
            kernels=tuple(to_rows(works, None)),
        )
        writer.append(outcome, None)
    return cell.id
