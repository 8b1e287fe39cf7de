"""How many small operations a CPU core starts per ms: what limits an eager step of small kernels.

The rate differs between processors and with the load of the machine. In a virtual machine that includes
load outside of it, which Linux sees only if the hypervisor reports it as steal time. The rate may
change from one second to the next, so a value from before and one from after a cell's steps hint at
trouble, but cannot correct a measured time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import cycle
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tasks.process.cpu_affinity import pin_to_cores

# 40 chunks of 50 additions take a few milliseconds. The median over chunks ignores interruptions by
# the scheduler, which hit single chunks.
_CHUNKS = 40
_OPERATIONS = 50


def dispatch_rate() -> float:
    """Return how many additions to one number a single thread starts per ms."""
    number = torch.zeros(1, device="cpu")
    chunks = [_chunk_ns(number) for _ in range(_CHUNKS)]
    return _OPERATIONS / median(chunks) * 1e6


def dispatch_rates(seconds: float) -> list[float]:
    """Return `dispatch_rate` measured again and again for so many seconds, on each core in turn.

    The process stays on the last core. Without `sched_setaffinity` it runs where the system puts it.
    """
    dispatch_rate()  # the first call is slower
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    turns = cycle([[core] for core in cores] or [None])
    deadline, rates = time.monotonic() + seconds, []
    while time.monotonic() < deadline:
        pin_to_cores(next(turns))
        rates.append(dispatch_rate())
    return rates


class Additions:
    """How long the host takes to have a device add to one number: to launch a kernel as small as can be.

    An eager step that waits for its host is launches of kernels, too. Counted in additions rather than ms it depends less on how
    fast the host happens to be: which each thread is by itself, having a core of its own. A backward pass is launched by a thread
    that autograd has for each device; there it is read in the backward pass of an addition.
    """

    def __init__(self, device: torch.device, backward: bool) -> None:
        """backward: whether to read it on autograd's thread, too."""
        self._number = torch.zeros(1, device=device)
        self._leaf = torch.zeros(1, device=device, requires_grad=True) if backward else None

    def read(self) -> tuple[float, float]:
        """ms for one, on this thread and on that of backward passes, nan where it is not to be read there. The device is idle."""
        here, there = _chunk_ns(self._number), [float("nan")]
        if self._leaf is not None:
            there.clear()
            seen = _OnTheWayBack.apply(self._leaf, lambda: there.append(_chunk_ns(self._number)))  # type: ignore[no-untyped-call]
            torch.autograd.grad(seen, self._leaf)
        return here / _OPERATIONS / 1e6, there[0] / _OPERATIONS / 1e6


class _OnTheWayBack(torch.autograd.Function):
    """Hands a tensor on, and calls something when the gradient passes."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, call: Callable[[], None]) -> Tensor:
        context.call = call
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.call()
        return gradient, None


def _chunk_ns(number: Tensor) -> int:
    with torch.inference_mode():
        began = time.perf_counter_ns()
        for _ in range(_OPERATIONS):
            number.add_(1)
        return time.perf_counter_ns() - began
