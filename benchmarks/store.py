"""CPU time of storing and reading attempts.

    python benchmarks/store.py

Stores and reads a thousand attempts with 84 samples each, which is what a GPU cell has. Exit code 1 if
storing or reading takes more CPU time than its limit. Commands on large runs are in growth.py.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from orchestrator.store.run import Run
from orchestrator.store.run_writer import RunWriter
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tasks.spec.tables import Sample

APPEND_MS, READ_S = 2.0, 0.08
ATTEMPTS, SAMPLES = 1000, 84


def main() -> None:
    """Print what storing and reading take."""
    with tempfile.TemporaryDirectory() as scratch:
        append_ms, read_s = time_attempts(Path(scratch) / "run")
        print(f"append of an attempt with {SAMPLES} samples: {append_ms:.2f} ms of CPU time")
        print(f"read of {ATTEMPTS} attempts: {read_s:.3f} s of CPU time")
    sys.exit(append_ms > APPEND_MS or read_s > READ_S)


def time_attempts(folder: Path) -> tuple[float, float]:
    """Return the CPU time of an append in ms, and of reading all attempts and samples in s."""
    cell = make_cell("train_step", {"device": "cpu", "size": "tiny"})
    folder.mkdir()
    writer, append_s = RunWriter(folder), 0.0
    for number in range(1, ATTEMPTS + 1):
        outcome = outcome_of(cell, number)
        began_s = time.process_time()
        writer.append(outcome, None)
        append_s += time.process_time() - began_s
    run, fastest_s = Run(folder), float("inf")
    for _ in range(3):
        began_s = time.process_time()
        rows = run.read("samples", categories=True)
        attempts = list(run.rows("attempts", ["cell", "attempt", "status"]))
        fastest_s = min(fastest_s, time.process_time() - began_s)
    if (len(attempts), len(rows)) != (ATTEMPTS, ATTEMPTS * SAMPLES):
        raise SystemExit("some rows were not read")
    return 1e3 * append_s / ATTEMPTS, fastest_s


def outcome_of(cell: Cell, number: int) -> Outcome:
    """Return an attempt that measured as many samples as one on a GPU."""
    samples = [
        Sample("timing", "duration", "ms", 10.0 + step / number, "pipelined", "step", step)
        for step in range(SAMPLES)
    ]
    attempt = Attempt(cell, number, "", Settings())
    return Outcome(attempt, Status.OK, "", "", {}, {}, tuple(samples), 1.7e9, 10.0)


if __name__ == "__main__":
    main()
