"""Memory of steps whose functions an optimizer compiles itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tasks.prediction import predictor
from tasks.prediction.operations.emulation import GpuFunctions, gpu_emulated
from tasks.prediction.predictor import Predictor
from tasks.prediction.records import AS_EAGER, Prediction, PredictionRequest
from tasks.spec.registry import make_cell

# One worker makes what these tests share.
pytestmark = pytest.mark.xdist_group("compiled functions")

LIMIT = 1024**3


def step(p: Tensor, grad: Tensor) -> None:
    """Change a parameter. Run eagerly, it allocates three tensors of its size at once; compiled, none."""
    p.add_(grad.square().sqrt() * 2 + grad.abs(), alpha=-1e-3)


class Eager(torch.optim.SGD):
    """Steps by `function`."""

    function: Callable[..., None] = staticmethod(step)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                type(self).function(p, p.grad)


class CompiledInStep(Eager):
    @staticmethod
    def function(p: Tensor, grad: Tensor) -> None:
        torch.compile(step, fullgraph=True, dynamic=False)(p.detach(), grad)


class OfCudaGraphs(Eager):
    @staticmethod
    def function(p: Tensor, grad: Tensor) -> None:
        torch.compile(step, mode="reduce-overhead")(p, grad)


class RunEagerly(Eager):
    @staticmethod
    def function(p: Tensor, grad: Tensor) -> None:
        torch.compile(step, backend="eager")(p, grad)


def predicted(optimizer: type[Eager], monkeypatch: pytest.MonkeyPatch, **values: Any) -> Prediction:
    package: Any = ModuleType("own_optimizers")
    package.Own = optimizer
    monkeypatch.setitem(sys.modules, "own_optimizers", package)
    axes = {"device": "cuda", "size": "small", "context_length": 32, "batch_size": 1}
    cell = make_cell("train_step", {**axes, "optimizer": "own_optimizers:Own", **values})
    return Predictor().predict(PredictionRequest(cell, (LIMIT,)))


def optimizer_peak(prediction: Prediction) -> float:
    """Return the peak while the optimizer steps, in bytes."""
    (peak,) = [
        one.value
        for one in prediction.samples
        if (one.metric, one.mode, one.phase) == ("peak_allocated_bytes", "steady", "optimizer")
    ]
    assert peak is not None
    return peak


@pytest.fixture(scope="module")
def eager() -> Prediction:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return predicted(Eager, monkeypatch)


# The largest parameter, the embedding of 10,000 × 768 numbers in fp32, takes 29.3 MiB, and blocks of
# the allocator are multiples of 2 MiB.
EMBEDDING = 30 * 2**20


@pytest.mark.compile
def test_a_function_that_an_optimizer_compiles_allocates_what_its_code_does(
    eager: Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = predicted(CompiledInStep, monkeypatch)
    assert (compiled.how, compiled.reason) == ("modelled", "") == (eager.how, eager.reason)
    saved = optimizer_peak(eager) - optimizer_peak(compiled)
    assert saved == 3 * EMBEDDING


@pytest.mark.compile
def test_a_decorated_function_is_compiled_for_each_shape_and_for_parameters(
    eager: Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Decorated(Eager):
        @staticmethod
        def function(p: Tensor, grad: Tensor) -> None:
            assert isinstance(p, nn.Parameter)
            compiled(p, grad)

    compiled: Callable[..., None] = step

    class Module(Decorated):
        """Decorates the function when it is built, as the import of a file of optimizers does."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            nonlocal compiled
            compiled = torch.compile(fullgraph=True)(step)
            super().__init__(*args, **kwargs)

    prediction = predicted(Module, monkeypatch)
    assert prediction.reason == ""
    saved = optimizer_peak(eager) - optimizer_peak(prediction)
    assert saved == 3 * EMBEDDING


def test_the_compiler_is_imported_before_functions_of_torch_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's compiler keeps what it finds when it is imported, such as `torch.autocast`."""
    module = "tasks.prediction.compiled_calls"
    monkeypatch.delitem(sys.modules, module, raising=False)
    was_imported: list[bool] = []

    def emulated(*args: Any) -> AbstractContextManager[GpuFunctions]:
        was_imported.append(module in sys.modules)
        return gpu_emulated(*args)

    monkeypatch.setattr(predictor, "gpu_emulated", emulated)
    predicted(Eager, monkeypatch)
    assert was_imported == [True]


def test_an_optimizer_that_cannot_be_compiled_is_predicted_as_eager_and_never_as_oom(
    eager: Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert eager.verdicts == {LIMIT: "oom"}
    graphs = predicted(OfCudaGraphs, monkeypatch)
    assert (graphs.how, graphs.verdicts) == (AS_EAGER, {LIMIT: "perhaps"})
    assert graphs.reason == (
        "functions that its code compiles ran eagerly: step; "
        "the cell may take as little as 1/2.11 of this"
    )
    assert optimizer_peak(graphs) == optimizer_peak(eager)


def test_a_backend_that_generates_no_code_is_eager(
    eager: Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    prediction = predicted(RunEagerly, monkeypatch)
    assert (prediction.how, prediction.samples) == (eager.how, eager.samples)
