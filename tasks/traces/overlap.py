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
    """Time in ns. All but `communication`, `transfer` and `wait` add up to `whole`.

    whole: from the begin of the first kernel to the end of the last one.
    communication: in which a collective ran. transfer, wait: summed over the collectives.
    """

    whole: int
    compute: int
    exposed_transfer: int
    exposed_wait: int
    copies: int
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

    Raise ValueError if the ranks did not run as many collectives.
    """
    counts = [len(of_rank) for of_rank in durations]
    if len(set(counts)) > 1:
        raise ValueError(f"the ranks ran different numbers of collectives: {counts}")
    return [min(of_call) for of_call in zip(*durations, strict=True)]


def divide(kernels: DeviceKernels, transfers: Sequence[int]) -> Parts:
    """Return how a GPU spent its time. transfers: of each collective."""
    computing, copies = merge(kernels.computing), merge(kernels.copies)
    collectives = merge(kernels.collectives)
    waits = []
    for (begin, end), transfer in zip(kernels.collectives, transfers, strict=True):
        waits.append((begin, max(begin, end - transfer)))
    everything = merge([*computing, *collectives, *copies])
    whole = everything[-1][1] - everything[0][0] if everything else 0
    exposed = subtract(collectives, computing)
    exposed_waits = subtract(merge(waits), computing)
    return Parts(
        whole=whole,
        compute=length(computing),
        exposed_transfer=length(exposed) - length(exposed_waits),
        exposed_wait=length(exposed_waits),
        copies=length(subtract(copies, merge([*computing, *collectives]))),
        idle=whole - length(everything),
        communication=length(collectives),
        transfer=sum(transfers),
        wait=sum(end - begin for begin, end in waits),
    )


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, in order and without overlaps."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def subtract(intervals: Sequence[Interval], removed: Sequence[Interval]) -> list[Interval]:
    """Return what is in the intervals and not in the removed ones. Both are unions by `merge`."""
    left: list[Interval] = []
    for begin, end in intervals:
        for low, high in removed:
            if high <= begin or low >= end:
                continue
            if low > begin:
                left.append((begin, low))
            begin = min(high, end)
        if begin < end:
            left.append((begin, end))
    return left


def length(intervals: Iterable[Interval]) -> int:
    """Return the sum of the lengths."""
    return sum(end - begin for begin, end in intervals)
