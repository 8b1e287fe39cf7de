"""Kernel times of the same cells in many runs: after which run a cell is slower.

Runs of many machines enter, because kernel times hardly depend on the machine; a `CellHistory` for
each cell leaves. A suspect is no verdict: `sweep ab` of its commit and the one before decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.analysis.axes import has_value
from orchestrator.analysis.cell_timing import load_timings
from orchestrator.analysis.comparison import cell_settings
from orchestrator.common.errors import RunError
from orchestrator.store.run import Run

# With measured noise of kernel times on changing machines, 400 simulated histories of 60 commits
# and 40 cells had no false suspect, and changes of 3 % were always found.
BEFORE, LAST, LIMIT = 8, 3, 0.02


@dataclass(frozen=True)
class Point:
    """The median kernel time of a step of one cell in one run.

    started_at: when it was measured, as in ISO 8601. commit: of the measuring program.
    """

    run: Run
    started_at: str
    commit: str
    ms: float


@dataclass(frozen=True)
class CellHistory:
    """The points of a cell, oldest first, and the number of the first one that is suspect."""

    cell: str
    settings: dict[str, str]
    points: tuple[Point, ...]

    @property
    def suspect(self) -> int | None:
        return first_suspect([point.ms for point in self.points])


def first_suspect(times: Sequence[float]) -> int | None:
    """Return the number of the first time that is too long, or None.

    The median of three times in a row exceeds that of the eight before by more than 2 %. The first
    of the three that does so itself is the suspect.
    """
    for end in range(BEFORE + LAST, len(times) + 1):
        limit = (1 + LIMIT) * median(times[end - LAST - BEFORE : end - LAST])
        slow = [number for number in range(end - LAST, end) if times[number] > limit]
        if median(times[end - LAST : end]) > limit:
            return slow[0]
    return None


def cell_histories(runs: Sequence[Run]) -> list[CellHistory]:
    """Return the histories of the cells with kernel times in several runs.

    Raise RunError for several kinds of GPU.
    """
    gpus: set[str] = set()
    settings: dict[str, dict[str, str]] = {}
    points: dict[str, list[Point]] = {}
    for run in runs:
        timed = load_timings(run.require())
        settings |= cell_settings(timed.results)
        for row in timed.results.cells.to_dict("records"):
            cell = str(row["cell"])
            timing = timed.timings.get(cell)
            if timing is not None and timing.kernels_ms:
                gpus |= {str(row["gpu"])} if has_value(row, "gpu") else set()
                commit = str(row["commit"]) if has_value(row, "commit") else ""
                point = Point(run, str(row["started_at"]), commit, median(timing.kernels_ms))
                points.setdefault(cell, []).append(point)
    if len(gpus) > 1:
        problem = f"the runs have several kinds of GPU: {', '.join(sorted(gpus))}"
        raise RunError(problem, "Name runs of one kind")
    return [
        CellHistory(cell, own, tuple(sorted(points[cell], key=lambda one: one.started_at)))
        for cell, own in settings.items()
        if len(points.get(cell, ())) > 1
    ]
