"""What does it cost that each cell is a process of its own? And what does `timing: adaptive` save?

    python benchmarks/isolation.py benchmarks/isolation.yaml
    python benchmarks/isolation.py benchmarks/isolation.yaml --ways loop,sweep --where size=small
    python benchmarks/isolation.py benchmarks/isolation.yaml --fresh 10

The same cells in several ways, one way after the other, each a command from its start to its end:

    loop        a plain loop over all cells in one process, unprotected: warm-up, steps waited for, as many that run on
    processes   the same loop with a fresh process a cell
    sweep       `sweep run`: each cell forked, with the instruments of the config
    spawn       `sweep run --start-method spawn`: each cell in a fresh process
    adaptive    `sweep run --set timing=adaptive`

The loop is that of benchmarks/plain_loop.py. What it takes without the steps that run on, which the course does not ask for,
is a row of its own. Prints seconds, seconds a cell, and the ratio to the loop. With `--fresh N`, fresh processes are shown on N
of the cells, drawn at random but the same ones each time, and held against what the loop took for these: all 50 take a quarter
of an hour on an H200. Exit code 1 if some cell was not measured, of which the ratios say too little.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from folders import new_folder
from options import asked, at_least, cell_options, ending_in_order, folder_to_keep, refuse

Values = dict[str, Any]


def main() -> None:
    from orchestrator.cli.bytecode_cache import keep_bytecode

    parser = cell_options(__doc__, 1)
    parser.add_argument(
        "--ways", type=some_ways, default=list(WAYS), help="some of these, in their order"
    )
    parser.add_argument(
        "--fresh", type=at_least(1), help="of how many cells `processes` is; of all if left out"
    )
    parser.add_argument(
        "--keep",
        type=folder_to_keep,
        help="the folder in which what each `sweep run` measured is kept",
    )
    options = parser.parse_args()
    keep_bytecode()  # as `sweep` does: the loop has it too
    selection = [
        *(f"--set={one}" for one in options.sets),
        *(f"--where={one}" for one in options.wheres),
    ]
    cells = cells_of(options)
    fresh = drawn(cells, options.fresh)
    taken: dict[str, Taken] = {}
    unmeasured = 0
    for way in options.rounds * options.ways:
        of = fresh if way == "processes" else cells
        with new_folder(way, options.keep) as folder:
            began = time.monotonic()
            looped = WAYS[way](of, [str(options.config), *selection, "--out", str(folder)])
            seconds = time.monotonic() - began
            unmeasured += unmeasured_in(folder)
        note(taken, way, Taken(seconds, len(of)))
        if looped:
            note(
                taken,
                f"{way}, but for what runs on",
                Taken(seconds - sum(one.running_on_s for one in looped), len(of)),
            )
        if way == "loop" and len(fresh) < len(cells):
            own_s = sum(
                one.seconds for one, cell in zip(looped, cells, strict=True) if cell in fresh
            )
            note(taken, LOOP_OF_FRESH, Taken(own_s, len(fresh)))
        print(f"{way}: {seconds:.1f} s", flush=True)
    print(table(taken))
    if unmeasured:
        sys.exit(f"{unmeasured} of the cells were not measured: their ways took less for it")


def some_ways(word: str) -> list[str]:
    ways = word.split(",")
    if strangers := [way for way in ways if way not in WAYS]:
        raise argparse.ArgumentTypeError(f"{', '.join(strangers)}: choose from {', '.join(WAYS)}")
    return ways


class Taken(NamedTuple):
    """What a way took for how many cells."""

    seconds: float
    cells: int


class Looped(NamedTuple):
    """What the loop took for a cell, and for its steps that run on."""

    seconds: float
    running_on_s: float


def drawn(cells: list[Values], count: int | None) -> list[Values]:
    """The same ones each time, in their order."""
    if count is None or count >= len(cells):
        return cells
    chosen = set(random.Random(0).sample(range(len(cells)), count))
    return [cell for place, cell in enumerate(cells) if place in chosen]


def note(taken: dict[str, Taken], way: str, found: Taken) -> None:
    """The quickest of all rounds: whatever else the machine does only adds."""
    taken[way] = min(found, taken.get(way, found))


def unmeasured_in(folder: Path) -> int:
    """Of the cells that `sweep run` came to there, how many have no result."""
    from orchestrator.store.run import Run
    from tasks.spec.status import Status

    return sum(status != Status.OK for (status,) in Run(folder).rows("attempts", ["status"]))


def cells_of(options: argparse.Namespace) -> list[Values]:
    """The parameters of each cell. Ends the program where the plain loop cannot do one."""
    from plain_loop import plain_cells

    cells = asked(options).cells
    if len(plain_cells(cells)) < len(cells):
        refuse(
            "a plain loop does eager cells of train_step alone: narrow it with --set and --where"
        )
    return [cell.params.values() for cell in cells]


def table(taken: dict[str, Taken]) -> str:
    """Each way against the loop over the same cells."""
    from tabulate import tabulate

    loops = {
        found.cells: found.seconds for way, found in taken.items() if way in (LOOP_OF_FRESH, "loop")
    }
    rows = [
        [
            way,
            found.cells,
            found.seconds,
            found.seconds / found.cells,
            found.seconds / loops.get(found.cells, float("nan")),
        ]
        for way, found in taken.items()
    ]
    return tabulate(rows, ["", "cells", "s", "s a cell", "/ loop"], "github", floatfmt=".2f")


def by_loop(cells: list[Values], command: Sequence[str]) -> list[Looped]:
    return run_loop(cells)


def by_processes(cells: list[Values], command: Sequence[str]) -> list[Looped]:
    return [looped for cell in cells for looped in run_loop([cell])]


def run_loop(cells: list[Values]) -> list[Looped]:
    """In a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, LOOP], input=json.dumps(cells), stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit("isolation.py: the plain loop failed: it has no one to contain it")
    return [Looped(*one) for one in json.loads(done.stdout)]


def loop(cells: list[Values]) -> list[Looped]:
    import torch
    from plain_loop import plain_loop

    looped: list[Looped] = []
    for cell in cells:
        began = time.monotonic()
        running_on_s = sum(plain_loop(cell)["step"]) / 1e3
        gc.collect()
        if cell["device"] == "cuda":
            torch.cuda.empty_cache()
        looped.append(Looped(time.monotonic() - began, running_on_s))
    return looped


def by_sweep(*extra: str) -> Callable[[list[Values], Sequence[str]], list[Looped]]:
    def measure(cells: list[Values], command: Sequence[str]) -> list[Looped]:
        from orchestrator.common.errors import COMPLETED

        sweep = [sys.executable, "-m", "orchestrator", "run", *command, *extra]
        code = subprocess.run(sweep, stdout=subprocess.DEVNULL).returncode
        if code not in COMPLETED:  # it has said why
            sys.exit(code)
        return []

    return measure


LOOP = "--as-loop"
LOOP_OF_FRESH = "loop, of those in fresh processes"
WAYS: dict[str, Callable[[list[Values], Sequence[str]], list[Looped]]] = {
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
        ending_in_order(main)
