"""One training step of a Transformer language model, or a part of it, phase by phase.

This module is read when planning, on machines that need no torch: what needs it is imported where it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from model.accounting import (
    attention_matmul_flops,
    backward_flops,
    forward_flops,
    parameter_count,
    softmax_flops,
)
from model.config import SIZES, VOCAB_SIZE, Dimensions
from tasks.process.source_digest import source_digest
from tasks.spec.parameters import AttendingParams, PositiveInt
from tasks.spec.registry import Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from tasks.harness.device import Device
    from tasks.harness.workload import PhaseMarker, Workload

Compile = Literal["eager", "blocks", "model"]
Pass = Literal["forward", "forward_grad", "forward_backward", "train_step"]
Size = Literal["tiny", "mini", "small", "medium", "large", "xl", "2.7B", "10B"]

PHASES: dict[Pass, tuple[str, ...]] = {
    "forward": ("forward",),
    "forward_grad": ("forward",),
    "forward_backward": ("forward", "backward"),
    "train_step": ("forward", "backward", "optimizer"),
}


class TrainStepParams(AttendingParams):
    """The model is named by `size` and `year`, spelled out by its dimensions, or brought along as a factory."""

    more_memory_with: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "context_length": (),
        "batch_size": (),
        "vocab_size": (),
        "num_layers": (),
        "pass": tuple(PHASES),
    }

    size: Size | None = Field(None, description="a size of the course")
    year: Literal[2025, 2026] = Field(2025, description="which course year's sizes: xl differs")
    d_model: PositiveInt | None = None
    d_ff: PositiveInt | None = None
    num_layers: PositiveInt | None = None
    num_heads: PositiveInt | None = None
    model: str | None = Field(
        None, description="your own model: package.module:Factory, from token ids to logits"
    )
    model_args: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the factory"
    )
    context_length: PositiveInt = 512
    batch_size: PositiveInt = 4
    vocab_size: PositiveInt = VOCAB_SIZE
    compile: Compile = "eager"
    pass_: Pass = Field("train_step", alias="pass")
    optimizer: Literal["course", "foreach", "fused"] = "course"

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        spelled = (self.d_model, self.d_ff, self.num_layers, self.num_heads)
        ways = [self.size is not None, any(spelled), self.model is not None]
        if sum(ways) != 1:
            raise ValueError(
                "name the model in exactly one way: size, or d_model with the rest, or model"
            )
        if any(spelled) and not all(spelled):
            raise ValueError("d_model, d_ff, num_layers and num_heads go together")
        if self.size is not None and self.size not in SIZES[self.year]:
            raise ValueError(
                f"size {self.size} is not of {self.year}, which has {', '.join(SIZES[self.year])}"
            )
        if self.model is not None and not all(self.model.partition(":")):
            raise ValueError(f"model {self.model!r} is not of the form package.module:Factory")
        if self.model_args and self.model is None:
            raise ValueError("model_args are of a model of your own: name it with model")
        if self.model is not None and self.attention != "naive":
            raise ValueError("attention is of the course's model: yours computes its own")
        self.dimensions  # noqa: B018  raises where they do not fit together
        return self

    @property
    def dimensions(self) -> Dimensions | None:
        """None for a model that somebody brought along."""
        if self.size is not None:
            return SIZES[self.year][self.size]
        if self.d_model and self.d_ff and self.num_layers and self.num_heads:
            return Dimensions(self.d_model, self.d_ff, self.num_layers, self.num_heads)
        return None


def build(params: TrainStepParams) -> Workload:
    """Model, optimizer and inputs on the device, ready to step. Raises Skip, or torch's out-of-memory."""
    from tasks.harness.setup import set_up

    return build_on(set_up(params), params)


def build_on(device: Device, params: TrainStepParams) -> Workload:
    """The same on a device that is ready, which need not be the one that the cell names."""
    from model.optimizer import OPTIMIZERS
    from tasks.harness.workload import Workload

    model = _build_model(params, device)
    model.train(params.pass_ != "forward")  # no dropout in inference
    _compile(model, params)
    inputs, targets = _random_tokens(params, device)
    optimizer = OPTIMIZERS[params.optimizer](model.parameters())
    return Workload(
        step=_make_step(params, model, optimizer, inputs, targets),
        phases=PHASES[params.pass_],
        device=device,
        tokens=params.batch_size * params.context_length,
        compiled=params.compiled,
        flops=_flops(params),
        facts=_read_back(params, model),
        square=_square(params),
        resident=(inputs, targets, *model.parameters(), *model.buffers()),
        model=model,
        optimizer=optimizer,
    )


def work(params: TrainStepParams) -> float:
    """How much a step must compute, for guessing its duration: FLOPs, or tokens where no formula is known."""
    flops = _flops(params)
    return float(sum(flops.values()) if flops else params.batch_size * params.context_length)


def _make_step(
    params: TrainStepParams,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
) -> Callable[[PhaseMarker], None]:
    """Forward ends with the logits where nothing is to be learnt (`forward`), with the loss everywhere else."""
    import torch
    from torch.nn import functional

    from model.parts import part
    from tasks.harness.compilation import begin_step
    from tasks.harness.precision import autocast

    scaler = torch.amp.GradScaler(params.device, enabled=params.precision == "fp16")
    precision = autocast(params)
    run: Callable[[Tensor], Tensor] = model

    def checked(tokens: Tensor) -> Tensor:
        nonlocal run
        logits: Tensor = model(tokens)
        _require_logits(logits, params)
        run = model  # from the second step on nothing stands between
        return logits

    run = checked

    @part("loss")
    def compare(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def loss_of(tokens: Tensor) -> Tensor:
        with precision():
            return compare(run(tokens))

    def inference(phase: PhaseMarker) -> None:
        begin_step(params)
        with phase("forward"), torch.no_grad(), precision():
            run(inputs)

    def training(phase: PhaseMarker) -> None:
        begin_step(params)
        optimizer.zero_grad(set_to_none=True)
        with phase("forward"):
            loss = loss_of(inputs)
        if "backward" in PHASES[params.pass_]:
            with phase("backward"):
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if "optimizer" in PHASES[params.pass_]:
            with phase("optimizer"):
                scaler.step(optimizer)
                scaler.update()

    return inference if params.pass_ == "forward" else training


def _require_logits(logits: object, params: TrainStepParams) -> None:
    """Raises ValueError for what is no tensor of (batch, context, vocabulary or more). Its shape is all that is looked at."""
    import torch

    batch, context, vocab = params.batch_size, params.context_length, params.vocab_size
    shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else None
    if shape is None or len(shape) != 3 or shape[:2] != (batch, context) or shape[2] < vocab:
        given = f"a {type(logits).__name__}" if shape is None else f"a tensor of {shape}"
        wanted = f"({batch}, {context}, {vocab} or more)"
        raise ValueError(
            f"the model gives {given}, where logits are a tensor of {wanted}: batch, context, vocabulary"
        )


def _build_model(params: TrainStepParams, device: Device) -> nn.Module:
    import torch

    from model.transformer import TransformerLM
    from tasks.harness.attention_backends import choose_attention
    from tasks.harness.precision import stored_dtype

    dtype = stored_dtype(params)
    dims, place = params.dimensions, device.torch_device
    torch.set_default_dtype(dtype)  # built in it, not converted to it: that would hold both at once
    try:
        with torch.device(place):
            if dims is None:
                return _own_factory(params)(**params.model_args).to(place, dtype)
            attend = choose_attention(
                params, params.context_length, True, dims.d_head, place, params.pass_ != "forward"
            )
            return TransformerLM(dims, params.context_length, params.vocab_size, attend).to(
                place, dtype
            )
    finally:
        torch.set_default_dtype(torch.float32)


def _own_factory(params: TrainStepParams) -> Callable[..., nn.Module]:
    """Raises ImportError or AttributeError, which name what is missing."""
    import importlib

    module, _, name = str(params.model).partition(":")
    factory: Callable[..., nn.Module] = getattr(importlib.import_module(module), name)
    return factory


def _compile(model: nn.Module, params: TrainStepParams) -> None:
    """In place, so that names of parameters stay."""
    from tasks.harness.compilation import compile_options
    from tasks.harness.device import Skip
    from tasks.harness.model_parts import blocks_of

    if params.compile == "eager":
        return
    options = compile_options(params, ours=params.dimensions is not None)
    if params.compile == "model":
        model.compile(**options)
    elif params.compile == "blocks":
        blocks = blocks_of(model)
        if not blocks:
            raise Skip(
                "compile: blocks needs blocks in a torch.nn.ModuleList, and this model has none"
            )
        for block in blocks:
            block.compile(**options)


def _random_tokens(params: TrainStepParams, device: Device) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (batch, context) each. Random: the data's pattern changes power draw and clocks."""
    import torch

    shape = (2, params.batch_size, params.context_length)
    tokens = torch.randint(params.vocab_size, shape, device=device.torch_device)
    return tokens[0], tokens[1]


def _flops(params: TrainStepParams) -> dict[str, int] | None:
    dims = params.dimensions
    if dims is None:
        return None
    shape = (params.batch_size, params.context_length, params.vocab_size)
    flops = {"forward": forward_flops(dims, *shape)}
    if "backward" in PHASES[params.pass_]:
        flops["backward"] = backward_flops(dims, *shape)
    return flops


def _square(params: TrainStepParams) -> tuple[int, int, int] | None:
    """None also where a head, or with one head any width, is as long as the context: shapes then tell nothing."""
    dims, length = params.dimensions, params.context_length
    if dims is None or length in (
        dims.d_head,
        *((dims.d_model, dims.d_ff) if dims.num_heads == 1 else ()),
    ):
        return None
    return params.batch_size * dims.num_heads, length, length


def _read_back(params: TrainStepParams, model: nn.Module) -> dict[str, Any]:
    """What precision is really set, as torch reports it, and what was built."""
    from tasks.harness.precision import dtype_name, precision_facts

    dims = params.dimensions
    return {
        **precision_facts(params),
        "model_source": source_digest(params.model, sys.path) if params.model else None,
        "parameter_dtype": dtype_name(next(model.parameters()).dtype),
        "grad_mode": "no_grad" if params.pass_ == "forward" else "grad",
        "attention_asked": params.attention if dims else None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "parameters_expected": parameter_count(dims, params.vocab_size) if dims else None,
        **_attention_flops(params),
    }


def _attention_flops(params: TrainStepParams) -> dict[str, int]:
    """Of one forward pass, all layers: what a table holds the time of softmax and matrix products against."""
    dims = params.dimensions
    if dims is None:
        return {}
    square = (params.batch_size, dims.num_layers * dims.num_heads, params.context_length)
    return {
        "softmax_flops": softmax_flops(*square),
        "attention_matmul_flops": attention_matmul_flops(*square, dims.d_head),
    }


TASK = Task("train_step", 2, TrainStepParams, build, work)
