"""Memory that GPU kernels need in addition to their results: workspaces and scratch.

Sources: ATen/cuda/CublasHandlePool.cpp; ATen/native/transformers/cuda/attention_backward.cu and
flash_attn/flash_api.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tasks.prediction.operations.reductions import reduction_scratch
from tasks.prediction.operations.shapes import Arguments

_aten = torch.ops.aten
_FP32 = 4

# Operations that call cuBLAS.
MULTIPLIES = frozenset({"mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot"})

# Fused optimizers without a kernel for the `meta` device. They allocate nothing.
NOT_ON_META = frozenset({"_fused_sgd_", "_fused_adagrad_"})


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


def fused_attention(call: SdpaCall) -> Tensor:
    """Return the output of the attention kernel that a GPU would choose among the enabled ones.

    Raise RuntimeError with torch's message if every kernel is disabled.
    """
    # On `meta` torch itself would always fall back to the plain formula. On some GPUs cuDNN's
    # kernel comes before flash, and needs the same memory.
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    is_low = query.dtype in (torch.float16, torch.bfloat16)
    has_gradients = any(tensor.requires_grad for tensor in (query, key, value))
    gradients = torch.is_grad_enabled() and has_gradients
    backends: Any = torch.backends.cuda
    is_grouped = call.enable_gqa and query.shape[-3] != key.shape[-3]
    given = (query, key, value)
    options = (call.dropout_p, call.is_causal)
    if is_low and mask is None and backends.flash_sdp_enabled():
        attend = partial(_aten._scaled_dot_product_flash_attention, *given)
    elif is_low and backends.cudnn_sdp_enabled():
        attend = partial(_aten._scaled_dot_product_cudnn_attention, *given, mask, gradients)
    elif backends.mem_efficient_sdp_enabled() and not is_grouped:
        attend = partial(_aten._scaled_dot_product_efficient_attention, *given, mask, gradients)
    elif backends.math_sdp_enabled():
        if is_grouped:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        attend = partial(_aten._scaled_dot_product_attention_math, query, key, value, mask)
    else:
        raise RuntimeError("No available kernel. Aborting execution.")
    output: Tensor = attend(*options, scale=call.scale)[0]
    return output
