"""Memory that GPU kernels need in addition to their results: workspaces and scratch.

Sources: ATen/cuda/CublasHandlePool.cpp; ATen/native/transformers/cuda/attention_backward.cu and
flash_attn/flash_api.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.torch_version import TorchVersion

from tasks.prediction.operations.reductions import reduction_scratch
from tasks.prediction.operations.shapes import Arguments

_aten = torch.ops.aten
_FP32 = 4
_LOW = (torch.float16, torch.bfloat16)
# cuDNN rounds the share of dropout to 1/16; from 2.12 on, torch uses it for such shares alone
# (pytorch/pytorch#174245).
_ROUNDS_DROPOUT = TorchVersion(torch.__version__) < "2.12"

# Operations that call cuBLAS.
MULTIPLIES = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "_grouped_mm"}
)

# Operations that may run in kernels of cuDNN, and beginnings of the names of those of cuFFT and
# cuSOLVER. They have workspaces of unknown size.
_OF_CUDNN = frozenset({"convolution", "_ctc_loss", "_use_cudnn_ctc_loss"})
ALGEBRA = ("fft_", "linalg_", "cholesky", "lu_", "ormqr", "geqrf", "triangular_solve")
# Operations with such names that compute no products, in kernels of torch.
WITHOUT_PRODUCTS = frozenset({"linalg_vector_norm", "linalg_cross", "linalg_check_errors"})
_OF_TORCH = WITHOUT_PRODUCTS | {"linalg_matrix_exp"}

# Fused optimizers without a kernel for the `meta` device. They allocate nothing.
NOT_ON_META = frozenset({"_fused_sgd_", "_fused_adagrad_"})


@cache
def has_unknown_workspace(name: str) -> bool:
    """Return True if an operation may run in kernels of libraries that have a workspace."""
    plain = name.removeprefix("_")
    return name in _OF_CUDNN or (plain.startswith(ALGEBRA) and plain not in _OF_TORCH)


# Measured on an H200 (torch 2.11, 16,384 tokens, 8 sequences, width 64): the backward passes of
# flash, efficient and cuDNN attention need 80.5 MiB in bf16, three gradients of 16 MiB, a sum in
# fp32 of 32 MiB and sums of rows of 0.5 MiB. The one of efficient attention in fp32 needs 128.5
# MiB, three gradients of 32 MiB and the same sums.
def _backward_sums(args: Arguments) -> tuple[int, ...]:
    """Return the scratch for (grad_out, query, key, …).

    The query's gradient in fp32 and a sum per row; gradients of keys and values for every query
    head, if these have fewer heads (`mha_bwd` in flash_api.cpp).
    """
    query, key = args[1:3]
    sums = (_FP32 * query.numel(), _FP32 * query.numel() // query.shape[-1])
    if key.shape[-3] == query.shape[-3]:
        return sums
    expanded = query.element_size() * key.numel() // key.shape[-3] * query.shape[-3]
    return (*sums, expanded, expanded)


def _grad_times_output(args: Arguments) -> tuple[int, ...]:
    """Return the scratch for (grad_out, output, …): their product (ATen/native/cuda/SoftMax.cu).

    The CPU's kernel does not need it.
    """
    grad: Tensor = args[0]
    return (grad.nbytes,)


def _masked_scores(args: Arguments) -> tuple[int, ...]:
    """Return the scratch for (scores, dim): a byte per score and per row.

    They mark scores that are minus infinity (ATen/native/transformers/attention.cpp).
    """
    scores: Tensor = args[0]
    return scores.numel(), scores.numel() // scores.shape[-1]


SCRATCH: Mapping[str, Callable[[Arguments], tuple[int, ...]]] = {
    "_scaled_dot_product_flash_attention_backward": _backward_sums,
    "_scaled_dot_product_cudnn_attention_backward": _backward_sums,
    "_scaled_dot_product_efficient_attention_backward": _backward_sums,
    "_safe_softmax": _masked_scores,
    "_softmax_backward_data": _grad_times_output,
    "mean": reduction_scratch,
    "sum": reduction_scratch,
}


@dataclass
class SdpaCall:
    """Arguments of `torch.nn.functional.scaled_dot_product_attention`, in torch's order."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def fused_attention(call: SdpaCall, capability: float = 9.0) -> Tensor:
    """Return the output of the attention kernel that a GPU would choose among the enabled ones.

    Raise RuntimeError with torch's message if no enabled kernel takes the call. The checks, and
    what is converted and padded before a kernel, follow ATen/native/transformers: sdp_utils.cpp in
    cuda, sdp_utils_cpp.h and attention.cpp.

    capability: compute capability of the GPU, 7.0, 8.0, 8.6 or 9.0; others choose like one of these.
    """
    # On `meta` torch itself would always fall back to the plain formula. On some GPUs cuDNN's
    # kernel comes before flash, and needs the same memory.
    query, key, value = call.query, call.key, call.value
    backends: Any = torch.backends.cuda
    options = (call.dropout_p, call.is_causal)
    output: Tensor
    has_gradients = any(tensor.requires_grad for tensor in (query, key, value))
    gradients = torch.is_grad_enabled() and has_gradients
    is_limited = capability == 8.6 and gradients
    if backends.flash_sdp_enabled() and capability >= 8 and _takes_flash(call, is_limited):
        width = query.shape[-1]
        padded = [_padded(one, 8) for one in (query, key, value)]
        attend = partial(_aten._scaled_dot_product_flash_attention, *padded, *options)
        output = attend(scale=width**-0.5 if call.scale is None else call.scale)[0]
        return output if output.shape[-1] == width else output[..., :width]
    mask = _additive(call.attn_mask, query.dtype)
    if backends.cudnn_sdp_enabled() and _takes_cudnn(call, capability):
        attend = partial(_aten._scaled_dot_product_cudnn_attention, query, key, value, mask)
        output = attend(gradients, *options, scale=call.scale)[0]
    elif backends.mem_efficient_sdp_enabled() and _takes_efficient(call, capability):
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        attend = partial(_aten._scaled_dot_product_efficient_attention, query, key, value, mask)
        output = attend(gradients, *options, scale=call.scale)[0]
    elif backends.math_sdp_enabled():
        attend = partial(_aten._scaled_dot_product_attention_math, query, key, value, mask)
        output = attend(*options, scale=call.scale, enable_gqa=call.enable_gqa)[0]
    else:
        raise RuntimeError("No available kernel. Aborting execution.")
    return output


def _takes_flash(call: SdpaCall, is_limited: bool) -> bool:
    """Return True for a call that flash attention takes.

    is_limited: its backward pass needs more shared memory for wide heads than the GPU has.
    """
    width = call.query.shape[-1]
    if is_limited and (192 < width <= 224 or (width > 224 and call.dropout_p > 0)):
        return False
    widths = {tensor.shape[-1] for tensor in (call.query, call.key, call.value)}
    is_square = call.query.shape[-2] == call.key.shape[-2]
    return (
        call.attn_mask is None
        and call.query.dtype in _LOW
        and _is_dense(call, takes_groups=True)
        and len(widths) == 1
        and max(widths) <= 256
        and (is_square or not call.is_causal)
    )


def _takes_cudnn(call: SdpaCall, capability: float) -> bool:
    widths = (call.query.shape[-1], call.value.shape[-1])
    return (
        capability >= 8
        and call.query.dtype in _LOW
        and _is_dense(call, takes_groups=True)
        and _takes_mask(call)
        and all(width % 8 == 0 for width in widths)
        and (max(widths) <= 128 or (capability == 9.0 and widths == (192, 128)))
        and call.key.shape[-2] > 1
        and (_ROUNDS_DROPOUT or (call.dropout_p * 16).is_integer())
    )


def _takes_mask(call: SdpaCall) -> bool:
    """Return True for a mask that cuDNN's kernel takes: its gradient is not computed."""
    mask, query, key = call.attn_mask, call.query, call.key
    if mask is None:
        return True
    # Of three dimensions it is not taken.
    full = (*query.shape[:-1], key.shape[-2])[-mask.dim() :]
    fits = all(size in (1, wanted) for size, wanted in zip(mask.shape, full, strict=True))
    return not mask.requires_grad and mask.dim() in (2, 4) and fits


def _takes_efficient(call: SdpaCall, capability: float) -> bool:
    query, key, value = call.query, call.key, call.value
    # Before compute capability 8.0 it has no bf16, and no tensor cores for fp32.
    dtypes = (*_LOW, torch.float32) if capability >= 8 else (torch.float16, torch.float32)
    aligned = 8 if query.dtype in _LOW else 4 if capability >= 8 else 1
    return (
        query.dtype in dtypes
        and _is_dense(call, takes_groups=False)
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % aligned == 0
        and value.shape[-1] % aligned == 0
    )


def _is_dense(call: SdpaCall, takes_groups: bool) -> bool:
    """Return True for shapes and strides that all fused kernels need."""
    given = (call.query, call.key, call.value)
    if any(tensor.dim() != 4 for tensor in given):
        return False
    heads = [tensor.shape[1] for tensor in given]
    is_grouped = heads[1] == heads[2] and heads[0] % heads[1] == 0
    is_even = len(set(heads)) == 1 or (takes_groups and call.enable_gqa and is_grouped)
    rows = (*given,) if call.attn_mask is None else (*given, call.attn_mask)
    return (
        is_even
        and len({tensor.shape[0] for tensor in given}) == 1
        and all(tensor.shape[2] for tensor in given)
        and all(tensor.stride(-1) == 1 for tensor in rows)
    )


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as scores to add: torch converts one of booleans in each call."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    return torch.where(mask.logical_not(), -math.inf, zero)


def _aligned(mask: Tensor) -> Tensor:
    """Return a mask whose rows begin at multiples of 8 elements, which efficient attention needs."""
    is_aligned = mask.stride(-1) == 1 and not any(stride % 8 for stride in mask.stride()[:-1])
    # Torch adds 8 columns where none are missing.
    return (
        mask
        if is_aligned
        else functional.pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
    )


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return functional.pad(tensor, (0, missing)) if missing else tensor


def grouped_product(a: Tensor, b: Tensor, offsets: Tensor | None) -> Tensor:
    """Return the result of `_grouped_mm` for dtypes that its kernel on `meta` refuses.

    A GPU multiplies one group after the other then, and writes into one result.
    """
    shape: tuple[int, ...] = (a.shape[-2], b.shape[-1])
    if a.dim() == b.dim():
        groups = a.shape[0] if offsets is None else offsets.shape[0]
        shape = (groups, *shape)
    return a.new_empty(shape)


class FusedRMSNorm(torch.autograd.Function):
    """The GPU's kernel for `rms_norm`: it saves its input, and a number for each row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float32 if x.dtype in _LOW else x.dtype
        scales = x.new_empty((*x.shape[: -len(shape)], *(1 for _ in shape)), dtype=dtype)
        ctx.save_for_backward(x, scales, weight)
        ctx.mark_non_differentiable(scales)
        ctx.shape = shape
        return torch.empty_like(x, memory_format=torch.contiguous_format), scales

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        x, scales, weight = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        of_x, of_weight = _aten._fused_rms_norm_backward(
            gradients[0], x, ctx.shape, scales, weight, needed
        )
        return of_x, None, of_weight
