"""Sizes of the Transformer, pinned by the course year they come from. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB_SIZE = 10_000
ROPE_THETA = 10_000.0
RMS_EPS = 1e-5


@dataclass(frozen=True)
class Dimensions:
    """Widths and depths of one model; all lengths in elements."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int

    def __post_init__(self) -> None:
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


_SMALL_TO_LARGE = {
    "small": Dimensions(768, 3072, 12, 12),
    "medium": Dimensions(1024, 4096, 24, 16),
    "large": Dimensions(1280, 5120, 36, 20),
}
_FOR_TRIALS = {
    "tiny": Dimensions(64, 256, 2, 2),
    "mini": Dimensions(256, 1024, 4, 4),
}

SIZES: dict[int, dict[str, Dimensions]] = {
    2025: {
        **_FOR_TRIALS,
        **_SMALL_TO_LARGE,
        "xl": Dimensions(1600, 6400, 48, 25),
        "2.7B": Dimensions(2560, 10240, 32, 32),
    },
    2026: {
        **_FOR_TRIALS,
        **_SMALL_TO_LARGE,
        "xl": Dimensions(2560, 10240, 32, 32),
        "10B": Dimensions(4608, 12288, 50, 36),
    },
}
