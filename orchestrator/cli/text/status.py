"""Text of `sweep status`: what is measured, what failed and why, what is left."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from orchestrator.cli.text.plan import SHOWN_CELLS, describe_too_wide, repetition_note
from orchestrator.common.text import (
    cell_count,
    cells_and_verb,
    end_location,
    failure_reason,
    format_counts,
    shell_path,
)
from orchestrator.planning.cell_decisions import Plan
from orchestrator.planning.invocation import command_in_copy, last_command
from orchestrator.planning.request import SweepRequest
from orchestrator.store.cell_state import PENDING
from orchestrator.store.run import INCOMPLETE, Run
from tasks.spec.status import Status

_NO_FAILURES = (Status.OK, Status.SKIPPED, INCOMPLETE)


def describe_status(request: SweepRequest, plan: Plan) -> Iterator[str]:
    """Return counts by status, what failed and why, and what would run next."""
    requested = {decision.cell.id for decision in plan.decisions}
    others = Counter(
        str(state.status) for cell, state in plan.states.items() if cell not in requested
    )
    counts, is_closed = plan.statuses(), request.run.is_published
    if is_closed:  # which command asked for a cell matters only to one that continues
        counts += others
    for status, count in sorted(counts.items()):
        yield f"{count:>6} {status}"
    if others and not is_closed:
        cells, by_status = cell_count(others.total()), format_counts(sorted(others.items()))
        yield f"and {cells} that the last command did not ask for: {by_status}"
    yield from _failures(request, plan)
    to_run = list(dict.fromkeys(plan.to_measure))
    if is_closed:
        measured = counts.total() - counts[PENDING]
        share = f"{measured} of {cells_and_verb(counts.total(), 'was', 'were')} measured"
        yield f"this run is published and closed: {share}"
        yield from _continuation_in_copy(request.run, plan)
    else:
        yield _continuation(request.run, plan, len(to_run))
    for cell in to_run[:SHOWN_CELLS]:
        yield f"  {cell.id} {request.expansion.label(cell)}"
    if len(to_run) > SHOWN_CELLS:
        yield f"  … and {len(to_run) - SHOWN_CELLS} more"
    yield from describe_too_wide(plan, request.expansion.label, SHOWN_CELLS)


def _continuation(run: Run, plan: Plan, to_run: int) -> str:
    """Return how many cells are left to measure, and the command that measures them."""
    requested = cell_count(len(plan.decisions))
    if not to_run:
        left = f"nothing is left to measure of {requested}{_given_up(run, plan)}"
        if plan.too_wide:
            wider = cells_and_verb(len(plan.too_wide), "needs", "need")
            left += f"; {wider} another host: {last_command(run)}"
        return left
    left = f"{to_run} of {requested}{repetition_note(plan)}"
    return f"left to measure: {left}. To continue: {last_command(run)}"


def _given_up(run: Run, plan: Plan) -> str:
    """Return how many cells failed too often, and the command that tries them again."""
    exhausted = [decision.cell for decision in plan.decisions if decision.exhausted]
    if not exhausted:
        return ""
    statuses = sorted({str(plan.state(cell).since_mark.status) for cell in exhausted})
    retry = " ".join(f"--retry {status}" for status in statuses)
    failed = f"{cell_count(len(exhausted))} failed too often"
    return f"; {failed}. To try again: {last_command(run)} {retry}"


def _continuation_in_copy(run: Run, plan: Plan) -> Iterator[str]:
    """Yield the commands that measure the other cells of a published run in a copy."""
    if plan.to_measure:
        copy = Path("results") / run.folder.name
        # `cp -r` into an existing folder would create a folder inside it.
        if copy.exists():
            copy = copy.with_name(f"{copy.name}-copy")
        yield f"to continue, copy it: cp -r {shell_path(run)} {shell_path(copy)}"
        yield f"then: {command_in_copy(run, copy)}"
        yield f"which measures {cell_count(len(set(plan.to_measure)))}{repetition_note(plan)}:"


def _failures(request: SweepRequest, plan: Plan) -> Iterator[str]:
    """Yield the status of each cell without a result, where it ended and why."""
    rows = request.run.rows("attempts", ["cell", "attempt", "stage", "phase", "evidence"])
    ends = {(cell, number): end for cell, number, *end in rows}
    failed = []
    for cell in (decision.cell for decision in plan.decisions):
        shown = plan.state(cell).shown
        if shown and shown.status not in _NO_FAILURES:
            failed.append((cell, shown))
    for cell, shown in failed[:SHOWN_CELLS]:
        stage, phase, evidence = ends[shown.cell, shown.number]
        where = end_location(stage, phase) or "start"
        reason = failure_reason(json.loads(evidence))
        yield f"  {shown.status} {cell.id} {request.expansion.label(cell)} in {where}: {reason}"
    if len(failed) > SHOWN_CELLS:
        yield f"  … and {len(failed) - SHOWN_CELLS} more that did not end well"
