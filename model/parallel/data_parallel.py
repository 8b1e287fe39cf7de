"""Four ways to average the gradients of ranks, from the simplest one to that of torch's DDP.

All ranks have the whole model. Each computes the gradients of its rows, and replaces them by their
mean over all ranks. The optimizers of all ranks then make the same update. With a ring of n ranks,
each rank sends 2(n-1)/n times the bytes of the gradients in a step, in all four ways: only the
number of calls differs, and how much of them the backward pass hides.

A parameter must have a gradient on all ranks or on none. `parameters()` names a tied parameter
once, so it is sent once. Frozen parameters are not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.parallel.collectives import Averaging, Collectives


class GradientAveraging(Protocol):
    """A way to average gradients."""

    def communicate(self) -> None:
        """Complete all means, after the backward pass and before the optimizer."""


def broadcast_model(model: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0."""
    for tensor in (*model.parameters(), *model.buffers()):
        values = tensor.detach()
        sent = values.contiguous()
        dist.broadcast(sent, src=0)
        if sent is not values:
            values.copy_(sent)


class Naive:
    """After the backward pass, one all-reduce for each parameter, one after the other."""

    def __init__(self, model: nn.Module, collectives: Collectives) -> None:
        self._trained = trained_parameters(model)
        self._collectives = collectives

    def communicate(self) -> None:
        if self._collectives.is_on:
            for gradient in _gradients(self._trained):
                self._collectives.average(gradient)


class Flat:
    """After the backward pass, one all-reduce of all gradients, which are copied into one tensor.

    Gradients of different dtypes are different tensors. For a moment, all gradients exist twice.
    """

    def __init__(self, model: nn.Module, collectives: Collectives) -> None:
        self._trained = trained_parameters(model)
        self._collectives = collectives

    def communicate(self) -> None:
        if not self._collectives.is_on:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in _gradients(self._trained):
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for gradients in by_dtype.values():
            flat = flatten(gradients)
            self._collectives.average(flat)
            unflatten(flat, gradients)


class Overlap:
    """During the backward pass, one all-reduce for each parameter, as soon as it has its gradient.

    The calls do not block, so that they run while the gradients of earlier layers are computed.
    """

    def __init__(self, model: nn.Module, collectives: Collectives) -> None:
        self._trained = trained_parameters(model)
        self._collectives = collectives
        self._started: dict[Tensor, Averaging] = {}
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._start)  # type: ignore[no-untyped-call]

    def communicate(self) -> None:
        if not self._collectives.is_on:
            return
        for parameter in self._trained:
            # An earlier micro-batch may have given it the only gradient of this step.
            if parameter.grad is not None and parameter not in self._started:
                self._start(parameter)
        for averaging in self._started.values():
            averaging.wait()
        self._started.clear()

    def _start(self, parameter: Tensor) -> None:
        if not self._collectives.is_on:
            return
        _require_first(parameter in self._started)
        assert parameter.grad is not None
        self._started[parameter] = self._collectives.start_average(parameter.grad)


class Bucketed:
    """During the backward pass, one all-reduce for each bucket, when its last gradient is ready.

    Buckets are filled in the reverse order of `parameters()`, which is about the order in which a
    backward pass makes gradients. The gradients of a bucket are copied into one tensor and back. A
    bucket with a parameter that has no gradient is sent after the backward pass, without it.
    """

    def __init__(
        self, model: nn.Module, collectives: Collectives, bucket_bytes: float = 25 * 2**20
    ) -> None:
        self._collectives = collectives
        self._buckets = tuple(
            _Bucket(one) for one in _fill(trained_parameters(model), bucket_bytes)
        )
        self._bucket_of: dict[Tensor, _Bucket] = {}
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                self._bucket_of[parameter] = bucket
                parameter.register_post_accumulate_grad_hook(self._receive)  # type: ignore[no-untyped-call]

    @property
    def bucket_bytes(self) -> tuple[int, ...]:
        """The sizes of the buckets, in the order of their filling."""
        return tuple(bucket.nbytes for bucket in self._buckets)

    def communicate(self) -> None:
        if not self._collectives.is_on:
            return
        for bucket in self._buckets:
            if bucket.averaging is None:
                self._send(bucket)
        for bucket in self._buckets:
            if bucket.averaging is not None:
                bucket.averaging.wait()
                unflatten(bucket.averaging.gradient, bucket.gradients())
            bucket.averaging = None
            bucket.ready.clear()

    def _receive(self, parameter: Tensor) -> None:
        if not self._collectives.is_on:
            return
        bucket = self._bucket_of[parameter]
        _require_first(parameter in bucket.ready)
        bucket.ready.add(parameter)
        if len(bucket.ready) == len(bucket.parameters):
            self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        if gradients := bucket.gradients():
            bucket.averaging = self._collectives.start_average(flatten(gradients))


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients travel together.

    ready: those that have their gradient of this step. averaging: of all of them, once it is sent.
    """

    parameters: Sequence[nn.Parameter]
    ready: set[Tensor] = field(default_factory=set)
    averaging: Averaging | None = None

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    def gradients(self) -> list[Tensor]:
        return list(_gradients(self.parameters))


def _fill(parameters: Sequence[nn.Parameter], bucket_bytes: float) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each bucket. A bucket has one dtype, and is full with its last one.

    Like those of DDP, a bucket ends with the parameter that makes it at least as large as asked.
    """
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        bucket = filling.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(one.nbytes for one in bucket) >= bucket_bytes:
            yield filling.pop(parameter.dtype)
    yield from filling.values()


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _gradients(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """Yield the gradients of parameters that have one."""
    for parameter in parameters:
        if parameter.grad is not None:
            yield parameter.grad


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of all tensors, one after the other in one dimension."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy from one dimension back into the tensors that were flattened."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def _require_first(is_repeated: bool) -> None:
    """Raise RuntimeError if a parameter gets a second gradient in one backward pass.

    Its first one is on its way already, so that the second would be lost.
    """
    if is_repeated:
        raise RuntimeError(
            "a parameter got two gradients in one backward pass, as with reentrant checkpoints "
            "(use_reentrant=True). Use non-reentrant ones, or parallel: naive, flat or fsdp2"
        )
