"""Predicted memory of the cells, before the first one is measured."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.common.text import cell_count
from orchestrator.hardware.host import HostInfo
from orchestrator.planning.attempt_queue import AttemptQueue
from orchestrator.planning.memory_prediction import cap_bytes, predict_memory, verdict_of
from orchestrator.planning.preflight import smallest_gpu
from orchestrator.planning.request import SweepRequest
from orchestrator.store.run_writer import RunWriter
from orchestrator.sweep.result import Summary
from orchestrator.sweep.runtime import Means
from tasks.prediction.records import Prediction, unsupported_reason


def foresee(
    request: SweepRequest,
    writer: RunWriter,
    queue: AttemptQueue,
    means: Means,
    summary: Summary,
    hosts: Sequence[HostInfo],
) -> None:
    """Predicts what memory the cells will take, keeps that beside what is measured, and leaves out what is asked."""
    cells = [cell for cell in queue.cells if not unsupported_reason(cell)]
    if not cells:
        return
    means.say(f"predicting the memory of {cell_count(len(cells))}")
    cards = {kind: smallest_gpu(hosts, kind) for kind in {cell.params.gpu_kind for cell in cells}}
    predictions: dict[str, Prediction] = {}
    for kind, card in cards.items():
        own = [cell for cell in cells if cell.params.gpu_kind == kind]
        predictions |= predict_memory(own, card, request.import_paths)
    verdicts = {
        cell.id: verdict_of(cell, predictions[cell.id], cards[cell.params.gpu_kind])
        for cell in cells
    }
    writer.append_predictions(
        {cell: found.samples_with(verdicts[cell]) for cell, found in predictions.items()}
    )
    if means.skip_predicted_oom:
        doomed = [cell for cell in cells if verdicts[cell.id] == "oom"]
        for cell in doomed:
            why = predictions[cell.id].why_oom(cap_bytes(cell, cards[cell.params.gpu_kind]))
            means.say(f"left out: {request.expansion.label(cell)}: {why}")
        queue.leave_out(doomed)
        summary.foreseen = len(doomed)
