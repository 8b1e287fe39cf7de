"""Result of probing a host: its GPUs and their names, its software, and what its cells would inherit.

A scheduler asks every host once, before the first cell, in a process that imports torch
(execution/host_probe.py). The JSON answer is parsed here, so that no other module reads it by key.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.common.errors import RunMismatch
from tasks.spec.axes import Values, select_fields

Fingerprint = Values  # what must match before results may share a folder
Fingerprints = Mapping[str, Sequence[Fingerprint]]  # by device type, oldest first
GpuUuids = Mapping[str, str]  # UUID by the name that a GPU has in CUDA_VISIBLE_DEVICES
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class GpuInfo:
    """A GPU as CUDA sees it. The UUID is written as torch prints it, without `GPU-`."""

    name: str
    memory_bytes: int
    uuid: str = ""


@dataclass(frozen=True)
class HostInfo:
    """A host that could measure.

    `fingerprints` has one entry for each kind of GPU of each device type, such as
    `{"cpu": [{...}], "cuda": [{...}, {...}]}`. The list of a device type that it lacks is empty.
    """

    name: str = ""
    gpus: tuple[GpuInfo, ...] = ()
    fingerprints: Mapping[str, Sequence[Fingerprint]] = field(default_factory=dict)
    visible_devices: str | None = None
    nice: int = 0
    python: str = ""
    torch: str = ""
    cuda: str | None = None
    cudnn: int | None = None
    driver: str | None = None
    driver_note: str = ""
    cpu: str = ""
    cores: int = 0

    @classmethod
    def from_probe(cls, facts: Values) -> HostInfo:
        """Read what `python -m tasks --probe` printed."""
        gpus = tuple(
            GpuInfo(gpu["name"], gpu["memory_bytes"], gpu["uuid"]) for gpu in facts["gpus"]
        )
        return cls(**{**select_fields(cls, facts), "name": facts["host"], "gpus": gpus})


def gpu_counts(hosts: Iterable[HostInfo]) -> list[dict[str, int]]:
    """Return how many GPUs of each name a host has, for each host that differs from the others."""
    counts = [Counter(gpu.name for gpu in host.gpus) for host in hosts]
    return [dict(one) for number, one in enumerate(counts) if one and one not in counts[:number]]


def cores_here() -> int:
    """Return how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def split_gpu_names(visible: str) -> tuple[str, ...]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names."""
    return tuple(filter(None, map(str.strip, visible.split(","))))


def visible_gpu_uuids(host: HostInfo) -> dict[str, str]:
    """Return the UUIDs of a host's GPUs by their names in CUDA_VISIBLE_DEVICES.

    Without that variable the names are indices: "0", "1", …
    """
    names = split_gpu_names(host.visible_devices or "")
    if not names:
        names = tuple(map(str, range(len(host.gpus))))
    # CUDA ignores the first name that does not exist and all names after it, so there may be more
    # names than GPUs.
    return {name: gpu.uuid for name, gpu in zip(names, host.gpus, strict=False)}


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
    before: Sequence[Fingerprint], current: Iterable[Fingerprint], run: object, *, any_gpu: bool
) -> None:
    """Raise RunMismatch if a current fingerprint is not among the earlier ones, at least one.

    any_gpu: GPUs may differ, because each cell names its kind of GPU. run: named in the error.
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
