"""How fast the host does what an eager step has it do: hand small operations to torch, one after another.

It differs between processors, and with what else runs on the machine: outside of a virtual one, too, of which Linux tells only
where the hypervisor does. It may jump from one second to the next: a sign, no measure of what passes between two readings.
"""

from __future__ import annotations

import time
from statistics import median

import torch

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
