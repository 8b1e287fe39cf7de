"""Low-rank adapters (LoRA, arXiv 2106.09685): only they are trained, all other weights are frozen.

They compute what peft's linear adapters compute without dropout, with alpha of twice the rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.layers import Linear
from tasks.harness.device import Skip
from tasks.harness.model_parts import blocks_of

_SCALE = 2.0  # alpha / rank


class Adapted(nn.Module):
    """A frozen linear map, and the product of two trained matrices that is added to it.

    Code that reads `weight` instead of calling the layer, such as torch's MultiheadAttention, gets
    the sum of both. All other attributes are those of the frozen map.
    """

    def __init__(self, base: nn.Module, weight: Tensor, rank: int) -> None:
        super().__init__()
        d_out, d_in = weight.shape
        self.base = base
        self.lora_a = nn.Parameter(torch.empty(rank, d_in))
        self.lora_b = nn.Parameter(torch.zeros(d_out, rank))  # so that the model starts unchanged
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    @property
    def weight(self) -> Tensor:
        base: Any = self.base
        frozen: Tensor = base.weight
        return frozen + self.lora_b @ self.lora_a * _SCALE

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x)
        narrow = functional.linear(x, self.lora_a)
        return result + functional.linear(narrow, self.lora_b) * _SCALE


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freeze the model and adapt each linear layer of its blocks. Raise Skip without such layers."""
    model.requires_grad_(False)
    blocks = blocks_of(model)
    found = []
    for block in blocks.members if blocks is not None else ():
        for parent in block.modules():
            for name, child in parent.named_children():
                if isinstance(child, nn.Linear | Linear):
                    found.append((parent, name, child))
    if not found:
        raise Skip("lora needs torch.nn.Linear layers in blocks, and this model has none")
    for parent, name, child in found:
        setattr(parent, name, Adapted(child, child.weight, rank))
