"""Language models of many architectures, written as people write them, for `prediction_truth.py`.

Each maps token ids `(batch, context)` to logits `(batch, context, vocabulary)`. Where an
architecture has two ways to compute its attention, `path` chooses one: `sdpa` is torch's fused
function, `written` the products and the softmax.
"""

# Torch declares that modules return Any, and does not declare some methods.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

FUSED, WRITTEN = "sdpa", "written"
BOTH = (FUSED, WRITTEN)
# Paths on which torch chooses a kernel for attention: also those of torch's own layers.
FUSED_PATHS = (FUSED, "causal", "masked")


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model. hidden: width within the feed-forward part, 0 for 4 times `width`.

    is_small: replaces kernels that only a GPU has, so that a CPU saves the same tensors.
    """

    width: int = 512
    depth: int = 8
    heads: int = 8
    groups: int = 0  # heads of keys and values; 0: as many as `heads`
    hidden: int = 0
    vocabulary: int = 8192
    context: int = 1024
    dropout: float = 0.0
    is_small: bool = False

    @property
    def inner(self) -> int:
        return self.hidden or 4 * self.width

    @property
    def kv_heads(self) -> int:
        return self.groups or self.heads

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def split(x: Tensor, heads: int) -> Tensor:
    """Return `(batch, heads, context, width of a head)`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def causal(length: int, device: torch.device) -> Tensor:
    """Return a mask that is true where a position may be seen."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def attend(q: Tensor, k: Tensor, v: Tensor, path: str, mask: Tensor | None = None) -> Tensor:
    """Return attention under a mask of booleans or of scores to add; None: causal."""
    if path == FUSED:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is None:
        mask = causal(q.shape[2], q.device)
    hidden = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, float("-inf")) if hidden else scores + mask
    return scores.softmax(-1) @ v


class Norm(nn.Module):
    """RMS norm as Llama writes it. shift: added to the weight, 1 in Gemma."""

    def __init__(self, width: int, shift: float = 0.0) -> None:
        super().__init__()
        self.shift, self.weight = shift, nn.Parameter(torch.full((width,), 1.0 - shift))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (self.weight.float() + self.shift)).type_as(x)


class SwiGLU(nn.Module):
    def __init__(self, shape: Shape, gate: Callable[[Tensor], Tensor] = functional.silu) -> None:
        super().__init__()
        self.gate = gate
        self.w1, self.w3 = (nn.Linear(shape.width, shape.inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.gate(self.w1(x)) * self.w3(x))


def mlp(shape: Shape, activation: nn.Module | None = None) -> nn.Sequential:
    maps = nn.Linear(shape.width, shape.inner), nn.Linear(shape.inner, shape.width)
    return nn.Sequential(maps[0], activation or nn.GELU(), maps[1])


class Residual(nn.Module):
    """Adds the result of a module on the normed input to the input."""

    def __init__(self, norm: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def block(width: int, mixer: nn.Module, feed_forward: nn.Module) -> nn.Module:
    """Return a block of a mixer of positions and a feed-forward part, each behind a norm."""
    norms = Norm(width), Norm(width)
    return nn.Sequential(Residual(norms[0], mixer), Residual(norms[1], feed_forward))


class LanguageModel(nn.Module):
    """An embedding, layers, a norm and a head.

    positions: learned, `shape.context` of them. tied: the head has the weight of the embedding.
    """

    def __init__(
        self, layers: list[nn.Module], shape: Shape, positions: bool = False, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width) if positions else None
        self.drop, self.layers = nn.Dropout(shape.dropout), nn.ModuleList(layers)
        self.norm = nn.LayerNorm(shape.width) if positions else Norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.positions is not None:
            x = self.drop(x + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# Layers of torch itself


class TorchEncoder(nn.Module):
    """torch's own layer. path: its causal mask is declared as one, or is any mask of booleans."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.path = path
        options: dict[str, Any] = {"dropout": shape.dropout, "batch_first": True}
        self.layer = nn.TransformerEncoderLayer(shape.width, shape.heads, shape.inner, **options)

    def forward(self, x: Tensor) -> Tensor:
        if self.path == "causal":
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            return self.layer(x, src_mask=mask, is_causal=True)
        return self.layer(x, src_mask=~causal(x.shape[1], x.device))


class TorchDecoder(nn.Module):
    """torch's own decoder layer, which also attends to half of its input."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layer = nn.TransformerDecoderLayer(shape.width, shape.heads, shape.inner, **options)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.layer(x, x[:, ::2], tgt_mask=mask, tgt_is_causal=True)


class TorchStack(nn.Module):
    """torch's own stack of two layers, which finds out whether its mask is causal."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.path = path
        options: dict[str, Any] = {"dropout": shape.dropout, "batch_first": True}
        layer = nn.TransformerEncoderLayer(shape.width, shape.heads, shape.inner, **options)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.path == "causal":
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            return self.layers(x, mask=mask)
        padding = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]) >= x.shape[1] - 5
        return self.layers(x, mask=~causal(x.shape[1], x.device), src_key_padding_mask=padding)


class TorchTransformer(nn.Module):
    """torch's own encoder and decoder, of two layers each."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        options: dict[str, Any] = {"dropout": shape.dropout, "batch_first": True}
        self.both = nn.Transformer(shape.width, shape.heads, 2, 2, shape.inner, **options)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.both(x[:, ::2], x, tgt_mask=mask)


class TorchAttention(nn.Module):
    """nn.MultiheadAttention. With its weights it does not use the fused function."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.needs_weights = path == WRITTEN
        self.norm, self.ffn = nn.LayerNorm(shape.width), mlp(shape, nn.ReLU())
        self.attention = nn.MultiheadAttention(shape.width, shape.heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = ~causal(x.shape[1], x.device)
        y, _ = self.attention(x, x, x, attn_mask=mask, need_weights=self.needs_weights)
        x = self.norm(x + y)
        return x + self.ffn(x)


class Recurrent(nn.Module):
    """An LSTM or GRU of torch behind a norm."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        kinds: dict[str, type[nn.Module]] = {"lstm": nn.LSTM, "gru": nn.GRU}
        self.norm = nn.LayerNorm(shape.width)
        self.cells = kinds[path](shape.width, shape.width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cells(self.norm(x))[0]


# Transformers of published models


class GPT2(nn.Module):
    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.heads, self.path, self.dropout = shape.heads, path, shape.dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)
        self.drop, self.mlp = nn.Dropout(shape.dropout), mlp(shape, nn.GELU("tanh"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(y, self.heads) for y in self.c_attn(self.ln_1(x)).chunk(3, -1))
        if self.path == FUSED:
            y = functional.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
            )
        else:
            scores = (q @ k.transpose(-2, -1)) * k.shape[-1] ** -0.5
            seen = causal(x.shape[1], x.device)
            y = self.drop(scores.masked_fill(~seen, float("-inf")).softmax(-1)) @ v
        x = x + self.drop(self.c_proj(merge(y)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class LlamaAttention(nn.Module):
    """Rotary positions as complex numbers, grouped heads."""

    rotation: Tensor

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.shape, self.path = shape, path
        of_kv = shape.kv_heads * shape.head_width
        self.wq, self.wo = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(shape.width, of_kv, bias=False) for _ in range(2))
        steps = 10000.0 ** -(torch.arange(0, shape.head_width, 2).float() / shape.head_width)
        angles = torch.outer(torch.arange(shape.context).float(), steps)
        rotation = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("rotation", rotation, persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.rotation[: x.shape[2]]).flatten(-2).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        q = self.rotate(split(self.wq(x), shape.heads))
        k, v = self.rotate(split(self.wk(x), shape.kv_heads)), split(self.wv(x), shape.kv_heads)
        repeats = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        return self.wo(merge(attend(q, k, v, self.path)))


class QwenAttention(nn.Module):
    """Rotated halves, biases, norms of queries and keys, groups left to torch; fp32 softmax."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.shape, self.path = shape, path
        of_kv = shape.kv_heads * shape.head_width
        self.q_proj = nn.Linear(shape.width, shape.width)
        self.k_proj, self.v_proj = (nn.Linear(shape.width, of_kv) for _ in range(2))
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.q_norm, self.k_norm = Norm(shape.head_width), Norm(shape.head_width)
        half = shape.head_width // 2
        steps = 1e6 ** -(torch.arange(half).float() / half)
        angles = torch.outer(torch.arange(shape.context).float(), steps).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        length = x.shape[2]
        turned = torch.cat([-second, first], -1) * self.sin[:length].to(x.dtype)
        return x * self.cos[:length].to(x.dtype) + turned

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        q = self.rotate(self.q_norm(split(self.q_proj(x), shape.heads)))
        k = self.rotate(self.k_norm(split(self.k_proj(x), shape.kv_heads)))
        v = split(self.v_proj(x), shape.kv_heads)
        if self.path == FUSED:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return self.o_proj(merge(y))
        repeats = shape.heads // shape.kv_heads
        k, v = (y[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2) for y in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * shape.head_width**-0.5
        low = torch.finfo(scores.dtype).min
        scores = scores + (~causal(x.shape[1], x.device)).to(scores.dtype) * low
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.o_proj(merge(weights @ v))


class GemmaLayer(nn.Module):
    """Four norms; every second layer sees a window; scores are capped where they are written out."""

    def __init__(self, shape: Shape, path: str, is_local: bool) -> None:
        super().__init__()
        self.heads, self.path, self.is_local = shape.heads, path, is_local
        self.norms = nn.ModuleList(Norm(shape.width, 1.0) for _ in range(4))
        self.qkv = nn.Linear(shape.width, 3 * shape.heads * 128, bias=False)
        self.out = nn.Linear(shape.heads * 128, shape.width, bias=False)
        self.ffn = SwiGLU(shape, lambda x: functional.gelu(x, approximate="tanh"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.qkv(self.norms[0](x)), 3 * self.heads).chunk(3, 1)
        seen = causal(x.shape[1], x.device)
        if self.is_local:
            seen = seen & seen.triu(-255)
        if self.path == FUSED:
            y = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=shape_scale(q)
            )
        else:
            scores = 50 * torch.tanh(q @ k.transpose(-2, -1) * shape_scale(q) / 50)
            y = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        x = x + self.norms[1](self.out(merge(y)))
        return x + self.norms[3](self.ffn(self.norms[2](x)))


def shape_scale(q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5)


class Gemma(LanguageModel):
    """Scaled embeddings, shared with the head, and capped logits."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.embed.embedding_dim**0.5
        for layer in self.layers:
            x = layer(x)
        return 30 * torch.tanh(self.head(self.norm(x)) / 30)


class Olmo(nn.Module):
    """Norms behind the parts, and over all queries and keys together, by torch's own module."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.heads, self.path = shape.heads, path
        kind: Callable[[int], nn.Module] = Norm if shape.is_small else nn.RMSNorm
        self.q_norm, self.k_norm, self.norm_1, self.norm_2 = (kind(shape.width) for _ in range(4))
        self.maps = nn.ModuleList(nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))
        self.ffn = SwiGLU(shape)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_norm(self.maps[0](x)), self.k_norm(self.maps[1](x)), self.maps[2](x)
        q, k, v = (split(one, self.heads) for one in (q, k, v))
        y = attend(q, k, v, self.path)
        x = x + self.norm_1(self.maps[3](merge(y)))
        return x + self.norm_2(self.ffn(x))


class NeoX(nn.Module):
    """Attention and feed-forward side by side; a quarter of each head is rotated."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.heads, self.path, self.turned = shape.heads, path, shape.head_width // 4
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2))
        self.qkv, self.dense = (nn.Linear(shape.width, n * shape.width) for n in (3, 1))
        self.mlp = mlp(shape)

    def rotate(self, x: Tensor) -> Tensor:
        turned, rest = x[..., : self.turned], x[..., self.turned :]
        steps = torch.arange(self.turned // 2, device=x.device) / (self.turned // 2)
        at = torch.arange(x.shape[-2], device=x.device)[:, None] * 10000.0**-steps
        cos, sin = at.cos().to(x.dtype), at.sin().to(x.dtype)
        a, b = turned.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.qkv(self.norms[0](x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, k, v = mixed.chunk(3, -1)
        y = attend(self.rotate(q), self.rotate(k), v, self.path)
        return x + self.dense(merge(y)) + self.mlp(self.norms[1](x))


class AlibiAttention(nn.Module):
    """Scores fall with the distance: a mask of numbers that each layer builds."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.heads, self.path = shape.heads, path
        self.qkv, self.out = (nn.Linear(shape.width, n * shape.width) for n in (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        slopes = 2.0 ** -torch.arange(1, self.heads + 1, device=x.device, dtype=q.dtype)
        at = torch.arange(x.shape[1], device=x.device)
        distance = (at[None, :] - at[:, None]).to(q.dtype)
        mask = (slopes[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))
        return self.out(merge(attend(q, k, v, self.path, mask[None])))


class WindowAttention(nn.Module):
    """Sees the last 256 positions, by a mask of booleans that each layer makes."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.heads, self.path = shape.heads, path
        self.qkv, self.out = (nn.Linear(shape.width, n * shape.width, bias=False) for n in (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(y, self.heads) for y in self.qkv(x).chunk(3, -1))
        at = torch.arange(x.shape[1], device=x.device)
        distance = at[:, None] - at
        return self.out(merge(attend(q, k, v, self.path, (distance >= 0) & (distance < 256))))


class PrefixAttention(nn.Module):
    """Every position sees the first part of its sequence, whose length differs between sequences."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.heads, self.path = shape.heads, path
        self.q, self.kv = (nn.Linear(shape.width, n * shape.width) for n in (1, 2))
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        prefix = torch.arange(1, batch + 1, device=x.device) * (length // (2 * batch))
        at = torch.arange(length, device=x.device)
        seen = (at < prefix[:, None])[:, None, None] | causal(length, x.device)
        k, v = (split(y, self.heads) for y in self.kv(x).chunk(2, -1))
        return self.out(merge(attend(split(self.q(x), self.heads), k, v, self.path, seen)))


class T5Layer(nn.Module):
    """No scale, and a learned bias of scores that all layers share: the mask has a gradient."""

    def __init__(self, shape: Shape, path: str, bias: nn.Embedding) -> None:
        super().__init__()
        self.heads, self.path, self.bias = shape.heads, path, bias
        self.norms = nn.ModuleList(Norm(shape.width) for _ in range(2))
        self.maps = nn.ModuleList(nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))
        self.ffn = mlp(shape, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        distance = (at[:, None] - at).clamp(0, 31)
        y = self.norms[0](x)
        q, k, v = (split(one(y), self.heads) for one in self.maps[:3])
        bias = self.bias(distance).permute(2, 0, 1)[None].to(q.dtype)
        bias = bias.masked_fill(~causal(x.shape[1], x.device), float("-inf"))
        if self.path == FUSED:
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        else:
            y = (torch.einsum("bhqd,bhkd->bhqk", q, k) + bias).softmax(-1) @ v
        x = x + self.maps[3](merge(y))
        return x + self.ffn(self.norms[1](x))


class BertLayer(nn.Module):
    """Sees in both directions; token 0 is padding, whose scores are lowered."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.heads, self.path = shape.heads, path
        self.query, self.key, self.value, self.dense = (
            nn.Linear(shape.width, shape.width) for _ in range(4)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width, eps=1e-12) for _ in range(2))
        self.drop, self.mlp = nn.Dropout(shape.dropout), mlp(shape)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (split(one(x), self.heads) for one in (self.query, self.key, self.value))
        if self.path == FUSED:
            y = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=self.drop.p if self.training else 0.0
            )
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
            y = self.drop(functional.softmax(scores, dim=-1)) @ v
        x = self.norms[0](x + self.drop(self.dense(merge(y))))
        return self.norms[1](x + self.drop(self.mlp(x)))


class Bert(LanguageModel):
    def __init__(self, layers: list[nn.Module], shape: Shape) -> None:
        super().__init__(layers, shape, positions=True, tied=True)
        self.types = nn.Embedding(2, shape.width)
        self.transform = nn.Sequential(nn.Linear(shape.width, shape.width), nn.GELU())

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.positions is not None
        x = self.embed(tokens) + self.types(torch.zeros_like(tokens))
        x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        mask = (1.0 - (tokens != 0)[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min
        if torch.is_autocast_enabled(tokens.device.type):
            mask = mask.to(torch.get_autocast_dtype(tokens.device.type))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(self.transform(x)))


class CrossLayer(nn.Module):
    """A decoder's layer that attends to itself and to what an encoder made."""

    def __init__(self, shape: Shape, path: str, is_decoder: bool = True) -> None:
        super().__init__()
        self.heads, self.path, self.is_decoder = shape.heads, path, is_decoder
        count = 3 if is_decoder else 2
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(count))
        self.qkv, self.out = (nn.Linear(shape.width, n * shape.width) for n in (3, 1))
        self.ffn = mlp(shape)
        if is_decoder:
            self.q, self.kv = (nn.Linear(shape.width, n * shape.width) for n in (1, 2))
            self.crossed = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = (split(y, self.heads) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        whole = torch.ones(1, 1, dtype=torch.bool, device=x.device)
        if self.is_decoder or self.path == WRITTEN:
            y = attend(q, k, v, self.path, None if self.is_decoder else whole)
        else:
            y = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(merge(y))
        if memory is not None:
            q = split(self.q(self.norms[2](x)), self.heads)
            k, v = (split(y, self.heads) for y in self.kv(memory).chunk(2, -1))
            if self.path == FUSED:
                y = functional.scaled_dot_product_attention(q, k, v)
            else:
                y = attend(q, k, v, self.path, whole)
            x = x + self.crossed(merge(y))
        return x + self.ffn(self.norms[1](x))


class EncoderDecoder(LanguageModel):
    """The first half of the layers reads every second token; the other half attends to it."""

    def forward(self, tokens: Tensor) -> Tensor:
        half = len(self.layers) // 2
        memory, x = self.embed(tokens[:, ::2]), self.embed(tokens)
        for layer in self.layers[:half]:
            memory = layer(memory)
        for layer in self.layers[half:]:
            x = layer(x, memory)
        return self.head(self.norm(x))


class LatentAttention(nn.Module):
    """Keys and values come from a narrow latent (MLA); values are narrower than keys."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.heads, self.path = shape.heads, path
        self.plain, self.turned = shape.head_width, shape.head_width // 2
        self.latent = shape.width // 4
        each = self.plain + self.turned
        self.q_down = nn.Linear(shape.width, self.latent, bias=False)
        self.q_up = nn.Linear(self.latent, shape.heads * each, bias=False)
        self.kv_down = nn.Linear(shape.width, self.latent + self.turned, bias=False)
        self.kv_up = nn.Linear(self.latent, 2 * shape.heads * self.plain, bias=False)
        self.q_norm, self.kv_norm = Norm(self.latent), Norm(self.latent)
        self.out = nn.Linear(shape.heads * self.plain, shape.width, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[2], device=x.device)[:, None]
        angles = at * 1e4 ** -(torch.arange(0, self.turned, 2, device=x.device) / self.turned)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        q = split(self.q_up(self.q_norm(self.q_down(x))), self.heads)
        q_plain, q_turned = q.split((self.plain, self.turned), -1)
        latent, k_turned = self.kv_down(x).split((self.latent, self.turned), -1)
        k_plain, v = split(self.kv_up(self.kv_norm(latent)), self.heads).chunk(2, -1)
        k_turned = self.rotate(k_turned[:, None]).expand(-1, self.heads, -1, -1)
        q = torch.cat((q_plain, self.rotate(q_turned)), -1)
        k = torch.cat((k_plain, k_turned), -1)
        return self.out(merge(attend(q, k, v, self.path)))


class DifferentialAttention(nn.Module):
    """The difference of two attentions with the same values."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.heads, self.path = shape.heads, path
        self.qkv, self.out = (nn.Linear(shape.width, n * shape.width, bias=False) for n in (3, 1))
        self.share, self.norm = nn.Parameter(torch.tensor(0.5)), Norm(shape.head_width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(y, self.heads) for y in self.qkv(x).chunk(3, -1))
        (q_1, q_2), (k_1, k_2) = q.chunk(2, -1), k.chunk(2, -1)
        first, second = attend(q_1, k_1, v, self.path), attend(q_2, k_2, v, self.path)
        return self.out(merge(self.norm(first - self.share * second)))


class CosineAttention(nn.Module):
    """Queries and keys of length one, with a learned scale for each head."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.heads, self.path = shape.heads, path
        self.qkv, self.out = (nn.Linear(shape.width, n * shape.width, bias=False) for n in (3, 1))
        self.scale = nn.Parameter(torch.full((shape.heads, 1, 1), 10.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(y, self.heads) for y in self.qkv(x).chunk(3, -1))
        q, k = functional.normalize(q, dim=-1) * self.scale, functional.normalize(k, dim=-1)
        q, k = q.to(v.dtype), k.to(v.dtype)
        return self.out(merge(attend(q, k, v, self.path)))


class ChunkedAttention(nn.Module):
    """Attends within chunks of 128 positions, which are folded into the batch."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.heads, self.path, self.length = shape.heads, path, min(128, shape.context // 2)
        self.qkv, self.out = (nn.Linear(shape.width, n * shape.width) for n in (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        chunks = x.unflatten(1, (-1, self.length)).flatten(0, 1)
        q, k, v = (split(y, self.heads) for y in self.qkv(chunks).chunk(3, -1))
        y = merge(attend(q, k, v, self.path))
        return self.out(y.unflatten(0, (batch, -1)).flatten(1, 2))


# Mixtures of experts


class DenseExperts(nn.Module):
    """Each of 4 experts computes all tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, 4, bias=False)
        self.experts = nn.ModuleList(mlp(shape) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * weights[..., None, :]).sum(-1)


class CapacityExperts(nn.Module):
    """One of 8 experts for each token, as products with one-hot places, as in Switch."""

    def __init__(self, shape: Shape, count: int = 8) -> None:
        super().__init__()
        self.count, self.gate = count, nn.Linear(shape.width, count, bias=False)
        self.up = nn.Parameter(torch.empty(count, shape.width, shape.inner))
        self.down = nn.Parameter(torch.empty(count, shape.inner, shape.width))
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        capacity = rows.shape[0] // self.count
        share, chosen = self.gate(rows).float().softmax(-1).max(-1)
        of_expert = functional.one_hot(chosen, self.count)
        place = (of_expert.cumsum(0) * of_expert).sum(-1) - 1
        is_in = place < capacity
        places = functional.one_hot(place.clamp(max=capacity - 1), capacity)
        sent = of_expert[:, :, None] * places[:, None] * is_in[:, None, None]
        sent = sent.to(x.dtype)  # (rows, experts, capacity)
        inputs = torch.einsum("nec,nw->ecw", sent, rows)
        hidden = functional.gelu(torch.bmm(inputs, self.up))
        outputs = torch.bmm(hidden, self.down)
        combined = torch.einsum("nec,ecw->nw", sent.to(outputs.dtype), outputs)
        return (combined * share[:, None].to(combined.dtype)).view_as(x)


class GroupedExperts(nn.Module):
    """Two of 8 experts for each token: rows are sorted by expert for a grouped product."""

    def __init__(self, shape: Shape, count: int = 8) -> None:
        super().__init__()
        self.count, self.router = count, nn.Linear(shape.width, count, bias=False)
        self.w1, self.w3 = (
            nn.Parameter(torch.randn(count, shape.width, shape.inner) * 0.02) for _ in range(2)
        )
        self.w2 = nn.Parameter(torch.randn(count, shape.inner, shape.width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).float().softmax(-1).topk(2, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = functional.one_hot(chosen.flatten(), self.count).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        inputs = rows[order // 2]
        gate = functional.grouped_mm(inputs, self.w1.to(inputs.dtype), offs=ends)
        up = functional.grouped_mm(inputs, self.w3.to(inputs.dtype), offs=ends)
        hidden = functional.silu(gate) * up
        outputs = functional.grouped_mm(hidden, self.w2.to(hidden.dtype), offs=ends)
        outputs = outputs * weights.flatten()[order][:, None].to(outputs.dtype)
        summed = torch.zeros_like(rows).index_add(0, order // 2, outputs.to(rows.dtype))
        return summed.view_as(x)


class LoopedExperts(nn.Module):
    """Each expert picks its tokens: the sizes depend on the data, which a prediction lacks."""

    def __init__(self, shape: Shape, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, count, bias=False)
        self.experts = nn.ModuleList(SwiGLU(shape) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        result = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            (picked,) = torch.where(chosen == index)
            y = expert(rows[picked]) * weights[picked, None]
            result = result.index_add(0, picked, y.to(result.dtype))
        return result.view_as(x)


# Without attention


class Mamba(nn.Module):
    """A selective scan, by cumulative sums within chunks, behind a convolution."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.inner, self.states = 2 * shape.width, 8
        self.in_proj = nn.Linear(shape.width, 2 * self.inner, bias=False)
        self.conv = nn.Conv1d(self.inner, self.inner, 4, groups=self.inner, padding=3)
        self.x_proj = nn.Linear(self.inner, 1 + 2 * self.states, bias=False)
        self.dt_proj = nn.Linear(1, self.inner)
        self.a_log = nn.Parameter(torch.arange(1, self.states + 1).float().log())
        self.d = nn.Parameter(torch.ones(self.inner))
        self.out_proj = nn.Linear(self.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.in_proj(x).chunk(2, -1)
        x = functional.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        dt, b, c = self.x_proj(x).split((1, self.states, self.states), -1)
        dt = functional.softplus(self.dt_proj(dt)).float()
        decay = -dt[..., None] * self.a_log.float().exp()  # (batch, context, inner, states)
        added = (dt * x.float())[..., None] * b.float()[:, :, None]
        total = decay.cumsum(1).clamp(min=-20)
        state = total.exp() * (added * (-total).exp()).cumsum(1)
        y = (state * c.float()[:, :, None]).sum(-1) + self.d.float() * x.float()
        return self.out_proj(y.to(z.dtype) * functional.silu(z))


class StateSpace(nn.Module):
    """The quadratic form of Mamba 2: products with a matrix of decays."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.heads, self.states = shape.heads, 32
        self.x, self.z, self.out = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(3)
        )
        self.bc, self.dt = (
            nn.Linear(shape.width, 64, bias=False),
            nn.Linear(shape.width, shape.heads),
        )
        self.norm = Norm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        b, c = self.bc(x).chunk(2, -1)
        dt = functional.softplus(self.dt(x).float())  # (batch, context, heads)
        total = -dt.cumsum(1).transpose(1, 2)
        decay = total[..., :, None] - total[..., None, :]
        seen = causal(x.shape[1], x.device)
        decay = decay.masked_fill(~seen, float("-inf")).exp()
        scores = torch.einsum("bin,bjn->bij", c, b)[:, None] * decay.to(b.dtype)
        values = self.x(x).unflatten(-1, (self.heads, -1)) * dt[..., None].to(b.dtype)
        y = torch.einsum("bhij,bjhd->bihd", scores, values.to(scores.dtype)).flatten(2)
        return self.out(self.norm(y * functional.silu(self.z(x))))


class Retention(nn.Module):
    """Scores without a softmax, multiplied by powers of a decay for each head."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.heads = shape.heads
        self.maps = nn.ModuleList(nn.Linear(shape.width, shape.width, bias=False) for _ in range(5))
        self.norm = nn.GroupNorm(shape.heads, shape.width, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(one(x), self.heads) for one in self.maps[:3])
        at = torch.arange(x.shape[1], device=x.device)
        decay = 1 - 2.0 ** (-5 - torch.arange(self.heads, device=x.device))
        distance = (at[:, None] - at).clamp(min=0)
        powers = (decay[:, None, None] ** distance).tril().to(q.dtype)
        y = merge((q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 * powers) @ v)
        y = self.norm(y.flatten(0, 1)).view_as(x)
        return self.maps[4](functional.silu(self.maps[3](x)) * y.to(x.dtype))


class LinearAttention(nn.Module):
    """Keys and values are summed up along the positions."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv, self.out = (nn.Linear(shape.width, n * shape.width, bias=False) for n in (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(y, self.heads) for y in self.qkv(x).chunk(3, -1))
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        pairs = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
        scale = (q * k.cumsum(2)).sum(-1, keepdim=True)
        y = torch.einsum("bhtd,bhtde->bhte", q, pairs.to(q.dtype)) / scale
        return self.out(merge(y.to(x.dtype)))


class MinGRU(nn.Module):
    """A recurrence without matrices, as a scan of logarithms."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.map, self.out = (nn.Linear(shape.width, n * shape.width, bias=False) for n in (2, 1))

    def forward(self, x: Tensor) -> Tensor:
        gate, hidden = self.map(x).float().chunk(2, -1)
        log_keep, log_new = -functional.softplus(gate), -functional.softplus(-gate)
        log_hidden = torch.where(
            hidden >= 0, (hidden.relu() + 0.5).log(), -functional.softplus(-hidden)
        )
        decay = log_keep.cumsum(1)
        log_state = decay + torch.logcumsumexp(log_new + log_hidden - decay, dim=1)
        return self.out(log_state.exp().to(x.dtype))


class LongConvolution(nn.Module):
    """A convolution as long as the context, by Fourier transforms."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.maps = nn.Linear(shape.width, 3 * shape.width)
        self.kernel = nn.Parameter(torch.randn(shape.width, shape.context) * 0.02)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        gate, key, value = self.maps(x).transpose(1, 2).chunk(3, 1)
        length = x.shape[1]
        signal = (key * value).float()
        spectrum = torch.fft.rfft(signal, n=2 * length)
        spectrum = spectrum * torch.fft.rfft(self.kernel[:, :length].float(), n=2 * length)
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
        return self.out((gate * y.to(gate.dtype)).transpose(1, 2))


class PositionMixer(nn.Module):
    """A matrix over positions, half of which is gated by the other (gMLP)."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(shape.width, shape.inner),
            nn.Linear(shape.inner // 2, shape.width),
        )
        self.norm = nn.LayerNorm(shape.inner // 2)
        self.weight = nn.Parameter(torch.randn(shape.context, shape.context) * 1e-3)
        self.bias = nn.Parameter(torch.ones(shape.context))

    def forward(self, x: Tensor) -> Tensor:
        values, gate = functional.gelu(self.up(x)).chunk(2, -1)
        mixed = self.weight.tril() @ self.norm(gate) + self.bias[:, None]
        return self.down(values * mixed)


# Unusual ways to train


class TernaryLinear(nn.Linear):
    """Weights of three values, trained through a straight-through estimator (BitNet)."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().mean().clamp(min=1e-5)
        rounded = (self.weight / scale).round().clamp(-1, 1) * scale
        most = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        quantized = (x / most).round() * most
        x = x + (quantized - x).detach()
        return functional.linear(x, self.weight + (rounded - self.weight).detach())


class TernaryAttention(nn.Module):
    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.heads, self.path = shape.heads, path
        self.qkv = TernaryLinear(shape.width, 3 * shape.width, bias=False)
        self.out = TernaryLinear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(y, self.heads) for y in self.qkv(x).chunk(3, -1))
        return self.out(merge(attend(q, k, v, self.path)))


class Checkpointed(nn.Module):
    """A layer that is computed again in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Shared(LanguageModel):
    """One layer that runs many times, and factorised embeddings (ALBERT)."""

    def __init__(self, layers: list[nn.Module], shape: Shape) -> None:
        super().__init__(layers[:1], shape)
        narrow = shape.width // 4
        self.times = len(layers)
        self.embed = nn.Embedding(shape.vocabulary, narrow)
        self.widen = nn.Linear(narrow, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.widen(self.embed(tokens))
        for _ in range(self.times):
            x = self.layers[0](x)
        return self.head(self.norm(x))


class InnerGradient(nn.Module):
    """A memory that is changed by a gradient within the forward pass (test-time training)."""

    def __init__(self, shape: Shape, path: str) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.eye(shape.width))
        self.key, self.value, self.query = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.key(x), self.value(x)

        def surprise(memory: Tensor) -> Tensor:
            return ((keys @ memory - values) ** 2).mean()

        slope = torch.func.grad(surprise)(self.memory)
        return self.query(x) @ (self.memory - 0.1 * slope)


class WordPieces(LanguageModel):
    """Adds the mean embedding of the last three tokens, by a bag of embeddings."""

    def __init__(self, layers: list[nn.Module], shape: Shape) -> None:
        super().__init__(layers, shape, positions=True)
        self.bag = nn.EmbeddingBag(shape.vocabulary, shape.width, mode="mean")

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.positions is not None
        triples = torch.stack([tokens, tokens.roll(1, 1), tokens.roll(2, 1)], -1)
        x = self.embed(tokens) + self.bag(triples.flatten(0, 1)).view(*tokens.shape, -1)
        x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


Layer = Callable[[Shape, str], nn.Module]


def layered(
    layer: Layer,
    model: Callable[..., nn.Module] = LanguageModel,
    **options: bool,
) -> Callable[[Shape, str], nn.Module]:
    """Return a factory of a model of equal layers."""

    def make(shape: Shape, path: str) -> nn.Module:
        return model([layer(shape, path) for _ in range(shape.depth)], shape, **options)

    return make


def mixed(mixer: Layer, feed_forward: Callable[[Shape], nn.Module] = SwiGLU) -> Layer:
    """Return a layer of a mixer of positions and a feed-forward part."""
    return lambda shape, path: block(shape.width, mixer(shape, path), feed_forward(shape))


def gemma(shape: Shape, path: str) -> nn.Module:
    layers: list[nn.Module] = [
        GemmaLayer(shape, path, is_local=index % 2 == 0) for index in range(shape.depth)
    ]
    return Gemma(layers, shape, tied=True)


def t5(shape: Shape, path: str) -> nn.Module:
    bias = nn.Embedding(32, shape.heads)
    return LanguageModel([T5Layer(shape, path, bias) for _ in range(shape.depth)], shape)


def encoder_decoder(shape: Shape, path: str) -> nn.Module:
    kinds = [index >= shape.depth // 2 for index in range(shape.depth)]
    return EncoderDecoder([CrossLayer(shape, path, kind) for kind in kinds], shape)


def checkpointed(shape: Shape, path: str) -> nn.Module:
    layers: list[nn.Module] = [Checkpointed(GPT2(shape, path)) for _ in range(shape.depth)]
    return LanguageModel(layers, shape, positions=True)


@dataclass(frozen=True)
class Architecture:
    """A model, its dimensions on a GPU, and what a training step of it looks like."""

    make: Callable[[Shape, str], nn.Module]
    shape: Shape = field(default_factory=Shape)
    paths: tuple[str, ...] = BOTH
    batch: int = 4
    optimizer: str = "fused"

    def small(self) -> Shape:
        """Return dimensions with which a CPU runs a step in a fraction of a second."""
        heads, groups = min(self.shape.heads, 4), min(self.shape.groups, 2)
        return replace(
            self.shape,
            width=64, depth=2, heads=heads, groups=groups, hidden=96 if self.shape.hidden else 0,
            vocabulary=211, context=64, dropout=0.0, is_small=True,
        )  # fmt: skip


LLAMA_1B = Shape(2048, 20, 32, groups=4, hidden=5632, vocabulary=32000)
GPT2_124M = Shape(768, 12, 12, vocabulary=50257)
ARCHITECTURES: dict[str, Architecture] = {
    "torch encoder": Architecture(
        layered(TorchEncoder, positions=True), Shape(1024, 6, 16), ("causal", "masked")
    ),
    "torch encoder, dropout": Architecture(
        layered(TorchEncoder, positions=True), Shape(dropout=0.1), ("causal",)
    ),
    "torch decoder": Architecture(layered(TorchDecoder), paths=("causal",)),
    "torch stack": Architecture(layered(TorchStack), Shape(depth=3), ("causal", "masked")),
    "torch transformer": Architecture(layered(TorchTransformer), Shape(depth=2), ("causal",)),
    "torch attention": Architecture(layered(TorchAttention, positions=True)),
    "recurrent": Architecture(layered(Recurrent), Shape(depth=2, context=512), ("lstm", "gru"), 8),
    "gpt2": Architecture(layered(GPT2, positions=True, tied=True), GPT2_124M, optimizer="foreach"),
    "gpt2, dropout": Architecture(layered(GPT2, positions=True), Shape(dropout=0.1)),
    "llama": Architecture(layered(mixed(LlamaAttention)), LLAMA_1B, batch=1),
    "llama, long": Architecture(
        layered(mixed(LlamaAttention)), Shape(context=4096, depth=4, groups=2), batch=1
    ),
    "qwen": Architecture(
        layered(mixed(QwenAttention), tied=True), Shape(1024, 12, 16, groups=4, hidden=2816)
    ),
    "gemma": Architecture(gemma, Shape(768, 10, 6, hidden=3072, vocabulary=32000), batch=2),
    "olmo": Architecture(layered(Olmo), Shape(1024, 8, 16, hidden=2816)),
    "neox": Architecture(layered(NeoX), Shape(768, 8, 12)),
    "alibi": Architecture(layered(mixed(AlibiAttention)), batch=8),
    "window": Architecture(layered(mixed(WindowAttention)), Shape(context=2048)),
    "prefix": Architecture(layered(mixed(PrefixAttention))),
    "learned bias": Architecture(t5, Shape(hidden=1024)),
    "bert": Architecture(layered(BertLayer, Bert), Shape(768, 8, 12, vocabulary=30522, context=512), batch=8),
    "bert, dropout": Architecture(layered(BertLayer, Bert), Shape(context=512, dropout=0.1), batch=8),
    "cross attention": Architecture(encoder_decoder, Shape(depth=8)),
    "latent attention": Architecture(layered(mixed(LatentAttention)), Shape(1024, 8, 8)),
    "differential": Architecture(layered(mixed(DifferentialAttention))),
    "cosine": Architecture(layered(mixed(CosineAttention))),
    "chunked": Architecture(layered(mixed(ChunkedAttention))),
    "dense experts": Architecture(layered(mixed(WindowAttention, DenseExperts)), batch=2),
    "capacity experts": Architecture(layered(mixed(AlibiAttention, CapacityExperts)), batch=2),
    "grouped experts": Architecture(
        layered(mixed(QwenAttention, GroupedExperts)), Shape(hidden=1024), (FUSED,)
    ),
    "looped experts": Architecture(layered(mixed(QwenAttention, LoopedExperts)), paths=(FUSED,)),
    "mamba": Architecture(layered(mixed(Mamba)), Shape(256, 4), ("scan",), 2),
    "state space": Architecture(layered(mixed(StateSpace)), paths=(WRITTEN,)),
    "retention": Architecture(layered(mixed(Retention)), paths=(WRITTEN,)),
    "linear attention": Architecture(
        layered(mixed(LinearAttention)), Shape(256, 4, context=512), (WRITTEN,), 2
    ),
    "minimal gru": Architecture(layered(mixed(MinGRU)), paths=("scan",), batch=8),
    "long convolution": Architecture(layered(mixed(LongConvolution)), paths=("fourier",)),
    "position mixer": Architecture(layered(PositionMixer), paths=("gated",)),
    "ternary": Architecture(layered(mixed(TernaryAttention)), optimizer="foreach"),
    "checkpointed": Architecture(checkpointed, Shape(768, 12, 12)),
    "shared layer": Architecture(layered(mixed(AlibiAttention), Shared), Shape(1024, 8, 16)),
    "inner gradient": Architecture(layered(mixed(InnerGradient)), paths=("grad",)),
    "word pieces": Architecture(layered(GPT2, WordPieces), Shape(256, 2, 4), (FUSED,), 8),
}  # fmt: skip


def build(name: str, path: str, is_small: bool = False) -> nn.Module:
    """Return the model of an architecture: the factory that cells name."""
    chosen = ARCHITECTURES[name]
    return chosen.make(chosen.small() if is_small else chosen.shape, path)


def cell_values(name: str, path: str, precision: str, is_small: bool = False) -> dict[str, Any]:
    """Return the axes of a training step of an architecture."""
    chosen = ARCHITECTURES[name]
    shape = chosen.small() if is_small else chosen.shape
    values = asdict(shape)
    return {
        "model": f"{__name__}:build",
        "model_args": {"name": name, "path": path, **({"is_small": True} if is_small else {})},
        "vocab_size": values["vocabulary"],
        "context_length": values["context"],
        "batch_size": 2 if is_small else chosen.batch,
        "precision": precision,
        "optimizer": chosen.optimizer,
    }
