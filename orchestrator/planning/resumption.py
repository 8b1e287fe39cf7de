"""A command that was ended early and is given again goes on: `--retry` and `--fresh` do not begin with the first cell anew.

What the unfinished invocations of the same command have brought to an end is not asked for again, whatever ran in between; a
command that had come to its end is another one when it is given once more, and so is one that would measure otherwise by now.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from orchestrator.common.text import cell_count
from orchestrator.planning.history import CellHistory, history_of
from orchestrator.planning.invocation import FINISHED, INVOCATION, is_same, measures_alike
from orchestrator.planning.options import ResumedCell, RunOptions
from orchestrator.planning.request import SweepRequest
from orchestrator.store.run import Run
from orchestrator.store.run_writer import RunWriter


def resume(request: SweepRequest, choice: RunOptions, invocation: Mapping[str, Any]) -> RunOptions:
    """What is left of it, where this command was ended before. invocation: the one that is to begin."""
    if not choice.again:
        return choice
    return replace(
        choice, done=_done_already(request.run, invocation, request.config.limits.attempts)
    )


def describe_resumption(request: SweepRequest, choice: RunOptions) -> Iterator[str]:
    if done := sum(cell.id in choice.done for cell in request.expansion.cells):
        yield f"this command was ended before: it goes on, with {cell_count(done)} of it done"


def _done_already(run: Run, invocation: Mapping[str, Any], attempts: int) -> dict[str, ResumedCell]:
    """The cells that the command has measured again already, if it has not come to its end since.

    attempts: how often a cell that fails is tried.
    """
    invocations = run.read_manifest().get("invocations", [])
    own = _unfinished(invocations, invocation)
    if not own:
        return {}
    places = {one["time"]: place for place, one in enumerate(invocations)}
    read = run.rows("attempts", ["cell", "attempt", "status", "wall_s", "replaces", "facts"])
    rows = [(row[:-1], places.get(json.loads(row[-1]).get(INVOCATION), -1)) for row in read]
    since = history_of((row for row, place in rows if place in own), run)
    before = history_of((row for row, place in rows if place < min(own)), run)
    found = {}
    for cell, past in since.items():
        failed = all(status.is_retried for status in past.statuses)
        if not failed or past.failures >= attempts:
            earlier = before.get(cell, CellHistory())
            found[cell] = ResumedCell(max(1, earlier.successes), earlier.misses, failed)
    return found


def _unfinished(
    invocations: Sequence[Mapping[str, Any]], invocation: Mapping[str, Any]
) -> set[int]:
    """The places of the last ones of this command, since it came to its end, that measured as it would."""
    own = [
        (place, one)
        for place, one in enumerate(invocations)
        if is_same(one, invocation) and measures_alike(one, invocation)
    ]
    return {
        place for place, _ in takewhile(lambda own: own[1].get(FINISHED) is False, reversed(own))
    }


def mark_finished(writer: RunWriter, invocation: Mapping[str, Any]) -> None:
    manifest = writer.read_manifest()
    before = manifest.get("invocations", [])
    noted = [{**one, FINISHED: True} if is_same(one, invocation) else one for one in before]
    if noted != before:
        writer.write_manifest({**manifest, "invocations": noted})
