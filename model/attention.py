"""Implementations of attention, from the course's plain one to the fused kernels.

Each one is a function that takes query, key and value of shape `(..., sequence, d_head)` and
returns the same shape. They differ in what they save for the backward pass. The memory of squares,
which are tensors of `(..., sequence, sequence)`, grows with the square of the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from einops import einsum
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from model.parts import part

FLEX_BLOCK = 128  # queries, and keys, of a block of its mask
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of query, key and value


class Implementation(Protocol):
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor: ...


@part("softmax")
def softmax(scores: Tensor) -> Tensor:
    """Return the softmax over the last dimension, written out as in the course."""
    shifted = scores - scores.max(dim=-1, keepdim=True).values
    exponentials = torch.exp(shifted)
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def naive(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Compute attention as the course does. Scores, mask and each step of the softmax make a square.

    Two of them are saved.
    """
    return _weigh(softmax(_scores(query, key, causal)), value)


def torch_softmax(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Compute naive attention with torch's softmax: one kernel, which saves only its result."""
    return _weigh(_library_softmax(_scores(query, key, causal)), value)


def weights_only(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Compute in place on one square, the weights, and save only that."""
    result: Tensor = _WeightsOnly.apply(*_autocast_inputs(query, key, value), causal)  # type: ignore[no-untyped-call]
    return result


def recompute(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Save no square: the backward pass computes the weights again.

    It needs the maximum and the sum of each row.
    """
    result: Tensor = _Recompute.apply(*_autocast_inputs(query, key, value), causal)  # type: ignore[no-untyped-call]
    return result


def sdpa(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Call torch's scaled_dot_product_attention with the backend that torch chooses."""
    if query.ndim == 4:
        return _fused(query, key, value, causal)
    # The fused kernels know four dimensions only.
    query, key, value = (x.unsqueeze(-3) for x in (query, key, value))
    return _fused(query, key, value, causal).squeeze(-3)


@part("fused attention")
def _fused(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    is_grouped = key.shape[-3] != query.shape[-3]
    if is_grouped and query.dtype == torch.float32:
        # Only flash and cuDNN read groups, and neither reads fp32: torch would write out scores.
        key, value = _repeated(key, query), _repeated(value, query)
        is_grouped = False
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=causal, enable_gqa=is_grouped
    )


def _repeated(keys: Tensor, query: Tensor) -> Tensor:
    """Return keys or values with a copy of each head for every query head of its group."""
    return keys.repeat_interleave(query.shape[-3] // keys.shape[-3], dim=-3)


def _with_repeated_heads(attend: Attention) -> Attention:
    """Return the attention for keys and values with fewer heads than the query."""

    def attend_groups(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.ndim == 4 and key.shape[-3] != query.shape[-3]:
            key, value = _repeated(key, query), _repeated(value, query)
        return attend(query, key, value)

    return attend_groups


def _pinned(backend: SDPBackend) -> Implementation:
    """Return `sdpa` restricted to one backend; it raises RuntimeError if that cannot run."""

    def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(query, key, value, causal)

    return attend


IMPLEMENTATIONS: dict[str, Implementation] = {
    "naive": naive,
    "torch_softmax": torch_softmax,
    "weights_only": weights_only,
    "recompute": recompute,
    "sdpa": sdpa,
    "math": _pinned(SDPBackend.MATH),
    "efficient": _pinned(SDPBackend.EFFICIENT_ATTENTION),
    "flash": _pinned(SDPBackend.FLASH_ATTENTION),
    "cudnn": _pinned(SDPBackend.CUDNN_ATTENTION),
}

# torch passes groups of heads to these kernels; others get a copy of each head.
_READ_GROUPS = ("sdpa", "flash", "cudnn")
CAUSAL_NAIVE: Attention = _with_repeated_heads(partial(naive, causal=True))


def make_attention(name: str, length: int, causal: bool, device: torch.device) -> Attention:
    """Return one of IMPLEMENTATIONS, or `flex`, for sequences of `length`.

    It takes query, key and value of shape `(batch, heads, sequence, d_head)`. Key and value may have
    fewer heads than the query. Raise KeyError for another name.
    """
    if name == "flex":
        return _with_repeated_heads(compiled_flex(length, causal, device))
    attend = partial(IMPLEMENTATIONS[name], causal=causal)
    if name in _READ_GROUPS:
        return attend
    return _with_repeated_heads(attend)


def compiled_flex(length: int, causal: bool, device: torch.device) -> Attention:
    """Return FlexAttention, which is a kernel only if compiled. Its block mask is made once."""
    mask = causal_blocks(length, device) if causal else None
    compiled: Any = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    compiled = part("fused attention")(compiled)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        has_heads = query.ndim == 4
        query, key, value = _autocast_inputs(query, key, value)
        if not has_heads:
            query, key, value = (x.unsqueeze(-3) for x in (query, key, value))
        function = flex_attention if torch.compiler.is_compiling() else compiled
        result: Tensor = function(query, key, value, block_mask=mask)
        return result if has_heads else result.squeeze(-3)

    return attend


def causal_blocks(length: int, device: torch.device) -> BlockMask:
    """Return the causal mask of `create_block_mask`, computed block by block.

    `create_block_mask` itself makes the whole square, which would then be the memory peak.
    """
    blocks = torch.arange(math.ceil(length / FLEX_BLOCK), device=device)
    query, key = blocks[:, None], blocks[None, :]
    # No block is full in a row of blocks that the sequence does not fill.
    full = (key < query) & ((query + 1) * FLEX_BLOCK <= length)
    partial = (key <= query) & ~full
    return BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(full),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=_not_ahead,
        seq_lengths=(length, length),
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the count of blocks in each row, and the column numbers with these blocks first."""
    columns = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]


def _not_ahead(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


@part("softmax")
def _library_softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1)


@part("scores")
def _scores(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    scores = einsum(query, key, "... query d, ... key d -> ... query key")
    scores = scores / math.sqrt(query.shape[-1])  # another name would keep a square in memory
    if causal:
        return torch.where(_mask(query), scores, float("-inf"))
    return scores


def _mask(query: Tensor) -> Tensor:
    """Return True where a query may attend: to itself and to earlier positions."""
    positions = torch.arange(query.shape[-2], device=query.device)
    return positions[:, None] >= positions[None, :]


@part("attention output")
def _weigh(weights: Tensor, value: Tensor) -> Tensor:
    return einsum(weights, value, "... query key, ... key d -> ... query d")


def _autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors cast as autocast would: it does not reach into a Function or into Flex."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _no_autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)


def _scaled(query: Tensor) -> Tensor:
    """Return the scaled query, which is smaller than the square of scores."""
    return query / math.sqrt(query.shape[-1])


@part("scores")
def _scores_in_place(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    scores = _scaled(query) @ key.transpose(-2, -1)
    if causal:
        return scores.masked_fill_(~_mask(query), float("-inf"))
    return scores


def _weights(query: Tensor, key: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights, and each row's maximum and sum."""
    return _softmax_in_place(_scores_in_place(query, key, causal))


@part("softmax")
def _softmax_in_place(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    top = scores.amax(dim=-1, keepdim=True)
    scores.sub_(top).exp_()
    total = scores.sum(dim=-1, keepdim=True, dtype=torch.float32)
    return scores.div_(total), top, total


@part("attention output")
def _output(weights: Tensor, value: Tensor) -> Tensor:
    return weights @ value


@part("softmax")
def _softmax_again(scores: Tensor, top: Tensor, total: Tensor) -> Tensor:
    return scores.sub_(top).exp_().div_(total)


def _gradients(
    grad: Tensor, weights: Tensor, output: Tensor, inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `inputs` (query, key and value) from the output's gradient.

    With the weights P and their gradient dP, the gradient of the scores is P * (dP - rowsum(P *
    dP)). That sum equals rowsum(dO * O), as in FlashAttention (Dao et al., 2022, appendix B.2), so
    that one square in addition to P is enough.
    """
    query, key, value = inputs
    d_weights, d_value = _through_output(grad, weights, value)
    d_scores = _through_softmax(d_weights, grad, weights, output)
    return *_through_scores(d_scores, query, key), d_value


@part("attention output")
def _through_output(grad: Tensor, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    d_value = weights.transpose(-2, -1) @ grad
    return grad @ value.transpose(-2, -1), d_value


@part("softmax")
def _through_softmax(d_weights: Tensor, grad: Tensor, weights: Tensor, output: Tensor) -> Tensor:
    """Return the gradient of the scores, computed in place in `d_weights`."""
    d_weights -= (grad * output).sum(dim=-1, keepdim=True)
    d_weights *= weights
    return d_weights


@part("scores")
def _through_scores(d_scores: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return _scaled(d_scores @ key), d_scores.transpose(-2, -1) @ _scaled(query)


class _WeightsOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        with _no_autocast(query):
            weights, _, _ = _weights(query, key, causal)
            output = _output(weights, value)
            ctx.save_for_backward(query, key, value, output, weights)
            return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, weights = ctx.saved_tensors
        with _no_autocast(query):
            return (*_gradients(grad, weights, output, (query, key, value)), None)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        with _no_autocast(query):
            weights, top, total = _weights(query, key, causal)
            output = _output(weights, value)
            ctx.causal = causal
            ctx.save_for_backward(query, key, value, output, top, total)
            return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, top, total = ctx.saved_tensors
        with _no_autocast(query):
            weights = _softmax_again(_scores_in_place(query, key, ctx.causal), top, total)
            return (*_gradients(grad, weights, output, (query, key, value)), None)
