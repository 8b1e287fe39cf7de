"""The time that a run's cells would take on 1, 4, 8 or 64 GPUs, simulated from their durations.

    python benchmarks/gpu_queue.py results/published/h200/full
    python benchmarks/gpu_queue.py RUN --gpus 2,8 --start-s 12

The queue of a sweep hands out the cells, and backfill decides which one starts next, on one host with
all GPUs. Each takes as long as it was measured; besides that, only the start before the first cell
(--start-s) takes time. Cells that need more GPUs are left out. Efficiency is the time of all cells,
each times its GPUs, over GPUs × duration of the sweep. The column "durations unknown" is a first
sweep, which learns durations on its way; "known" is one that is repeated. The bound is the
larger one of two times: that of the longest cell, and that of all cells divided by the GPUs.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from options import at_least

from orchestrator.analysis.results import read_attempts
from orchestrator.hardware.host import GpuInfo, HostInfo
from orchestrator.planning.attempt_queue import AttemptQueue
from orchestrator.planning.cell_decisions import make_plan
from orchestrator.planning.invocation import RunOptions
from orchestrator.planning.preflight import Preflight, Slots
from orchestrator.scheduling.multi_gpu import HostSlots, Occupied, next_start
from orchestrator.store.cell_state import CellState, read_states
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status


@dataclass(frozen=True)
class MeasuredCells:
    """The cells of a run that were measured on GPUs, and the seconds that each took."""

    gpu: str
    cells: list[Cell]
    states: Mapping[str, CellState]
    seconds: Mapping[str, float]

    @property
    def gpu_s(self) -> float:
        """The seconds of all cells, each times its number of GPUs."""
        return sum(self.seconds[cell.id] * cell.params.slots for cell in self.cells)

    def on(self, gpus: int) -> MeasuredCells:
        """Return the cells that need no more GPUs."""
        return replace(self, cells=[cell for cell in self.cells if cell.params.slots <= gpus])

    def bound_s(self, gpus: int) -> float:
        """Return the shortest possible duration of a sweep over all cells."""
        longest_s = max((self.seconds[cell.id] for cell in self.cells), default=0.0)
        return max(self.gpu_s / gpus, longest_s)


def read_cells(folder: Path) -> MeasuredCells:
    """Return the cells of a results folder that were measured on a GPU."""
    run = Run(folder)
    cells, gpus = [], set()
    attempts = read_attempts(run, ["task", "params", "status", "facts"])
    for row in attempts.to_dict("records"):
        params = json.loads(row["params"])
        if row["status"] == Status.OK and params["device"] == "cuda":
            cells.append(make_cell(row["task"], params))
            gpus.add(json.loads(row["facts"])["gpu"])
    if not cells:
        sys.exit(f"{folder}: no cell was measured on a GPU")
    states = read_states(run)
    seconds = {cell.id: states[cell.id].attempts[-1].wall_s for cell in cells}
    unique = {cell.id: cell for cell in cells}
    return MeasuredCells(min(gpus), list(unique.values()), states, seconds)


def simulate(measured: MeasuredCells, gpus: int, start_s: float, are_known: bool) -> float:
    """Return the simulated duration of a sweep in seconds.

    are_known: the queue knows the durations from the start, as in a repeated sweep.
    """
    states = measured.states if are_known else {}
    options = RunOptions(retry=frozenset({"ok"})) if are_known else RunOptions()
    plan = make_plan(measured.cells, states, options, 1)
    queue = AttemptQueue(plan, Run(Path("nowhere")), Settings())
    host = HostInfo(gpus=(GpuInfo(measured.gpu, 1),))
    queue.begin(Preflight(hosts=(host,), slots=Slots({"cuda": gpus})))
    running: list[tuple[float, int, Attempt]] = []
    started = 0
    now_s = start_s

    def occupied(ends_s: float, cell: Cell) -> Occupied:
        began_s, expected_s = ends_s - measured.seconds[cell.id], queue.expected_s(cell)
        left_s = None if expected_s is None else max(0.0, began_s + expected_s - now_s)
        return Occupied(cell.params.slots, left_s)

    while True:
        while True:
            used = tuple(occupied(ends_s, attempt.cell) for ends_s, _, attempt in running)
            hosts = [HostSlots("host", gpus, measured.gpu, used)]
            if (start := next_start(queue.waiting(), hosts, queue.expected_s)) is None:
                break
            if attempt := queue.take(start[0]):
                ends_s = now_s + measured.seconds[attempt.cell.id]
                heapq.heappush(running, (ends_s, started, attempt))
                started += 1
        if not running:
            return now_s
        now_s, _, ended = heapq.heappop(running)
        seconds = measured.seconds[ended.cell.id]
        queue.finished(Outcome(ended, Status.OK, "", "", {}, {}, (), 0.0, wall_s=seconds))


def main() -> None:
    """Print a row for each number of GPUs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--gpus", default="1,2,4,8,64", metavar="N,M")
    parser.add_argument("--start-s", type=float, default=0.0, metavar="S")
    options = parser.parse_args()
    measured = read_cells(options.run)
    print(f"{len(measured.cells)} cells, {measured.gpu_s:.0f} GPU seconds, {measured.gpu}\n")
    print("| GPUs | cells | bound, s | durations unknown, s | efficiency | known, s | efficiency |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for gpus in map(at_least(1), options.gpus.split(",")):
        fitting = measured.on(gpus)
        columns = [f"{gpus}", f"{len(fitting.cells)}", f"{fitting.bound_s(gpus):.0f}"]
        for are_known in (False, True):
            seconds = simulate(fitting, gpus, options.start_s, are_known)
            share = f"{fitting.gpu_s / gpus / seconds:.1%}" if fitting.cells else ""
            columns += [f"{seconds:.0f}", share]
        print(f"| {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
