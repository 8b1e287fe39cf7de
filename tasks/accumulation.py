"""Adding up a small number many times, in this precision and that: what the accumulator keeps and what it loses.

The course's experiment (assignment 2, mixed_precision_accumulation): 0.01 added a thousand times, which should be 10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from tasks.spec.parameters import Params, PositiveInt
from tasks.spec.registry import Task

if TYPE_CHECKING:
    from tasks.harness.workload import StaticResult

Number = Literal["fp64", "fp32", "fp16", "bf16"]


class AccumulationParams(Params):
    accumulator: Number = Field("fp32", description="dtype of the sum")
    addend: Number = Field("fp32", description="dtype of what is added, each time")
    upcast: bool = Field(
        False,
        description="the addend is cast to the accumulator's dtype by hand before it is added",
    )
    value: float = 0.01
    count: PositiveInt = 1000
    at_once: bool = Field(
        False,
        description="by torch's sum over one tensor, whose kernel has an accumulator of its own",
    )

    @model_validator(mode="after")
    def _one_way_to_add(self) -> Self:
        if self.upcast and self.at_once:
            raise ValueError("upcast is of adding one by one: it cannot go with at_once")
        return self


def build(params: AccumulationParams) -> StaticResult:
    """The sum, and its error against value times count."""
    import torch

    from tasks.harness.setup import open_capped
    from tasks.harness.workload import StaticResult
    from tasks.spec.tables import Sample

    dtypes = {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
    }
    device = open_capped(params)
    wide, narrow = dtypes[params.accumulator], dtypes[params.addend]
    if params.at_once:
        total = torch.full(
            (params.count,), params.value, dtype=narrow, device=device.torch_device
        ).sum(dtype=wide)
    else:
        total = torch.tensor(0, dtype=wide, device=device.torch_device)
        for _ in range(params.count):
            addend = torch.tensor(params.value, dtype=narrow, device=device.torch_device)
            total += addend.to(wide) if params.upcast else addend
    found, exact = float(total), params.value * params.count
    samples = (Sample("finding", "sum", "1", found), Sample("finding", "error", "1", found - exact))
    return StaticResult(samples, device)


def work(params: AccumulationParams) -> float:
    return float(params.count)


TASK = Task("accumulation", 1, AccumulationParams, build, work)
