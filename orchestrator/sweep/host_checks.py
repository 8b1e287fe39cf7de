"""The preflight of a sweep: ask the hosts, check them, predict memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.common.output import Notify
from orchestrator.common.text import cell_count
from orchestrator.planning.cell_decisions import Plan
from orchestrator.planning.prediction_requests import PredictedCell, cap_bytes, predict_memory
from orchestrator.planning.preflight import CHECKS, Preflight, Slots, smallest_gpu
from orchestrator.planning.request import SweepRequest
from orchestrator.scheduling.scheduler import Scheduler
from tasks.prediction.records import predictable
from tasks.spec.cell import Cell, device_types


def check_hosts(
    request: SweepRequest, plan: Plan, scheduler: Scheduler, notify: Notify
) -> Preflight:
    """Return what is known about the hosts, and the cells that they can measure.

    Raises PlatformError or RunMismatch if a check fails.
    """
    preflight = Preflight(
        cells=tuple(dict.fromkeys(plan.to_run)),
        hosts=tuple(scheduler.hosts()),
        has_results=bool(plan.states),
    )
    slots = Slots(
        by_device={device: scheduler.slots(device) for device in device_types(preflight.cells)},
        by_gpu_kind={kind: scheduler.slots("cuda", kind) for kind in preflight.gpu_kinds},
    )
    preflight = replace(preflight, slots=slots)
    for check in CHECKS:
        preflight = check(request, preflight, notify)
    # After the checks, so that no slot is prepared for a cell that no host can measure. The slots
    # import torch while memory is predicted.
    scheduler.import_ahead(request.example_attempt(preflight.cells))
    return preflight


def predict_cells(request: SweepRequest, preflight: Preflight, notify: Notify) -> Preflight:
    """Predict the memory of the cells, on the smallest GPU that each may run on.

    With --skip-predicted-oom, cells that are predicted to run out of memory are excluded. This may
    take minutes, so it comes after the checks and after the manifest is written.
    """
    by_kind: dict[str | None, list[Cell]] = defaultdict(list)
    for cell in predictable(preflight.cells):
        by_kind[cell.params.gpu_kind].append(cell)
    if not by_kind:
        return preflight
    notify(f"predicting the memory of {cell_count(sum(map(len, by_kind.values())))}")
    predictions: dict[str, PredictedCell] = {}
    for kind, cells in by_kind.items():
        predictions |= _predict_on(cells, kind, request, preflight)
    preflight = replace(preflight, predictions=predictions)
    if not request.execution.skip_predicted_oom:
        return preflight
    skipped = []
    for one in predictions.values():
        if one.verdict == "oom":
            notify(f"skipped: {request.expansion.label(one.cell)}: {one.oom_reason}")
            skipped.append(one.cell)
    return preflight.exclude(skipped, is_deferred=False)


def _predict_on(
    cells: Sequence[Cell], kind: str | None, request: SweepRequest, preflight: Preflight
) -> dict[str, PredictedCell]:
    gpu = smallest_gpu(preflight.hosts, kind)
    predictions = predict_memory(cells, gpu, request.import_paths)
    return {
        cell.id: PredictedCell(cell, predictions[cell.id], cap_bytes(cell, gpu)) for cell in cells
    }
