"""Checks after each stage that its steps did the work that the cell describes."""

from __future__ import annotations

from tasks.harness.compilation import require_compiled
from tasks.harness.precision import require_precision, require_threads
from tasks.harness.stage import Session
from tasks.spec.parameters import Params

# In their steps, the gradient scaler of fp16 may still look for its scale.
_WARM_UP_STAGES = ("compile", "warm-up")


class StageChecks:
    """Checks of one session: `check(stage)` raises RuntimeError for a stage without its work.

    threads: number of threads of torch before the cell was built.
    """

    def __init__(self, session: Session, threads: int) -> None:
        self._session = session
        self._threads = threads
        self._steps = 0
        self._optimizer_steps = 0

    def check(self, stage: str) -> None:
        """Check the stage that has just ended, and set the fact `optimizer_steps_skipped`."""
        session = self._session
        require_precision(session.params)
        require_threads(self._threads, session.params)
        if session.workload.compiled and session.steps:
            require_compiled()
        count_steps = session.workload.optimizer_steps
        if count_steps is None or not session.steps:
            return
        # Without a warm-up stage, the first step of another stage is the warm-up.
        spare = session.steps - self._steps if stage in _WARM_UP_STAGES else int(not self._steps)
        before = self._steps - self._optimizer_steps
        self._steps, self._optimizer_steps = session.steps, count_steps()
        skipped = self._steps - self._optimizer_steps
        session.facts["optimizer_steps_skipped"] = skipped
        if skipped - before > spare:
            raise RuntimeError(
                f"the optimizer changed nothing in {skipped - before} steps of {stage}. "
                f"{_reason(session.params)}"
            )


def _reason(params: Params) -> str:
    if getattr(params, "precision", "") == "fp16":
        return "The gradients overflowed: use bf16, or timing: fixed with more warmup_steps"
    return (
        "No parameter of the optimizer had a gradient: check whether the model detaches its logits"
    )
