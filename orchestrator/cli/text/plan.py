"""Text of `sweep plan`: what would run, why, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from orchestrator.common.text import cell_count, format_seconds
from orchestrator.hardware.gpu_catalog import GpuModel, driver_name
from orchestrator.hardware.nvml import gpu_names
from orchestrator.planning.duration_estimate import DurationConditions, DurationEstimator, expect
from orchestrator.planning.fingerprints import known_fingerprints
from orchestrator.planning.plan import Plan
from orchestrator.planning.request import SweepRequest
from tasks.spec.cell import Cell

SHOWN_CELLS = 20


def describe_plan(
    plan: Plan, label: Callable[[Cell], str], expected: str, everything: bool
) -> Iterator[str]:
    """The cells, how many are done, what will run, and why. expected: what is said of how long it
    will take.
    """
    statuses = ", ".join(f"{count} {status}" for status, count in sorted(plan.statuses().items()))
    yield f"{cell_count(len(plan.decisions))}: {statuses}"
    inferred = (
        f", and {len(plan.inferred)} are inferred to run out of memory" if plan.inferred else ""
    )
    yield f"{len(set(plan.to_measure))} to run{repetition_note(plan)}{inferred}"
    if expected:
        yield expected
    width = len("infer" if plan.inferred else "keep")
    chosen = sorted(plan.decisions, key=lambda decision: not decision.repetitions)
    for decision in chosen if everything else chosen[:SHOWN_CELLS]:
        witness = plan.inferred.get(decision.cell.id)
        mark = "infer" if witness else "run" if decision.repetitions else "keep"
        reason = (
            f"needs at least as much memory as {witness.id}, which ran out of memory"
            if witness
            else decision.reason
        )
        often = (
            f", {decision.repetitions} times" if decision.repetitions > 1 and not witness else ""
        )
        yield f"  {mark:{width}} {decision.cell.id} {label(decision.cell)}  ({reason}{often})"
    if not everything and len(chosen) > SHOWN_CELLS:
        yield f"  … and {len(chosen) - SHOWN_CELLS} more: --all prints them"


def repetition_note(plan: Plan) -> str:
    times = len(plan.to_measure)
    return f", {times} times in all" if times > len(set(plan.to_measure)) else ""


def describe_cost(request: SweepRequest, plan: Plan, card: GpuModel | None) -> str:
    """How long what is to run will take: on `card`, or on the GPUs that are here. Empty where
    nothing can be said.
    """
    cells = plan.to_measure
    if not cells:
        return ""
    on_gpu = any(cell.params.device == "cuda" for cell in cells)
    here = gpu_names() if on_gpu and card is None else ()
    gpu = (driver_name(card) if card else next(iter(here), None)) if on_gpu else None
    elsewhere = card is not None and gpu not in _measured_on(request)
    conditions = DurationConditions.of(request.settings, gpu)
    estimator = DurationEstimator(
        request.expansion.cells, {} if elsewhere else plan.histories, conditions
    )
    widest = max(cell.params.gpu_count for cell in cells)
    expected = expect(estimator, cells, {"cuda": max(1, len(here), widest)})
    if expected:
        where = _where(cells, card, here, widest)
        return f"expected: {format_seconds(expected.wall_s)} on {where}{',' if on_gpu else ''} {expected}"
    if not on_gpu:
        return ""
    named = card.name if card else next(iter(here), None)
    return (
        f"expected time: unknown, no source gives a peak speed of {named}"
        if named
        else "expected time: unknown, no GPU is here; add --gpu H200 for an estimate"
    )


def _where(cells: Sequence[Cell], card: GpuModel | None, here: Sequence[str], widest: int) -> str:
    devices = {cell.params.device for cell in cells}
    if "cuda" not in devices:
        return "the CPU" if devices == {"cpu"} else "this machine"
    if card is not None:
        return f"one {card.name}" if widest <= 1 else f"{widest} × {card.name}"
    if len(here) < widest:
        return f"a host with {widest} GPUs" if widest > 1 else "one GPU"
    return f"this machine's {len(here)} GPU{'s' if len(here) > 1 else ''}"


def _measured_on(request: SweepRequest) -> set[str]:
    """The GPUs that the run's rows are of."""
    return {str(mark.get("gpu")) for mark in known_fingerprints(request.run).get("cuda", [])}
