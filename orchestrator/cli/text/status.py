"""Text of `sweep status`: what is measured, what failed and why, what is left."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

from orchestrator.cli.text.plan import SHOWN_CELLS, repetition_note
from orchestrator.common.text import cell_count, end_location, failure_reason
from orchestrator.planning.invocation import command_in_copy, last_command
from orchestrator.planning.options import PENDING
from orchestrator.planning.plan import Plan, plan_request
from orchestrator.planning.request import SweepRequest
from orchestrator.planning.resumption import resume
from orchestrator.store.run import Run


def describe_status(request: SweepRequest) -> Iterator[str]:
    """Counts by status, what failed and why, what would run next."""
    plan = plan_request(resume(request, request.new_invocation()))
    for status, count in sorted(plan.statuses().items()):
        yield f"{count:>6} {status}"
    asked = {decision.cell.id for decision in plan.decisions}
    others = Counter(str(past.status) for cell, past in plan.histories.items() if cell not in asked)
    if others:
        said = ", ".join(f"{count} {status}" for status, count in sorted(others.items()))
        yield f"and {sum(others.values())} cells that the last command did not ask for: {said}"
    yield from _failures(request)
    to_run = list(dict.fromkeys(plan.to_measure))
    if request.run.is_published:
        yield from _describe_closed(request.run, plan)
    else:
        yield f"{last_command(request.run)} would run {len(to_run)} of {cell_count(len(plan.decisions))}{repetition_note(plan)}"
    for cell in to_run[:SHOWN_CELLS]:
        yield f"  {cell.id} {request.expansion.label(cell)}"
    if len(to_run) > SHOWN_CELLS:
        yield f"  … and {len(to_run) - SHOWN_CELLS} more"


def _describe_closed(run: Run, plan: Plan) -> Iterator[str]:
    """Of a published run: what was measured, and how to go on in a copy, where something is left."""
    asked, pending = len(plan.decisions), plan.statuses()[PENDING]
    yield f"this run is published and closed: {asked - pending} of the {cell_count(asked)} asked for were measured"
    if plan.to_measure:
        copy = Path("results") / run.folder.name
        if copy.exists():
            copy = copy.with_name(f"{copy.name}-copy")
        yield f"to go on, copy it: cp -r {shlex.quote(str(run))} {shlex.quote(str(copy))}"
        yield f"then: {command_in_copy(run, copy)}"
        yield f"which would run {cell_count(len(set(plan.to_measure)))}{repetition_note(plan)}:"


def _failures(request: SweepRequest) -> Iterator[str]:
    columns = ["cell", "attempt", "status", "stage", "phase", "evidence"]
    last = {
        row[0]: row[2:] for row in sorted(request.run.rows("attempts", columns), key=itemgetter(1))
    }
    ended = [(cell, *last[cell.id]) for cell in request.expansion.cells if cell.id in last]
    bad = [end for end in ended if end[1] not in ("ok", "skipped")]
    for cell, status, stage, phase, evidence in bad[:SHOWN_CELLS]:
        said = failure_reason(json.loads(evidence))
        yield f"  {status} {cell.id} {request.expansion.label(cell)} in {end_location(stage, phase) or 'start'}: {said}"
    if len(bad) > SHOWN_CELLS:
        yield f"  … and {len(bad) - SHOWN_CELLS} more that did not end well"
