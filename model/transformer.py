"""The course's Transformer language model, pre-norm, built on whatever device is current."""

from __future__ import annotations

from torch import Tensor, nn

from model.attention import CAUSAL_NAIVE, Attention
from model.config import VOCAB_SIZE, Dimensions
from model.layers import CausalSelfAttention, Embedding, Linear, RMSNorm, RotaryEmbedding, SwiGLU

# Of an embedding that is the head, too: with 1, the logits would be tens.
_TIED_STD = 0.02


class Block(nn.Module):
    def __init__(self, dims: Dimensions, rope: RotaryEmbedding, attend: Attention) -> None:
        super().__init__()
        self.ln1 = RMSNorm(dims.d_model)
        self.attn = CausalSelfAttention(dims, rope, attend)
        self.ln2 = RMSNorm(dims.d_model)
        self.ffn = SwiGLU(dims.d_model, dims.d_ff)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln1(x)
        x = x + self.attn(normed)
        normed = self.ln2(x)
        return x + self.ffn(normed)  # type: ignore[no-any-return]


class TransformerLM(nn.Module):
    """Token ids (batch, sequence) to logits (batch, sequence, vocabulary).

    Build it under `torch.device(...)`: no parameter is ever made on the host first.
    """

    def __init__(
        self,
        dims: Dimensions,
        context_length: int,
        vocab_size: int = VOCAB_SIZE,
        attend: Attention = CAUSAL_NAIVE,
    ) -> None:
        super().__init__()
        dims.require_whole_heads()
        rope = RotaryEmbedding(dims.d_head, context_length)  # one table, shared by every block
        std = _TIED_STD if dims.is_tied else 1.0
        self.token_embeddings = Embedding(vocab_size, dims.d_model, std)
        self.layers = nn.ModuleList(Block(dims, rope, attend) for _ in range(dims.num_layers))
        self.ln_final = RMSNorm(dims.d_model)
        shared = self.token_embeddings.weight if dims.is_tied else None
        self.lm_head = Linear(dims.d_model, vocab_size, shared)

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.token_embeddings(token_ids)
        for layer in self.layers:
            x = layer(x)
        normed = self.ln_final(x)
        return self.lm_head(normed)  # type: ignore[no-any-return]
