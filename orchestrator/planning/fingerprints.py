"""What a folder's results were measured with: results of other hardware or software do not join them unasked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.common.errors import RunMismatch
from orchestrator.hardware.host import HostInfo
from orchestrator.store.run import Run

if TYPE_CHECKING:
    from orchestrator.planning.attempt_queue import AttemptQueue

Marks = dict[str, list[dict[str, Any]]]  # by device


def known_fingerprints(run: Run) -> Marks:
    """Of what a folder holds, oldest first: as its run.json says, or the rows where that was lost."""
    told: Marks | None = run.read_manifest().get("fingerprints")
    return _of_rows(run) if told is None else told


def check_fingerprints(
    run: Run, hosts: Sequence[HostInfo], queue: AttemptQueue, mixed: bool
) -> Marks:
    """Those of the folder with those that this run adds. Raises RunMismatch."""
    known = known_fingerprints(run) if queue.has_results else {}
    for device in sorted(queue.devices):
        current = [dict(mark) for host in hosts for mark in host.fingerprints.get(device, [])]
        before = known.get(device, [])
        unknown = [
            mark
            for place, mark in enumerate(current)
            if mark not in before and mark not in current[:place]
        ]
        same_but_gpu = [_but_gpu(mark) for mark in before] if queue.names_kinds else []
        others = [mark for mark in unknown if _but_gpu(mark) not in same_but_gpu]
        if before and others and not mixed:
            raise RunMismatch(
                f"{run}: holds results of {_difference(before[-1], others[0])}",
                "Name another folder with --out, or add --mixed to keep both in one",
            )
        known[device] = [*before, *unknown]
    return known


def _of_rows(run: Run) -> Marks:
    found: Marks = {}
    for _, params, facts in sorted(
        run.rows("attempts", ["started_at", "params", "facts"]), key=lambda row: str(row[0])
    ):
        device, mark = json.loads(params).get("device"), json.loads(facts).get("fingerprint")
        if device and mark and mark not in found.setdefault(device, []):
            found[device].append(mark)
    return found


def _but_gpu(mark: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mark.items() if name != "gpu"}


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)} (here {now.get(name)})" for name in names)
