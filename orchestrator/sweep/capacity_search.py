"""Find the largest context or batch that fits: predict and bisect, then measure if requested.

Cells are measured by `run_sweep`, so that their rows are stored in the run's folder. A value that
the folder has a result of is not measured again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from orchestrator.common.errors import ConfigError
from orchestrator.config.grid import Expansion
from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.planning.prediction_requests import predicting
from orchestrator.planning.request import SweepRequest
from orchestrator.store.cell_state import CellState, read_states
from orchestrator.sweep.capacity_limits import DECIDED, Bounds, Found, Limit, Search
from orchestrator.sweep.pipeline import Runtime
from orchestrator.sweep.search_loop import run_search, this_gpu
from tasks.spec.cell import Cell


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
    gpu = gpu or this_gpu(cells, runtime is not None)
    predict_limits(groups, gpu, request.import_paths)
    if runtime is None:
        return Found(groups, gpu)
    for group in groups:
        group.begin_measuring()
    next_step = partial(_next_step, request, groups)
    return Found(groups, gpu, run_search(request, runtime, next_step))


def _open_groups(expansion: Expansion, bounds: Bounds) -> list[Limit]:
    """Return a limit for all cells that differ along the axis alone. Raise ConfigError."""
    groups: dict[str, Limit] = {}
    for cell in expansion.cells:
        values = cell.params.values()
        if bounds.axis in values:
            limit = Limit(cell.task, values, bounds, Search(bounds), Search(bounds))
            if reason := limit.reason_against(bounds.granularity):
                ranks = cell.params.ranks
                raise ConfigError(
                    f"the smallest value that is tried is impossible: {reason}",
                    f"Add --granularity {ranks}" if ranks > 1 else "Name another --granularity",
                )
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
            raise ConfigError("the CPU has no memory limit", "Add --set memory_limit_gib=8")


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


def _next_step(
    request: SweepRequest, groups: Iterable[Limit], tried: Collection[str]
) -> SweepRequest | None:
    """Return a request for the next cell of each group: the predicted limit, the value next to it,
    and on from there.

    Each group learns from what the run has stored.
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
    return replace(request, expansion=Expansion(tuple(cells.values()))) if cells else None
