"""Find the largest context or batch that fits: predict and bisect, then measure if requested.

Cells are measured by `run_sweep`, so that their rows are stored in the run's folder. A value that
the folder has a result of is not measured again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace

from orchestrator.common.errors import ConfigError
from orchestrator.common.output import Notify
from orchestrator.config.grid import Expansion
from orchestrator.execution.host_probe import probe_here
from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.planning.invocation import ExecutionOptions
from orchestrator.planning.prediction_requests import cap_bytes, predicting
from orchestrator.planning.preflight import smallest_gpu
from orchestrator.planning.request import SweepRequest
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.store.cell_state import CellState, read_states
from orchestrator.sweep.capacity_limits import DECIDED, Bounds, Found, Limit, Search
from orchestrator.sweep.outcome_log import SweepResult
from orchestrator.sweep.pipeline import OpenScheduler, Runtime, run_sweep
from tasks.prediction.records import predictable
from tasks.spec.attempt import Attempt
from tasks.spec.cell import Cell


class SharedScheduler(ExitStack):
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


def find_limits(
    request: SweepRequest, bounds: Bounds, gpu: GpuModel | None, runtime: Runtime | None
) -> Found:
    """Predict the limits, and measure them too if there is a runtime. Raise ConfigError.

    gpu: the GPU that was named, or None for this machine's.
    """
    if bounds.up_to < bounds.granularity:
        raise ConfigError(
            f"--up-to {bounds.up_to}: is less than the granularity, {bounds.granularity}",
            "Name a larger one",
        )
    groups = _open_groups(request.expansion, bounds)
    cells = [group.at(bounds.granularity) for group in groups]
    if runtime is not None:
        _require_memory_limits(request, cells)
    gpu = gpu or _this_gpu(cells, runtime is not None)
    predict_limits(groups, gpu, request.import_paths)
    result = None if runtime is None else _measure_limits(request, groups, runtime)
    return Found(groups, gpu, result)


def _open_groups(expansion: Expansion, bounds: Bounds) -> list[Limit]:
    """Return a limit for all cells that differ along the axis alone. Raise ConfigError."""
    groups: dict[str, Limit] = {}
    for cell in expansion.cells:
        values = cell.params.values()
        if bounds.axis in values:
            limit = Limit(cell.task, values, bounds, Search(bounds), Search(bounds))
            groups.setdefault(limit.at(bounds.granularity).id, limit)
    if not groups:
        tasks = ", ".join(sorted({cell.task for cell in expansion.cells}))
        raise ConfigError(
            f"{tasks}: has no axis {bounds.axis!r}", "Name a sweep of train_step or attention"
        )
    return list(groups.values())


def _require_memory_limits(request: SweepRequest, cells: Iterable[Cell]) -> None:
    # On the CPU, a search without a limit would grow until the kernel kills other programs.
    if request.config.limits.host_memory_gib is not None:
        return
    for cell in cells:
        if cell.params.device == "cpu" and cell.params.memory_limit_gib is None:
            raise ConfigError(
                "--confirm: the CPU has no memory limit", "Add --set memory_limit_gib=8"
            )


def _this_gpu(cells: Iterable[Cell], measures: bool) -> GpuModel | None:
    """Return this machine's smallest GPU if the limits depend on it. Raise ConfigError."""
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


def predict_limits(
    groups: Sequence[Limit], gpu: GpuModel | None, import_paths: tuple[str, ...]
) -> None:
    """Search by prediction. Each round predicts one value of every group, in parallel."""
    with predicting(gpu, import_paths) as predict:
        while True:
            trials = []
            for group in groups:
                while (value := group.next_to_predict) is not None:
                    if group.accepts(value):
                        trials.append((group, value, group.at(value)))
                        break
            if not trials:
                return
            predictions = predict([cell for _, _, cell in trials])
            for group, value, cell in trials:
                group.learn_prediction(value, predictions[cell.id], gpu)


def _measure_limits(
    request: SweepRequest, groups: Sequence[Limit], runtime: Runtime
) -> SweepResult | None:
    """Measure the predicted limits and the values next to them, and search on from there.

    Return the result of the last round, or None if nothing was left to measure.
    """
    started_s, result = time.monotonic(), None
    for group in groups:
        group.begin_measuring()
    tried: set[str] = set()
    # Starting Ray takes seconds, so that all rounds share one scheduler.
    with SharedScheduler(runtime.open_scheduler) as scheduler:
        shared = replace(runtime, open_scheduler=scheduler.opened)
        while cells := _next_cells(request, groups, tried):
            if result is not None and result.is_cut_short:
                break
            execution = with_time_left(request.execution, started_s)
            expansion = Expansion(tuple(cells.values()))
            step = replace(request, expansion=expansion, execution=execution, is_search=True)
            result = run_sweep(step, shared)
            tried.update(cells)
            if result.is_cut_short:  # cells that did not start are left to another command
                tried.intersection_update(read_states(request.run))
    return result


def with_time_left(execution: ExecutionOptions, started_s: float) -> ExecutionOptions:
    if execution.time_limit_s is None:
        return execution
    elapsed_s = time.monotonic() - started_s
    return replace(execution, time_limit_s=execution.time_limit_s - elapsed_s)


def _next_cells(request: SweepRequest, groups: Iterable[Limit], tried: set[str]) -> dict[str, Cell]:
    """Return the next cell of each group, by id, after learning from what the run has stored.

    tried: cells of earlier rounds. They are not tried again, whatever came of them: a cell may
    fail, or a check may exclude it before it runs.
    """
    states = read_states(request.run)
    cells = {}
    for group in groups:
        while (value := group.next_to_measure) is not None:
            cell = group.at(value)
            status = states.get(cell.id, CellState()).status
            if status not in DECIDED and cell.id not in tried:
                cells[cell.id] = cell
                break
            group.learn_status(value, status)
    return cells
