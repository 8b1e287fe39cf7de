"""Architectures of published models, by name. Imports no torch.

The values are those of each model's config.json. transformers builds the models from them, without
weights and without network access.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.spec.axes import Values


@dataclass(frozen=True)
class Preset:
    """A model: transformers' `model_type`, its number of parameters, and values of its config.

    Parameters are counted as on the model's page, tied weights once.
    """

    model_type: str
    parameters: int
    config: Values

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def learned_positions(self) -> int | None:
        """The number of positions with a learned embedding; None if positions are rotated."""
        return self.config.get("n_positions")


def _gpt2(width: int, layers: int, heads: int) -> Values:
    shape = {"n_embd": width, "n_layer": layers, "n_head": heads}
    return {**shape, "vocab_size": 50_257, "n_positions": 1024}


def _decoder(
    widths: tuple[int, int], layers: int, heads: tuple[int, int], vocab_size: int, **others: object
) -> Values:
    """Return the config of a Llama-like model. heads: of queries, and of keys and values."""
    return {
        "hidden_size": widths[0],
        "intermediate_size": widths[1],
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab_size,
        **others,
    }


PRESETS = {
    "gpt2": Preset("gpt2", 124_439_808, _gpt2(768, 12, 12)),
    "gpt2-xl": Preset("gpt2", 1_557_611_200, _gpt2(1600, 48, 25)),
    "llama-2-7b": Preset(
        "llama",
        6_738_415_616,
        _decoder((4096, 11008), 32, (32, 32), 32_000, max_position_embeddings=4096),
    ),
    "llama-3-8b": Preset(
        "llama",
        8_030_261_248,
        _decoder(
            (4096, 14336), 32, (32, 8), 128_256, max_position_embeddings=8192, rope_theta=500000.0
        ),
    ),
    "llama-3.2-1b": Preset(
        "llama",
        1_235_814_400,
        _decoder(
            (2048, 8192),
            16,
            (32, 8),
            128_256,
            head_dim=64,
            max_position_embeddings=131072,
            rope_theta=500000.0,
            tie_word_embeddings=True,
        ),
    ),
    "llama-3.2-3b": Preset(
        "llama",
        3_212_749_824,
        _decoder(
            (3072, 8192),
            28,
            (24, 8),
            128_256,
            head_dim=128,
            max_position_embeddings=131072,
            rope_theta=500000.0,
            tie_word_embeddings=True,
        ),
    ),
    "tinyllama-1.1b": Preset(
        "llama",
        1_100_048_384,
        _decoder((2048, 5632), 22, (32, 4), 32_000, max_position_embeddings=2048),
    ),
    "smollm2-135m": Preset(
        "llama",
        134_515_008,
        _decoder(
            (576, 1536), 30, (9, 3), 49_152, max_position_embeddings=8192, tie_word_embeddings=True
        ),
    ),
    "mistral-7b": Preset(
        "mistral",
        7_241_732_096,
        _decoder(
            (4096, 14336), 32, (32, 8), 32_000, max_position_embeddings=32768, sliding_window=4096
        ),
    ),
    "qwen2.5-0.5b": Preset(
        "qwen2",
        494_032_768,
        _decoder(
            (896, 4864),
            24,
            (14, 2),
            151_936,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
        ),
    ),
    "qwen2.5-1.5b": Preset(
        "qwen2",
        1_543_714_304,
        _decoder(
            (1536, 8960),
            28,
            (12, 2),
            151_936,
            max_position_embeddings=131072,
            tie_word_embeddings=True,
        ),
    ),
    "qwen2.5-7b": Preset(
        "qwen2",
        7_615_616_512,
        _decoder((3584, 18944), 28, (28, 4), 152_064, max_position_embeddings=131072),
    ),
    "qwen3-0.6b": Preset(
        "qwen3",
        596_049_920,
        _decoder(
            (1024, 3072),
            28,
            (16, 8),
            151_936,
            head_dim=128,
            max_position_embeddings=40960,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-1.7b": Preset(
        "qwen3",
        1_720_574_976,
        _decoder(
            (2048, 6144),
            28,
            (16, 8),
            151_936,
            head_dim=128,
            max_position_embeddings=40960,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-8b": Preset(
        "qwen3",
        8_190_735_360,
        _decoder((4096, 12288), 36, (32, 8), 151_936, head_dim=128, max_position_embeddings=40960),
    ),
    "gemma-2-2b": Preset(
        "gemma2",
        2_614_341_888,
        _decoder((2304, 9216), 26, (8, 4), 256_000, head_dim=256, max_position_embeddings=8192),
    ),
    "gemma-3-1b": Preset(
        "gemma3_text",
        999_885_952,
        _decoder((1152, 6912), 26, (4, 1), 262_144, head_dim=256, max_position_embeddings=32768),
    ),
    "pythia-1.4b": Preset(
        "gpt_neox",
        1_414_647_808,
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
        },
    ),
    "phi-3-mini": Preset(
        "phi3",
        3_821_079_552,
        _decoder(
            (3072, 8192), 32, (32, 32), 32_064, max_position_embeddings=4096, pad_token_id=32000
        ),
    ),
    "olmo-2-1b": Preset(
        "olmo2",
        1_484_916_736,
        _decoder((2048, 8192), 16, (16, 16), 100_352, max_position_embeddings=4096),
    ),
}
