"""Makes the optimizers of a cell: one, two for Muon, or one for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer

from model.optimizer import OPTIMIZERS
from tasks.harness.device import Skip
from tasks.harness.model_parts import blocks_of
from tasks.training.imports import import_named
from tasks.training.parameters import TrainStepParams


def make_optimizers(params: TrainStepParams, model: nn.Module) -> tuple[Optimizer, ...]:
    """Return the optimizers of all trained parameters. Raise ImportError for an unknown class."""
    trained = [one for one in model.parameters() if one.requires_grad]
    if not trained and "backward" not in params.phases:
        return ()  # inference with a frozen model
    if params.optimizer == "muon":
        return _with_muon(params, model, trained)
    if params.optimizer_step == "after":
        return (make_optimizer(params, trained),)
    optimizers = []
    for parameter in trained:
        optimizer = make_optimizer(params, [parameter])
        step = partial(_step_and_free, optimizer)
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
        optimizers.append(optimizer)
    return tuple(optimizers)


def make_optimizer(params: TrainStepParams, trained: list[nn.Parameter]) -> Optimizer:
    """Return one optimizer of these parameters. Raise TypeError for a class of something else."""
    optimizer = _factory(params.optimizer)(trained, **params.optimizer_args)
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(
            f"{params.optimizer} gives a {kind}, where a torch.optim.Optimizer is needed"
        )
    return optimizer


def _factory(name: str) -> Callable[..., Optimizer]:
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    return import_named(name, "optimizer")


def _step_and_free(optimizer: Optimizer, parameter: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _with_muon(
    params: TrainStepParams, model: nn.Module, trained: Iterable[nn.Parameter]
) -> tuple[Optimizer, ...]:
    """Return Muon for the matrices of the blocks, and fused AdamW for everything else."""
    blocks = blocks_of(model)
    if blocks is None:
        raise Skip("optimizer: muon needs blocks in a torch.nn.ModuleList, and this model has none")
    within = {id(one) for block in blocks.members for one in block.parameters()}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in trained:
        is_matrix = id(parameter) in within and parameter.ndim == 2
        (matrices if is_matrix else others).append(parameter)
    muon = OPTIMIZERS["muon"](matrices, **params.optimizer_args)
    return muon, OPTIMIZERS["fused"](others)


class StepCounter:
    """Counter of the steps in which optimizers changed parameters."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._calls = 0
        # In a step of several optimizers, or of one for each parameter, the first one counts.
        optimizers[0].register_step_post_hook(self._count)

    def __call__(self) -> int:
        """Return the number of steps so far."""
        # A gradient scaler skips the fused optimizer's step on the device, where no hook of torch
        # sees it; only the optimizer's own count stands still. SGD has no count.
        counts = []
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                if "step" in state:
                    counts.append(float(state["step"]))
        return int(max(counts, default=self._calls))

    def _count(self, *_: object) -> None:
        # A model may have detached its logits from all of its parameters.
        groups = chain.from_iterable(one.param_groups for one in self._optimizers)
        parameters = chain.from_iterable(group["params"] for group in groups)
        self._calls += any(parameter.grad is not None for parameter in parameters)
