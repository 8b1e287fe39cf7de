from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.accounting import (
    BACKWARD_BEGINS,
    IN_OPTIMIZER,
    activation_bytes,
    backward_flops,
    forward_flops,
    parameter_count,
    peak_moment,
    state_bytes,
    training_moments_bytes,
)
from model.config import SIZES, VOCAB_SIZE, VOCABULARIES, Dimensions
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


@pytest.mark.parametrize(
    "dims",
    [
        SIZES[2025]["tiny"],
        # All of their 12 and 32 layers count the same, and take seconds.
        replace(SIZES[2025]["small"], num_layers=2),
        replace(SIZES[2025]["2.7B"], num_layers=2),
        Dimensions(96, 256, 3, 6, 2, is_tied=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("context_length", [128, 1024])
def test_flops_equal_what_torch_counts(dims: Dimensions, context_length: int) -> None:
    with torch.device("meta"):
        model = TransformerLM(dims, context_length)
        tokens = torch.zeros(4, context_length, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        loss = model(tokens).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() == forward_flops(dims, 4, context_length, VOCAB_SIZE)
    assert backward.get_total_flops() == backward_flops(dims, 4, context_length, VOCAB_SIZE)


def test_activations_are_those_that_autograd_keeps() -> None:
    dims, (batch, length, vocab) = SIZES[2025]["tiny"], (2, 64, 500)
    with torch.device("meta"):
        model, tokens = (
            TransformerLM(dims, length, vocab),
            torch.zeros(batch, length, dtype=torch.long),
        )
    resident = {
        parameter.untyped_storage()._cdata
        for parameter in (*model.parameters(), *model.buffers(), tokens)
    }
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in resident:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    formula = sum(activation_bytes(dims, batch, length, vocab).values())
    assert sum(storage.nbytes() for storage in kept.values()) == pytest.approx(formula, rel=0.02)


def test_the_moment_of_the_peak_moves_with_the_length() -> None:
    """Short sequences leave it to the optimizer, long ones to the activations."""
    shorter, longer = (
        training_moments_bytes(SIZES[2025]["2.7B"], 4, length) for length in (128, 1024)
    )
    assert (peak_moment(shorter), peak_moment(longer)) == (IN_OPTIMIZER, BACKWARD_BEGINS)
    short, long = shorter[IN_OPTIMIZER], longer[BACKWARD_BEGINS]
    assert (short["activations"], long["gradients"]) == (0, 0)
    assert long["activations"] > short["gradients"] == short["parameters"] == 4 * PUBLISHED["2.7B"]
    assert short["optimizer state"] == 2 * short["parameters"]


def test_untrained_parameters_have_neither_gradients_nor_optimizer_state() -> None:
    assert state_bytes(10, 3, ("forward", "backward", "optimizer"), 2) == {
        "parameters": 20, "gradients": 6, "optimizer state": 12,
    }  # fmt: skip
    assert state_bytes(10, 3, ("forward",)) == {
        "parameters": 40,
        "gradients": 0,
        "optimizer state": 0,
    }


@pytest.mark.parametrize(
    ("size", "published"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("mistral-7b", 7_241_732_096),
        ("tinyllama-1.1b", 1_100_048_384),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_published_models_have_their_published_number_of_parameters(
    size: str, published: int
) -> None:
    dims, vocabulary = SIZES[2025][size], VOCABULARIES[size]
    assert parameter_count(dims, vocabulary) == published
    with torch.device("meta"):
        model = TransformerLM(dims, 16, vocabulary)
    assert sum(parameter.numel() for parameter in model.parameters()) == published
