"""Divide the time of a GPU among computing, communication that nothing hides, copies and idleness.

Times are ns, and intervals are pairs of a begin and an end. Communication is exposed where no kernel
computes. A collective's kernel begins with waiting for the last rank: the shortest duration of the
same call over the ranks is its transfer, and the rest of a rank's duration is the wait (as TraceLens
defines them). No clocks of different GPUs are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tasks.traces.kernel_classes import classify
from tasks.traces.timeline import covered_ns

Interval = tuple[int, int]
_COPY = re.compile(r"^(CUDA )?(Memcpy|Memset)|^\[CUDA mem")


@dataclass(frozen=True)
class DeviceKernels:
    """The intervals of a GPU's kernels by kind, each kind in the order of the begins."""

    computing: Sequence[Interval]
    collectives: Sequence[Interval]
    copies: Sequence[Interval]


@dataclass(frozen=True)
class Parts:
    """Times in ns, under the names of the samples. The five after `profiled_step` add up to it.

    profiled_step: from the begin of the first kernel to the end of the last one.
    communication: in which a collective ran. transfer, wait: summed over the collectives.
    """

    profiled_step: int
    compute: int
    exposed_transfer: int
    exposed_wait: int
    exposed_copies: int
    idle: int
    communication: int
    transfer: int
    wait: int


def by_kind(kernels: Iterable[tuple[str, int, int]]) -> DeviceKernels:
    """Sort kernels, given as name, begin and end."""
    computing: list[Interval] = []
    collectives: list[Interval] = []
    copies: list[Interval] = []
    for name, begin, end in sorted(kernels, key=lambda kernel: kernel[1:]):
        if classify(name) == "communication":
            collectives.append((begin, end))
        elif _COPY.match(name):
            copies.append((begin, end))
        else:
            computing.append((begin, end))
    return DeviceKernels(computing, collectives, copies)


def transfers_of(durations: Sequence[Sequence[int]]) -> list[int]:
    """Return the transfer of each collective: of its durations on all ranks the shortest.

    Raise ValueError if the ranks ran different numbers of collectives.
    """
    counts = [len(of_rank) for of_rank in durations]
    if len(set(counts)) > 1:
        raise ValueError(f"the ranks ran different numbers of collectives: {counts}")
    return [min(of_call) for of_call in zip(*durations, strict=True)]


def divide(kernels: DeviceKernels, transfers: Sequence[int]) -> Parts:
    """Return how a GPU spent its time. transfers: of each collective."""
    computing, collectives = kernels.computing, kernels.collectives
    waits = []
    for (begin, end), transfer in zip(collectives, transfers, strict=True):
        waits.append((begin, max(begin, end - transfer)))
    everything = [*computing, *collectives, *kernels.copies]
    whole = 0
    if everything:
        whole = max(end for _, end in everything) - min(begin for begin, _ in everything)
    # What is exposed of something is by how much it enlarges the union.
    compute = covered_ns(computing)
    without_copies = covered_ns([*computing, *collectives])
    exposed_wait = covered_ns([*computing, *waits]) - compute
    return Parts(
        profiled_step=whole,
        compute=compute,
        exposed_transfer=without_copies - compute - exposed_wait,
        exposed_wait=exposed_wait,
        exposed_copies=covered_ns(everything) - without_copies,
        idle=whole - covered_ns(everything),
        communication=covered_ns(collectives),
        transfer=sum(transfers),
        wait=sum(end - begin for begin, end in waits),
    )
