"""Time and memory of `sweep report` for ten thousand cells, from its imports to its files.

    python benchmarks/report.py
    python benchmarks/report.py --cells 1000

Makes a run like that of eager and compiled cells on a GPU. Each cell has all samples of the
instruments timing, memory and telemetry (about 175); some cells ran out of memory, some failed.
Then a fresh process reports the run. Exit code 1 if that takes more than --seconds or --mb.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa

from orchestrator.config.selection import Selection
from orchestrator.planning.request import SweepRequest, resolve
from orchestrator.store.batch_writer import BATCH
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.store.tables import SCHEMAS
from tasks.spec.cell import Cell

SECONDS, MB = 20.0, 500.0
CONFIG = """
name: many
limits: {attempts: 1}
grids:
  - task: train_step
    fixed: {device: cuda}
    axes:
      size: [small, medium, large, xl, 2.7B]
      context_length: [128, 256, 512, 1024]
      precision: [fp32, tf32, bf16]
      compile: [eager, blocks]
      pass: [forward, forward_backward, train_step]
      seed: [SEEDS]
"""
CELLS_PER_SEED = 5 * 4 * 3 * 2 * 3
STEPS, WARM_UP = 10, 5
ROOT = Path(__file__).resolve().parent.parent
_SAMPLING_S = 0.01
PHASES = ("forward", "backward", "optimizer", "step")
GIB = 1024**3


def main() -> None:
    """Make a run, report it, and print what that took."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--mb", type=float, default=MB)
    parser.add_argument("--keep", type=Path, help="folder of the run; an existing run is reported")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch) / "many"
        if not Run(folder).exists:
            make_run(folder, options.cells)
        cost = report(folder)
    times = f"{cost.wall_s:.1f} s, {cost.cpu_s:.1f} s of CPU time"
    print(f"{times}, at most {cost.peak_mb:.0f} MB")
    sys.exit(cost.wall_s > options.seconds or cost.peak_mb > options.mb)


@dataclass(frozen=True)
class ReportCost:
    """Resources of `sweep report` and of the processes that it starts.

    peak_mb: largest sum of their resident sets, in 10⁶ bytes, sampled a hundred times per second.
    """

    wall_s: float
    cpu_s: float
    peak_mb: float


def report(folder: Path) -> ReportCost:
    """Report a run in a fresh process."""
    command = [sys.executable, "-m", "orchestrator", "report", str(folder)]
    started_s, cpu_before_s = time.monotonic(), children_cpu_s()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
    peak_bytes = 0
    while child.poll() is None:
        peak_bytes = max(peak_bytes, resident_bytes(child.pid))
        time.sleep(_SAMPLING_S)
    wall_s = time.monotonic() - started_s
    if child.returncode:
        raise SystemExit(f"sweep report ended with {child.returncode}")
    return ReportCost(wall_s, children_cpu_s() - cpu_before_s, peak_bytes / 1e6)


def children_cpu_s() -> float:
    """Return the CPU time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of processes that have ended
    return used.ru_utime + used.ru_stime


def resident_bytes(pid: int) -> int:
    """Return the resident set of a process and its children."""
    total = 0
    # A process may end while it is read.
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        total, command = parent.memory_info().rss, parent.cmdline()
        for process in parent.children(recursive=True):
            # Until its program starts, a new process shares the memory of its parent.
            if process.cmdline() != command:
                total += process.memory_info().rss
    return total


def make_run(folder: Path, cells: int) -> SweepRequest:
    """Make a finished run of at least this number of cells, in batches like those of a real run."""
    folder.mkdir(parents=True)
    config = folder / "many.yaml"
    seeds = map(str, range(math.ceil(cells / CELLS_PER_SEED)))
    config.write_text(CONFIG.replace("SEEDS", ", ".join(seeds)))
    request = resolve(config, Selection(), folder)
    found = request.expansion.cells
    with open_for_writing(Run(folder)) as writer:
        writer.write_manifest(request.manifest({}, request.new_invocation()))
        for start in range(0, len(found), BATCH):
            cells_of_batch = found[start : start + BATCH]
            rows = pa.Table.from_pylist(list(map(_attempt, cells_of_batch)), SCHEMAS["attempts"])
            successes = [cell for cell in cells_of_batch if _status(cell) == "ok"]
            samples = _samples(successes).to_pandas()
            writer.write_tables({"samples": samples, "attempts": rows.to_pandas()})
    return request


def _status(cell: Cell) -> str:
    # Large models with long contexts run out of memory, as on a GPU with 32 GB; a few cells fail.
    values = cell.params.values()
    is_long = (values["context_length"], values["precision"]) == (1024, "fp32")
    if is_long and values["size"] in ("xl", "2.7B"):
        return "oom"
    return "failed" if int(cell.id, 16) % 40 == 0 else "ok"


def _attempt(cell: Cell) -> dict[str, Any]:
    status = _status(cell)
    facts = {
        "host": "host", "gpu": "NVIDIA H200", "torch": "2.13.0", "cuda": "13.0", "driver": "580.159.04", "python": "3.12.3",
        "cpu": "a processor", "tokens": 4096, "flops": {"forward": 10**12, "backward": 2 * 10**12}, "packages": "y" * 1500,
    }  # fmt: skip
    # As long as torch's message and a traceback.
    evidence = {
        "message": "CUDA out of memory. Tried to allocate 2.00 GiB. " * 6,
        "asked_bytes": 2 * GIB,
        "allocated_bytes": 30 * GIB,
        "traceback": "z" * 1000,
    }
    return {
        "cell": cell.id, "attempt": 1, "task": cell.task, "task_version": cell.version, "status": status,
        "params": json.dumps(cell.params.values()), "stage": "" if status == "ok" else "warm-up",
        "phase": "" if status == "ok" else "backward", "evidence": json.dumps({} if status == "ok" else evidence),
        "contents": json.dumps({"samples": len(_SERIES)} if status == "ok" else {}),
        "facts": json.dumps(facts), "started_at": datetime.now(UTC), "wall_s": 10.0, "timeout_s": 600.0,
    }  # fmt: skip


def _series() -> Iterator[tuple[str, str, str, str, str, int]]:
    """Return instrument, mode, phase, metric, unit and number of steps of one cell's samples."""
    for mode, steps in (("synced", STEPS), ("pipelined", STEPS), ("warmup", WARM_UP)):
        yield from (("timing", mode, phase, "duration", "ms", steps) for phase in PHASES)
    yield from (("timing", "pipelined", phase, "lead", "ms", STEPS) for phase in PHASES)
    yield "timing", "pipelined", "step", "drain", "ms", 1
    for mode, phase in itertools.product(("first", "steady"), PHASES[:3]):
        for name in ("peak_allocated", "peak_reserved", "peak_requested", "held_allocated"):
            yield "memory", mode, phase, f"{name}_bytes", "bytes", 1
    for mode, metric in itertools.product(
        ("before", "after"), ("sm_clock", "memory_clock", "power", "temperature", "energy")
    ):
        yield "telemetry", mode, "", metric, "J" if metric == "energy" else "unit", 1
    yield "telemetry", "timing", "", "waited_for_core", "", 1
    yield from (("telemetry", mode, "", "host_pace", "1/ms", 1) for mode in ("before", "after"))


_SERIES = [(*values, step) for *values, steps in _series() for step in range(steps)]


def _samples(cells: Sequence[Cell]) -> pa.Table:
    names = ["instrument", "mode", "phase", "metric", "unit", "step"]
    samples = pd.DataFrame(_SERIES * len(cells), columns=names)
    samples["cell"] = np.repeat([cell.id for cell in cells], len(_SERIES))
    samples["attempt"], samples["note"] = 1, ""
    scale = np.where(samples["unit"] == "bytes", GIB, 1.0)
    random = np.random.default_rng(len(cells))
    samples["value"] = scale * random.lognormal(2.0, 0.1, len(samples))
    schema = SCHEMAS["samples"]
    return pa.Table.from_pandas(samples[schema.names], schema, preserve_index=False)


if __name__ == "__main__":
    main()
