"""Does `sweep` report what a plain loop would? Both measure the same cells, one after the other, in their own processes.

    python benchmarks/plain_loop.py configs/full.yaml --set compile=eager --set pass=train_step --set precision=fp32,bf16

The plain loop knows nothing of this project but its model: build, warm up, then time. It times steps with a
synchronisation after each phase, to be held against the phases and the `synced` step of a sweep, and then steps that run
on, synchronised once at the end with an event between any two, to be held against the `total`. Both run in children
forked from this process, which has imported torch and never touched the GPU, so that a cell costs a second
instead of six. Prints the ratios plain / sweep of the medians. They agree where every ratio is within 2 %, or where the
intervals of the medians overlap; cells that do not are measured again, up to --rounds times, and then agree where the
ranges of the medians of their processes overlap: the noise from process to process. Exit code 1 if some do not agree.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
    "1"  # asking CUDA for its devices would spoil every forked child
)

import torch
import torch._dynamo
from options import asked, cell_options, ending_in_order, file_to_write, refuse
from tabulate import tabulate
from torch.nn import functional

from model.config import SIZES
from model.optimizer import OPTIMIZERS
from model.transformer import TransformerLM
from tasks.__main__ import _measure
from tasks.process.journal import read_journal
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.cell import Cell
from tasks.spec.order_statistics import median_rank

TOLERANCE = 0.02
PLAIN = ("fp32", "tf32", "bf16")
LAPS = {"forward": ["forward"], "train_step": ["forward", "backward", "optimizer"]}


def main() -> None:
    parser = cell_options(__doc__, 5)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no further cell after so long"
    )
    parser.add_argument("--json", type=file_to_write, help="also write the rows here")
    options = parser.parse_args()
    began, rows = time.monotonic(), []
    cells = plain_cells(asked(options).cells)
    if not cells:
        refuse("a plain loop does eager cells of train_step alone: none of these is one")
    for cell in cells:
        if time.monotonic() - began > options.seconds:
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
    """The cells that the plain loop below does by hand, with as many steps as they say, and that no cap makes fail."""
    values = [(cell, cell.params.values()) for cell in cells]
    return [
        cell
        for cell, v in values
        if cell.task == "train_step"
        and v["compile"] == "eager"
        and v["pass"] in LAPS
        and v["size"]
        and v["precision"] in PLAIN
        and v["timing"] == "fixed"
        and v["memory_limit_gib"] is None
    ]


Runs = dict[str, list[list[float]]]  # by phase, the steps of each process


def compare(cell: Cell, rounds: int) -> dict[str, Any]:
    plain: Runs = {}
    ours: Runs = {}
    count, wrong = 0, ["nothing yet"]
    while wrong and count < rounds:
        for runs, work in (
            (plain, lambda: plain_loop(cell.params.values())),
            (ours, lambda: by_sweep(cell)),
        ):
            for phase, steps in in_child(work).items():
                runs.setdefault(phase, []).append(steps)
        count += 1
        wrong = [phase for phase in plain if not agree(plain[phase], ours[phase])]
    values = cell.params.values()
    row = {name: values[name] for name in ("size", "context_length", "precision")} | {
        "rounds": count
    }
    for phase in plain:
        p, s = (pooled_median(runs[phase]) for runs in (plain, ours))
        row |= {f"{phase} ms": round(s, 2)} if phase == "step" else {}
        row |= {f"{phase} ratio": round(p / s, 3)}
    return {**row, "agrees": "NO: " + ", ".join(wrong) if wrong else "yes"}


def agree(plain: list[list[float]], ours: list[list[float]]) -> bool:
    p, s = (pooled_median(runs) for runs in (plain, ours))
    if abs(p / s - 1) <= TOLERANCE:
        return True
    (p_low, p_high), (s_low, s_high) = noise(plain), noise(ours)
    return p_low <= s_high and s_low <= p_high


def pooled_median(runs: list[list[float]]) -> float:
    return statistics.median(itertools.chain.from_iterable(runs))


def noise(runs: list[list[float]]) -> tuple[float, float]:
    """Of one process, the interval of its median; of several, the range of their medians."""
    if len(runs) > 1:
        medians = [statistics.median(run) for run in runs]
        return min(medians), max(medians)
    ordered, rank = sorted(runs[0]), median_rank(len(runs[0]))
    return ordered[rank - 1], ordered[-rank]


def plain_loop(p: dict[str, Any]) -> dict[str, list[float]]:
    """What one would write by hand: milliseconds of each measured step, then of each phase of further steps."""
    device = p["device"]
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    torch.set_float32_matmul_precision("high" if p["precision"] == "tf32" else "highest")
    torch.manual_seed(p["seed"])
    with torch.device(device):
        model = TransformerLM(SIZES[p["year"]][p["size"]], p["context_length"], p["vocab_size"])
        x, y = torch.randint(p["vocab_size"], (2, p["batch_size"], p["context_length"]))
    optimizer = OPTIMIZERS[p["optimizer"]](model.parameters())
    times: dict[str, list[float]] = {
        "step": [],
        "step_synced": [],
        **{lap: [] for lap in LAPS[p["pass"]]},
    }

    def inference(lap: Callable[[str], None]) -> None:
        with (
            torch.no_grad(),
            torch.autocast(device, torch.bfloat16, enabled=p["precision"] == "bf16"),
        ):
            model(x)
        lap("forward")

    def training(lap: Callable[[str], None]) -> None:
        optimizer.zero_grad()
        lap("")
        with torch.autocast(device, torch.bfloat16, enabled=p["precision"] == "bf16"):
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
    """Now: of the device's queue where it has one."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def elapsed_ms(start: Any, end: Any) -> float:
    return float((end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end))


def by_sweep(cell: Cell) -> dict[str, list[float]]:
    """The measuring process of a sweep: the step as its tables give it, and each phase."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"
        with journal.open("w") as stream:
            _measure(
                Attempt(cell, 1, folder, Settings(instruments=("timing",))),
                stream,
                "fork",
                by_hand=True,
            )
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
    """The result of `work`, done in a forked child, through a pipe."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result = json.dumps(work())
            os.write(writing, result.encode())
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
    ending_in_order(main)
