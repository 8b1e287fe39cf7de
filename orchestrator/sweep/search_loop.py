"""The loop that all searches share: ask for the next cells, measure them, and learn from the rows.

There is no state but the rows of the run: an interrupted search is continued by the same command,
and a cell that the run has a result of is not measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace

from orchestrator.common.errors import ConfigError
from orchestrator.common.output import Notify, ProgressLine
from orchestrator.execution.host_probe import probe_here
from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.planning.invocation import ExecutionOptions
from orchestrator.planning.prediction_requests import cap_bytes
from orchestrator.planning.preflight import smallest_gpu
from orchestrator.planning.request import SweepRequest
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.store.cell_state import read_states
from orchestrator.sweep.interruption import Interruption
from orchestrator.sweep.outcome_log import SweepResult
from orchestrator.sweep.pipeline import OpenScheduler, Runtime, run_sweep
from tasks.prediction.records import predictable
from tasks.spec.attempt import Attempt
from tasks.spec.cell import Cell

# Reads what the run has stored and returns the request that is measured next, or None at the end.
# It is called with the ids of the cells that this command has tried, which may have failed or may
# have been excluded by a check: none of them is tried again.
NextStep = Callable[[Collection[str]], SweepRequest | None]


class _SharedScheduler(ExitStack):
    """A scheduler that several runs use one after the other, so that Ray starts only once."""

    def __init__(self, open_scheduler: OpenScheduler) -> None:
        super().__init__()
        self._open_scheduler = open_scheduler
        self._scheduler: Scheduler | None = None

    def opened(
        self, execution: ExecutionOptions, example: Attempt, notify: Notify
    ) -> AbstractContextManager[Scheduler]:
        """Return the scheduler, which is opened for the first run and stays open after each."""
        if self._scheduler is None:
            self._scheduler = self.enter_context(self._open_scheduler(execution, example, notify))
        return nullcontext(self._scheduler)


def run_search(request: SweepRequest, runtime: Runtime, next_step: NextStep) -> SweepResult:
    """Measure step after step, and return the result of all of them."""
    result, tried = SweepResult(folder=str(request.run)), set[str]()
    with (
        Interruption(request.execution.time_limit_s, is_shared=True) as interruption,
        _SharedScheduler(runtime.open_scheduler) as scheduler,
    ):
        interruption.install()
        shared = replace(runtime, open_scheduler=scheduler.opened, interruption=interruption)
        while True:
            with ProgressLine("choosing the next cells"):
                step = next_step(tried)
            if step is None or result.is_cut_short:
                return result
            result = result.followed_by(run_sweep(replace(step, is_search=True), shared))
            tried.update(cell.id for cell in step.expansion.cells)
            if result.is_cut_short:  # cells that did not start are left to another command
                tried.intersection_update(read_states(step.run))


def this_gpu(cells: Iterable[Cell], measures: bool) -> GpuModel | None:
    """Return this machine's smallest GPU if a prediction depends on it. Raise ConfigError."""
    predicted = predictable(cells)
    needs_gpu = any(cap_bytes(cell, None) is None for cell in predicted)
    if not (needs_gpu or (measures and predicted)):
        return None
    gpu = smallest_gpu([probe_here()])
    if gpu is None and needs_gpu:
        raise ConfigError(
            "for which GPU? This machine has none",
            "Add --gpu 'RTX 5090' or --set memory_limit_gib=32",
        )
    return gpu
