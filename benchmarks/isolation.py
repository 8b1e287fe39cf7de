"""What does it cost that each cell is a process of its own? And what does `timing: adaptive` save?

    python benchmarks/isolation.py benchmarks/isolation.yaml
    python benchmarks/isolation.py benchmarks/isolation.yaml --ways loop,sweep --where size=small

The same cells in several ways, one way after the other, each a command from its start to its end:

    loop        a plain loop over all cells in one process, unprotected: warm-up, steps waited for, as many that run on
    processes   the same loop with a fresh process a cell
    sweep       `sweep run`: each cell forked, with the instruments of the config
    spawn       `sweep run --start-method spawn`: each cell in a fresh process
    adaptive    `sweep run --set timing=adaptive`

The loop is that of benchmarks/plain_loop.py. What it takes without the steps that run on, which the course does not ask for,
is a row of its own. Prints seconds, seconds a cell, and the ratio to the loop. Exit code 1 if some cell was not measured.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from options import cell_options

Values = dict[str, Any]


def main() -> None:
    parser = cell_options(__doc__, 1)
    parser.add_argument("--ways", default=",".join(WAYS), help="some of these, in their order")
    parser.add_argument("--keep", type=Path, help="the folder in which what each `sweep run` measured is kept")
    options = parser.parse_args()
    selection = [*(f"--set={one}" for one in options.sets), *(f"--where={one}" for one in options.wheres)]
    cells = cells_of(options.config, options.sets, options.wheres)
    taken_s: dict[str, float] = {}
    for way in options.rounds * options.ways.split(","):
        began = time.monotonic()
        with folder_for(way, options.keep) as folder:
            beside = WAYS[way](cells, [str(options.config), *selection, "--out", folder])
        note(taken_s, way, time.monotonic() - began)
        if beside:
            note(taken_s, f"{way}, but for what runs on", time.monotonic() - began - beside)
        print(f"{way}: {time.monotonic() - began:.1f} s", flush=True)
    print(table(taken_s, len(cells)))


@contextmanager
def folder_for(way: str, keep: Path | None) -> Iterator[str]:
    """A new one, so that every round measures all cells."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder
        if keep:
            shutil.copytree(folder, keep / way, dirs_exist_ok=True, ignore=shutil.ignore_patterns("artifacts", "cache"))


def note(taken_s: dict[str, float], way: str, seconds: float) -> None:
    """The quickest of all rounds: whatever else the machine does only adds."""
    taken_s[way] = min(seconds, taken_s.get(way, math.inf))


def cells_of(config: Path, sets: Sequence[str], wheres: Sequence[str]) -> list[Values]:
    """The parameters of each cell. Ends the program where the plain loop cannot do one."""
    from plain_loop import plain_cells

    from orchestrator.run import resolve

    cells = resolve(config, list(sets), list(wheres), None).expansion.cells
    if len(plain_cells(cells)) < len(cells):
        sys.exit("a plain loop does eager cells of train_step alone: narrow it with --set and --where")
    return [cell.params.values() for cell in cells]


def table(taken_s: dict[str, float], cells: int) -> str:
    from tabulate import tabulate

    loop = taken_s.get("loop", float("nan"))
    rows = [[way, seconds, seconds / cells, seconds / loop] for way, seconds in taken_s.items()]
    return tabulate(rows, [f"{cells} cells", "s", "s a cell", "/ loop"], "github", floatfmt=".2f")


def by_loop(cells: list[Values], command: Sequence[str]) -> float:
    return run_loop(cells)


def by_processes(cells: list[Values], command: Sequence[str]) -> float:
    return sum(run_loop([cell]) for cell in cells)


def run_loop(cells: list[Values]) -> float:
    """In a process of its own. Gives the seconds of the steps that run on."""
    asked = json.dumps(cells)
    done = subprocess.run([sys.executable, __file__, LOOP], input=asked, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def loop(cells: list[Values]) -> float:
    import torch
    from plain_loop import plain_loop

    running_on_ms = 0.0
    for cell in cells:
        running_on_ms += sum(plain_loop(cell)["step"])
        gc.collect()
        if cell["device"] == "cuda":
            torch.cuda.empty_cache()
    return running_on_ms / 1e3


def by_sweep(*extra: str) -> Callable[[list[Values], Sequence[str]], float]:
    def measure(cells: list[Values], command: Sequence[str]) -> float:
        sweep = [sys.executable, "-m", "orchestrator", "run", *command, *extra]
        subprocess.run(sweep, stdout=subprocess.DEVNULL, check=True)
        return 0.0

    return measure


LOOP = "--as-loop"
WAYS: dict[str, Callable[[list[Values], Sequence[str]], float]] = {
    "loop": by_loop,
    "sweep": by_sweep(),
    "adaptive": by_sweep("--set", "timing=adaptive"),
    "processes": by_processes,
    "spawn": by_sweep("--start-method", "spawn"),
}

if __name__ == "__main__":
    if sys.argv[1:] == [LOOP]:
        print(loop(json.load(sys.stdin)))
    else:
        main()
