"""Time from `sweep run` to the start of its first cell, and the CPU time of further cells.

    python benchmarks/first_cell.py
    python benchmarks/first_cell.py --cells 50 --rounds 3

Measures one small CPU cell and then --cells of them, without Ray and with it, in alternation. Prints
the smallest of all rounds: seconds until the first cell started, CPU seconds of the command with one
cell, and CPU milliseconds of each further cell. Exit code 1 if a cell starts after more than
--seconds.

Each cell has one thread: several threads wait for each other in a loop, which takes CPU time on a
machine that is busy. Processes that outlive their parents are counted too.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from options import at_least, run_until_interrupted
from report import ROOT, children_cpu_s

from orchestrator.store.run import Run

SECONDS = 5.0
SCHEDULERS = ("serial", "ray")
CONFIG = """
name: first-cell
instruments: [timing, memory]
env: {OMP_NUM_THREADS: "1"}
grids:
  - task: train_step
    fixed: {device: cpu, size: tiny, vocab_size: 200, context_length: 16, batch_size: 1,
            warmup_steps: 1, measured_steps: 2}
    axes:
      seed: [SEEDS]
"""
_BECOME_SUBREAPER = 36  # of prctl


def main() -> None:
    """Run the sweeps and print a line for each scheduler."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--cells", type=at_least(2), default=20, help="cells at once  [20]")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="rounds of all  [3]")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"limit  [{SECONDS:g}]")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_BECOME_SUBREAPER, 1, 0, 0, 0)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        for scheduler in SCHEDULERS:
            for cells in (1, options.cells):
                found.setdefault((scheduler, cells), []).append(sweep(scheduler, cells))
    is_late = False
    for scheduler in SCHEDULERS:
        one, many = found[scheduler, 1], found[scheduler, options.cells]
        first_s = min(start_s for start_s, _ in [*one, *many])
        one_s, many_s = (min(cpu_s for _, cpu_s in runs) for runs in (one, many))
        each_ms = 1e3 * (many_s - one_s) / (options.cells - 1)
        print(
            f"{scheduler:7} first cell after {first_s:.1f} s (at most {options.seconds:g}),"
            f" {one_s:.1f} CPU-s with one cell, {each_ms:.0f} CPU-ms for each further cell"
        )
        is_late |= first_s > options.seconds
    sys.exit(is_late)


def sweep(scheduler: str, cells: int) -> tuple[float, float]:
    """Measure cells. Return the seconds until the first one started, and the CPU seconds of all."""
    with tempfile.TemporaryDirectory(prefix="first-cell-") as scratch:
        config, out = Path(scratch) / "cells.yaml", Path(scratch) / "run"
        config.write_text(CONFIG.replace("SEEDS", ", ".join(map(str, range(cells)))))
        words = ["run", str(config), "--scheduler", scheduler, "--out", str(out)]
        command = [sys.executable, "-m", "orchestrator", *words]
        before_s, began_s = children_cpu_s(), time.time()
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        with suppress(ChildProcessError):
            while True:
                os.wait()  # for processes that the command has left
        cpu_s = children_cpu_s() - before_s
        starts = [started.timestamp() for (started,) in Run(out).rows("attempts", ["started_at"])]
    return min(starts) - began_s, cpu_s


if __name__ == "__main__":
    run_until_interrupted(main)
