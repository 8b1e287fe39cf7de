"""How fast the host does what an eager step has it do: hand small operations to torch, one after another.

It differs between processors, and with what else runs on the machine: outside of a virtual one, too, of which Linux tells only
where the hypervisor does. It may jump from one second to the next: what is read before some seconds and after them is a sign, no
measure. Read beside each step, on the threads that the step has, it is one (`Additions`).
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

from tasks.process.cpu_affinity import pin

_CHUNKS = 40
_OPERATIONS = 50


def host_pace() -> float:
    """Operations a ms: additions to one number, by one thread. The median of 40 chunks of 50, some milliseconds in all."""
    number = torch.zeros(1, device="cpu")
    chunks = [_chunk_ns(number) for _ in range(_CHUNKS)]
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
