"""Comparison of `sweep` with a plain loop: do both report the same times?

    python benchmarks/plain_loop.py configs/full.yaml --set compile=eager --set pass=train_step --set precision=fp32,bf16

The plain loop uses only the model of this project: build, warm up, then time. It times steps with a
synchronisation after each phase, which are compared with the phases and the `synced` step of a
sweep. Then it times pipelined steps with an event between them and one synchronisation at the end,
which are compared with the `pipelined` step.

Both measure the same cells, one after the other, in children forked from this process, which has
imported torch and never used the GPU: a cell then takes one second instead of six.

Prints the ratios plain / sweep of the medians. A cell agrees if every ratio is within 2 %, or if
the intervals of the medians overlap. Cells that do not agree are measured again, up to --rounds
times, and then agree if the ranges of the medians of their processes overlap: the noise between
processes. Exit code 1 if some cells do not agree.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

# By default, torch.cuda.is_available() asks the CUDA runtime,
# after which no forked child can use CUDA. This variable makes it ask NVML.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch
import torch._dynamo
from options import (
    cell_options,
    file_to_write,
    refuse,
    run_until_interrupted,
    selected_cells,
)
from tabulate import tabulate
from torch.nn import functional

from model.config import SIZES
from model.optimizer import OPTIMIZERS
from model.transformer import TransformerLM
from tasks.__main__ import Rank, _measure
from tasks.process.journal import read_journal
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.cell import Cell
from tasks.spec.order_statistics import median_rank

TOLERANCE = 0.02
PLAIN = ("fp32", "tf32", "bf16")
LAPS = {"forward": ["forward"], "train_step": ["forward", "backward", "optimizer"]}


Runs = dict[str, list[list[float]]]  # milliseconds by phase: the steps of each process


def main() -> None:
    """Compare cell by cell and print a table."""
    parser = cell_options(__doc__, 5)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cell after this time")
    parser.add_argument("--json", type=file_to_write, help="also write the rows to this file")
    options = parser.parse_args()
    deadline_s, rows = time.monotonic() + options.seconds, []
    cells = plain_cells(selected_cells(options).cells)
    if not cells:
        refuse("a plain loop measures only eager cells of train_step: none of these is one")
    for cell in cells:
        if time.monotonic() > deadline_s:
            break
        rows.append(compare(cell, options.rounds))
        print(rows[-1], flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows))
    print(tabulate(rows, headers="keys", tablefmt="pipe"))
    agreeing = sum(row["agrees"] == "yes" for row in rows)
    print(f"\n{agreeing} of {len(rows)} agree")
    sys.exit(agreeing != len(rows))


def plain_cells(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells that the plain loop can measure: eager, with fixed steps, without a limit."""
    return [cell for cell in cells if cell.task == "train_step" and _is_plain(cell.params.values())]


def _is_plain(v: Mapping[str, Any]) -> bool:
    return (
        (v["compile"], v["timing"], v["memory_limit_gib"]) == ("eager", "fixed", None)
        and v["pass"] in LAPS
        and v["precision"] in PLAIN
        and bool(v["size"])
    )


def compare(cell: Cell, rounds: int) -> dict[str, Any]:
    """Measure a cell in both ways until they agree, and return its row of the table."""
    values = cell.params.values()
    plain: Runs = {}
    ours: Runs = {}
    for _ in range(rounds):
        _add_process(plain, in_child(lambda: plain_loop(values)))
        _add_process(ours, in_child(lambda: by_sweep(cell)))
        different = [phase for phase in plain if not agree(plain[phase], ours[phase])]
        if not different:
            break
    row = {name: values[name] for name in ("size", "context_length", "precision")}
    row["rounds"] = len(plain["step"])
    for phase in plain:
        plain_ms, ours_ms = pooled_median(plain[phase]), pooled_median(ours[phase])
        if phase == "step":
            row["step ms"] = round(ours_ms, 2)
        row[f"{phase} ratio"] = round(plain_ms / ours_ms, 3)
    row["agrees"] = f"NO: {', '.join(different)}" if different else "yes"
    return row


def _add_process(runs: Runs, steps_ms: dict[str, list[float]]) -> None:
    for phase, steps in steps_ms.items():
        runs.setdefault(phase, []).append(steps)


def agree(plain: list[list[float]], ours: list[list[float]]) -> bool:
    """True if the medians are within the tolerance, or their noise overlaps."""
    if abs(pooled_median(plain) / pooled_median(ours) - 1) <= TOLERANCE:
        return True
    (plain_low, plain_high), (ours_low, ours_high) = noise(plain), noise(ours)
    return plain_low <= ours_high and ours_low <= plain_high


def pooled_median(runs: list[list[float]]) -> float:
    """Return the median of the steps of all processes."""
    return statistics.median(itertools.chain.from_iterable(runs))


def noise(runs: list[list[float]]) -> tuple[float, float]:
    """Return the interval of the median of one process, or the range of several medians."""
    if len(runs) > 1:
        medians = [statistics.median(run) for run in runs]
        return min(medians), max(medians)
    ordered, rank = sorted(runs[0]), median_rank(len(runs[0]))
    return ordered[rank - 1], ordered[-rank]


def plain_loop(p: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the milliseconds of each step and phase, as a loop written by hand would time them."""
    device = p["device"]
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    torch.set_float32_matmul_precision("high" if p["precision"] == "tf32" else "highest")
    torch.manual_seed(p["seed"])
    with torch.device(device):
        model = TransformerLM(SIZES[p["year"]][p["size"]], p["context_length"], p["vocab_size"])
        x, y = torch.randint(p["vocab_size"], (2, p["batch_size"], p["context_length"]))
    optimizer = OPTIMIZERS[p["optimizer"]](model.parameters())
    phases = ["step", "step_synced", *LAPS[p["pass"]]]
    times: dict[str, list[float]] = {phase: [] for phase in phases}
    autocast = partial(torch.autocast, device, torch.bfloat16, enabled=p["precision"] == "bf16")

    def inference(lap: Callable[[str], None]) -> None:
        with torch.no_grad(), autocast():
            model(x)
        lap("forward")

    def training(lap: Callable[[str], None]) -> None:
        optimizer.zero_grad()
        lap("")  # belongs to no phase
        with autocast():
            loss = functional.cross_entropy(model(x).view(-1, p["vocab_size"]), y.view(-1))
        lap("forward")
        loss.backward()  # type: ignore[no-untyped-call]
        lap("backward")
        optimizer.step()
        lap("optimizer")

    step = training if p["pass"] == "train_step" else inference
    for _ in range(p["warmup_steps"]):
        step(lambda phase: None)
    for _ in range(p["measured_steps"]):
        wait()
        start = last = time.perf_counter()

        def lap(phase: str) -> None:
            nonlocal last
            wait()
            if phase:
                times[phase].append((time.perf_counter() - last) * 1e3)
            last = time.perf_counter()

        step(lap)
        times["step_synced"].append((time.perf_counter() - start) * 1e3)
    wait()
    marks = [mark_time(device)]
    for _ in range(p["measured_steps"]):
        step(lambda phase: None)
        marks.append(mark_time(device))
    wait()
    times["step"] = [elapsed_ms(*pair) for pair in itertools.pairwise(marks)]
    return times


def mark_time(device: str) -> Any:
    """Return the present time, or an event in the queue of the GPU."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def elapsed_ms(start: Any, end: Any) -> float:
    """Return the milliseconds between two marks of mark_time."""
    if isinstance(start, float):
        return float((end - start) * 1e3)
    return float(start.elapsed_time(end))


def by_sweep(cell: Cell) -> dict[str, list[float]]:
    """Return the milliseconds that a sweep measures: of the step in its tables, and of each phase."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"
        with journal.open("w") as stream:
            attempt = Attempt(cell, 1, folder, Settings(instruments=("timing",)))
            _measure(Rank(attempt, 0, by_hand=True), stream, "fork")
        account = read_journal(journal)
    if account.final is None or account.final.status != "ok":
        raise RuntimeError(f"{cell.describe()}: {account.final}")
    times: dict[tuple[str, str], list[float]] = {}
    for sample in account.samples:
        if sample.metric == "duration" and sample.value is not None:
            times.setdefault((sample.mode, sample.phase), []).append(sample.value)
    whole = times.get(("pipelined", "step")) or times["synced", "step"]
    phases = {lap: times["synced", lap] for lap in LAPS[cell.params.values()["pass"]]}
    return {"step": whole, "step_synced": times["synced", "step"], **phases}


def in_child(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, which runs in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(work()).encode())
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError("a measuring child died")
    return json.loads(text)


if __name__ == "__main__":
    run_until_interrupted(main)
