"""Which processor cores what measures on a GPU has to itself, so that a neighbour's compiling or launching takes none of them.

With several GPUs on a host each has an equal share of the cores, of those on its NUMA node where that is known. With one, the
cores of its node where that is known to be a part of the host, and else all. A core's hardware threads stay together.

On four H200s and 64 cores a host-bound cell (small, 128 tokens, fp32) took 38 ms a step alone, 32 alone and pinned, 41 to 52
with three others beside it, and 39 to 41 with all of them pinned.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from orchestrator.hardware.nvml import near_cores

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def cores_for(gpu: str, gpus: Mapping[str, str]) -> tuple[int, ...] | None:
    """The cores for one of this host's GPUs, or None for all that there are.

    gpu: as in CUDA_VISIBLE_DEVICES. gpus: the UUID of each that cells may be measured on, by that name.
    """
    if gpu not in gpus or not hasattr(os, "sched_getaffinity"):
        return None
    return _cores_here(gpu, tuple(gpus.items()), frozenset(os.sched_getaffinity(0)))


@cache
def _cores_here(
    gpu: str, gpus: tuple[tuple[str, str], ...], allowed: frozenset[int]
) -> tuple[int, ...] | None:
    near = {name: near_cores(uuid) for name, uuid in gpus}
    return divide(allowed, near, [_siblings(core) for core in sorted(allowed)])[gpu]


def divide(
    allowed: frozenset[int],
    near: Mapping[str, frozenset[int] | None],
    together: Iterable[frozenset[int]],
) -> dict[str, tuple[int, ...] | None]:
    """The share of each GPU. near: the cores of its node; together: cores that are threads of one. None: all that there are.

    Nodes count where they are known of every GPU, and are the same or have nothing in common; else all GPUs share all cores.
    """
    nodes = {name: allowed if cores is None else cores & allowed for name, cores in near.items()}
    distinct = set(nodes.values())
    apart = sum(map(len, distinct)) == len(frozenset().union(*distinct))
    if not all(nodes.values()) or not apart:
        nodes = dict.fromkeys(near, allowed)
    physical = sorted({frozenset(group & allowed) for group in together}, key=sorted)
    shares: dict[str, tuple[int, ...] | None] = {}
    for node in set(nodes.values()):
        names = [name for name in near if nodes[name] == node]
        whole = [group for group in physical if group <= node]
        for place, name in enumerate(names):
            share = frozenset().union(*_part(whole, place, len(names)))
            shares[name] = tuple(sorted(share)) if share and share != allowed else None
    return shares


def _part(groups: Sequence[frozenset[int]], place: int, of: int) -> Sequence[frozenset[int]]:
    """Equal parts; what is left over is nobody's, for all to be alike."""
    size = len(groups) // of
    return groups[place * size : (place + 1) * size]


def _siblings(core: int) -> frozenset[int]:
    path = Path(_TOPOLOGY.format(core))
    return parse_cores(path.read_text()) if path.exists() else frozenset({core})


def parse_cores(text: str) -> frozenset[int]:
    """`0-3,8` as the kernel writes it."""
    spans = [span.partition("-") for span in text.strip().split(",") if span]
    return frozenset(
        core
        for low, dash, high in spans
        for core in range(int(low), int(high if dash else low) + 1)
    )
