"""What does the driver itself take for a cell, and does it grow?

    python benchmarks/overhead.py --cells 300
    python benchmarks/overhead.py --cells 10000 --schedulers serial

Cells that do next to nothing (one addition on the CPU) through `sweep run`, without Ray and on it. Of each cell the overhead is
the time from the end of the last one to its own, less what it took by its own account; the first ten, which wait for
processes to be prepared, are left out. Memory is the driver's resident set after so many cells, and how much a cell adds to it
by a straight line through all that came after the first tenth.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import psutil
from tabulate import tabulate

WARMING = 10
CONFIG = """
name: overhead
grids:
  - task: accumulation
    fixed: {device: cpu, count: 1}
    axes: {seed: [%s]}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=300)
    parser.add_argument("--schedulers", default="serial,ray")
    options = parser.parse_args()
    marks = sorted(
        {mark for mark in (WARMING, 100, 1000, 5000, 10_000) if mark < options.cells}
        | {options.cells}
    )
    rows = [
        [scheduler, *measure(scheduler, options.cells, marks)]
        for scheduler in options.schedulers.split(",")
    ]
    names = ["scheduler", "cell itself ms", "overhead ms", "overhead ms, last tenth"]
    names += [f"driver MiB after {mark:,}" for mark in marks] + ["KiB a cell"]
    print(tabulate(rows, names, "github", floatfmt=".1f"))


def measure(scheduler: str, cells: int, marks: Sequence[int]) -> list[float]:
    """Medians and sizes, in the order of the table. marks: after how many cells the driver's memory is to be told."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "overhead.yaml"
        config.write_text(CONFIG % ", ".join(map(str, range(cells))))
        command = [
            sys.executable,
            "-m",
            "orchestrator",
            "run",
            str(config),
            "--out",
            f"{folder}/run",
            "--scheduler",
            scheduler,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
            ended_s, held_mib = [], []
            for line in driver.stdout or ():
                if line.startswith("["):
                    ended_s.append(time.monotonic())
                    held_mib.append(psutil.Process(driver.pid).memory_info().rss / 1024**2)
                    if len(ended_s) in marks:
                        print(
                            f"{scheduler}: {held_mib[-1]:.1f} MiB after {len(ended_s):,} cells",
                            file=sys.stderr,
                            flush=True,
                        )
        attempts = pd.concat(
            pd.read_parquet(part) for part in Path(folder).glob("run/attempts/*.parquet")
        )
    if set(attempts["status"]) != {"ok"} or len(attempts) != cells:
        sys.exit(f"{scheduler}: not every cell was measured")
    cell_ms = statistics.median(attempts.sort_values("started_at")["wall_s"][WARMING:]) * 1e3
    between_ms = [
        (after - before) * 1e3
        for before, after in zip(ended_s[WARMING:], ended_s[WARMING + 1 :], strict=False)
    ]
    late_ms = between_ms[-max(1, cells // 10) :]
    overhead_ms, late_overhead_ms = (
        statistics.median(some) - cell_ms for some in (between_ms, late_ms)
    )
    later = range(cells // 10, cells)
    growth_kib = statistics.linear_regression(later, held_mib[cells // 10 :]).slope * 1024
    return [
        cell_ms,
        overhead_ms,
        late_overhead_ms,
        *(held_mib[mark - 1] for mark in marks),
        growth_kib,
    ]


if __name__ == "__main__":
    main()
