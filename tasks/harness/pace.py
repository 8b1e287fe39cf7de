"""How fast the host does what an eager step has it do: hand small operations to torch, one after another.

It differs between processors, and with what else runs on the machine: outside of a virtual one, too, of which Linux tells only
where the hypervisor does. It may jump from one second to the next: a sign, no measure of what passes between two readings.
"""

from __future__ import annotations

import os
import time
from itertools import cycle
from statistics import median

import torch

from tasks.harness.placing import pin

_CHUNKS = 40
_OPERATIONS = 50


def host_pace() -> float:
    """Operations a ms: additions to one number, by one thread. The median of 40 chunks of 50, some milliseconds in all."""
    number, chunks = torch.zeros(1, device="cpu"), []
    with torch.inference_mode():
        for _ in range(_CHUNKS):
            began = time.perf_counter_ns()
            for _ in range(_OPERATIONS):
                number.add_(1)
            chunks.append(time.perf_counter_ns() - began)
    return _OPERATIONS / median(chunks) * 1e6


def paces(seconds: float) -> list[float]:
    """`host_pace` again and again, for so long, on one core after the other where a process may choose. It stays on the last."""
    host_pace()  # the first one is slower
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    turns = cycle([[core] for core in cores] or [None])
    ends, read = time.monotonic() + seconds, []
    while time.monotonic() < ends:
        pin(next(turns))
        read.append(host_pace())
    return read
