"""Builds the model that a cell names: the course's Transformer, or one from the user's own factory."""

from __future__ import annotations

import torch
from torch import nn

from model.transformer import TransformerLM
from tasks.harness.attention_backends import AttentionShape, choose_attention
from tasks.harness.compilation import compile_module, compile_options
from tasks.harness.device import Device, Skip
from tasks.harness.model_parts import Blocks, blocks_of
from tasks.harness.precision import require_default_dtype, stored_dtype
from tasks.training.hugging_face import build_hugging_face
from tasks.training.imports import import_named
from tasks.training.lora import add_adapters
from tasks.training.parameters import TrainStepParams


def build_model(params: TrainStepParams, device: Device) -> nn.Module:
    """Return the model on the device, with its parameters in the dtype that `precision` asks for."""
    dtype = stored_dtype(params)
    # The model is built in its dtype. A conversion afterwards would hold both copies for a moment,
    # and the largest cells would run out of memory during the build.
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device.torch_device):
            if params.hub_name:
                model: nn.Module = build_hugging_face(params, dtype)
            elif params.dimensions is None:
                model = import_named(str(params.model), "model")(**params.model_args)
            else:
                model = _build_transformer(params, device)
            if params.lora:
                add_adapters(model, params.lora)
            require_default_dtype(dtype, params)
            if not isinstance(model, nn.Module):
                kind = type(model).__name__
                raise TypeError(f"{params.model} gives a {kind}, where a torch.nn.Module is needed")
            if params.dimensions is None and not params.hub_name:
                _cast_parameters(model, dtype)
                return model.to(device.torch_device)
            return model.to(device.torch_device, dtype)
    finally:
        torch.set_default_dtype(torch.float32)


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters that the model made narrower than `precision` stores them.

    All others stay as they are: complex and integer numbers, buffers, and parameters that the model
    keeps in a wider dtype.
    """
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            is_narrow = parameter.dtype in (torch.float16, torch.bfloat16)
            if is_narrow and type(parameter) is nn.Parameter:
                parameter.data = parameter.data.to(dtype)


def _build_transformer(params: TrainStepParams, device: Device) -> nn.Module:
    dims = params.dimensions
    assert dims is not None
    has_gradients = params.pass_ != "forward"
    shape = AttentionShape(params.context_length, True, dims.d_head, has_gradients)
    attend = choose_attention(params, shape, device.torch_device)
    return TransformerLM(dims, params.context_length, params.vocab_size, attend)


def compile_model(model: nn.Module, params: TrainStepParams) -> Blocks | None:
    """Compile the model or its blocks in place, and return the blocks that were compiled."""
    if params.compile == "eager":
        return None
    options = compile_options(params, ours=params.dimensions is not None)
    if params.compile == "model":
        compile_module(model, options)
        return None
    blocks = blocks_of(model)
    if blocks is None:
        raise Skip(
            "compile: blocks needs a torch.nn.ModuleList, ModuleDict or Sequential of equal blocks, "
            "and this model has none"
        )
    for block in blocks.members:
        compile_module(block, options)
    return blocks
