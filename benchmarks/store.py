"""CPU time of storing and reading attempts, and cost of commands on a run of many cells.

    python benchmarks/store.py
    python benchmarks/store.py --cells 1000

Stores and reads a thousand attempts with 84 samples each, which is what a GPU cell has. Then fresh
processes run commands on a run of `--cells` cells. Exit code 1 if storing or reading takes more CPU
time than its limit.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import ROOT, children_cpu_s, make_run, resident_bytes

from orchestrator.store.open import open_for_writing
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
_SAMPLING_S = 0.01


def main() -> None:
    """Print what storing, reading and each command take."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--cells", type=int, default=20_000, help="0: run no commands")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        append_ms, read_s = time_attempts(Path(scratch) / "run")
        print(f"append of an attempt with {SAMPLES} samples: {append_ms:.2f} ms of CPU time")
        print(f"read of {ATTEMPTS} attempts: {read_s:.3f} s of CPU time")
        if options.cells:
            print_commands(Path(scratch) / "many", options.cells)
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


def print_commands(folder: Path, cells: int) -> None:
    """Print the cost of commands on a finished run of many cells."""
    make_run(folder, cells)
    config = folder / "many.yaml"
    with open_for_writing(Run(folder)) as writer:
        writer.write_manifest({**writer.read_manifest(), "fingerprints": {}})
    for words in (
        ["run", str(config), "--out", str(folder)],
        ["run", str(config), "--out", str(folder)],
        ["status", str(folder)],
        ["report", str(folder), "--table", "timings"],
    ):
        print_command(words)


def print_command(words: list[str]) -> None:
    """Print time and memory of a command in a fresh process."""
    command = [sys.executable, "-m", "orchestrator", *words]
    began_s, cpu_before_s, peak_bytes = time.monotonic(), children_cpu_s(), 0
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
    while child.poll() is None:
        peak_bytes = max(peak_bytes, resident_bytes(child.pid))
        time.sleep(_SAMPLING_S)
    wall_s, cpu_s = time.monotonic() - began_s, children_cpu_s() - cpu_before_s
    name = " ".join(word for word in words if not word.startswith("/"))
    cost = f"{wall_s:.1f} s, {cpu_s:.1f} s of CPU time, at most {peak_bytes / 1e6:.0f} MB"
    print(f"{name}: {cost}, exit code {child.returncode}")


if __name__ == "__main__":
    main()
