"""One large matrix product: the ceiling that a GPU reaches in practice, for each precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.spec.axes import WORK, axis
from tasks.spec.parameters import PositiveInt, TimedParams
from tasks.spec.registry import Task

if TYPE_CHECKING:
    from tasks.harness.workload import PhaseMarker, Workload


class MatmulParams(TimedParams):
    """Parameters of a matrix product."""

    matrix_size: PositiveInt = axis(
        8192, "rows and columns of both factors", unit="elements", affects=WORK
    )


def build(params: MatmulParams) -> Workload:
    """Build two random factors in the dtype of the precision. Raise Skip."""
    import torch

    from tasks.harness.precision import dtype_name, matmul_dtype, precision_facts
    from tasks.harness.setup import set_up
    from tasks.harness.workload import Workload

    device = set_up(params)
    shape, dtype = (params.matrix_size, params.matrix_size), matmul_dtype(params)
    left, right = (torch.randn(shape, device=device.torch_device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)

    def step(phase: PhaseMarker) -> None:
        with phase("forward"):
            torch.matmul(left, right, out=product)

    facts = {**precision_facts(params), "parameter_dtype": dtype_name(dtype)}
    flops = {"forward": int(work(params))}
    return Workload(step, ("forward",), device, tokens=None, flops=flops, facts=facts)


def work(params: MatmulParams) -> float:
    """Return the FLOPs of the product."""
    return 2.0 * params.matrix_size**3


TASK = Task("matmul", 1, MatmulParams, build, work)
