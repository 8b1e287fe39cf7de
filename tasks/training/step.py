"""One training step, or the part of it that the axis `pass` names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.parts import part
from tasks.harness.compilation import begin_step
from tasks.harness.precision import autocast
from tasks.harness.workload import PhaseMarker
from tasks.training.parameters import TrainStepParams


class TrainingStep:
    """Runs one step: `step(phase)` wraps each of its phases in `with phase(name):`.

    The forward phase ends with the logits if `pass` is `forward`, and with the loss otherwise.

    inputs, targets: token ids, both `(micro-batches, batch, context)`.
    """

    def __init__(
        self,
        params: TrainStepParams,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        inputs: Tensor,
        targets: Tensor,
    ) -> None:
        self._params = params
        self._model = model
        self._optimizer = optimizer
        # Divided here: in a step, it would be an operation outside of the phases.
        self._micro_batches = tuple(zip(inputs.unbind(), targets.unbind(), strict=True))
        self._autocast = autocast(params)
        # Only fp16 has so narrow a range that its gradients need scaling.
        is_scaled = params.precision == "fp16"
        self._scaler = torch.amp.GradScaler(params.device, enabled=is_scaled)
        self._is_checked = False

    def __call__(self, phase: PhaseMarker) -> None:
        begin_step(self._params)
        if self._params.pass_ == "forward":
            self._infer(phase)
        else:
            self._train(phase)

    def _infer(self, phase: PhaseMarker) -> None:
        with phase("forward"), torch.no_grad(), self._autocast():
            self._logits(self._micro_batches[0][0])

    def _train(self, phase: PhaseMarker) -> None:
        phases = self._params.phases
        self._optimizer.zero_grad(set_to_none=True)
        for inputs, targets in self._micro_batches:
            with phase("forward"):
                loss = self._loss(inputs, targets)
            if not loss.requires_grad:
                raise RuntimeError(
                    "the loss has no gradient: check whether the model detaches its logits or calls "
                    "torch.set_grad_enabled(False)"
                )
            if "backward" in phases:
                with phase("backward"):
                    self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if "optimizer" in phases:
            with phase("optimizer"):
                self._scaler.step(self._optimizer)
                self._scaler.update()

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a micro-batch: its share of the mean over the whole step."""
        with self._autocast():
            loss = mean_loss(self._logits(inputs), targets)
        count = self._params.gradient_accumulation
        return loss / count if count > 1 else loss

    def _logits(self, inputs: Tensor) -> Tensor:
        """Return the model's logits, `(batch, context, vocabulary)`, checked in the first step."""
        logits: Tensor = self._model(inputs)
        if not self._is_checked:
            require_logits(logits, self._params)
            self._is_checked = True
        return logits


@part("loss")
def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits `(batch, context, vocabulary)`, a scalar."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def require_logits(logits: object, params: TrainStepParams) -> None:
    """Raise ValueError for anything but a tensor of `(batch, context, vocabulary or more)`.

    Only the shape is checked. A model may pad its vocabulary, so the last dimension may be larger.
    """
    batch, context, vocab = params.batch_size, params.context_length, params.vocab_size
    if not isinstance(logits, Tensor):
        given = f"a {type(logits).__name__}"
    else:
        shape = tuple(logits.shape)
        if len(shape) == 3 and shape[:2] == (batch, context) and shape[2] >= vocab:
            return
        given = f"a tensor of {shape}"
    expected = f"({batch}, {context}, {vocab} or more)"
    raise ValueError(
        f"the model gives {given}, where logits are a tensor of {expected}: "
        "batch, context, vocabulary"
    )
