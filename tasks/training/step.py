"""One training step, or the part of it that the axis `pass` names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tasks.harness.compilation import begin_step
from tasks.harness.precision import autocast
from tasks.harness.workload import PhaseMarker
from tasks.training.losses import Logits, make_loss, require_loss
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
        optimizers: Sequence[Optimizer],
        inputs: Tensor,
        targets: Tensor,
    ) -> None:
        self._params = params
        self._optimizers = optimizers
        # Divided here: in a step, it would be an operation outside of the phases.
        self._micro_batches = tuple(zip(inputs.unbind(), targets.unbind(), strict=True))
        self._logits = Logits(params, model)
        self._loss = make_loss(params, model)
        self._autocast = autocast(params)
        # Only fp16 has so narrow a range that its gradients need scaling.
        is_scaled = params.precision == "fp16"
        self._scaler = torch.amp.GradScaler(params.device, enabled=is_scaled)

    def __call__(self, phase: PhaseMarker) -> None:
        begin_step(self._params)
        try:
            if self._params.pass_ == "forward":
                self._infer(phase)
            else:
                self._train(phase)
        except IndexError as error:
            if "out of range in self" not in str(error):  # what an embedding says on the CPU
                raise
            raise IndexError(
                f"{error}: an embedding has fewer rows than there are tokens (vocab_size "
                f"{self._params.vocab_size}) or positions (context_length "
                f"{self._params.context_length})"
            ) from error

    def _infer(self, phase: PhaseMarker) -> None:
        with phase("forward"), torch.no_grad(), self._autocast():
            self._logits(self._micro_batches[0][0])

    def _train(self, phase: PhaseMarker) -> None:
        phases = self._params.phases
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        for inputs, targets in self._micro_batches:
            with phase("forward"):
                loss = self._share_of_loss(inputs, targets)
            if "backward" in phases:
                with phase("backward"):
                    self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if "optimizer" in phases:
            with phase("optimizer"):
                for optimizer in self._optimizers:
                    self._scaler.step(optimizer)
                self._scaler.update()

    def _share_of_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a micro-batch: its share of the mean over the whole step."""
        with self._autocast():
            loss = self._loss(inputs, targets)
        require_loss(loss, self._params.loss)
        count = self._params.gradient_accumulation
        return loss / count if count > 1 else loss
