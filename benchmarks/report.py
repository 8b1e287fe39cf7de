"""What a report of ten thousand cells takes: seconds and megabytes, of `sweep report` as a whole, from its imports to its files.

    python benchmarks/report.py
    python benchmarks/report.py --cells 1000

Makes a run of as many cells as an eager or compiled sweep on a GPU leaves, each with all the samples that the instruments
timing, memory and telemetry take of it (about 175), some out of memory, some failed; then reports it in a process of its own.
Exit code 1 where that takes more than --seconds or --mb.
"""

from __future__ import annotations

import argparse
import itertools
import json
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
import psutil
import pyarrow as pa

from orchestrator.config.selection import Selection
from orchestrator.planning.request import SweepRequest, resolve
from orchestrator.store.open import open_for_writing
from orchestrator.store.parquet_parts import write_part
from orchestrator.store.run import Run
from orchestrator.store.run_writer import MERGE_BATCH
from orchestrator.store.tables import SCHEMAS
from tasks.spec.cell import Cell

SECONDS, MB = 20.0, 500.0
CONFIG = """
name: many
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
CELLS_A_SEED = 5 * 4 * 3 * 2 * 3
STEPS, WARM_UP = 10, 5
ROOT = Path(__file__).resolve().parent.parent
_LOOK_S = 0.01
PHASES = ("forward", "backward", "optimizer", "step")
GIB = 1024**3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--mb", type=float, default=MB)
    parser.add_argument(
        "--keep",
        type=Path,
        help="make the run here, and keep it; one that is here is reported again",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch) / "many"
        if not Run(folder).exists:
            make_run(folder, options.cells)
        taken = report(folder)
    print(
        f"{taken.clock_s:.1f} s, of processors {taken.processor_s:.1f} s, {taken.peak_mb:.0f} MB at most"
    )
    sys.exit(taken.clock_s > options.seconds or taken.peak_mb > options.mb)


@dataclass(frozen=True)
class Taken:
    """By the command with all that it writes and the processes that it starts. peak_mb: the most that they held at a time,
    their resident sets added up, in 10⁶ bytes, by a look a hundred times a second."""

    clock_s: float
    processor_s: float
    peak_mb: float


def report(folder: Path) -> Taken:
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "report", str(folder)],
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
    )
    peak = 0
    while child.poll() is None:
        peak = max(peak, _resident_bytes(child.pid))
        time.sleep(_LOOK_S)
    clock_s, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if child.returncode:
        raise SystemExit(f"sweep report ended with {child.returncode}")
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Taken(clock_s, processor_s, peak / 1e6)


def _resident_bytes(process: int) -> int:
    """Of a process and of those that it started."""
    with suppress(psutil.Error):
        parent = psutil.Process(process)
        return sum(one.memory_info().rss for one in (parent, *parent.children(recursive=True)))
    return 0


def make_run(folder: Path, cells: int) -> SweepRequest:
    """A run of at least so many cells, all finished, in parts as such a run leaves: merged ones and a rest of single ones."""
    folder.mkdir(parents=True)
    config = folder / "many.yaml"
    config.write_text(
        CONFIG.replace("SEEDS", ", ".join(map(str, range(-(-cells // CELLS_A_SEED)))))
    )
    request = resolve(config, Selection(), folder)
    found = request.expansion.cells
    with open_for_writing(Run(folder)) as writer:
        writer.write_manifest(request.manifest({}, request.new_invocation()))
        merged = len(found) - len(found) % MERGE_BATCH
        for start in range(0, merged, MERGE_BATCH):
            _write(folder, f"merged-{start}", found[start : start + MERGE_BATCH])
        for cell in found[merged:]:
            _write(folder, f"{cell.id}-1", [cell])
    return request


def _write(folder: Path, name: str, cells: Sequence[Cell]) -> None:
    write_part(
        folder / "samples" / f"{name}.parquet",
        _samples([cell for cell in cells if _status(cell) == "ok"]),
    )
    rows = pa.Table.from_pylist([_attempt(cell) for cell in cells], SCHEMAS["attempts"])
    write_part(folder / "attempts" / f"{name}.parquet", rows)


def _status(cell: Cell) -> str:
    """What is large and long runs out of memory, as on a GPU of 32 GB; a few cells fail."""
    values = cell.params.values()
    large = (
        values["size"] in ("xl", "2.7B")
        and values["context_length"] == 1024
        and values["precision"] == "fp32"
    )
    return "oom" if large else "failed" if int(cell.id, 16) % 40 == 0 else "ok"


def _attempt(cell: Cell) -> dict[str, Any]:
    status = _status(cell)
    facts = {
        "host": "host", "gpu": "NVIDIA H200", "torch": "2.13.0", "cuda": "13.0", "driver": "580.159.04", "python": "3.12.3",
        "cpu": "a processor", "tokens": 4096, "flops": {"forward": 10**12, "backward": 2 * 10**12}, "packages": "y" * 1500,
    }  # fmt: skip
    message = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 31.36 GiB, of which 1.20 GiB is free. "
        * 3
    )
    evidence = {
        "message": message,
        "asked_bytes": 2 * GIB,
        "allocated_bytes": 30 * GIB,
        "traceback": "z" * 1000,
    }
    return {
        "cell": cell.id, "attempt": 1, "task": cell.task, "task_version": cell.version, "status": status,
        "params": json.dumps(cell.params.values()), "stage": "" if status == "ok" else "warm-up",
        "phase": "" if status == "ok" else "backward", "evidence": json.dumps({} if status == "ok" else evidence),
        "facts": json.dumps(facts), "started_at": datetime.now(UTC), "wall_s": 10.0, "timeout_s": 600.0,
    }  # fmt: skip


def _series() -> Iterator[tuple[str, str, str, str, str, int]]:
    """instrument, mode, phase, metric, unit and how many steps, of one cell, as its instruments take them."""
    for mode, steps in (("synced", STEPS), ("pipelined", STEPS), ("warmup", WARM_UP)):
        yield from (("timing", mode, phase, "duration", "ms", steps) for phase in PHASES)
    yield from (("timing", "pipelined", phase, "lead", "ms", STEPS) for phase in PHASES)
    yield "timing", "pipelined", "step", "drain", "ms", 1
    for mode, phase in itertools.product(("first", "steady"), PHASES[:3]):
        metrics = (
            "peak_allocated_bytes",
            "peak_reserved_bytes",
            "peak_requested_bytes",
            "held_allocated_bytes",
        )
        yield from (("memory", mode, phase, metric, "bytes", 1) for metric in metrics)
    for mode, metric in itertools.product(
        ("before", "after"), ("sm_clock", "memory_clock", "power", "temperature", "energy")
    ):
        yield "telemetry", mode, "", metric, "J" if metric == "energy" else "unit", 1
    yield "telemetry", "timing", "", "waited_for_core", "", 1
    yield from (("telemetry", mode, "", "host_pace", "1/ms", 1) for mode in ("before", "after"))


def _samples(cells: Sequence[Cell]) -> pa.Table:
    series = [(*names, step) for *names, steps in _series() for step in range(steps)]
    columns = dict(
        zip(
            ("instrument", "mode", "phase", "metric", "unit", "step"),
            zip(*series, strict=True),
            strict=True,
        )
    )
    data: dict[str, Any] = {name: list(values) * len(cells) for name, values in columns.items()}
    count = len(series) * len(cells)
    random = np.random.default_rng(len(cells))
    data |= {
        "cell": [cell.id for cell in cells for _ in series],
        "attempt": [1] * count,
        "note": [""] * count,
    }
    data["value"] = np.where(np.array(data["unit"]) == "bytes", GIB, 1.0) * random.lognormal(
        2.0, 0.1, count
    )
    return pa.table(
        {name: data[name] for name in SCHEMAS["samples"].names}, schema=SCHEMAS["samples"]
    )


if __name__ == "__main__":
    main()
