"""Copies of parameters, and values that no parameter has."""

from __future__ import annotations

import pytest

from model.config import SIZES
from tasks.training.parameters import TrainStepParams


def test_a_copy_keeps_no_value_that_follows_from_the_original() -> None:
    original = TrainStepParams(size="small", year=2025)
    assert original.values()["size"] == original.non_default["size"] == "small"
    assert original.dimensions == SIZES[2025]["small"]
    copied = original.model_copy(update={"size": "large"})
    assert copied.values()["size"] == copied.non_default["size"] == "large"
    assert copied.dimensions == SIZES[2025]["large"]


@pytest.mark.parametrize("value", ["\udcff", ["\ud800"], {"\udfff": 1}])
def test_half_of_a_surrogate_pair_is_no_value(value: object) -> None:
    """A run with such a parameter could be written, but not read."""
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        TrainStepParams(model="a:B", model_args={"x": value})
