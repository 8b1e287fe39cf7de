"""The loop that all searches share: ask for the next cells, measure them, and learn from the rows.

There is no state but the rows of the run: an interrupted search is continued by the same command,
and a cell that the run has a result of is not measured again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace

from orchestrator.common.errors import ConfigError
from orchestrator.common.output import Notify
from orchestrator.execution.host_probe import probe_here
from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.planning.invocation import ExecutionOptions
from orchestrator.planning.prediction_requests import cap_bytes
from orchestrator.planning.preflight import smallest_gpu
from orchestrator.planning.request import SweepRequest
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.store.cell_state import read_states
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


def run_search(runtime: Runtime, next_step: NextStep) -> SweepResult | None:
    """Measure step after step. Return the result of the last one, or None if there was none."""
    started_s, result = time.monotonic(), None
    tried: set[str] = set()
    with _SharedScheduler(runtime.open_scheduler) as scheduler:
        shared = replace(runtime, open_scheduler=scheduler.opened)
        while (step := next_step(tried)) is not None:
            if result is not None and result.is_cut_short:
                break
            execution = _with_time_left(step.execution, started_s)
            result = run_sweep(replace(step, execution=execution, is_search=True), shared)
            tried.update(cell.id for cell in step.expansion.cells)
            if result.is_cut_short:  # cells that did not start are left to another command
                tried.intersection_update(read_states(step.run))
    return result


def _with_time_left(execution: ExecutionOptions, started_s: float) -> ExecutionOptions:
    if execution.time_limit_s is None:
        return execution
    elapsed_s = time.monotonic() - started_s
    return replace(execution, time_limit_s=execution.time_limit_s - elapsed_s)


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
