"""One training step of a Transformer language model, or a part of it, phase by phase.

Planning imports this module on machines without torch, so what needs torch is imported in
functions.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from model.accounting import (
    attention_matmul_flops,
    backward_flops,
    forward_flops,
    parameter_count,
    softmax_flops,
)
from tasks.spec.axes import Values
from tasks.spec.registry import Task
from tasks.spec.source_digest import source_digest
from tasks.training.parameters import TrainStepParams
from tasks.training.presets import PRESETS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tasks.harness.device import Device
    from tasks.harness.workload import Workload


def build(params: TrainStepParams) -> Workload:
    """Build model, optimizer and inputs on the cell's device.

    A cell with several ranks needs torch.distributed's default group. Raise Skip, or torch's
    out-of-memory.
    """
    from tasks.harness.setup import set_up

    return build_on(set_up(params), params)


def build_on(device: Device, params: TrainStepParams) -> Workload:
    """Build the cell on a device that is set up, which may be another one than the cell names."""
    from tasks.harness.workload import Workload
    from tasks.training.checkpointing import checkpoint_blocks
    from tasks.training.model_sources import build_model, compile_model
    from tasks.training.optimizers import StepCounter
    from tasks.training.step import TrainingStep
    from tasks.training.strategies import local_tensors, make_strategy, require_equal_ranks

    model = build_model(params, device)
    model.train(params.pass_ != "forward")  # no dropout in inference
    blocks = compile_model(model, params)
    checkpoint_blocks(model, params)  # after it, because compiling replaces calls of blocks
    chosen = {"compile_blocks": blocks.describe()} if blocks else {}
    inputs, targets = _random_tokens(params, device)
    strategy = make_strategy(params, model)
    counter = StepCounter(strategy.optimizers) if params.pass_ == "train_step" else None
    return Workload(
        step=TrainingStep(params, strategy, inputs, targets),
        phases=params.phases,
        device=device,
        tokens=params.tokens,
        micro_batches=params.gradient_accumulation,
        compiled=params.compiled,
        flops=None if params.lora else _flops(params),
        facts=_read_back(params, model) | chosen,
        square=_square(params),
        resident=(inputs, targets, *local_tensors(model)),
        model=model,
        optimizers=strategy.local_optimizers,
        optimizer_steps=counter,
        read_facts=strategy.read_facts,
        without_transfers=strategy.without_transfers if strategy.is_separable else None,
        verify=partial(require_equal_ranks, model) if params.ranks > 1 else None,
    )


def work(params: TrainStepParams) -> float | None:
    """Return the FLOPs of a step on each rank, or None for a model without a formula."""
    flops = _flops(params)
    if flops:
        return sum(flops.values()) / params.ranks
    if params.hub_name in PRESETS:
        # Two per parameter and token in the forward pass, and twice that in the backward pass.
        passes = 3 if "backward" in params.phases else 1
        tokens = params.tokens / params.ranks
        return 2.0 * passes * PRESETS[params.hub_name].parameters * tokens
    return None


def _random_tokens(params: TrainStepParams, device: Device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of this rank, both `(micro-batches, batch, context)`.

    They are random, because the pattern of the data changes power draw and clocks. All ranks draw
    the same global batch, and each takes other rows of it.
    """
    import torch
    import torch.distributed as dist

    shape = (2, params.gradient_accumulation, params.global_batch_size, params.context_length)
    tokens = torch.randint(params.vocab_size, shape, device=device.torch_device)
    if params.ranks > 1:
        rows = tokens.chunk(params.ranks, dim=2)[dist.get_rank()]
        tokens = rows.clone()  # so that those of other ranks are released
    return tokens[0], tokens[1]


def _flops(params: TrainStepParams) -> dict[str, int] | None:
    """Return the FLOPs of each phase, of all ranks together."""
    dims = params.dimensions
    if dims is None:
        return None
    sequences = params.gradient_accumulation * params.global_batch_size
    shape = (sequences, params.context_length, params.vocab_size)
    flops = {"forward": forward_flops(dims, *shape)}
    if "backward" in params.phases:
        flops["backward"] = backward_flops(dims, *shape)
    return flops


def _square(params: TrainStepParams) -> tuple[int, int, int] | None:
    """Return the shape of the scores; None if it is unknown, or other tensors have it, too."""
    dims, length = params.dimensions, params.context_length
    if dims is None:
        return None
    widths = [dims.d_head]
    if dims.num_heads == 1:
        widths += [dims.d_model, dims.d_ff]
    if length in widths:
        return None
    return params.rank_batch_size * dims.num_heads, length, length


def _read_back(params: TrainStepParams, model: nn.Module) -> Values:
    """Return the precision that torch reports, and the properties of the model that was built."""
    from tasks.harness.precision import precision_facts

    dims = params.dimensions
    return {
        **precision_facts(params),
        "model_source": _model_source(params),
        "parameter_dtype": _parameter_dtype(model),
        "grad_mode": "no_grad" if params.pass_ == "forward" else "grad",
        "attention_asked": params.attention if dims else None,
        "attention_used": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "parameters_trained": sum(one.numel() for one in model.parameters() if one.requires_grad),
        "parameters_expected": _expected_parameters(params),
        **_attention_flops(params),
    }


def _parameter_dtype(model: nn.Module) -> str | None:
    """Return the dtype of the parameters; several ones in the order in which they occur."""
    from tasks.harness.precision import dtype_name

    names = dict.fromkeys(dtype_name(parameter.dtype) for parameter in model.parameters())
    return ", ".join(names) or None


def _model_source(params: TrainStepParams) -> str | None:
    if params.model is None or params.is_preset:
        return None
    return source_digest(params.model, sys.path)


def _expected_parameters(params: TrainStepParams) -> int | None:
    dims = params.dimensions
    if dims is None or params.lora:
        return None
    return parameter_count(dims, params.vocab_size)


def _attention_flops(params: TrainStepParams) -> dict[str, int]:
    """Return one rank's FLOPs of softmax and of attention's products in a forward pass."""
    dims = params.dimensions
    if dims is None:
        return {}
    square = (params.rank_batch_size, dims.num_layers * dims.num_heads, params.context_length)
    return {
        "softmax_flops": softmax_flops(*square),
        "attention_matmul_flops": attention_matmul_flops(*square, dims.d_head),
    }


TASK = Task("train_step", 2, TrainStepParams, build, work)
