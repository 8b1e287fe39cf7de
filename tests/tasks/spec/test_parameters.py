"""Copies of parameters."""

from __future__ import annotations

from model.config import SIZES
from tasks.training.parameters import TrainStepParams


def test_a_copy_keeps_no_value_that_follows_from_the_original() -> None:
    original = TrainStepParams(size="small", year=2025)
    assert original.values()["size"] == original.non_default()["size"] == "small"
    assert original.dimensions == SIZES[2025]["small"]
    copied = original.model_copy(update={"size": "large"})
    assert copied.values()["size"] == copied.non_default()["size"] == "large"
    assert copied.dimensions == SIZES[2025]["large"]
