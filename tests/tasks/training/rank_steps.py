"""Steps of training cells, alone and on each rank of a group, and what is left of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tasks.harness.workload import Workload
from tasks.train_step import build
from tasks.training.parameters import TrainStepParams
from tasks.training.strategies import checksums

SMALL: dict[str, Any] = {
    "device": "cpu", "d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2,
    "context_length": 8, "batch_size": 4, "vocab_size": 50, "optimizer": "fused",
}  # fmt: skip
Arrays = dict[str, Any]


@dataclass
class Trained:
    """A rank after some steps. Tensors are numpy arrays by the names of parameters.

    losses: of each step, the sum over its micro-batches. gradients: those with which the last update
    was made. parts: for zero1, those of this rank, at their places in zeros.
    """

    losses: list[float]
    gradients: Arrays
    parameters: Arrays
    facts: dict[str, Any]
    checksums: tuple[float, float]
    calls: dict[str, int]
    payload_bytes: dict[str, int]
    phases: list[str]
    steps: int


def train(values: dict[str, Any], steps: int = 3) -> Trained:
    """Build a cell and run its steps."""
    workload = build(TrainStepParams.model_validate(SMALL | values))
    assert workload.model is not None
    step: Any = workload.step
    losses: list[float] = []
    share = step._share_of_loss

    def share_and_note(*tokens: Tensor) -> Tensor:
        loss: Tensor = share(*tokens)
        losses[-1] += float(loss.detach())
        return loss

    step._share_of_loss = share_and_note
    gradients: Arrays = {}
    phases: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        phases.append(name)
        if name == "optimizer":
            gradients.update(_gradients(workload))
        yield

    collectives = getattr(step._strategy, "collectives", None)
    for _ in range(steps):
        losses.append(0.0)
        phases.clear()
        if collectives is not None:
            collectives.calls.clear()
            collectives.payload_bytes.clear()
        step(phase)
    mean = torch.tensor(losses)
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    parameters = {name: _array(one) for name, one in workload.model.named_parameters()}
    return Trained(
        mean.tolist(),
        gradients,
        parameters,
        {**workload.facts, **workload.read_facts()},
        checksums(workload.model),
        dict(collectives.calls) if collectives is not None else {},
        dict(collectives.payload_bytes) if collectives is not None else {},
        phases,
        workload.optimizer_steps() if workload.optimizer_steps is not None else 0,
    )


def _gradients(workload: Workload) -> Arrays:
    assert workload.model is not None
    zero = getattr(workload.step._strategy, "_zero", None)  # type: ignore[attr-defined]
    pieces = getattr(zero, "_pieces", ())
    found = {}
    for name, parameter in workload.model.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad
        if pieces:
            gradient = _whole_gradient(parameter, pieces)
        found[name] = _array(gradient)
    return found


def _whole_gradient(parameter: Tensor, pieces: Any) -> Tensor:
    """Return the gradient of zero1, from the parts of all ranks."""
    whole = torch.zeros(parameter.numel())
    for piece in pieces:
        if piece.whole is parameter:
            start = piece.part.storage_offset() - parameter.storage_offset()
            whole[start : start + piece.part.numel()] = piece.part.grad
    dist.all_reduce(whole)
    return whole.view_as(parameter)


def _array(tensor: Tensor) -> Any:
    whole = getattr(tensor, "full_tensor", None)
    values = tensor.detach() if whole is None else whole().detach()
    return np.array(values.float())
