"""What it takes a process to reach its GPU and to make its first step there: alone, and as many at once as there are GPUs.

    python benchmarks/reaching.py --rounds 5

Every cell's process does so anew, forked from one that has imported all it needs, as here. By turns one process goes through the
parts alone, on each GPU in turn, and one for each GPU does each part at the same moment. A ratio well above 1 is of what the
driver, or the machine around it, does for one process at a time. With --held all GPUs are kept open meanwhile, as a daemon of the
driver does, so that no process is the first to open one.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Barrier

import pynvml
from options import at_least, ending_in_order, refuse
from tabulate import tabulate

from orchestrator.hardware.nvml import gpu_uuids
from tasks.process.fork_server import import_everything
from tasks.train_step import build
from tasks.training.parameters import TrainStepParams

Took = Mapping[str, float]  # by its name, the milliseconds of each part

PATIENCE_S = 120.0  # for the slowest to come to a part: building `tiny` on a busy CPU included


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--held", action="store_true", help="keep all GPUs open meanwhile")
    parser.add_argument(
        "--size",
        choices=["tiny", "mini", "small"],
        default="small",
        help="of the model that is built",
    )
    parser.add_argument(
        "--cpu", type=at_least(2), metavar="N", help="N processes on the CPU instead, to try it out"
    )
    options = parser.parse_args()
    uuids = gpu_uuids()
    if not uuids and not options.cpu:
        refuse("reaching.py: there is no GPU here. Add --cpu 2 to try it out on the CPU")
    device = {"device": "cpu", "context_length": 16} if options.cpu else {"device": "cuda"}
    params = TrainStepParams.model_validate({"size": options.size, **device})
    places = [""] * options.cpu if options.cpu else list(uuids)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__"])
    with held() if options.held else nullcontext():
        go_through(
            context, params, places[:1]
        )  # starts the server, and has the machine read its libraries
        alone, at_once = [], []
        for done in range(options.rounds):
            alone += go_through(context, params, [places[done % len(places)]])
            at_once += go_through(context, params, places)
    print(table(alone, at_once, len(places)))


@contextmanager
def held() -> Iterator[None]:
    """All GPUs open."""
    pynvml.nvmlInit()
    for index in range(pynvml.nvmlDeviceGetCount()):
        pynvml.nvmlDeviceGetHandleByIndex(index)
    yield
    pynvml.nvmlShutdown()


def go_through(
    context: ForkServerContext, params: TrainStepParams, places: Sequence[str]
) -> list[Took]:
    """What each part took in a process for each place, which begin each part together. places: as in CUDA_VISIBLE_DEVICES."""
    together = context.Barrier(len(places))
    pipes = [context.Pipe(duplex=False) for _ in places]
    processes = [
        context.Process(target=time_parts, args=(params, place, together, answer))
        for place, (_, answer) in zip(places, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    for _, answer in pipes:
        answer.close()
    try:
        return [question.recv() for question, _ in pipes]
    except EOFError:
        sys.exit("reaching.py: a process ended before its first step: what it says stands above")
    finally:
        for process in processes:
            process.join()


def time_parts(params: TrainStepParams, place: str, together: Barrier, answer: Connection) -> None:
    if place:
        os.environ["CUDA_VISIBLE_DEVICES"] = place
    took, going = {}, parts(params)
    try:
        while True:
            together.wait(PATIENCE_S)
            began = time.perf_counter()
            part = next(going, None)
            if part is None:
                break
            took[part] = (time.perf_counter() - began) * 1e3
    except BaseException:
        together.abort()
        raise
    answer.send(took)


def parts(params: TrainStepParams) -> Iterator[str]:
    """Does one after the other, and names it when it is done."""
    if params.device == "cuda":
        import torch

        pynvml.nvmlInit()
        yield "NVML"
        ctypes.CDLL("libcuda.so.1").cuInit(0)
        yield "driver"
        torch.empty(1, device="cuda")
        torch.cuda.synchronize()
        yield "context"
    workload = build(params)
    workload.device.synchronize()
    yield "build"
    for step in ("first step", "second step"):
        workload.step(lambda phase: nullcontext())
        workload.device.synchronize()
        yield step


def table(alone: Sequence[Took], at_once: Sequence[Took], places: int) -> str:
    rows = [
        [part, *_compared([took[part] for took in alone], [took[part] for took in at_once])]
        for part in alone[0]
    ]
    rows.append(
        [
            "in all",
            *_compared(
                [sum(took.values()) for took in alone], [sum(took.values()) for took in at_once]
            ),
        ]
    )
    header = ["part", "alone ms", f"{places} at once ms", "at most ms", "at once / alone"]
    return tabulate(rows, header, "github", floatfmt=("", ".1f", ".1f", ".1f", ".2f"))


def _compared(alone: Sequence[float], at_once: Sequence[float]) -> list[float]:
    middle, among = statistics.median(alone), statistics.median(at_once)
    return [middle, among, max(at_once), among / middle]


if __name__ == "__mp_main__":  # in the process that the others are forked from
    import_everything(compiled=False)
if __name__ == "__main__":
    ending_in_order(main)
