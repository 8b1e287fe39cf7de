"""Error of a normalisation in a narrow dtype: overflow, a narrow accumulator, an eps rounded away.

The same rows are normalised in three ways and compared with float64. `narrow` computes everything
in the dtype and adds up the sums one element after another; `wide` computes in fp32 and rounds at
the end, as models do; `library` is torch's kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tasks.spec.axes import WORK, axis
from tasks.spec.parameters import Params, PositiveInt
from tasks.spec.registry import Task
from tasks.spec.tables import Sample

if TYPE_CHECKING:
    from torch import Tensor

    from tasks.harness.workload import StaticResult

_ROWS = 64


class NormSensitivityParams(Params):
    """Parameters of a normalisation."""

    norm: Literal["layer_norm", "rms_norm"] = axis(
        "layer_norm", "norm whose error is measured: layer_norm or rms_norm", affects=WORK
    )
    dtype: Literal["fp32", "fp16", "bf16"] = axis(
        "fp16", "dtype of the rows: fp32, fp16 or bf16", affects=WORK
    )
    width: PositiveInt = axis(1024, "elements of a row", unit="elements", affects=WORK)
    scale: Annotated[float, Field(gt=0)] = axis(
        1.0, "standard deviation of the elements", affects=WORK
    )
    mean: float = axis(0.0, "mean of the elements, in standard deviations", affects=WORK)
    eps: Annotated[float, Field(ge=0)] = axis(1e-5, "number added under the root", affects=WORK)


def build(params: NormSensitivityParams) -> StaticResult:
    """Return the errors of the three ways, as samples `WAY_error` and `WAY_nonfinite`.

    The error is the largest one of an element in finite rows, over the root mean square of the
    exact result. `WAY_nonfinite` is the share of elements that are not finite.
    """
    import torch

    from tasks.harness.precision import DTYPES
    from tasks.harness.setup import open_capped
    from tasks.harness.workload import StaticResult

    device = open_capped(params)
    dtype = DTYPES[params.dtype]
    generator = torch.Generator().manual_seed(params.seed)
    rows = torch.randn(_ROWS, params.width, generator=generator, dtype=torch.float64)
    x = ((rows + params.mean) * params.scale).to(device.torch_device, dtype)
    exact = _normalise(x.double(), params, _sum)
    ways = {
        "narrow": _normalise(x, params, _sum_one_by_one),
        "wide": _normalise(x.float(), params, _sum).to(dtype),
        "library": _by_torch(x, params),
    }
    samples: list[Sample] = []
    for way, result in ways.items():
        samples += _errors(way, result, exact)
    return StaticResult(tuple(samples), device)


def _normalise(
    x: Tensor, params: NormSensitivityParams, total: Callable[[Tensor], Tensor]
) -> Tensor:
    """Normalise x in its own dtype, with sums by `total`."""
    import torch

    if params.norm == "layer_norm":
        x = x - total(x) / params.width
    eps = torch.tensor(params.eps, dtype=x.dtype, device=x.device)
    return x * torch.rsqrt(total(x * x) / params.width + eps)


def _sum(x: Tensor) -> Tensor:
    return x.sum(dim=-1, keepdim=True)


def _sum_one_by_one(x: Tensor) -> Tensor:
    """Return the sum, rounded to the dtype after each addition. Torch's sum rounds once."""
    import torch

    total = torch.zeros_like(x[:, :1])
    for column in range(x.shape[1]):
        total += x[:, column : column + 1]
    return total


def _by_torch(x: Tensor, params: NormSensitivityParams) -> Tensor:
    from torch.nn import functional

    if params.norm == "layer_norm":
        return functional.layer_norm(x, (params.width,), eps=params.eps)
    return functional.rms_norm(x, (params.width,), eps=params.eps)


def _errors(way: str, y: Tensor, exact: Tensor) -> list[Sample]:
    finite = y.isfinite().all(dim=-1)
    error, note = None, "no row came out finite"
    if finite.any():
        unit = exact[finite].square().mean().sqrt()
        error, note = float((y[finite].double() - exact[finite]).abs().max() / unit), ""
    share = float((~y.isfinite()).double().mean())
    return [
        Sample("finding", f"{way}_error", "1", error, note=note),
        Sample("finding", f"{way}_nonfinite", "1", share),
    ]


def work(params: NormSensitivityParams) -> float:
    """Return the width of a row, in whose number the duration grows."""
    return float(params.width)


TASK = Task("norm_sensitivity", 1, NormSensitivityParams, build, work)
