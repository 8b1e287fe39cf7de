"""A sweep into a bucket whose drivers are killed by -9 at random moments: what is lost, measured again, counted twice?

    python -m tests.killing_remote --times 50

Each driver begins on one of two hosts, which keep their working copies, or on a new one without, and takes the bucket over. The bucket refuses one file in fifty. What is measured is played: it is the carrying
that is tried. Prints how many rows that were in the bucket are not there any more or are others, how many cells were measured
again that were in it, and how many cells are there twice or have no samples. Exit code 1 if any. A host that was killed before
all was uploaded, and comes back after another one, renames its copy: nothing of that copy is counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.store import batch_writer
from orchestrator.store.open import open_run
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tests.orchestrator.store.test_mirror import ADDRESS, go, measured
from tests.support.s3 import Bucket, serve

_CELLS_A_KILL = 30  # more than a driver comes to
_LONGEST_CELL_S = 0.04
_LONGEST_S = 1.5
_REFUSED = 0.02
_BATCH = 5

Rows = dict[tuple[str, int], float]  # of attempts: how long each took, which no two have in common


def drive(folder: Path, environment: dict[str, str], log: Path, cells: int) -> None:
    """A driver, which writes down the cells that it measures."""
    os.environ.update(environment)
    batch_writer.BATCH = _BATCH

    def measure(attempt: Attempt) -> Outcome:
        time.sleep(random.uniform(0, _LONGEST_CELL_S))
        with log.open("a") as file:
            file.write(f"{attempt.cell.id}\n")
        return replace(measured(attempt), wall_s=random.random())

    # The one before was killed, on this host or another.
    go(folder, *range(8, 8 * cells + 1, 8), measure=measure, summary=True, take_over=True)


def kill_one(folder: Path, environment: dict[str, str], cells: int, after_s: float) -> set[str]:
    """The cells that it measured until it was killed, so long after its first, or ended."""
    log = folder / "measured"
    log.write_text("")
    driver = multiprocessing.get_context("spawn").Process(
        target=drive, args=(folder, environment, log, cells)
    )
    driver.start()
    while driver.is_alive() and not log.read_text():
        time.sleep(0.02)
    driver.join(after_s)
    driver.kill()
    driver.join()
    return set(log.read_text().split())


def rows_there() -> tuple[Rows, int]:
    """Return the rows in the bucket, and how many cells are there twice or have no samples."""
    run = open_run(ADDRESS)
    found = [
        ((cell, number), wall_s)
        for cell, number, wall_s in run.rows("attempts", ["cell", "attempt", "wall_s"])
    ]
    times = Counter(cell for (cell, _), _ in found)
    samples = set(run.rows("samples", ["cell", "attempt"]))
    return dict(found), sum(count > 1 for count in times.values()) + sum(
        key not in samples for key, _ in found
    )


def torture(folder: Path, options: argparse.Namespace) -> bool:
    chance, bucket = random.Random(options.seed), Bucket()
    bucket.fails = lambda method, key: (
        method == "PUT" and "owner.json" not in key and chance.random() < _REFUSED
    )
    rows: Rows = {}
    counts: Counter[str] = Counter()
    with serve(bucket):
        os.environ |= {**bucket.environment, "XDG_CACHE_HOME": str(folder / "reader")}
        for kill in range(options.times):
            host = chance.choice(["first", "second", f"new {kill}"])
            environment: dict[str, Any] = {
                **bucket.environment,
                "XDG_CACHE_HOME": str(folder / host),
            }
            done = kill_one(
                folder, environment, _CELLS_A_KILL * options.times, chance.uniform(0, _LONGEST_S)
            )
            there, wrong = rows_there()
            counts["lost"] += sum(there.get(key) != wall_s for key, wall_s in rows.items())
            counts["measured again"] += len(done & {cell for cell, _ in rows})
            counts["twice or without samples"] = wrong
            rows = there
            print(
                f"{kill + 1} killed, on {host}; {len(done)} cells measured, {len(rows)} there",
                dict(counts),
                flush=True,
            )
    return any(counts.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        sys.exit(torture(Path(folder), parser.parse_args()))


if __name__ == "__main__":
    main()
