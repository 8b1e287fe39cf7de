"""Error of a sum of many small numbers, by the dtypes of the sum and of the numbers.

It is the course's experiment (assignment 2, mixed_precision_accumulation): 0.01 is added a thousand
times, which should give 10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from tasks.spec.axes import WORK, axis
from tasks.spec.parameters import Params, PositiveInt
from tasks.spec.registry import Task

if TYPE_CHECKING:
    from tasks.harness.workload import StaticResult

Number = Literal["fp64", "fp32", "fp16", "bf16"]


class AccumulationParams(Params):
    """Parameters of a repeated addition."""

    accumulator: Number = axis("fp32", "dtype of the sum: fp64, fp32, fp16 or bf16", affects=WORK)
    addend: Number = axis("fp32", "dtype of each addend: fp64, fp32, fp16 or bf16", affects=WORK)
    upcast: bool = axis(
        False, "true: cast the addend to the sum's dtype before it is added", affects=WORK
    )
    value: float = axis(0.01, "the number that is added", affects=WORK)
    count: PositiveInt = axis(
        1000, "number of additions; the exact sum is `value` times this", affects=WORK
    )
    at_once: bool = axis(
        False,
        "true: torch's sum over one tensor, whose kernel has a separate accumulator",
        affects=WORK,
    )

    @model_validator(mode="after")
    def _require_one_way_to_add(self) -> Self:
        if self.upcast and self.at_once:
            raise ValueError("upcast is of adding one by one: it cannot go with at_once")
        return self


def build(params: AccumulationParams) -> StaticResult:
    """Return the sum, and its difference from `value` times `count`."""
    import torch

    from tasks.harness.precision import DTYPES
    from tasks.harness.setup import open_capped
    from tasks.harness.workload import StaticResult
    from tasks.spec.tables import Sample

    device = open_capped(params)
    wide, narrow = DTYPES[params.accumulator], DTYPES[params.addend]
    place = device.torch_device
    if params.at_once:
        addends = torch.full((params.count,), params.value, dtype=narrow, device=place)
        total = addends.sum(dtype=wide)
    else:
        total = torch.tensor(0, dtype=wide, device=place)
        for _ in range(params.count):
            addend = torch.tensor(params.value, dtype=narrow, device=place)
            if params.upcast:
                addend = addend.to(wide)
            total += addend
    found, exact = float(total), params.value * params.count
    samples = (Sample("finding", "sum", "1", found), Sample("finding", "error", "1", found - exact))
    return StaticResult(samples, device)


def work(params: AccumulationParams) -> float:
    """Return the number of additions."""
    return float(params.count)


TASK = Task("accumulation", 1, AccumulationParams, build, work)
