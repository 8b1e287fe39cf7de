"""Checks after each stage that its steps did the work that the cell describes."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from tasks.harness.compilation import require_compiled
from tasks.harness.precision import require_precision, require_threads
from tasks.harness.process_settings import THREADS, changed_settings
from tasks.harness.stage import Session
from tasks.harness.workload import Workload
from tasks.spec.axes import FrozenValues
from tasks.spec.parameters import Params

# In their steps, the gradient scaler of fp16 may still look for its scale.
_WARM_UP_STAGES = ("compile", "warm-up")

# Compared of each parameter. A copy of all values would take as much memory as the model.
_COMPARED_VALUES = 64


class StageChecks:
    """Checks of one session: `check(stage)` raises RuntimeError for a stage without its work.

    settings: those of the process before the cell's code was imported.
    """

    def __init__(self, session: Session, settings: FrozenValues) -> None:
        self._session = session
        self._settings = settings
        self._steps = 0
        self._optimizer_steps = 0
        self._parameters = _Parameters(session.workload)

    def check(self, stage: str) -> None:
        """Check the stage that has just ended.

        Set the facts `settings_changed`, if the cell's code has changed one,
        `optimizer_steps_skipped`, and those of the workload that steps may change.
        """
        session = self._session
        require_precision(session.params)
        require_threads(self._settings[THREADS], session.params)
        if changes := changed_settings(self._settings):
            session.facts["settings_changed"] = changes
        session.facts.update(session.workload.read_facts())
        if session.workload.compiled and session.steps:
            require_compiled()
        self._check_optimizer(stage)

    def _check_optimizer(self, stage: str) -> None:
        session, count_steps = self._session, self._session.workload.optimizer_steps
        steps = session.steps - self._steps
        if count_steps is None or not steps:
            return
        # Without a warm-up stage, the first step of another stage is the warm-up.
        spare = steps if stage in _WARM_UP_STAGES else int(not self._steps)
        before = self._steps - self._optimizer_steps
        self._steps, self._optimizer_steps = session.steps, count_steps()
        skipped = self._steps - self._optimizer_steps
        session.facts["optimizer_steps_skipped"] = skipped
        idle, reason = skipped - before, _reason(session.params)
        if not self._parameters.have_changed() and not idle:
            idle = steps
            reason = (
                "It ran, but no parameter changed: check whether its step() writes to the "
                "parameters that it was given"
            )
        if idle > spare:
            raise RuntimeError(
                f"the optimizer changed nothing in {idle} steps of {stage}. {reason}"
            )


class _Parameters:
    """The trained parameters of a model in fp32, and their state when last read.

    No parameter is read if an optimizer is fused, because torch does not count the writes of its
    kernels, nor one in bf16: a small step may change none of its values, all rounded to what they
    were.
    """

    def __init__(self, workload: Workload) -> None:
        groups = list(chain.from_iterable(one.param_groups for one in workload.optimizers))
        is_fused = any(group.get("fused") for group in groups)
        self._trained: list[nn.Parameter] = []
        if workload.model is not None and groups and not is_fused:
            for parameter in workload.model.parameters():
                if parameter.requires_grad and parameter.dtype is torch.float32:
                    self._trained.append(parameter)
        self._states = [_state_of(one) for one in self._trained]

    def have_changed(self) -> bool:
        """Return True if one has changed since the last call, or if none is read."""
        if not self._trained:
            return True
        before, self._states = self._states, [_state_of(one) for one in self._trained]
        for (version, values), (version_now, values_now) in zip(before, self._states, strict=True):
            if version != version_now or not torch.equal(values, values_now):
                return True
        return False


def _state_of(parameter: nn.Parameter) -> tuple[int, Tensor]:
    """Return the number of writes that torch knows of, and the first values, on the CPU.

    Course code writes to `parameter.data`, which torch does not count.
    """
    # Of a sharded parameter this rank's shard, as torch does not count writes to the whole.
    local: Tensor = getattr(parameter, "_local_tensor", parameter)
    version = local._version
    # Only of these is the slice a view. Another slice would be an allocation on the device.
    if type(local) not in (Tensor, nn.Parameter) or not local.is_contiguous():
        return version, torch.empty(0)
    first = local.detach().flatten()[:_COMPARED_VALUES]
    return version, first.to("cpu", copy=True)


def _reason(params: Params) -> str:
    if getattr(params, "precision", "") == "fp16":
        return "The gradients overflowed: use bf16, or timing: fixed with more warmup_steps"
    return (
        "No parameter of the optimizer had a gradient: check whether the model detaches its logits"
    )
