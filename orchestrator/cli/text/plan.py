"""Text of `sweep plan`: what would run, why, and for how long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from orchestrator.common.text import cell_count, counted, format_counts, format_seconds
from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.hardware.host import gpus_of
from orchestrator.hardware.nvml import gpu_names
from orchestrator.planning.cell_decisions import Decision, Plan
from orchestrator.planning.duration_estimate import DurationConditions, DurationEstimator, expect
from orchestrator.planning.prediction_requests import cap_bytes, reason_of, verdict_of
from orchestrator.planning.preflight import known_fingerprints
from orchestrator.planning.request import SweepRequest
from tasks.prediction.records import Prediction
from tasks.spec.axes import Values
from tasks.spec.cell import Cell, device_types

SHOWN_CELLS = 20


def describe_plan(
    plan: Plan, label: Callable[[Cell], str], expected: str, shown: int, shared: str = ""
) -> Iterator[str]:
    """Return how many cells are done, how many will run, for how long, and a line per cell.

    expected: the text of describe_cost.
    shown: number of cells that get a line.
    shared: the line of the settings that all cells have, empty for none.
    """
    statuses = format_counts(sorted(plan.statuses().items()))
    yield f"{cell_count(len(plan.decisions))}: {statuses}"
    to_run = f"{len(set(plan.to_measure))} to run{repetition_note(plan)}"
    if plan.inferred:
        to_run += f", and {len(plan.inferred)} are inferred to run out of memory"
    yield to_run
    yield from filter(None, [expected, shared])
    # Cells that run come first: of a large sweep, only the first cells are shown.
    decisions = [decision for decision in plan.decisions if decision.cell.id not in plan.too_wide]
    chosen = sorted(decisions, key=lambda decision: not decision.repetitions)
    for decision in chosen[:shown]:
        yield _decision_line(decision, plan, label(decision.cell))
    if shown and len(chosen) > shown:
        yield f"  … and {len(chosen) - shown} more: --all prints them"
    yield from describe_too_wide(plan, label, shown)


def describe_too_wide(plan: Plan, label: Callable[[Cell], str], shown: int) -> Iterator[str]:
    """Yield how many cells need how many GPUs of one host, and a line for each."""
    if not plan.too_wide:
        return
    cells = plan.too_wide.values()
    by_width = Counter(cell.params.gpu_count for cell in cells)
    counts = [f"{cell_count(by_width[width])} with {width} GPUs" for width in sorted(by_width)]
    yield f"needs more GPUs than a host has: {', '.join(counts)}"
    for cell in islice(cells, shown):
        yield f"  {cell.id} {label(cell)}"
    if shown and len(plan.too_wide) > shown:
        yield f"  … and {len(plan.too_wide) - shown} more"


def plan_records(
    plan: Plan, predictions: Mapping[str, Prediction], card: GpuModel | None
) -> Iterator[Values]:
    """Yield an object for programs for each cell, in the order of the config.

    predictions: by cell id. A cell that has one also has `memory`.
    """
    for decision in plan.decisions:
        cell = decision.cell
        action, reason = _action(decision, plan)
        record: Values = {
            "cell": cell.id,
            "task": cell.task,
            "params": cell.params.values(),
            "status": plan.state(cell).status,
            "action": action,
            "repetitions": decision.repetitions if action == "run" else 0,
            "reason": reason,
        }
        if prediction := predictions.get(cell.id):
            record["memory"] = {
                "verdict": verdict_of(cell, prediction, card),
                "limit_bytes": cap_bytes(cell, card),
                "peak_allocated_bytes": prediction.peak_bytes(),
                "peak_reserved_bytes": prediction.reserved_bytes,  # which the verdict is about
                "at_least_bytes": prediction.least_bytes(),
                "how": prediction.how,
                "reason": reason_of(cell, prediction, card),
            }
        yield record


def _action(decision: Decision, plan: Plan) -> tuple[str, str]:
    """Return what is planned for a cell (run, infer, defer or keep), and why."""
    if witness := plan.inferred.get(decision.cell.id):
        reason = f"needs at least as much memory as {witness.id}, which ran out of memory"
        return "infer", reason
    if decision.cell.id in plan.too_wide:
        return "defer", "needs more GPUs than a host has"
    return "run" if decision.repetitions else "keep", decision.reason


def _decision_line(decision: Decision, plan: Plan, label: str) -> str:
    action, reason = _action(decision, plan)
    if action == "run" and decision.repetitions > 1:
        reason += f", {decision.repetitions} times"
    width = len("infer" if plan.inferred else "keep")
    return f"  {action:{width}} {decision.cell.id} {label}  ({reason})"


def repetition_note(plan: Plan) -> str:
    """Return how many attempts will run, or nothing if each cell runs once."""
    times = len(plan.to_measure)
    if times > len(set(plan.to_measure)):
        return f", {times} times in all"
    return ""


def describe_cost(request: SweepRequest, plan: Plan, card: GpuModel | None) -> str:
    """Return how long the plan will take on `card`, or on the GPUs of this machine.

    Empty if nothing is to run, or if only the CPU is used and no cell of the kind was measured.
    """
    cells = plan.to_measure
    if not cells:
        return ""
    on_gpu = any(cell.params.device == "cuda" for cell in cells)
    gpu, name = None, None  # as the driver and as the catalogue name it
    gpus: Sequence[str] = ()  # of this machine
    states = plan.states
    if on_gpu and card is not None:
        gpu, name = card.device, card.name
        # Durations on another GPU say nothing about this card.
        if gpu not in gpus_of(known_fingerprints(request.run).get("cuda", ())):
            states = {}
    elif on_gpu:
        gpus = gpu_names()
        gpu = name = next(iter(gpus), None)
    conditions = DurationConditions.of(request.settings, gpu)
    estimator = DurationEstimator(request.expansion.cells, states, conditions)
    widest = max(cell.params.gpu_count for cell in cells)
    expected = expect(estimator, cells, {"cuda": max(1, len(gpus), widest)})
    if expected:
        where = _where(cells, card, gpus, widest)
        return f"expected: {format_seconds(expected.wall_s)} on {where} {expected}"
    return _why_unknown(estimator, cells, gpu, name)


def _why_unknown(
    estimator: DurationEstimator, cells: Sequence[Cell], gpu: str | None, name: str | None
) -> str:
    """Return why no duration can be estimated and what to do, or nothing for cells on the CPU.

    gpu: the name that the driver gives; None if only the memory of the GPU is known.
    name: the GPU's name for the reader; None without a GPU.
    """
    later = "an estimate is available when the first of these cells has ended"
    without_formula = next(filter(estimator.lacks_formula, cells), None)
    on_gpu = [cell for cell in cells if cell.params.device == "cuda"]
    precisions = estimator.precisions_without_peak(on_gpu)
    if without_formula is not None:
        model = without_formula.params.values().get("model") or without_formula.task
        reason = f"no formula is known for {model}; {later}"
    elif not on_gpu:
        return ""
    elif name is None:
        reason = "no GPU is here; add --gpu H200 for an estimate"
    elif gpu is None:
        reason = "--gpu gave only a memory size; name the GPU, for example --gpu 'RTX 4090'"
    elif precisions:
        peaks = f"the peak speed of {name} in {' and '.join(precisions)}"
        reason = f"no source was found for {peaks}; {later}"
    else:
        reason = f"some cells run on the CPU; {later}"
    return f"expected time: unknown, {reason}"


def _where(cells: Sequence[Cell], card: GpuModel | None, gpus: Sequence[str], widest: int) -> str:
    devices = device_types(cells)
    if devices == ["cpu"]:
        return "the CPU"
    if "cuda" not in devices:
        return "this machine"
    if card is not None:
        if widest > 1:
            return f"{widest} × {card.name},"
        return f"one {card.name},"
    if len(gpus) < widest:
        if widest > 1:
            return f"a host with {widest} GPUs,"
        return "one GPU,"
    return f"this machine's {counted(len(gpus), 'GPU')},"
