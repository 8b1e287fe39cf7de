"""Models of transformers, built from a config with random weights. Weights are never read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

import torch
from torch import nn

from tasks.spec.messages import error_text
from tasks.spec.source_digest import find_model_config
from tasks.training.parameters import TrainStepParams
from tasks.training.presets import PRESETS

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class NoModelError(ValueError):
    """The name of a model that cannot be built. The message has the remedy."""


_IMPLEMENTATIONS = {"naive": "eager", "sdpa": "sdpa"}
# What transformers raises for a config without a value that its code needs; never lack of memory.
_CONFIG_ERRORS = (AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError)
_LEAST_RATIO = 0.75  # of letters that agree: two that are swapped in a name of four letters


def build_hugging_face(params: TrainStepParams, dtype: torch.dtype) -> nn.Module:
    """Return the causal language model that `hf:NAME` names, on the current device.

    Raise ImportError without transformers, and NoModelError for a name without a usable config.
    """
    config = read_config(params)
    _require_language_model(config, params)
    _require_positions(config, params)
    # A config may have none, if transformers builds it from a part of another model.
    vocabulary = getattr(_text_part(config), "vocab_size", params.vocab_size)
    if vocabulary < params.vocab_size:
        raise NoModelError(
            f"vocab_size {params.vocab_size} is larger than the {vocabulary} of {params.model}"
        )
    try:
        return _from_config(config, _IMPLEMENTATIONS[params.attention], dtype)
    except _CONFIG_ERRORS as error:
        raise _unusable(params, error) from error


def _unusable(params: TrainStepParams, error: Exception) -> NoModelError:
    return NoModelError(
        f"{params.model}: transformers does not build this config: {error_text(error)}. Set its values"
        " with model_args, or use a folder that contains config.json"
    )


def _from_config(config: PretrainedConfig, attention: str, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    make = AutoModelForCausalLM.from_config
    try:
        model: nn.Module = make(config, attn_implementation=attention, dtype=dtype)
    except ValueError as error:
        # Some architectures, such as Gemma 2, have only the written-out attention.
        if attention == "sdpa" and "attn" in str(error).lower():
            return _from_config(config, "eager", dtype)
        raise
    return model


def read_config(params: TrainStepParams) -> PretrainedConfig:
    """Return the config of transformers that `hf:NAME` names."""
    config = _read_whole_config(params)
    text = _text_part(config)
    if text is config:
        return config
    text.use_cache = False
    own = type(config)().to_dict()
    for name in params.model_args:
        if name not in own and hasattr(text, name):
            raise NoModelError(
                f"model_args: {name} belongs to the language model within {params.model}. Write it "
                "below the name of that part, such as text_config"
            )
    return config


def _text_part(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the language model, which others contain next to those for images."""
    return config.get_text_config(decoder=True)


def _read_whole_config(params: TrainStepParams) -> PretrainedConfig:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        missing = error.name or "transformers"
        raise ImportError(f"hf: needs {missing}. Run pip install {missing}") from error

    name = params.hub_name
    values = {**params.model_args, "use_cache": False}
    if name in PRESETS:
        preset = PRESETS[name]
        return AutoConfig.for_model(preset.model_type, **{**preset.config, **values})
    if name in CONFIG_MAPPING:
        try:
            return AutoConfig.for_model(name, **values)
        except Exception as error:  # each architecture has its own checks
            raise _unusable(params, error) from error
    # In a folder next to the config of the sweep, in the run, or in the cache of the hub.
    file = find_model_config(name, sys.path)
    source = name if file is None else str(file.parent)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False, **values)
    except (OSError, ValueError) as error:
        near = get_close_matches(name, [*PRESETS, *CONFIG_MAPPING], n=1, cutoff=_LEAST_RATIO)
        raise NoModelError(_refusal(name, str(error), near)) from error


def _require_language_model(config: PretrainedConfig, params: TrainStepParams) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise NoModelError(
            f"{params.model}: {config.model_type} is no model that predicts the next token. Use one "
            "with a class …ForCausalLM, such as hf:gpt2, or your own factory"
        )


def _require_positions(config: PretrainedConfig, params: TrainStepParams) -> None:
    text = _text_part(config)
    # Rotary positions have no end.
    is_rotary = bool(getattr(text, "rope_parameters", None) or getattr(text, "rope_theta", None))
    positions = getattr(text, "max_position_embeddings", None) or 0
    # XLNet has -1 for positions without an end.
    if positions > 0 and not is_rotary and params.context_length > positions:
        raise NoModelError(
            f"context_length: {params.context_length} is too long, {params.model} has {positions} "
            "positions"
        )


def _refusal(name: str, text: str, near: Sequence[str]) -> str:
    """Return one line about a config that cannot be read, from the message of transformers."""
    if "gated" in text:
        return f"{name}: the config is gated. Accept the licence and set HF_TOKEN, or use a preset"
    if "trust_remote_code" in text:
        return (
            f"{name}: the model needs trust_remote_code, which is never enabled. Write a factory "
            "instead"
        )
    meant = f"Did you mean hf:{near[0]}? Otherwise use" if near else "Use"
    return (
        f"{name}: no preset, and no config in the cache or on the hub. {meant} a folder that "
        "contains config.json"
    )
