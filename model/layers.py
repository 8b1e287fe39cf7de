"""The parts of a block. Parameter names are those of the course, so that its checkpoints load.

No line calls two modules: torch 2.11 names the source lines of a compiled kernel, but no position
within a line.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from model.attention import Attention
from model.config import RMS_EPS, ROPE_THETA, Dimensions


class Linear(nn.Module):
    """A linear map without bias; `weight` is `(d_out, d_in)`, truncated normal at the Glorot scale.

    weight: the weight of another module, to share it.
    """

    def __init__(self, d_in: int, d_out: int, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        if weight is not None:
            self.weight = weight
            return
        std = math.sqrt(2 / (d_in + d_out))
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Embedding(nn.Module):
    """Rows of `weight` (vocabulary, d_model), looked up by token id."""

    def __init__(self, vocab_size: int, d_model: int, std: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids]


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, computed in fp32 and returned in the input's dtype."""

    def __init__(self, d_model: int, eps: float = RMS_EPS) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return (self.weight * (wide * scale)).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotates the adjacent pairs (2i, 2i+1) of each head by position times theta^(-2i/d_head).

    The table is a non-persistent buffer: a checkpoint neither holds nor needs it.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, d_head: int, context_length: int, theta: float = ROPE_THETA) -> None:
        super().__init__()
        frequencies = theta ** -(torch.arange(0, d_head, 2, dtype=torch.float32) / d_head)
        angles = torch.arange(context_length, dtype=torch.float32)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x, `(..., sequence, d_head)`, rotated. It may be shorter than the context length."""
        sequence = x.shape[-2]
        cos, sin = self.cos[:sequence], self.sin[:sequence]
        even, odd = rearrange(x, "... (half pair) -> pair ... half", pair=2)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return rearrange(rotated, "... half pair -> ... (half pair)").to(x.dtype)


class CausalSelfAttention(nn.Module):
    """Multi-head or grouped-query attention; causal if `attend` is."""

    def __init__(self, dims: Dimensions, rope: RotaryEmbedding, attend: Attention) -> None:
        super().__init__()
        self.num_heads = dims.num_heads
        self.kv_heads = dims.kv_heads
        self.rope = rope
        self.attend = attend
        self.q_proj = Linear(dims.d_model, dims.d_model)
        self.k_proj = Linear(dims.d_model, dims.kv_width)
        self.v_proj = Linear(dims.d_model, dims.kv_width)
        self.output_proj = Linear(dims.d_model, dims.d_model)

    def forward(self, x: Tensor) -> Tensor:
        split = "batch seq (heads d) -> batch heads seq d"
        query = self.q_proj(x)
        query = rearrange(query, split, heads=self.num_heads)
        query = self.rope(query)
        key = self.k_proj(x)
        key = rearrange(key, split, heads=self.kv_heads)
        key = self.rope(key)
        value = self.v_proj(x)
        value = rearrange(value, split, heads=self.kv_heads)
        heads = self.attend(query, key, value)
        joined = rearrange(heads, "batch heads seq d -> batch seq (heads d)")
        return self.output_proj(joined)  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """The feed-forward module w2(silu(w1 x) * w3 x).

    The course writes the silu out, which saves one tensor more than a fused one.
    """

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x)
        product = gate * torch.sigmoid(gate) * self.w3(x)
        return self.w2(product)  # type: ignore[no-any-return]
