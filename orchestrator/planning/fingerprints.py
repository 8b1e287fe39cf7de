"""Fingerprints: the hardware and software that the results of a folder were measured with.

Results with another fingerprint may not join a folder unless the user allows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.common.errors import RunMismatch
from orchestrator.hardware.host import Fingerprint
from orchestrator.store.run import Run

Fingerprints = Mapping[str, Sequence[Fingerprint]]  # by device type, oldest first


def known_fingerprints(run: Run) -> Fingerprints:
    """Return the fingerprints in run.json, or those in the rows if run.json was lost."""
    stored: Fingerprints | None = run.read_manifest().get("fingerprints")
    if stored is not None:
        return stored
    found: dict[str, list[Fingerprint]] = {}
    rows = run.rows("attempts", ["started_at", "params", "facts"])
    for _, params, facts in sorted(rows, key=lambda row: str(row[0])):
        device = json.loads(params).get("device")
        fingerprint = json.loads(facts).get("fingerprint")
        if device and fingerprint:
            found[device] = unique_fingerprints([*found.get(device, ()), fingerprint])
    return found


def gpus_of(fingerprints: Iterable[Fingerprint]) -> set[str]:
    """Return the names of the GPUs that these fingerprints are of."""
    return {str(fingerprint.get("gpu")) for fingerprint in fingerprints}


def unique_fingerprints(fingerprints: Iterable[Fingerprint]) -> list[Fingerprint]:
    """Return each fingerprint once, in the order of the first occurrences."""
    found: list[Fingerprint] = []
    # A set is not possible, because a fingerprint is a dict.
    for fingerprint in map(dict, fingerprints):
        if fingerprint not in found:
            found.append(fingerprint)
    return found


def require_compatible(
    before: Sequence[Fingerprint], current: Iterable[Fingerprint], run: Run, *, any_gpu: bool
) -> None:
    """Raise RunMismatch if a current fingerprint is not among the earlier ones, at least one.

    any_gpu: GPUs may differ, because each cell names its kind of GPU.
    """
    ignored = {"gpu"} if any_gpu else set()
    for now in current:
        if all(set(_differing_names(known, now)) - ignored for known in before):
            latest = before[-1]
            names = _differing_names(latest, now)
            found = [f"{name} {latest.get(name)} (here {now.get(name)})" for name in names]
            raise RunMismatch(
                f"{run}: holds results of {', '.join(found)}",
                "Name another folder with --out, or add --mixed to allow both in one",
            )


def _differing_names(before: Fingerprint, now: Fingerprint) -> list[str]:
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]
