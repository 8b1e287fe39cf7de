"""Time to predict a cell from two small models, compared with tracing the whole model.

    python benchmarks/prediction.py
    python benchmarks/prediction.py --size 2.7B --rounds 5

Traces a training step in both ways, alternately and in one process, and prints the CPU seconds of
each and their ratio. Exit code 1 if the ratio is above 0.40 (0.20 was measured for `xl`, which has
48 layers), or if the traces differ. Then predicts cells, and runs their steps on tensors without
data: exit code 1 if a prediction takes as long as the two steps that it follows (half as long was
measured).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

from options import at_least, run_until_interrupted

from tasks.harness.workload import run_step
from tasks.prediction.allocator import cublas_workspace_bytes
from tasks.prediction.predictor import NoData, Predictor, track
from tasks.prediction.records import PredictionRequest
from tasks.prediction.replay import Trace
from tasks.prediction.resizing import trace_by_layers
from tasks.process.phase_file import Progress
from tasks.spec.registry import make_cell
from tasks.train_step import build_on
from tasks.training.parameters import TrainStepParams

HIGHEST_RATIO = 0.40


def main() -> None:
    """Measure both ways and print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="xl", help="built-in model  [xl]")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="rounds of both  [3]")
    options = parser.parse_args()
    params = TrainStepParams.model_validate({"device": "cuda", "size": options.size})
    trace_whole = partial(track, workspace_bytes=cublas_workspace_bytes(None))
    gc.disable()
    trace_whole(params)  # the first trace of a process also imports, and fills caches
    whole_s, layers_s = [], []
    for _ in range(options.rounds):
        seconds, whole = timed(lambda: trace_whole(params))
        whole_s.append(seconds)
        seconds, written = timed(lambda: trace_by_layers(params, trace_whole))
        layers_s.append(seconds)
        if written != whole:
            sys.exit("prediction.py: the trace written out differs from that of the whole model")
    ratio = median(layers_s) / median(whole_s)
    print(f"whole model: {median(whole_s):.2f} CPU-s, by layers: {median(layers_s):.2f}")
    print(f"by layers / whole model: {ratio:.2f} (at most {HIGHEST_RATIO:.2f})")
    predicted_s, stepped_s = prediction_and_steps()
    print(f"prediction: {predicted_s:.2f} CPU-s, its steps without prediction: {stepped_s:.2f}")
    if ratio > HIGHEST_RATIO or predicted_s >= stepped_s:
        sys.exit(1)


def prediction_and_steps() -> tuple[float, float]:
    """Return the CPU seconds of predicting three cells, and of running their steps without data."""
    cells = [
        make_cell("train_step", {"size": "small", "pass": pass_})
        for pass_ in ("train_step", "forward_backward", "forward")
    ]
    predicted_s, stepped_s = [], []
    for _ in range(3):
        started_s = time.process_time()
        predictor = Predictor()
        for cell in cells:
            if predictor.predict(PredictionRequest(cell)).how != "tracked":
                sys.exit("prediction.py: a cell was not predicted by tracing it")
        predicted_s.append(time.process_time() - started_s)
        started_s = time.process_time()
        for cell in cells:
            assert isinstance(cell.params, TrainStepParams)
            workload = build_on(NoData(), cell.params)
            for _ in range(2):
                run_step(workload, Progress())
        stepped_s.append(time.process_time() - started_s)
        if min(predicted_s) < min(stepped_s):
            break
    return min(predicted_s), min(stepped_s)


def timed(trace: Callable[[], Trace | None]) -> tuple[float, Trace | None]:
    """Return the CPU seconds of a trace, and the trace. Objects of the one before are freed first."""
    gc.collect()
    started_s = time.process_time()
    found = trace()
    return time.process_time() - started_s, found


if __name__ == "__main__":
    run_until_interrupted(main)
