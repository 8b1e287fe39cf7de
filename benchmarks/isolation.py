"""Cost of a separate process per cell, and time that `timing: adaptive` saves.

    python benchmarks/isolation.py benchmarks/isolation.yaml
    python benchmarks/isolation.py benchmarks/isolation.yaml --ways loop,sweep --where size=small
    python benchmarks/isolation.py benchmarks/isolation.yaml --fresh 10

The same cells are measured in several ways, one after the other, each as a whole command:

    loop        a plain loop over all cells in one process, without any protection: warm-up, synced
                steps, and the same number of pipelined steps
    processes   the same loop with a fresh process per cell
    sweep       `sweep run`: each cell in a forked process, with the instruments of the config
    spawn       `sweep run --start-method spawn`: each cell in a fresh process
    adaptive    `sweep run --set timing=adaptive`

The loop is that of benchmarks/plain_loop.py. A row without its pipelined steps, which the course
does not ask for, is printed too. Prints seconds, seconds per cell, and the ratio to the loop. For a
sweep it also prints the mean seconds of each part of a cell, and of what is outside of all cells.

`--fresh N` measures `processes` on a random sample of N cells, the same one each time, and compares
it with the loop's time for these cells: all 50 take a quarter of an hour on an H200. Exit code 1
if some cell was not measured: the ratios are then too small.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from folders import new_folder
from options import (
    at_least,
    cell_options,
    folder_to_keep,
    refuse,
    run_until_interrupted,
    selected_cells,
    selection_words,
)

Values = Mapping[str, Any]  # the parameters of a cell


class Duration(NamedTuple):
    """The time of one way, for a number of cells."""

    seconds: float
    cells: int


class LoopTime(NamedTuple):
    """The time of the plain loop for one cell, and the pipelined steps' part of it."""

    seconds: float
    pipelined_s: float


Measure = Callable[[list[Values], Sequence[str]], list[LoopTime]]


def main() -> None:
    """Measure the cells in each way and print the comparison."""
    parser = cell_options(__doc__, 1)
    parser.add_argument("--ways", type=parse_ways, default=list(WAYS), help="ways, in this order")
    parser.add_argument("--fresh", type=at_least(1), help="number of cells of `processes`  [all]")
    parser.add_argument("--keep", type=folder_to_keep, help="folder for the results of the sweeps")
    options = parser.parse_args()
    cells = loop_cells(options)
    sample = sampled(cells, options.fresh)
    durations: dict[str, Duration] = {}
    unmeasured = 0
    for way in options.rounds * options.ways:
        chosen = sample if way == "processes" else cells
        with new_folder(way, options.keep) as folder:
            started_s = time.monotonic()
            loop_times = WAYS[way](chosen, [*selection_words(options), "--out", str(folder)])
            seconds = time.monotonic() - started_s
            unmeasured += count_unmeasured(folder)
            profile = "" if loop_times else mean_profile(folder, seconds)
        found = {way: Duration(seconds, len(chosen))}
        if loop_times:
            synced_s = seconds - sum(cell.pipelined_s for cell in loop_times)
            found[f"{way}, without pipelined steps"] = Duration(synced_s, len(chosen))
        if way == "loop" and len(sample) < len(cells):
            pairs = zip(loop_times, cells, strict=True)
            sample_s = sum(timed.seconds for timed, cell in pairs if cell in sample)
            found[LOOP_OVER_SAMPLE] = Duration(sample_s, len(sample))
        for name, duration in found.items():
            # The fastest round counts: other programs on the machine only add time.
            durations[name] = min(duration, durations.get(name, duration))
        print(f"{way}: {seconds:.1f} s{profile}", flush=True)
    print(table(durations))
    if unmeasured:
        sys.exit(f"{unmeasured} of the cells were not measured: the ratios are too small")


def parse_ways(word: str) -> list[str]:
    """Return the names of ways in a list such as `loop,sweep`."""
    ways = word.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(WAYS)}")
    return ways


def sampled(cells: list[Values], count: int | None) -> list[Values]:
    """Return a random sample in the order of the cells. It is the same each time."""
    if count is None or count >= len(cells):
        return cells
    chosen = random.Random(0).sample(range(len(cells)), count)
    return [cells[position] for position in sorted(chosen)]


def count_unmeasured(folder: Path) -> int:
    """Return how many attempts in a results folder failed. The plain loop has none."""
    from orchestrator.store.run import Run
    from tasks.spec.status import Status

    statuses = [status for (status,) in Run(folder).rows("attempts", ["status"])]
    return len(statuses) - statuses.count(Status.OK)


def mean_profile(folder: Path, seconds: float) -> str:
    """Return the mean seconds of a cell of a sweep, by the parts of its time."""
    import orchestrator
    from orchestrator.analysis.cells import TIME_SPENT

    cells = orchestrator.load(folder).cells
    parts = {part: cells[f"time_{part}_s"].mean() for part in TIME_SPENT}
    parts["outside of cells"] = (seconds - cells["wall_s"].sum()) / len(cells)
    return "; per cell " + ", ".join(f"{part} {mean_s:.2f}" for part, mean_s in parts.items())


def loop_cells(options: argparse.Namespace) -> list[Values]:
    """Return the parameters of each cell. Exit if the plain loop cannot measure one of them."""
    from plain_loop import plain_cells

    cells = selected_cells(options).cells
    if len(plain_cells(cells)) < len(cells):
        refuse("a plain loop measures only eager cells of train_step: use --set and --where")
    return [cell.params.values() for cell in cells]


def table(durations: dict[str, Duration]) -> str:
    """Return each way compared with the loop over the same number of cells."""
    from tabulate import tabulate

    loops_s = {
        found.cells: found.seconds
        for way, found in durations.items()
        if way in ("loop", LOOP_OVER_SAMPLE)
    }
    rows = []
    for way, (seconds, count) in durations.items():
        ratio = seconds / loops_s.get(count, float("nan"))
        rows.append([way, count, seconds, seconds / count, ratio])
    return tabulate(rows, ["", "cells", "s", "s per cell", "/ loop"], "github", floatfmt=".2f")


def by_loop(cells: list[Values], command: Sequence[str]) -> list[LoopTime]:
    """Measure all cells with the plain loop in one process."""
    return run_loop(cells)


def by_processes(cells: list[Values], command: Sequence[str]) -> list[LoopTime]:
    """Measure each cell with the plain loop in a fresh process."""
    return [loop_time for cell in cells for loop_time in run_loop([cell])]


def run_loop(cells: list[Values]) -> list[LoopTime]:
    """Run the plain loop in a fresh process."""
    command = [sys.executable, __file__, LOOP]
    done = subprocess.run(command, input=json.dumps(cells), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit("isolation.py: the plain loop failed, and nothing protects it")
    return [LoopTime(*values) for values in json.loads(done.stdout)]


def loop(cells: list[Values]) -> list[LoopTime]:
    """Measure cells with the plain loop, in this process."""
    import torch
    from plain_loop import plain_loop

    loop_times: list[LoopTime] = []
    for cell in cells:
        started_s = time.monotonic()
        pipelined_s = sum(plain_loop(cell)["step"]) / 1e3
        # Without both, the memory of one cell would count for the next one.
        gc.collect()
        if cell["device"] == "cuda":
            torch.cuda.empty_cache()
        loop_times.append(LoopTime(time.monotonic() - started_s, pipelined_s))
    return loop_times


def by_sweep(*extra: str) -> Measure:
    """Return a way that runs `sweep run` with these further words."""

    def measure(cells: list[Values], command: Sequence[str]) -> list[LoopTime]:
        from orchestrator.common.errors import COMPLETED

        sweep = [sys.executable, "-m", "orchestrator", "run", *command, *extra]
        code = subprocess.run(sweep, stdout=subprocess.DEVNULL).returncode
        if code not in COMPLETED:  # the sweep has printed the reason
            sys.exit(code)
        return []

    return measure


LOOP = "--as-loop"
LOOP_OVER_SAMPLE = "loop, over the cells in fresh processes"
WAYS: dict[str, Measure] = {
    "loop": by_loop,
    "sweep": by_sweep(),
    "adaptive": by_sweep("--set", "timing=adaptive"),
    "processes": by_processes,
    "spawn": by_sweep("--start-method", "spawn"),
}

if __name__ == "__main__":
    if sys.argv[1:] == [LOOP]:
        print(json.dumps(loop(json.load(sys.stdin))))
    else:
        run_until_interrupted(main)
