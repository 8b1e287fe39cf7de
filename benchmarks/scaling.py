"""How much sooner is a sweep done on all GPUs of a host than on one of them? And does it measure the same there?

    python benchmarks/scaling.py configs/full.yaml --where compile=eager --rounds 2

Runs the same cells with `sweep run` on one GPU and on all, by turns, each time into a fresh results folder, so that compilers
start from an empty cache too. Prints seconds of the whole command and from the first cell's start to the last one's end, the
speed-up over one GPU, and that by the number of GPUs: 1 is perfect. Then what the neighbours change: what a cell's seconds
went into, and the ratio of the medians of a step, among others / alone, of each cell. Memory is predicted once beforehand,
untimed: answers are kept from sweep to sweep. `--keep FOLDER` keeps what was measured, as results like any others.

Without a GPU, `--cpu-cells N` holds N cells at a time against one. They share the cores that one has to itself: it shows that
this works, not how a sweep scales.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from folders import new_folder
from options import at_least, cell_options, ending_in_order, file_to_write, folder_to_keep, refuse
from tabulate import tabulate

import orchestrator
from orchestrator.analysis.cells import TIME_SPENT
from orchestrator.common.errors import COMPLETED, EXIT_USER
from orchestrator.hardware.nvml import gpu_names
from orchestrator.store.run import Run

_WORST = 5


@dataclass(frozen=True)
class Swept:
    """One sweep. places: how many cells at once; step_ms: median of each cell that has one; statuses: of all.

    took_s: by part, what a cell took in the mean.
    """

    places: int
    command_s: float
    cells_s: float
    step_ms: Mapping[str, float]
    statuses: Mapping[str, str]
    took_s: Mapping[str, float]


def main() -> None:
    parser = cell_options(__doc__, 1, "how often on one and on all  [1]")
    parser.add_argument(
        "--cpu-cells", type=at_least(2), help="cells are on the CPU, so many at a time"
    )
    parser.add_argument("--json", type=file_to_write, help="also write each sweep here")
    parser.add_argument(
        "--keep", type=folder_to_keep, help="the folder in which what each sweep measured is kept"
    )
    options = parser.parse_args()
    most = options.cpu_cells or len(gpu_names())
    if most < 2:
        refuse(
            f"scaling.py: there is {most or 'no'} GPU here, and it takes two: cells on the CPU need --cpu-cells 2"
        )
    cells = [
        str(options.config),
        *_repeated("--set", options.sets),
        *_repeated("--where", options.wheres),
    ]
    sweep(["plan", *cells, "--memory"], {})
    runs: list[Swept] = []
    for _ in range(options.rounds):
        for places in (1, most):
            runs.append(measure(cells, places, bool(options.cpu_cells), options.keep))
            if options.json:
                options.json.write_text(json.dumps([asdict(run) for run in runs]))
    print(scaling(runs))
    print(seconds(runs))
    print(contention(runs))


def measure(cells: Sequence[str], places: int, on_cpu: bool, keep: Path | None) -> Swept:
    """The cells in a results folder of their own."""
    with new_folder(f"{places}-at-once", keep) as out:
        began = time.monotonic()
        how = ["--cpu-cells", str(places)] if on_cpu else []
        sweep(
            ["run", *cells, "--out", str(out), *how],
            _one_gpu() if places == 1 and not on_cpu else {},
        )
        return read(out, places, time.monotonic() - began)


def sweep(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Calls it as a user does. Ends this program where it does not come to its end."""
    command = [sys.executable, "-m", "orchestrator", *words]
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode == EXIT_USER:  # it has said why
        sys.exit(EXIT_USER)
    if done.returncode not in COMPLETED:
        sys.exit(
            f"scaling.py: sweep {' '.join(words)} ended with exit code {done.returncode}:\n{done.stdout}"
        )


def _one_gpu() -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def read(out: Path, places: int, command_s: float) -> Swept:
    rows = list(Run(out).rows("attempts", ["cell", "status", "started_at", "wall_s"]))
    begins = [started.timestamp() for _, _, started, _ in rows]
    ends = [begin + row[3] for begin, row in zip(begins, rows, strict=True)]
    cells = orchestrator.load(out).cells
    timed = cells.reindex(columns=["cell", "step_ms_median"]).dropna()
    return Swept(
        places,
        command_s,
        max(ends) - min(begins),
        dict(zip(timed["cell"], timed["step_ms_median"].astype(float), strict=True)),
        {cell: status for cell, status, _, _ in rows},
        {part: float(cells[f"time_{part}_s"].mean()) for part in TIME_SPENT},
    )


def scaling(runs: Sequence[Swept]) -> str:
    """A row for one place and a row for all: of several rounds the medians."""
    by_places = {
        places: [run for run in runs if run.places == places]
        for places in sorted({run.places for run in runs})
    }
    command = {
        places: statistics.median(run.command_s for run in each)
        for places, each in by_places.items()
    }
    alone = {
        places: statistics.median(run.cells_s for run in each) for places, each in by_places.items()
    }
    rows = [
        [
            n,
            command[n],
            command[1] / command[n],
            command[1] / command[n] / n,
            alone[n],
            alone[1] / alone[n],
            alone[1] / alone[n] / n,
        ]
        for n in by_places
    ]
    header = ["at once", "command s", "speed-up", "each", "cells s", "speed-up", "each"]
    return tabulate(
        rows, header, "github", floatfmt=("d", ".1f", ".2f", ".2f", ".1f", ".2f", ".2f")
    )


def seconds(runs: Sequence[Swept]) -> str:
    """What a cell took in the mean, a row for one place and a row for all."""
    places = sorted({run.places for run in runs})
    rows = [
        [
            n,
            *(
                statistics.median(run.took_s[part] for run in runs if run.places == n)
                for part in TIME_SPENT
            ),
        ]
        for n in places
    ]
    header = ["at once", *(f"{part.replace('_', '-')} s" for part in TIME_SPENT)]
    return tabulate(rows, header, "github", floatfmt=("d", *(".2f" for _ in TIME_SPENT)))


def contention(runs: Sequence[Swept]) -> str:
    """What a cell's step takes among others, over what it takes alone; and the cells that ended otherwise."""
    alone, beside = ([run for run in runs if (run.places == 1) is one] for one in (True, False))
    ratios = {
        cell: _median(beside, cell) / _median(alone, cell)
        for cell in alone[0].step_ms
        if all(cell in run.step_ms for run in runs)
    }
    otherwise = [
        cell for cell in alone[0].statuses if len({run.statuses.get(cell) for run in runs}) > 1
    ]
    lines = [
        f"{len(otherwise)} cells did not end alike in all sweeps{': ' if otherwise else ''}{', '.join(otherwise)}"
    ]
    if ratios:
        ordered = sorted(ratios.values())
        evenly_spaced = f"{statistics.median(ordered):.3f} ({ordered[0]:.3f} to {ordered[-1]:.3f}) in {len(ordered)} cells"
        worst = sorted(ratios, key=lambda cell: -abs(ratios[cell] - 1))[:_WORST]
        furthest = ", ".join(f"{cell} {ratios[cell]:.3f}" for cell in worst)
        lines = [
            f"a step among others / alone: {evenly_spaced}",
            f"furthest off: {furthest}",
            *lines,
        ]
    return "\n".join(lines)


def _median(runs: Sequence[Swept], cell: str) -> float:
    return statistics.median(run.step_ms[cell] for run in runs)


def _repeated(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


if __name__ == "__main__":
    ending_in_order(main)
