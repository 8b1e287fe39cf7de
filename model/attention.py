"""Ways to compute attention. Each is a function of (query, key, value), so that it can be swapped."""

from __future__ import annotations

import math

import torch
from einops import einsum
from torch import Tensor


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension, written by hand as in the course: shift by the maximum, exponentiate, divide."""
    shifted = scores - scores.max(dim=-1, keepdim=True).values
    exponentials = torch.exp(shifted)
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def naive_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention that materialises the square of scores.

    query, key, value: `(..., sequence, d_head)`; mask: `(query, key)`, true where a query may look.
    Returns `(..., query, d_head)`.
    """
    scores = einsum(query, key, "... query d, ... key d -> ... query key") / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    return einsum(softmax(scores), value, "... query key, ... key d -> ... query d")
