"""Predicted memory against measured memory, for the models of architectures.py.

    python benchmarks/prediction_truth.py --out truth.jsonl
    python benchmarks/prediction_truth.py --predict-only
    python benchmarks/prediction_truth.py --saved-bytes

First predicts a training step of each model in fp32, bf16 and pure bf16, without a GPU, and stores
the predictions in --out. Then measures each step twice on the GPU: as a sweep does, and by a plain
loop of torch alone. Each measurement runs in a process that is forked from this one, which has
imported torch and never used the GPU. Several run at the same time, since only memory is measured.

Prints a row for each step and the errors of the predictions against the plain loop. Exit code 1 if
errors of `tracked` and `modelled` predictions are beyond these bars: of allocated memory the 95th
percentile at most 1% and the largest 3%, of reserved memory 5% and 10%.

--saved-bytes compares what the forward pass saves for the backward pass, with small models in fp32,
twice: on the GPU, or on the CPU of a machine without one. Exit code 1 if prediction and measurement
differ, or two runs do. Predictions are for a GPU: on a CPU, fused attention saves other tensors.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import quantiles
from typing import Any

# By default, torch.cuda.is_available() asks the CUDA runtime, after which no forked child can use
# CUDA. This variable makes it ask NVML.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch
import torch._dynamo  # optimizers import it: once here instead of in each child
from architectures import ARCHITECTURES, FUSED_PATHS, build, cell_values
from options import at_least, file_to_write, refuse, run_until_interrupted
from tabulate import tabulate
from torch.nn import functional

from orchestrator.hardware.gpu_catalog import find_gpu
from orchestrator.hardware.nvml import gpu_names
from orchestrator.planning.prediction_requests import predict_memory
from tasks.__main__ import Rank, _measure
from tasks.prediction.records import Prediction
from tasks.process.journal import read_journal
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.cell import Cell
from tasks.spec.registry import make_cell

HERE = str(Path(__file__).resolve().parent)
GIB = 1024**3
PRECISIONS = ("fp32", "bf16", "bf16_pure")
FOLLOWED = ("tracked", "modelled")  # predictions that promise to be right
# 95th percentile and largest error, as fractions.
BARS = {"allocated": (0.01, 0.03), "reserved": (0.05, 0.10)}
STEPS = 3  # the first one has no optimizer state, the second still frees what the first left
# Memory that measurements at the same time may take together, and each in addition to its tensors.
TOGETHER_BYTES, CONTEXT_BYTES, UNKNOWN_BYTES = 66 * GIB, GIB, 16 * GIB
LAST_S = 30.0  # after the limit, running measurements have this long to end
EQUAL, DIFFERENT, OTHER_RUN = "equal", "DIFFERENT", "DIFFERENT IN ANOTHER RUN"

Peaks = dict[str, Any]  # bytes `allocated` and `reserved`, or an `error`


@dataclass(frozen=True)
class Step:
    """A training step to predict and to measure."""

    architecture: str
    path: str
    precision: str
    is_small: bool = False

    def cell(self, device: str = "cuda") -> Cell:
        values = cell_values(self.architecture, self.path, self.precision, self.is_small)
        return make_cell("train_step", {**values, "device": device})

    @property
    def names(self) -> dict[str, str]:
        return {
            "architecture": self.architecture,
            "path": self.path,
            "precision": self.precision,
        }


@dataclass(frozen=True)
class Work:
    """A function to call in a child process, and the GPU memory that it needs."""

    call: Callable[[], Peaks]
    step: Step
    way: str
    nbytes: float = 0.0


def main() -> None:
    """Predict, measure and compare."""
    options = parse_options()
    names = options.only or list(ARCHITECTURES)
    if unknown := set(names) - set(ARCHITECTURES):
        refuse(f"--only {unknown.pop()}: choose from {', '.join(ARCHITECTURES)}")
    if options.saved_bytes:
        sys.exit(compare_saved_bytes(names, options.gpu))
    if not options.predict_only and not gpu_names():
        refuse("this machine has no GPU: add --predict-only or --saved-bytes")
    started_s = time.monotonic()
    steps = [
        Step(name, path, precision)
        for name in names
        for path in ARCHITECTURES[name].paths
        for precision in options.precision or PRECISIONS
    ]
    predictions = predict(steps, options.gpu)
    with options.out.open("w") as stored:
        for step in steps:
            row = {"way": "predicted", **step.names, **described(predictions[step])}
            print(json.dumps(row), file=stored, flush=True)
        seconds = time.monotonic() - started_s
        print(
            f"{len(steps)} steps of {len(names)} architectures predicted in {seconds:.0f} s",
            flush=True,
        )
        measured: dict[tuple[Step, str], Peaks] = {}
        if not options.predict_only:
            work = list(measurements(steps, predictions))
            for done, peaks in in_children(work, options.at_once, started_s + options.limit_s):
                measured[done.step, done.way] = peaks
                row = {"way": done.way, **done.step.names, **peaks}
                print(json.dumps(row), file=stored, flush=True)
    sys.exit(report(predictions, measured))


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=file_to_write, default=Path(os.devnull), help="file for rows of JSON")
    add("--limit-s", type=float, default=420.0, help="start no measurement after this time  [420]")
    add("--predict-only", action="store_true", help="predict, and measure nothing")
    add("--saved-bytes", action="store_true", help="compare saved bytes instead")
    add("--only", action="append", metavar="NAME", help="an architecture; may be repeated")
    add("--precision", action="append", choices=PRECISIONS, help="may be repeated  [all]")
    add("--gpu", default="H100", help="GPU of the predictions  [H100]")
    add("--at-once", type=at_least(1), default=8, help="measurements at the same time  [8]")
    return parser.parse_args()


def predict(steps: Iterable[Step], gpu: str) -> dict[Step, Prediction]:
    """Return the predictions of a sweep, which are made in processes without a GPU."""
    cells = {step: step.cell() for step in steps}
    found = predict_memory(list(cells.values()), find_gpu(gpu), (HERE,))
    return {step: found[cell.id] for step, cell in cells.items()}


def described(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as values of JSON."""
    return {
        "how": prediction.how or "not predicted",
        "reason": prediction.reason,
        "allocated": prediction.peak_bytes(),
        "reserved": prediction.reserved_bytes,
    }


def measurements(steps: Iterable[Step], predictions: Mapping[Step, Prediction]) -> Iterator[Work]:
    """Yield both measurements of each step."""
    for step in steps:
        nbytes = (predictions[step].reserved_bytes or UNKNOWN_BYTES) + CONTEXT_BYTES
        yield Work(partial(by_product, step.cell()), step, "product", nbytes)
        yield Work(partial(by_plain_loop, step), step, "plain", nbytes)


def by_product(cell: Cell) -> Peaks:
    """Return the peaks and the saved bytes that the measuring process of a sweep finds."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"
        with journal.open("w") as stream:
            settings = Settings(instruments=("memory",), import_paths=(HERE,))
            rank = Rank(Attempt(cell, 1, folder, settings), 0, by_hand=True)
            _measure(rank, stream, "fork")
        account = read_journal(journal)
    if account.final is None or account.final.status != "ok":
        return {"error": str(account.final)}
    peaks: Peaks = {"allocated": 0, "reserved": 0, "saved": None}
    for sample in account.samples:
        if sample.metric == "saved_bytes":
            peaks["saved"] = sample.value
        elif sample.metric == "peak_reserved_bytes":
            peaks["reserved"] = max(peaks["reserved"], sample.value or 0)
        elif (sample.metric, sample.mode) == ("peak_allocated_bytes", "steady"):
            peaks["allocated"] = max(peaks["allocated"], sample.value or 0)
    return peaks


def by_plain_loop(step: Step) -> Peaks:
    """Return the peaks of a training step, as a loop written by hand finds them."""
    values = cell_values(step.architecture, step.path, step.precision)
    shape = (2, values["batch_size"], values["context_length"])
    torch.set_default_dtype(torch.bfloat16 if step.precision == "bf16_pure" else torch.float32)
    with torch.device("cuda"):
        model = build(**values["model_args"])
        inputs, targets = torch.randint(values["vocab_size"], shape)
    torch.set_default_dtype(torch.float32)
    kind: dict[str, Any] = {values["optimizer"]: True}
    optimizer = torch.optim.AdamW(model.parameters(), **kind)
    for number in range(STEPS):
        optimizer.zero_grad()
        if number == STEPS - 1:
            torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=step.precision == "bf16"):
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
    }


def in_children(
    work: Sequence[Work], at_once: int, deadline_s: float
) -> Iterator[tuple[Work, Peaks]]:
    """Yield the results of work that runs in forked children, as many as the memory allows."""
    fork = multiprocessing.get_context("fork")
    waiting = deque(work)
    running: dict[Any, tuple[Any, Work]] = {}
    while waiting or running:
        late_s = time.monotonic() - deadline_s
        if late_s > 0:
            waiting.clear()
        if late_s > LAST_S:
            for process, _ in running.values():
                process.kill()
        while waiting and len(running) < at_once and _has_room(running, waiting[0]):
            task = waiting.popleft()
            reader, writer = fork.Pipe(duplex=False)
            process = fork.Process(target=_send, args=(writer, task.call))
            process.start()
            writer.close()
            running[reader] = process, task
        for ready in wait(list(running), timeout=1.0):
            process, task = running.pop(ready)
            connection: Any = ready
            try:
                peaks = connection.recv()
            except EOFError:
                peaks = {"error": "the process died"}
            process.join()
            yield task, peaks


def _has_room(running: Mapping[Any, tuple[Any, Work]], task: Work) -> bool:
    taken = sum(other.nbytes for _, other in running.values())
    return not running or taken + task.nbytes <= TOGETHER_BYTES


def _send(writer: Connection, call: Callable[[], Peaks]) -> None:
    try:
        writer.send(call())
    except Exception as error:
        traceback.print_exc()
        writer.send({"error": f"{type(error).__name__}: {error}"})


def report(
    predictions: Mapping[Step, Prediction], measured: Mapping[tuple[Step, str], Peaks]
) -> bool:
    """Print a row for each step and a summary. Return True if an error is beyond its bar."""
    rows = []
    errors: dict[str, list[float]] = {name: [] for name in BARS}
    apart = [0.0]
    for step, prediction in predictions.items():
        product, plain = (measured.get((step, way), {}) for way in ("product", "plain"))
        guess = described(prediction)
        row = list(step.names.values())
        for name in BARS:
            truth, error = plain.get(name), None
            if guess[name] and truth:
                error = guess[name] / truth - 1
                if prediction.how in FOLLOWED:
                    errors[name].append(abs(error))
            if truth and product.get(name):
                apart.append(abs(product[name] / truth - 1))
            row += [*map(_gib, (guess[name], product.get(name), truth)), _percent(error)]
        failed = product.get("error") or plain.get("error")
        words = (guess["how"], guess["reason"], failed and f"measurement failed: {failed}")
        rows.append([*row, ". ".join(filter(None, words))[:120]])
    sizes = ["predicted", "product", "plain", "error"]
    headers = [
        *("architecture", "path", "precision"),
        *(f"{name[:5]}. {size}" for name in BARS for size in sizes),
        "prediction",
    ]
    print(tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True))
    hows = [described(one)["how"] for one in predictions.values()]
    print(f"\n{', '.join(f'{hows.count(how)} {how}' for how in sorted(set(hows)))}")
    if not measured:
        return False
    print(f"product and plain loop differ by at most {max(apart):.2%}")
    is_beyond = False
    for name, found in errors.items():
        middle, high, largest = _spread(found)
        bars = BARS[name]
        is_beyond |= high > bars[0] or largest > bars[1]
        print(
            f"{name}: error of {len(found)} {' or '.join(FOLLOWED)} predictions: median {middle:.2%},"
            f" 95th percentile {high:.2%} (at most {bars[0]:.0%}), largest {largest:.2%}"
            f" (at most {bars[1]:.0%})"
        )
    return is_beyond


def _spread(errors: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the 95th percentile and the largest."""
    if len(errors) < 2:
        return (max(errors, default=0.0),) * 3
    cuts = quantiles(errors, n=20, method="inclusive")
    return cuts[9], cuts[18], max(errors)


def _gib(nbytes: float | None) -> str:
    return f"{nbytes / GIB:.3f}" if nbytes else ""


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.2%}"


def saved_bytes(prediction: Prediction) -> float | str:
    """Return the predicted bytes that the forward pass saves, or why there are none."""
    for sample in prediction.samples:
        if sample.metric == "saved_bytes":
            return sample.value if sample.value is not None else sample.note
    return prediction.reason


def compare_saved_bytes(names: Iterable[str], gpu: str) -> bool:
    """Print the saved bytes of small models, twice each. Return True if some differ."""
    steps = [
        Step(name, path, "fp32", is_small=True)
        for name in names
        for path in ARCHITECTURES[name].paths
    ]
    device = "cuda" if gpu_names() else "cpu"
    guesses = [predict(steps, gpu) for _ in range(2)]
    work = [
        Work(partial(by_product, step.cell(device)), step, way)
        for step in steps
        for way in ("once", "again")
    ]
    measured = {
        (done.step, done.way): peaks.get("saved", peaks.get("error"))
        for done, peaks in in_children(work, os.cpu_count() or 1, math.inf)
    }
    rows, is_different = [], False
    for step in steps:
        guessed = [saved_bytes(guess[step]) for guess in guesses]
        truth = [measured[step, way] for way in ("once", "again")]
        # The CPU's fused attention takes fewer calls than the GPU's, and the GPU's saves the two
        # numbers of its random generator.
        has_other_kernel = device == "cpu" and step.path in FUSED_PATHS
        note = compared(guesses[0][step].how, guessed, truth, has_other_kernel)
        is_different |= note in (DIFFERENT, OTHER_RUN)
        rows.append([step.architecture, step.path, guessed[0], truth[0], note])
    headers = ["architecture", "path", "predicted", "measured", "comparison"]
    print(tabulate(rows, headers=headers, tablefmt="simple", maxcolwidths=[None, None, 40]))
    counts = Counter(row[-1] for row in rows)
    print("\n" + ", ".join(f"{count} {note}" for note, count in counts.items()))
    return is_different


def compared(
    how: str, guessed: Sequence[object], truth: Sequence[object], has_other_kernel: bool
) -> str:
    """Return how two predictions and two measurements of the saved bytes compare."""
    if guessed[0] != guessed[1] or truth[0] != truth[1]:
        return OTHER_RUN
    if guessed[0] == truth[0]:
        return EQUAL
    if how not in FOLLOWED or isinstance(guessed[0], str):
        return "not followed, as its row says"
    return "another kernel of fused attention" if has_other_kernel else DIFFERENT


if __name__ == "__main__":
    run_until_interrupted(main)
