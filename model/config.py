"""Sizes of the Transformer, pinned by the course year they come from. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB_SIZE = 10_000
ROPE_THETA = 10_000.0
RMS_EPS = 1e-5


@dataclass(frozen=True)
class Dimensions:
    """Widths and depths of one model; all lengths in elements.

    num_kv_heads: heads of keys and values, each for several query heads; None: `num_heads`.
    is_tied: the head has the weight of the embedding.
    """

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    is_tied: bool = False

    def require_whole_heads(self) -> None:
        """Raise ValueError for heads that are not whole, or that RoPE cannot rotate."""
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads {self.kv_heads} does not divide num_heads {self.num_heads}"
            )
        if self.d_model % self.num_heads:
            raise ValueError(
                f"d_model {self.d_model} is not divisible by num_heads {self.num_heads}"
            )
        if self.d_head % 2:
            raise ValueError(
                f"d_model / num_heads is {self.d_head}: RoPE rotates pairs, so it must be even"
            )

    @property
    def d_head(self) -> int:
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def kv_width(self) -> int:
        """The width of all keys or values of a token."""
        return self.kv_heads * self.d_head


_SMALL_TO_LARGE = {
    "small": Dimensions(768, 3072, 12, 12),
    "medium": Dimensions(1024, 4096, 24, 16),
    "large": Dimensions(1280, 5120, 36, 20),
}
_FOR_TRIALS = {
    "tiny": Dimensions(64, 256, 2, 2),
    "mini": Dimensions(256, 1024, 4, 4),
}
# The shapes of published models with this architecture. Their config.json files give the values.
_PUBLISHED = {
    "llama-3-8b": Dimensions(4096, 14336, 32, 32, 8),
    "llama-3.2-1b": Dimensions(2048, 8192, 16, 32, 8, is_tied=True),
    "llama-3.2-3b": Dimensions(3072, 8192, 28, 24, 8, is_tied=True),
    "mistral-7b": Dimensions(4096, 14336, 32, 32, 8),
    "tinyllama-1.1b": Dimensions(2048, 5632, 22, 32, 4),
    "smollm2-135m": Dimensions(576, 1536, 30, 9, 3, is_tied=True),
}
VOCABULARIES = {
    "llama-3-8b": 128_256,
    "llama-3.2-1b": 128_256,
    "llama-3.2-3b": 128_256,
    "mistral-7b": 32_000,
    "tinyllama-1.1b": 32_000,
    "smollm2-135m": 49_152,
}

SIZES: dict[int, dict[str, Dimensions]] = {
    2025: {
        **_FOR_TRIALS,
        **_SMALL_TO_LARGE,
        "xl": Dimensions(1600, 6400, 48, 25),
        "2.7B": Dimensions(2560, 10240, 32, 32),
        **_PUBLISHED,
    },
    2026: {
        **_FOR_TRIALS,
        **_SMALL_TO_LARGE,
        "xl": Dimensions(2560, 10240, 32, 32),
        "10B": Dimensions(4608, 12288, 50, 36),
        **_PUBLISHED,
    },
}
