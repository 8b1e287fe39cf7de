"""Speed-up of a sweep on all GPUs of a host over one GPU, and the effect on what it measures.

    python benchmarks/scaling.py configs/full.yaml --where compile=eager --rounds 2

Runs the same cells with `sweep run` on one GPU and on all of them, alternately, each time into a
fresh results folder, so that compilers start with an empty cache. Prints:

- the seconds of the whole command, and from the start of the first cell to the end of the last one,
  with the speed-up over one GPU, and the speed-up divided by the number of GPUs (1 is perfect);
- how a cell's seconds are spent;
- the ratio of the medians of a step, with other cells running / alone, of each cell.

Memory is predicted once before, untimed, because predictions are cached. `--keep FOLDER` stores the
results.

Without a GPU, `--cpu-cells N` compares N cells at a time with one. They share the cores that one
cell has to itself: this shows that the benchmark works, not how a sweep scales.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from folders import new_folder
from options import (
    at_least,
    cell_options,
    file_to_write,
    folder_to_keep,
    refuse,
    run_until_interrupted,
    selection_words,
)
from tabulate import tabulate

import orchestrator
from orchestrator.analysis.cells import TIME_SPENT
from orchestrator.common.errors import COMPLETED, EXIT_USER
from orchestrator.hardware.nvml import gpu_names
from orchestrator.store.run import Run

_WORST = 5  # cells that are listed
ALONE = 1  # cells at a time in the sweeps that the others are compared with


@dataclass(frozen=True)
class TimedSweep:
    """One sweep with `slots` cells at a time.

    command_s: seconds of the command. cells_s: from the first start to the last end of a cell.
    step_ms: the median of each cell that has one. statuses: of all cells.
    mean_s: the mean seconds of a cell, by part.
    """

    slots: int
    command_s: float
    cells_s: float
    step_ms: Mapping[str, float]
    statuses: Mapping[str, str]
    mean_s: Mapping[str, float]


def main() -> None:
    """Run the sweeps and print the comparison."""
    parser = cell_options(__doc__, 1, "rounds, each on one GPU and on all  [1]")
    parser.add_argument("--cpu-cells", type=at_least(2), help="cells on the CPU at a time")
    parser.add_argument("--json", type=file_to_write, help="also write each sweep to this file")
    parser.add_argument("--keep", type=folder_to_keep, help="folder for the results of the sweeps")
    options = parser.parse_args()
    most = options.cpu_cells or len(gpu_names())
    if most < 2:
        refuse(
            f"scaling.py: this machine has {most or 'no'} GPU, and two are needed."
            " Cells on the CPU need --cpu-cells 2"
        )
    words = selection_words(options)
    sweep(["plan", *words, "--memory"], {})
    sweeps: list[TimedSweep] = []
    for _ in range(options.rounds):
        for slots in (ALONE, most):
            sweeps.append(measure(words, slots, bool(options.cpu_cells), options.keep))
            if options.json:
                options.json.write_text(json.dumps([asdict(timed) for timed in sweeps]))
    print(speed_up_table(sweeps))
    print(time_table(sweeps))
    print(contention(sweeps))


def measure(words: Sequence[str], slots: int, on_cpu: bool, keep: Path | None) -> TimedSweep:
    """Run one sweep in a fresh results folder."""
    environment = {}
    how = ["--cpu-cells", str(slots)] if on_cpu else []
    if slots == ALONE and not on_cpu:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        environment = {"CUDA_VISIBLE_DEVICES": visible.split(",")[0]}
    with new_folder(f"{slots}-cells", keep) as out:
        started_s = time.monotonic()
        sweep(["run", *words, "--out", str(out), *how], environment)
        return read(out, slots, time.monotonic() - started_s)


def sweep(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a command of `sweep` as a user does. Exit if it does not complete."""
    command = [sys.executable, "-m", "orchestrator", *words]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode == EXIT_USER:  # the sweep has printed the reason
        sys.exit(EXIT_USER)
    if done.returncode not in COMPLETED:
        ended = f"sweep {' '.join(words)} ended with exit code {done.returncode}"
        sys.exit(f"scaling.py: {ended}:\n{done.stdout}")


def read(out: Path, slots: int, command_s: float) -> TimedSweep:
    """Return the times of the sweep in a results folder."""
    rows = list(Run(out).rows("attempts", ["cell", "status", "started_at", "wall_s"]))
    starts_s = [started.timestamp() for _, _, started, _ in rows]
    ends_s = [start_s + row[3] for start_s, row in zip(starts_s, rows, strict=True)]
    cells = orchestrator.load(out).cells
    timed = cells.reindex(columns=["cell", "step_ms_median"]).dropna()
    return TimedSweep(
        slots,
        command_s,
        max(ends_s) - min(starts_s),
        dict(zip(timed["cell"], timed["step_ms_median"].astype(float), strict=True)),
        {cell: status for cell, status, _, _ in rows},
        {part: float(cells[f"time_{part}_s"].mean()) for part in TIME_SPENT},
    )


def _by_slots(sweeps: Sequence[TimedSweep]) -> dict[int, list[TimedSweep]]:
    by_slots: dict[int, list[TimedSweep]] = {}
    for timed in sorted(sweeps, key=lambda timed: timed.slots):
        by_slots.setdefault(timed.slots, []).append(timed)
    return by_slots


def speed_up_table(sweeps: Sequence[TimedSweep]) -> str:
    """Return a row for one cell at a time and one for several: medians over the rounds."""
    seconds = {
        slots: [median(t.command_s for t in timed), median(t.cells_s for t in timed)]
        for slots, timed in _by_slots(sweeps).items()
    }
    rows = []
    for slots, found in seconds.items():
        row: list[float] = [slots]
        for alone_s, several_s in zip(seconds[ALONE], found, strict=True):
            row += [several_s, alone_s / several_s, alone_s / several_s / slots]
        rows.append(row)
    header = ["cells", "command s", "speed-up", "per slot", "cells s", "speed-up", "per slot"]
    digits = ("d", ".1f", ".2f", ".2f", ".1f", ".2f", ".2f")
    return tabulate(rows, header, "github", floatfmt=digits)


def time_table(sweeps: Sequence[TimedSweep]) -> str:
    """Return the mean seconds of a cell by part, for one cell at a time and for several."""
    rows = [
        [slots, *(median(t.mean_s[part] for t in timed) for part in TIME_SPENT)]
        for slots, timed in _by_slots(sweeps).items()
    ]
    header = ["cells", *(f"{part.replace('_', '-')} s" for part in TIME_SPENT)]
    return tabulate(rows, header, "github", floatfmt=("d", *(".2f" for _ in TIME_SPENT)))


def contention(sweeps: Sequence[TimedSweep]) -> str:
    """Return how a step's time changes when other cells run, and which cells ended differently."""
    alone = [timed for timed in sweeps if timed.slots == ALONE]
    shared = [timed for timed in sweeps if timed.slots != ALONE]
    ratios = {}
    for cell in alone[0].step_ms:
        if all(cell in timed.step_ms for timed in sweeps):
            shared_ms = median(timed.step_ms[cell] for timed in shared)
            ratios[cell] = shared_ms / median(timed.step_ms[cell] for timed in alone)
    lines = []
    if ratios:
        lowest, middle, highest = (
            min(ratios.values()),
            median(ratios.values()),
            max(ratios.values()),
        )
        worst = sorted(ratios, key=lambda cell: -abs(ratios[cell] - 1))[:_WORST]
        lines = [
            f"step with other cells / alone: {middle:.3f} ({lowest:.3f} to {highest:.3f})"
            f" in {len(ratios)} cells",
            f"largest differences: {', '.join(f'{cell} {ratios[cell]:.3f}' for cell in worst)}",
        ]
    different = [
        cell
        for cell in alone[0].statuses
        if len({timed.statuses.get(cell) for timed in sweeps}) > 1
    ]
    ended = f"{len(different)} cells ended differently in some sweep"
    return "\n".join([*lines, ": ".join(filter(None, [ended, ", ".join(different)]))])


if __name__ == "__main__":
    run_until_interrupted(main)
