"""Text of `sweep plan` and `sweep status`: what is measured, what failed, what would run and when."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.common import text
from orchestrator.common.provenance import package_version
from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.hardware.host import gpus_of
from orchestrator.hardware.nvml import gpu_names
from orchestrator.planning.cell_decisions import Decision, Plan
from orchestrator.planning.duration_estimate import DurationConditions, DurationEstimator, expect
from orchestrator.planning.invocation import command_in_copy, command_with, is_search, last_command
from orchestrator.planning.preflight import known_fingerprints
from orchestrator.planning.request import SweepRequest
from orchestrator.store.cell_state import PENDING
from orchestrator.store.run import INCOMPLETE, Run
from tasks.spec.axes import Values, leave_out
from tasks.spec.cell import Cell, device_types
from tasks.spec.status import Status

if TYPE_CHECKING:
    from tasks.prediction.records import Prediction

SHOWN_CELLS = 20
_NO_FAILURES = (Status.OK, Status.SKIPPED, INCOMPLETE)


def describe_plan(
    plan: Plan, label: Callable[[Cell], str], expected: str, shown: int, shared: str = ""
) -> Iterator[str]:
    """Return how many cells are done, how many will run, for how long, and a line per cell.

    expected: the text of describe_cost.
    shown: number of cells that get a line.
    shared: the line of the settings that all cells have, empty for none.
    """
    statuses = text.format_counts(sorted(plan.statuses().items()))
    yield f"{text.cell_count(len(plan.decisions))}: {statuses}"
    to_run = f"{len(set(plan.to_measure))} to run{repetition_note(plan)}"
    if plan.inferred:
        to_run += f", and {len(plan.inferred)} are inferred to run out of memory"
    yield to_run
    yield from filter(None, [expected, shared])
    # Cells that run come first: of a large sweep, only the first cells are shown.
    decisions = [decision for decision in plan.decisions if decision.cell.id not in plan.too_wide]
    chosen = sorted(decisions, key=lambda decision: not decision.repetitions)
    width = len("infer" if plan.inferred else "keep")
    lines = []
    for one in chosen[:shown]:
        action, reason = _action(one, plan)
        if action == "run" and one.repetitions > 1:
            reason += f", {one.repetitions} times"
        lines.append(f"  {action:{width}} {one.cell.id} {label(one.cell)}  ({reason})")
    if shown:
        yield from _first_of(len(chosen), lines, ": --all prints them")
    yield from _too_wide(plan, label, shown)


def _too_wide(plan: Plan, label: Callable[[Cell], str], shown: int) -> Iterator[str]:
    """Yield how many cells need how many GPUs of one host, and a line for each."""
    if not plan.too_wide:
        return
    cells = plan.too_wide.values()
    by_width = Counter(cell.params.gpu_count for cell in cells)
    counts = [f"{text.cell_count(by_width[width])} with {width} GPUs" for width in sorted(by_width)]
    yield f"needs more GPUs than a host has: {', '.join(counts)}"
    if shown:
        lines = [f"  {cell.id} {label(cell)}" for cell in islice(cells, shown)]
        yield from _first_of(len(cells), lines)


def plan_records(
    plan: Plan, predictions: Mapping[str, Prediction], card: GpuModel | None
) -> Iterator[Values]:
    """Yield an object for programs for each cell, in the order of the config.

    predictions: by cell id. A cell that has one also has `memory`.
    """
    from orchestrator.planning.prediction_requests import cap_bytes, reason_of, verdict_of

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
                "torch": package_version("torch"),
                "reason": reason_of(cell, prediction, card),
                "at_peak_bytes": prediction.role_bytes(),
                "module_bytes": dict(prediction.module_bytes),
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
        return f"expected: {text.format_seconds(expected.wall_s)} on {where} {expected}"
    return _why_unknown(estimator, cells, gpu, name)


def _why_unknown(
    estimator: DurationEstimator, cells: Sequence[Cell], gpu: str | None, name: str | None
) -> str:
    """Return why no duration can be estimated and what to do, or nothing for cells on the CPU.

    gpu: the name that the driver gives; None if only the memory of the GPU is known.
    name: the GPU's name for the reader; None without a GPU.
    """
    on_gpu = [cell for cell in cells if cell.params.device == "cuda"]
    later = "; an estimate is available when the first of these cells has ended"
    if unknown := next(filter(estimator.lacks_formula, cells), None):
        model = unknown.params.values().get("model") or unknown.task
        reason = f"no formula is known for {model}{later}"
    elif not on_gpu:
        return ""
    elif name is None:
        reason = "no GPU is here; add --gpu H200 for an estimate"
    elif gpu is None:
        reason = "--gpu gave only a memory size; name the GPU, for example --gpu 'RTX 4090'"
    elif precisions := estimator.precisions_without_peak(on_gpu):
        peaks = f"the peak speed of {name} in {' and '.join(precisions)}"
        reason = f"no source was found for {peaks}{later}"
    else:
        reason = f"some cells run on the CPU{later}"
    return f"expected time: unknown, {reason}"


def _where(cells: Sequence[Cell], card: GpuModel | None, gpus: Sequence[str], widest: int) -> str:
    devices = device_types(cells)
    if "cuda" not in devices:
        return "the CPU" if devices == ["cpu"] else "this machine"
    if card is not None:
        return f"{widest} × {card.name}," if widest > 1 else f"one {card.name},"
    if len(gpus) < widest:
        return f"a host with {widest} GPUs," if widest > 1 else "one GPU,"
    return f"this machine's {text.counted(len(gpus), 'GPU')},"


def describe_status(request: SweepRequest, plan: Plan) -> Iterator[str]:
    """Return counts by status, what failed and why, and what would run next."""
    requested = {decision.cell.id for decision in plan.decisions}
    unrequested = leave_out(plan.states, requested).values()
    others = Counter(str(state.status) for state in unrequested)
    counts, is_closed = plan.statuses(), request.run.is_published
    if is_closed:  # which command asked for a cell matters only to one that continues
        counts += others
    for status, count in sorted(counts.items()):
        yield f"{count:>6} {status}"
    if others and not is_closed:
        cells, by_status = (
            text.cell_count(others.total()),
            text.format_counts(sorted(others.items())),
        )
        yield f"and {cells} that the last command did not ask for: {by_status}"
    yield from _failures(request, plan)
    to_run = list(dict.fromkeys(plan.to_measure))
    if is_closed:
        measured = counts.total() - counts[PENDING]
        share = f"{measured} of {text.cells_and_verb(counts.total(), 'was', 'were')} measured"
        yield f"this run is published and closed: {share}"
        yield from _continuation_in_copy(request.run, plan)
    else:
        yield _continuation(request.run, plan, len(to_run))
    label = request.expansion.label
    lines = [f"  {cell.id} {label(cell)}" for cell in to_run[:SHOWN_CELLS]]
    yield from _first_of(len(to_run), lines)
    yield from _too_wide(plan, label, SHOWN_CELLS)


def _first_of(count: int, lines: Sequence[str], more: str = "") -> Iterator[str]:
    """Yield the lines of the first ones of a number of cells, and how many cells there are besides."""
    yield from lines
    if count > len(lines):
        yield f"  … and {count - len(lines)} more{more}"


def _continuation(run: Run, plan: Plan, to_run: int) -> str:
    """Return how many cells are left to measure, and the command that measures them."""
    requested = text.cell_count(len(plan.decisions))
    if not to_run:
        left = f"nothing is left to measure of {requested}{_given_up(run, plan)}"
        if plan.too_wide:
            wider = text.cells_and_verb(len(plan.too_wide), "needs", "need")
            left += f"; {wider} another host: {last_command(run)}"
        return left
    if is_search(run):
        left = f"not measured by the search: {to_run} of {requested}"
        return f"{left}. To continue it, or to see its answer: {last_command(run)}"
    left = f"{to_run} of {requested}{repetition_note(plan)}"
    return f"left to measure: {left}. To continue: {last_command(run)}"


def _given_up(run: Run, plan: Plan) -> str:
    """Return how many cells failed too often, and the command that tries them again."""
    if not plan.given_up:
        return ""
    statuses = sorted(plan.given_up)
    retry = [word for status in statuses for word in ("--retry", status)]
    failed = f"{text.cell_count(plan.given_up.total())} failed too often"
    return f"; {failed}. To try again: {command_with(run, retry, statuses)}"


def _continuation_in_copy(run: Run, plan: Plan) -> Iterator[str]:
    """Yield the commands that measure the other cells of a published run in a copy."""
    if plan.to_measure:
        copy = Path("results") / run.folder.name
        # `cp -r` into an existing folder would create a folder inside it.
        if copy.exists():
            copy = copy.with_name(f"{copy.name}-copy")
        yield f"to continue, copy it: cp -r {text.shell_path(run)} {text.shell_path(copy)}"
        yield f"then: {command_in_copy(run, copy)}"
        yield f"which measures {text.cell_count(len(set(plan.to_measure)))}{repetition_note(plan)}:"


def _failures(request: SweepRequest, plan: Plan) -> Iterator[str]:
    """Yield the status of each cell without a result, where it ended and why."""
    rows = request.run.rows("attempts", ["cell", "attempt", "stage", "phase", "evidence"])
    ends = {(cell, number): end for cell, number, *end in rows}
    lines, count = [], 0
    for cell in (decision.cell for decision in plan.decisions):
        shown = plan.state(cell).shown
        if not shown or shown.status in _NO_FAILURES:
            continue
        count += 1
        if count <= SHOWN_CELLS:
            stage, phase, evidence = ends[shown.cell, shown.number]
            where = text.end_location(stage, phase) or "start"
            reason = text.failure_reason(json.loads(evidence))
            label = request.expansion.label(cell)
            lines.append(f"  {shown.status} {cell.id} {label} in {where}: {reason}")
    yield from _first_of(count, lines, " that did not end well")
