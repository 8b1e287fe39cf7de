"""Resumption of an interrupted --retry or --fresh.

If the same command is given again, it does not start from the first cell: cells that its
unfinished invocations have already measured again are not measured a third time, whatever other
commands ran in between. A finished command starts from the first cell, and so does one that would
measure in another way by now.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.common.text import cell_count
from orchestrator.planning.history import HISTORY_COLUMNS, CellHistory, histories_of
from orchestrator.planning.invocation import FINISHED, INVOCATION, Invocation, read_invocations
from orchestrator.planning.options import ResumedCell
from orchestrator.planning.request import SweepRequest
from orchestrator.store.run_writer import RunWriter


def resume(request: SweepRequest, invocation: Invocation) -> SweepRequest:
    """Return the request with the cells that its command measured before it was interrupted."""
    if not request.options.measures_again:
        return request
    options = replace(request.options, resumed=_resumed_cells(request, invocation))
    return replace(request, options=options)


def describe_resumption(request: SweepRequest) -> str:
    """Return a message for the user, empty if nothing is resumed."""
    done = sum(cell.id in request.options.resumed for cell in request.expansion.cells)
    if not done:
        return ""
    return f"resuming this command, which was interrupted: {cell_count(done)} measured already"


def mark_finished(writer: RunWriter, invocation: Invocation) -> None:
    """Mark all entries of this command as finished, so that the next one starts from the first cell."""
    manifest = writer.read_manifest()
    is_changed = False
    for entry in manifest.get("invocations", []):
        if Invocation.from_json(entry).is_same_command(invocation) and not entry.get(FINISHED):
            entry[FINISHED] = is_changed = True
    if is_changed:
        writer.write_manifest(manifest)


def _resumed_cells(request: SweepRequest, invocation: Invocation) -> dict[str, ResumedCell]:
    run, max_attempts = request.run, request.config.limits.attempts
    invocations = read_invocations(run)
    unfinished = _unfinished(invocations, invocation)
    if not unfinished:
        return {}
    # By position and not by time: the clock of a host may have been set back in between.
    positions = {one.time: position for position, one in enumerate(invocations)}
    before, since = [], []
    for *row, facts in run.rows("attempts", [*HISTORY_COLUMNS, "facts"]):
        position = positions.get(json.loads(facts).get(INVOCATION), -1)
        if position in unfinished:
            since.append(tuple(row))
        elif position < min(unfinished):
            before.append(tuple(row))
    earlier, resumed = histories_of(before, run), {}
    for cell, history in histories_of(since, run).items():
        failed = all(status.is_retried for status in history.statuses)
        if not failed or history.failures >= max_attempts:
            past = earlier.get(cell, CellHistory())
            resumed[cell] = ResumedCell(max(1, past.successes), past.misses, failed)
    return resumed


def _unfinished(invocations: Sequence[Invocation], invocation: Invocation) -> set[int]:
    """Return the positions of this command's entries since it was last finished."""
    positions: set[int] = set()
    for position, one in reversed(list(enumerate(invocations))):
        if one.is_same_command(invocation) and one.measures_like(invocation):
            if not one.is_unfinished:
                break
            positions.add(position)
    return positions
