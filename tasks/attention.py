"""Attention alone, forward and backward, without heads: as the course benchmarks it.

Planning imports this module on machines without torch, so what needs torch is imported in
functions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, Self, get_args

from pydantic import model_validator

from model.accounting import attention_flops, attention_matmul_flops, softmax_flops
from tasks.spec.axes import MORE_WORK, WORK, Affects, axis
from tasks.spec.parameters import (
    MEASURED_STEPS,
    PASS,
    AttentionAxisParams,
    PositiveInt,
)
from tasks.spec.registry import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from tasks.harness.device import Device
    from tasks.harness.workload import PhaseMarker, Workload

Pass = Literal["forward", "forward_grad", "forward_backward"]

PHASES: dict[Pass, tuple[str, ...]] = {
    "forward": ("forward",),
    "forward_grad": ("forward",),
    "forward_backward": ("forward", "backward"),
}
_COLUMNS_A_PASS = 64
_CACHES = 4  # to empty a cache, a buffer as large as this many caches is written
_AT_LEAST_FLUSHED_BYTES = 64 * 1024**2


class AttentionParams(AttentionAxisParams):
    """Parameters of attention alone."""

    d_head: PositiveInt = axis(
        64,
        "width of query, key and value; the course calls it d_model in this experiment",
        unit="elements",
        **MORE_WORK,
    )
    context_length: PositiveInt = axis(1024, "length of each sequence", unit="tokens", **MORE_WORK)
    batch_size: PositiveInt = axis(8, "sequences in a step", unit="sequences", **MORE_WORK)
    causal: bool = axis(
        False, "true: a token attends only to itself and earlier tokens", affects=WORK
    )
    compile: Literal["eager", "model"] = "eager"
    pass_: Pass = axis(
        "forward_backward",
        PASS.format(", ".join(get_args(Pass))),
        alias="pass",
        affects=WORK,
        memory_order=get_args(Pass),
    )
    projections: bool = axis(
        False, "true: with linear maps for query, key, value and output", affects=WORK
    )
    cold_l2: bool = axis(
        False,
        "true: empty the GPU's L2 cache before each phase; that is not timed",
        affects=WORK & ~Affects.GRAPH,
    )
    measured_steps: PositiveInt | None = axis(
        100, MEASURED_STEPS, unit="steps", affects=Affects.NONE
    )

    @model_validator(mode="after")
    def _require_a_cache(self) -> Self:
        if self.cold_l2 and self.device != "cuda":
            raise ValueError(f"cold_l2 is of a CUDA device, not of {self.device}")
        return self


def build(params: AttentionParams) -> Workload:
    """Build inputs and attention on the cell's device. Raise Skip, or torch's out-of-memory."""
    from tasks.harness.setup import set_up

    return build_on(set_up(params), params)


def build_on(device: Device, params: AttentionParams) -> Workload:
    """Build the cell on a device that is set up, which may be another one than the cell names."""
    import torch

    from tasks.harness.compilation import compile_options
    from tasks.harness.precision import dtype_name, matmul_dtype, precision_facts, stored_dtype
    from tasks.harness.workload import Workload

    inputs, attend, leaves = _build_inputs(params, device)
    if params.compile == "model":
        attend = torch.compile(attend, **compile_options(params, ours=True))
    gradient = torch.randn(inputs[0].shape, device=inputs[0].device).to(matmul_dtype(params))
    flops = attention_flops(params.batch_size, params.context_length, params.d_head, params.causal)
    return Workload(
        step=_make_step(params, attend, inputs, leaves, gradient),
        phases=PHASES[params.pass_],
        device=device,
        tokens=params.batch_size * params.context_length,
        compiled=params.compiled,
        flops=None if params.projections else _by_phase(params, flops),
        facts={
            **precision_facts(params),
            "parameter_dtype": dtype_name(stored_dtype(params)),
            "grad_mode": "no_grad" if params.pass_ == "forward" else "grad",
            "attention_asked": params.attention,
            "softmax_flops": softmax_flops(params.batch_size, 1, params.context_length),
            "attention_matmul_flops": attention_matmul_flops(
                params.batch_size, 1, params.context_length, params.d_head
            ),
        },
        before_phase=_flush(device) if params.cold_l2 else None,
        square=_square(params),
        resident=(*inputs, *leaves, gradient),
        model=attend if isinstance(attend, torch.nn.Module) else None,
    )


def work(params: AttentionParams) -> float:
    """Return a measure of the duration.

    A pass over the square of scores takes as long as `_COLUMNS_A_PASS` columns of a product.
    """
    square = params.batch_size * params.context_length**2
    forward = float(square * (params.d_head + _COLUMNS_A_PASS))
    if params.pass_ == "forward_backward":
        return 3 * forward
    return forward


def _square(params: AttentionParams) -> tuple[int, int, int] | None:
    """Return the shape of the scores; None if inputs are as wide as long and so have that shape."""
    length = params.context_length
    if length == params.d_head:
        return None
    return params.batch_size, length, length


def _by_phase(params: AttentionParams, forward: int) -> dict[str, int]:
    flops = {"forward": forward, "backward": 2 * forward}
    return {phase: flops[phase] for phase in PHASES[params.pass_]}


def _build_inputs(
    params: AttentionParams, device: Device
) -> tuple[tuple[Tensor, ...], Callable[..., Tensor], list[Tensor]]:
    """Return the inputs of a step, the function that computes it, and the tensors with gradients."""
    import torch

    from tasks.harness.attention_backends import AttentionShape, choose_attention
    from tasks.harness.precision import stored_dtype

    place, dtype, gradients = device.torch_device, stored_dtype(params), params.pass_ != "forward"
    attention = AttentionShape(params.context_length, params.causal, params.d_head, gradients)
    attend = choose_attention(params, attention, place)
    shape: tuple[int, ...] = (params.batch_size, params.context_length, params.d_head)
    if params.attention == "flex":
        # Within a larger graph, the compiler lowers flex attention only with a dimension of heads.
        shape = (params.batch_size, 1, params.context_length, params.d_head)
    make_input = partial(torch.randn, shape, device=place, dtype=dtype, requires_grad=gradients)
    if not params.projections:
        inputs = tuple(make_input() for _ in range(3))
        return inputs, attend, list(inputs)
    with torch.device(place):
        layer = _projected(params.d_head, attend).to(dtype)
    x = make_input()
    return (x,), layer, [x, *layer.parameters()]


def _projected(width: int, attend: Callable[..., Tensor]) -> nn.Module:
    from torch import nn

    from model.layers import Linear

    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = Linear(width, width)
            self.k_proj = Linear(width, width)
            self.v_proj = Linear(width, width)
            self.output_proj = Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            mixed: Tensor = self.output_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x)))
            return mixed

    return Projected()


def _make_step(
    params: AttentionParams,
    attend: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    leaves: list[Tensor],
    gradient: Tensor,
) -> Callable[[PhaseMarker], None]:
    """Return the step. Its backward pass begins with `gradient`, whose making is not timed."""
    import torch

    from tasks.harness.compilation import begin_step
    from tasks.harness.precision import autocast

    precision = autocast(params)

    def inference(phase: PhaseMarker) -> None:
        begin_step(params)
        with phase("forward"), torch.no_grad(), precision():
            attend(*inputs)

    def training(phase: PhaseMarker) -> None:
        begin_step(params)
        for leaf in leaves:
            leaf.grad = None
        with phase("forward"), precision():
            result = attend(*inputs)
        if params.pass_ == "forward_backward":
            with phase("backward"):
                result.backward(gradient)  # type: ignore[no-untyped-call]

    return inference if params.pass_ == "forward" else training


def _flush(device: Device) -> Callable[[], object]:
    """Return a function that overwrites the L2 cache."""
    import torch

    cache: int = torch.cuda.get_device_properties(device.torch_device).L2_cache_size
    nbytes = max(_CACHES * cache, _AT_LEAST_FLUSHED_BYTES)
    return torch.empty(nbytes, dtype=torch.int8, device=device.torch_device).zero_


TASK = Task("attention", 2, AttentionParams, build, work)
