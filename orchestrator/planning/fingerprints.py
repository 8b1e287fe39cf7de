"""Fingerprints: the hardware and software that the results of a folder were measured with.

Results with another fingerprint may not join a folder unless the user allows it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from orchestrator.common.errors import RunMismatch
from orchestrator.hardware.host import Fingerprint, HostInfo
from orchestrator.store.run import Run

Fingerprints = Mapping[str, Sequence[Fingerprint]]  # by device type, oldest first


def known_fingerprints(run: Run) -> Fingerprints:
    """Return the fingerprints in run.json, or those in the rows if run.json was lost."""
    stored: Fingerprints | None = run.read_manifest().get("fingerprints")
    return _in_rows(run) if stored is None else stored


def current_fingerprints(hosts: Sequence[HostInfo], device: str) -> list[Fingerprint]:
    """Return the fingerprints of a device type on these hosts, each once."""
    found: list[Fingerprint] = []
    for host in hosts:
        for fingerprint in map(dict, host.fingerprints.get(device, ())):
            if fingerprint not in found:
                found.append(fingerprint)
    return found


def require_compatible(
    before: Sequence[Fingerprint],
    current: Collection[Fingerprint],
    run: Run,
    *,
    any_gpu: bool,
) -> None:
    """Raise RunMismatch if a current fingerprint is not among the earlier ones.

    any_gpu: GPUs may differ, because each cell names its kind of GPU.
    """
    compared = _without_gpu if any_gpu else dict
    known = [compared(fingerprint) for fingerprint in before]
    others = [fingerprint for fingerprint in current if compared(fingerprint) not in known]
    if before and others:
        raise RunMismatch(
            f"{run}: holds results of {_difference(before[-1], others[0])}",
            "Name another folder with --out, or add --mixed to allow both in one",
        )


def _in_rows(run: Run) -> Fingerprints:
    found: dict[str, list[Fingerprint]] = {}
    rows = run.rows("attempts", ["started_at", "params", "facts"])
    for _, params, facts in sorted(rows, key=lambda row: str(row[0])):
        device = json.loads(params).get("device")
        fingerprint = json.loads(facts).get("fingerprint")
        if device and fingerprint and fingerprint not in found.setdefault(device, []):
            found[device].append(fingerprint)
    return found


def _without_gpu(fingerprint: Fingerprint) -> dict[str, Any]:
    return {name: value for name, value in fingerprint.items() if name != "gpu"}


def _difference(before: Fingerprint, now: Fingerprint) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)} (here {now.get(name)})" for name in names)
