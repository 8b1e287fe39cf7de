"""Steps of training cells, on one rank or on each of a group, and what they leave."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tasks.harness.compilation import compile_facts
from tasks.harness.workload import Workload
from tasks.train_step import build
from tasks.training.parameters import TrainStepParams
from tasks.training.strategies import checksums, require_equal_ranks

SMALL: dict[str, Any] = {
    "device": "cpu", "d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2,
    "context_length": 8, "batch_size": 4, "vocab_size": 50, "optimizer": "fused",
}  # fmt: skip
_BYTES = {"Float": 4, "BFloat16": 2}
Arrays = dict[str, Any]  # numpy arrays by the names of parameters


@dataclass
class Trained:
    """A rank after some steps. losses: of each step, the mean over ranks. gradients: the last ones."""

    losses: list[float]
    gradients: Arrays
    parameters: Arrays
    facts: dict[str, Any]
    phases: list[str]
    optimizer_steps: int
    checksums: tuple[float, float]


@dataclass
class Counted:
    """The collectives of a steady step, by name.

    calls, nbytes: as torch's flight recorder has them, where gloo's reduce-scatter is an all-reduce.
    The bytes are those of the outputs. own_calls, own_bytes: as our own strategies count them.
    """

    calls: dict[str, int]
    nbytes: dict[str, int]
    own_calls: dict[str, int]
    own_bytes: dict[str, int]


def make(values: dict[str, Any]) -> Workload:
    return build(TrainStepParams.model_validate(SMALL | values))


def train(values: dict[str, Any], steps: int = 3) -> Trained:
    """Build a cell and run its steps."""
    workload = make(values)
    assert workload.model is not None
    step: Any = workload.step
    share = step._share_of_loss
    losses: list[float] = []
    gradients: Arrays = {}
    phases: list[str] = []

    def share_and_note(*tokens: Tensor) -> Tensor:
        loss: Tensor = share(*tokens)
        losses[-1] += float(loss.detach())
        return loss

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        phases.append(name)
        if name == "optimizer":
            gradients.update(_gradients(workload))
        yield

    step._share_of_loss = share_and_note
    for _ in range(steps):
        losses.append(0.0)
        phases.clear()
        step(phase)
    mean = torch.tensor(losses)
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    assert workload.optimizer_steps is not None
    return Trained(
        mean.tolist(),
        gradients,
        {name: _array(one) for name, one in workload.model.named_parameters()},
        {**workload.facts, **workload.read_facts(), **_compiled(values)},
        phases,
        workload.optimizer_steps(),
        checksums(workload.model),
    )


def count(values: dict[str, Any], is_separated: bool = False) -> Counted:
    """Return the collectives of the third step; is_separated: of one that sends nothing."""
    workload = make(values)
    collectives = getattr(workload.step._strategy, "collectives", None)  # type: ignore[attr-defined]
    for _ in range(2):
        workload.step(lambda name: nullcontext())
    if collectives is not None:
        collectives.calls.clear()
        collectives.payload_bytes.clear()
    before = {one["record_id"] for one in _flight_record()}
    separated = workload.without_transfers
    with separated() if is_separated and separated is not None else nullcontext():
        workload.step(lambda name: nullcontext())
    calls: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for one in _flight_record():
        if one["record_id"] not in before:
            name = one["profiling_name"].removeprefix("gloo:")
            calls[name] += 1
            for shape, dtype in zip(one["output_sizes"], one["output_dtypes"], strict=True):
                nbytes[name] += math.prod(shape) * _BYTES[dtype]
    own = (collectives.calls, collectives.payload_bytes) if collectives is not None else ({}, {})
    return Counted(dict(calls), dict(nbytes), dict(own[0]), dict(own[1]))


def differ_after_a_step(values: dict[str, Any]) -> str:
    """Return the error of a cell in which the last rank has changed one parameter."""
    workload = make(values)
    workload.step(lambda name: nullcontext())
    assert workload.model is not None
    require_equal_ranks(workload.model)
    if dist.get_rank() == dist.get_world_size() - 1:
        parameter = next(workload.model.parameters()).detach()
        parameter[0, 0] += 1e-6
    try:
        require_equal_ranks(workload.model)
    except RuntimeError as error:
        return str(error)
    return ""


def _compiled(values: dict[str, Any]) -> dict[str, Any]:
    return compile_facts() if "compile" in values else {}


def _flight_record() -> list[dict[str, Any]]:
    from torch._C._distributed_c10d import _dump_fr_trace_json

    return list(json.loads(_dump_fr_trace_json()).get("entries", []))


def _gradients(workload: Workload) -> Arrays:
    assert workload.model is not None
    zero = getattr(workload.step._strategy, "_zero", None)  # type: ignore[attr-defined]
    pieces = getattr(zero, "_pieces", ())
    found = {}
    for name, parameter in workload.model.named_parameters():
        if parameter.grad is not None:
            whole = _gathered(parameter, pieces) if pieces else parameter.grad
            found[name] = _array(whole)
    return found


def _gathered(parameter: Tensor, pieces: Any) -> Tensor:
    """Return the whole gradient of a parameter of zero1, of which each rank has a part."""
    whole = torch.zeros(parameter.numel())
    for piece in pieces:
        if piece.whole is parameter:
            start = piece.part.storage_offset() - parameter.storage_offset()
            whole[start : start + piece.part.numel()] = piece.part.grad
    dist.all_reduce(whole)
    return whole.view_as(parameter)


def _array(tensor: Tensor) -> Any:
    gather = getattr(tensor, "full_tensor", None)
    values: Tensor = tensor if gather is None else gather()
    return values.detach().double().clone().numpy()
