"""Scratch memory of reductions."""

from __future__ import annotations

import pytest
import torch

from tasks.prediction.operations.reductions import reduction_scratch

MIB = 1024**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "measured_mib"), [(512, 32), (2048, 128)])
def test_sums_over_rows_need_what_an_h100_allocated(
    columns: int, measured_mib: int, dtype: torch.dtype
) -> None:
    """Gradients of the biases of a layer of 512 and 2,048 features for 8,192 tokens, torch 2.11."""
    grad = torch.empty(8192, columns, dtype=dtype, device="meta")
    assert reduction_scratch((grad, [0], True)) == (measured_mib * MIB,)


def test_leading_dimensions_count_as_one() -> None:
    grad = torch.empty(8, 1024, 512, device="meta")
    assert reduction_scratch((grad, [0, 1])) == reduction_scratch((grad.flatten(0, 1), [0]))


@pytest.mark.parametrize(
    ("shape", "dims"),
    [((8192, 2048), [1]), ((8192, 2048), None), ((64, 2048), [0]), ((0, 4), [0]), ((), None)],
)
def test_reductions_other_than_long_column_sums_need_no_scratch(
    shape: tuple[int, ...], dims: list[int] | None
) -> None:
    """Along rows, of everything, of few rows, of nothing, of a single number."""
    assert reduction_scratch((torch.empty(shape, device="meta"), dims)) == ()
