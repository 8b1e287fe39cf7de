"""The number of small operations a CPU core starts per ms, which limits steps of small kernels.

The rate differs between processors and with the load of the machine. In a virtual machine that
includes load outside of it, which Linux sees only if the hypervisor reports it as steal time. The
rate may change from one second to the next, so values from before and after a cell's steps hint at
trouble, but cannot correct a measured time.
"""

from __future__ import annotations

import os
from itertools import cycle
from statistics import median

import torch
from torch import Tensor

from tasks.process import clock
from tasks.process.cpu_affinity import pin_to_cores

# 40 chunks of 50 additions take a few milliseconds. The median over chunks ignores interruptions
# by the scheduler, which hit single chunks.
_CHUNKS = 40
_OPERATIONS = 50


def dispatch_rate() -> float:
    """Return how many additions to one number a single thread starts per ms."""
    number = torch.zeros(1, device="cpu")
    chunks = [_chunk_ns(number) for _ in range(_CHUNKS)]
    return _OPERATIONS / median(chunks) * 1e6


def dispatch_rates(seconds: float) -> list[float]:
    """Return `dispatch_rate` measured repeatedly for some seconds, on each core in turn.

    The process stays on the last core.
    """
    dispatch_rate()  # the first call is slower
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    turns = cycle([[core] for core in cores] or [None])
    deadline, rates = clock.monotonic() + seconds, []
    while clock.monotonic() < deadline:
        pin_to_cores(next(turns))
        rates.append(dispatch_rate())
    return rates


def _chunk_ns(number: Tensor) -> int:
    with torch.inference_mode():
        began = clock.perf_counter_ns()
        for _ in range(_OPERATIONS):
            number.add_(1)
        return clock.perf_counter_ns() - began
