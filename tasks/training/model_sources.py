"""Builds the model that a cell names: the course's Transformer, or one from the user's own factory."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import nn

from model.transformer import TransformerLM
from tasks.harness.attention_backends import AttentionShape, choose_attention
from tasks.harness.compilation import compile_options
from tasks.harness.device import Device, Skip
from tasks.harness.model_parts import blocks_of
from tasks.harness.precision import stored_dtype
from tasks.training.parameters import TrainStepParams


def build_model(params: TrainStepParams, device: Device) -> nn.Module:
    """Return the model on the device, with its parameters in the dtype that `precision` asks for."""
    dtype = stored_dtype(params)
    # The model is built in its dtype. A conversion afterwards would hold both copies for a moment,
    # and the largest cells would run out of memory during the build.
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device.torch_device):
            if params.dimensions is None:
                model = import_factory(params)(**params.model_args)
            else:
                model = _build_transformer(params, device)
            return model.to(device.torch_device, dtype)
    finally:
        torch.set_default_dtype(torch.float32)


def _build_transformer(params: TrainStepParams, device: Device) -> nn.Module:
    dims = params.dimensions
    assert dims is not None
    has_gradients = params.pass_ != "forward"
    shape = AttentionShape(params.context_length, True, dims.d_head, has_gradients)
    attend = choose_attention(params, shape, device.torch_device)
    return TransformerLM(dims, params.context_length, params.vocab_size, attend)


def import_factory(params: TrainStepParams) -> Callable[..., nn.Module]:
    """Import the user's factory. Raise ImportError or AttributeError, which name what is missing."""
    module, _, name = str(params.model).partition(":")
    factory: Callable[..., nn.Module] = getattr(importlib.import_module(module), name)
    return factory


def compile_model(model: nn.Module, params: TrainStepParams) -> None:
    """Compile the model or its blocks in place, which leaves the names of parameters unchanged."""
    if params.compile == "eager":
        return
    options = compile_options(params, ours=params.dimensions is not None)
    if params.compile == "model":
        model.compile(**options)
        return
    blocks = blocks_of(model)
    if not blocks:
        raise Skip("compile: blocks needs blocks in a torch.nn.ModuleList, and this model has none")
    for block in blocks:
        block.compile(**options)
