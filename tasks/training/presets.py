"""Architectures of published models, by name. Imports no torch.

The values are those of each model's config.json. transformers builds the models from them, without
weights and without network access.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.spec.axes import FrozenValues, Values

# Keys of the config of a Llama-like model.
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class Preset:
    """A model: transformers' `model_type`, its number of parameters, and values of its config.

    parameters: counted as on the model's page, tied weights once. sizes: the values of `_SIZES` of a
    Llama-like model. others: values of other keys.
    """

    model_type: str
    parameters: int
    sizes: tuple[int, ...] = ()
    others: FrozenValues = field(default_factory=dict)

    @property
    def config(self) -> Values:
        """The values of its config."""
        sizes = dict(zip(_SIZES, self.sizes, strict=True)) if self.sizes else {}
        return {**sizes, **self.others}

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def learned_positions(self) -> int | None:
        """The number of positions with a learned embedding; None if positions are rotated."""
        return self.config.get("n_positions")


_GPT2 = {"vocab_size": 50_257, "n_positions": 1024}
PRESETS = {
    "gpt2": Preset(
        "gpt2", 124_439_808, others={"n_embd": 768, "n_layer": 12, "n_head": 12, **_GPT2}
    ),
    "gpt2-xl": Preset(
        "gpt2", 1_557_611_200, others={"n_embd": 1600, "n_layer": 48, "n_head": 25, **_GPT2}
    ),
    "llama-2-7b": Preset("llama", 6_738_415_616, (4096, 11008, 32, 32, 32, 32_000, 4096)),
    "llama-3-8b": Preset(
        "llama", 8_030_261_248, (4096, 14336, 32, 32, 8, 128_256, 8192), {"rope_theta": 500000.0}
    ),
    "llama-3.2-1b": Preset(
        "llama",
        1_235_814_400,
        (2048, 8192, 16, 32, 8, 128_256, 131072),
        {"head_dim": 64, "rope_theta": 500000.0, "tie_word_embeddings": True},
    ),
    "llama-3.2-3b": Preset(
        "llama",
        3_212_749_824,
        (3072, 8192, 28, 24, 8, 128_256, 131072),
        {"head_dim": 128, "rope_theta": 500000.0, "tie_word_embeddings": True},
    ),
    "tinyllama-1.1b": Preset("llama", 1_100_048_384, (2048, 5632, 22, 32, 4, 32_000, 2048)),
    "smollm2-135m": Preset(
        "llama", 134_515_008, (576, 1536, 30, 9, 3, 49_152, 8192), {"tie_word_embeddings": True}
    ),
    "mistral-7b": Preset(
        "mistral", 7_241_732_096, (4096, 14336, 32, 32, 8, 32_000, 32768), {"sliding_window": 4096}
    ),
    "qwen2.5-0.5b": Preset(
        "qwen2", 494_032_768, (896, 4864, 24, 14, 2, 151_936, 32768), {"tie_word_embeddings": True}
    ),
    "qwen2.5-1.5b": Preset(
        "qwen2",
        1_543_714_304,
        (1536, 8960, 28, 12, 2, 151_936, 131072),
        {"tie_word_embeddings": True},
    ),
    "qwen2.5-7b": Preset("qwen2", 7_615_616_512, (3584, 18944, 28, 28, 4, 152_064, 131072)),
    "qwen3-0.6b": Preset(
        "qwen3",
        596_049_920,
        (1024, 3072, 28, 16, 8, 151_936, 40960),
        {"head_dim": 128, "tie_word_embeddings": True},
    ),
    "qwen3-1.7b": Preset(
        "qwen3",
        1_720_574_976,
        (2048, 6144, 28, 16, 8, 151_936, 40960),
        {"head_dim": 128, "tie_word_embeddings": True},
    ),
    "qwen3-8b": Preset(
        "qwen3", 8_190_735_360, (4096, 12288, 36, 32, 8, 151_936, 40960), {"head_dim": 128}
    ),
    "gemma-2-2b": Preset(
        "gemma2", 2_614_341_888, (2304, 9216, 26, 8, 4, 256_000, 8192), {"head_dim": 256}
    ),
    "gemma-3-1b": Preset(
        "gemma3_text", 999_885_952, (1152, 6912, 26, 4, 1, 262_144, 32768), {"head_dim": 256}
    ),
    "pythia-1.4b": Preset(
        "gpt_neox",
        1_414_647_808,
        others={
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
        },
    ),
    "phi-3-mini": Preset(
        "phi3", 3_821_079_552, (3072, 8192, 32, 32, 32, 32_064, 4096), {"pad_token_id": 32000}
    ),
    "olmo-2-1b": Preset("olmo2", 1_484_916_736, (2048, 8192, 16, 16, 16, 100_352, 4096)),
}
