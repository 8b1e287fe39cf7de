from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.accounting import backward_flops, forward_flops, parameter_count
from model.config import SIZES, VOCAB_SIZE
from model.transformer import TransformerLM

PUBLISHED = {
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl": 1_998_235_200,
    "2.7B": 3_406_809_600,
}


@pytest.mark.parametrize(("size", "count"), PUBLISHED.items())
def test_parameter_counts_are_those_of_the_course(size: str, count: int) -> None:
    with torch.device("meta"):
        model = TransformerLM(SIZES[2025][size], context_length=8)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert parameter_count(SIZES[2025][size]) == count


@pytest.mark.parametrize(("size", "count"), [("xl", 3_406_809_600), ("10B", 12_832_823_808)])
def test_sizes_of_2026(size: str, count: int) -> None:
    dims = SIZES[2026][size]
    with torch.device("meta"):
        model = TransformerLM(dims, context_length=8)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(dims)
    assert parameter_count(dims) == count


@pytest.mark.parametrize("size", ["tiny", "small", "2.7B"])
@pytest.mark.parametrize("context_length", [128, 1024])
def test_flops_equal_what_torch_counts(size: str, context_length: int) -> None:
    dims = SIZES[2025][size]
    with torch.device("meta"):
        model = TransformerLM(dims, context_length)
        tokens = torch.zeros(4, context_length, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        loss = model(tokens).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() == forward_flops(dims, 4, context_length, VOCAB_SIZE)
    assert backward.get_total_flops() == backward_flops(dims, 4, context_length, VOCAB_SIZE)
