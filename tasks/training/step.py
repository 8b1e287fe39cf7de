"""One training step, or the part of it that the axis `pass` names."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from tasks.harness.compilation import begin_step
from tasks.harness.precision import autocast
from tasks.harness.workload import PhaseMarker
from tasks.spec.messages import message_of
from tasks.training.losses import Logits, make_loss, require_loss
from tasks.training.parameters import TrainStepParams
from tasks.training.strategies import Strategy


class TrainingStep:
    """Runs one step: `step(phase)` wraps each of its phases in `with phase(name):`.

    The forward phase ends with the logits if `pass` is `forward`, and with the loss otherwise.

    inputs, targets: token ids of this rank, both `(micro-batches, batch, context)`.
    """

    def __init__(
        self, params: TrainStepParams, strategy: Strategy, inputs: Tensor, targets: Tensor
    ) -> None:
        self._params = params
        self._strategy = strategy
        # Divided here: in a step, it would be an operation outside of the phases.
        self._micro_batches = tuple(zip(inputs.unbind(), targets.unbind(), strict=True))
        self._logits = Logits(params, strategy.module)
        self._loss = make_loss(params, strategy.module)
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
            if "out of range in self" not in message_of(error):  # what an embedding says on the CPU
                raise
            raise IndexError(
                f"{error}: an embedding has fewer rows than there are tokens (vocab_size "
                f"{self._params.vocab_size}) or positions (context_length "
                f"{self._params.context_length})"
            ) from error
        except RuntimeError as error:
            # What DDP says, in ten lines, in the second step.
            if "Expected to have finished reduction in the prior iteration" not in message_of(
                error
            ):
                raise
            raise RuntimeError(
                f"parallel: {self._params.parallel} needs a gradient of each parameter in each "
                "step, and this model has parameters without one. Freeze them with "
                "requires_grad_(False), or use parallel: bucketed or fsdp2"
            ) from error

    def _infer(self, phase: PhaseMarker) -> None:
        with phase("forward"), torch.no_grad(), self._autocast():
            self._logits(self._micro_batches[0][0])

    def _train(self, phase: PhaseMarker) -> None:
        phases, strategy = self._params.phases, self._strategy
        strategy.zero_grad()
        for number, (inputs, targets) in enumerate(self._micro_batches, start=1):
            is_last = number == len(self._micro_batches)
            with nullcontext() if is_last else strategy.without_communication():
                with phase("forward"):
                    loss = self._share_of_loss(inputs, targets)
                if "backward" in phases:
                    with phase("backward"):
                        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if "communication" in phases:
            with phase("communication"):
                strategy.communicate()
        if "optimizer" in phases:
            with phase("optimizer"):
                for optimizer in strategy.optimizers:
                    self._scaler.step(optimizer)
                self._scaler.update()
        if "gather" in phases:
            with phase("gather"):
                strategy.gather()

    def _share_of_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a micro-batch: its share of the mean over the whole step."""
        with self._autocast():
            loss = self._loss(inputs, targets)
        require_loss(loss, self._params.loss)
        count = self._params.gradient_accumulation
        return loss / count if count > 1 else loss
