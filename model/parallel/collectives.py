"""The collective calls of one rank on torch.distributed's default group, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# Torch 2.13 renamed both, and warns at each call under the old name.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Averaging:
    """A mean over ranks that is being computed: `wait()` puts it into the gradient.

    work: None if nothing is sent. sent: what travels, which is the gradient itself if it already
    has the right dtype.
    """

    work: dist.Work | None
    gradient: Tensor
    sent: Tensor

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        if self.sent is not self.gradient:
            self.gradient.copy_(self.sent)


class Collectives:
    """Means over ranks, and their parts.

    wire: dtype in which gradients are sent if theirs is wider; None: always their own.
    is_on: False if ranks do not average, so that each trains on its own rows alone.
    transfers: False to leave out the calls alone, and do all else that an average needs.
    calls, payload_bytes: by collective. The payload S of a call is its whole tensor, as nccl-tests
        counts it: with a ring of n ranks, each rank sends 2(n-1)/n · S for an all-reduce, and
        (n-1)/n · S for a reduce-scatter or an all-gather (nccl-tests, doc/PERFORMANCE.md).
    """

    def __init__(self, wire: torch.dtype | None = None) -> None:
        self.wire = wire
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.is_on = self.transfers = True
        self.calls: Counter[str] = Counter()
        self.payload_bytes: Counter[str] = Counter()

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Average nothing within this context."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    @contextmanager
    def without_transfers(self) -> Iterator[None]:
        """Leave out the calls within this context: a mean is then this rank's share of it."""
        self.transfers = False
        try:
            yield
        finally:
            self.transfers = True

    def average(self, gradient: Tensor) -> None:
        """Replace a gradient by its mean over ranks."""
        sent = self._share(gradient)
        if self._is_due("all_reduce", sent):
            dist.all_reduce(sent)
        if sent is not gradient:
            gradient.copy_(sent)

    def start_average(self, gradient: Tensor) -> Averaging:
        """Start to replace a gradient by its mean; nothing may read or write it before `wait()`."""
        sent = self._share(gradient)
        is_due = self._is_due("all_reduce", sent)
        work = dist.all_reduce(sent, async_op=True) if is_due else None
        return Averaging(work, gradient, sent)

    def average_part(self, gradients: Tensor) -> None:
        """Replace this rank's part of a one-dimensional tensor by the mean over ranks."""
        sent = self._share(gradients)
        part = sent.chunk(self.ranks)[self.rank]
        if self._is_due("reduce_scatter", sent):
            reduce_scatter(part, sent)
        if sent is not gradients:
            gradients.chunk(self.ranks)[self.rank].copy_(part)

    def gather_parts(self, values: Tensor) -> None:
        """Replace all other ranks' parts of a one-dimensional tensor by what those ranks have."""
        if self._is_due("all_gather", values):
            all_gather(values, values.chunk(self.ranks)[self.rank])

    def _share(self, gradient: Tensor) -> Tensor:
        """Return this rank's share of the mean, in the dtype in which it is sent."""
        # Divided before it is sent: gloo cannot average, and a sum may overflow in a narrow dtype.
        gradient.div_(self.ranks)
        wire = self.wire
        if wire and gradient.is_floating_point() and gradient.dtype.itemsize > wire.itemsize:
            return gradient.to(wire)
        return gradient.contiguous()

    def _is_due(self, name: str, sent: Tensor) -> bool:
        """Return True, and count a call, unless calls are left out."""
        if self.transfers:
            self.calls[name] += 1
            self.payload_bytes[name] += sent.nbytes
        return self.transfers
