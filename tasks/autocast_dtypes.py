"""Dtypes of the parts of a small model under autocast, by device and version of torch.

It is the course's toy model (assignment 2, benchmarking_mixed_precision): linear, ReLU, LayerNorm,
linear, cross-entropy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tasks.spec.axes import WORK, axis
from tasks.spec.parameters import Params
from tasks.spec.registry import Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from tasks.harness.workload import StaticResult


class AutocastDtypesParams(Params):
    """Parameters of the small model under autocast."""

    autocast: Literal["fp16", "bf16"] = axis(
        "fp16", "dtype of autocast: fp16 or bf16", affects=WORK
    )
    norm: Literal["layer_norm", "rms_norm"] = axis(
        "layer_norm", "torch's norm in the small model: layer_norm or rms_norm", affects=WORK
    )


def build(params: AutocastDtypesParams) -> StaticResult:
    """Return the loss, and the facts `dtype_PART` of the parts, such as `dtype_fc1`."""
    import torch
    from torch import nn
    from torch.nn import functional

    from tasks.harness.precision import DTYPES, dtype_name
    from tasks.harness.setup import open_capped
    from tasks.harness.workload import StaticResult
    from tasks.spec.tables import Sample

    device = open_capped(params)
    torch.manual_seed(params.seed)
    with torch.device(device.torch_device):
        norm = nn.LayerNorm(10) if params.norm == "layer_norm" else nn.RMSNorm(10)
        model = nn.Sequential(
            nn.Linear(20, 10, bias=False), nn.ReLU(), norm, nn.Linear(10, 5, bias=False)
        )
        x, y = torch.randn(8, 20), torch.randint(5, (8,))
    seen = _watch_outputs(model)
    with torch.autocast(params.device, DTYPES[params.autocast]):
        parameters = next(model.parameters()).dtype
        loss = functional.cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = next(model.parameters()).grad
    assert gradient is not None
    fc1, relu, normed, logits = seen
    dtypes = {
        "parameters": parameters,
        "fc1": fc1,
        "relu": relu,
        "norm": normed,
        "logits": logits,
        "loss": loss.dtype,
        "gradients": gradient.dtype,
    }
    samples = (Sample("finding", "loss", "nat", float(loss.detach())),)
    facts = {f"dtype_{part}": dtype_name(dtype) for part, dtype in dtypes.items()}
    return StaticResult(samples, device, facts)


def _watch_outputs(model: nn.Sequential) -> list[torch.dtype]:
    """Return a list to which the layers append the dtypes of their outputs when the model runs."""
    seen: list[torch.dtype] = []

    def note(layer: nn.Module, inputs: object, output: Tensor) -> None:
        seen.append(output.dtype)

    for layer in model:
        layer.register_forward_hook(note)
    return seen


def work(params: AutocastDtypesParams) -> float:
    """Return a constant: all cells take equally long."""
    return 1.0


TASK = Task("autocast_dtypes", 1, AutocastDtypesParams, build, work)
