"""Find the process that launched each piece of work, in a file that holds the traces of several.

Programs that merge the traces of ranks change the ids of processes at most: ids of threads and
correlation ids, which a trace counts from 1, then occur once in each rank, and a device may be
number 0 of every process. Launches name their process, work names only its device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from tasks.traces.timeline import Launch

# Kernels of a device for each launch of an id: 1 if one process uses it, 2 if two share its name.
_MOST_OF_ONE_PROCESS = 1.5


class MergedWork(NamedTuple):
    """A piece of work: its position in the file, and the device as the file names it."""

    position: int
    start_ns: int
    correlation: int | None
    place: str


class Owners(NamedTuple):
    """The process of each piece of work, "" if unknown. is_guess: by the order in time alone."""

    processes: Sequence[str]
    is_guess: bool


# The moments of the launches with an id, by process.
_ById = Mapping[int | None, Mapping[str, int]]


def find_owners(
    launches: Mapping[str, Mapping[int, Launch]],
    extents: Mapping[str, tuple[int, int]],
    works: Sequence[MergedWork],
) -> Owners:
    """Return the process of each piece of work, which is given in the order of the file.

    launches: by process and correlation id. extents: the first and the last position in the file of
    what each process did on the host.
    """
    by_id: dict[int | None, dict[str, int]] = defaultdict(dict)
    for process, own in launches.items():
        for number, launch in own.items():
            by_id[number][process] = launch.at_ns
    in_order = sorted((first, last, process) for process, (first, last) in extents.items())
    if all(one[1] < other[0] for one, other in pairwise(in_order)):
        return Owners(list(_by_position(by_id, in_order, works)), is_guess=False)
    return _by_time(by_id, works)


def _by_position(
    by_id: _ById, extents: Sequence[tuple[int, int, str]], works: Sequence[MergedWork]
) -> Iterator[str]:
    """Yield the process of each piece of work in a file with one trace after the other."""
    firsts = [first for first, _, _ in extents]
    seen: set[tuple[str, int | None]] = set()
    for work in works:
        index = max(0, bisect_right(firsts, work.position) - 1)
        _, last, process = extents[index]
        owner = process
        if work.position > last and index + 1 < len(extents):
            # Between two processes: work may stand at the end or at the start of a trace.
            following = extents[index + 1][2]
            launched = by_id.get(work.correlation, {})
            is_over = process not in launched or (process, work.correlation) in seen
            owner = following if following in launched and is_over else process
        if work.position < last or owner != process:
            seen.add((owner, work.correlation))
        yield owner


def _by_time(by_id: _ById, works: Sequence[MergedWork]) -> Owners:
    """Return the processes for a file in which the traces are mixed, for example sorted by time."""
    of_id: dict[int | None, list[int]] = defaultdict(list)
    for index in sorted(range(len(works)), key=lambda index: works[index].start_ns):
        of_id[works[index].correlation].append(index)
    owners = [""] * len(works)
    votes: dict[str, Counter[str]] = defaultdict(Counter)
    kernels: dict[str, list[float]] = defaultdict(list)  # of a place for one launch
    for number, indices in of_id.items():
        # If all work can follow its launch, it does so in this order.
        launched = sorted((at_ns, process) for process, at_ns in by_id.get(number, {}).items())
        if not launched:
            continue
        for rank, index in enumerate(indices):
            _, owners[index] = launched[rank * len(launched) // len(indices)]
            votes[works[index].place][owners[index]] += 1
        for place, count in Counter(works[index].place for index in indices).items():
            kernels[place].append(count * len(launched) / len(indices))
    shared = {place for place, counts in kernels.items() if fmean(counts) > _MOST_OF_ONE_PROCESS}
    for index, work in enumerate(works):
        if work.place in votes and work.place not in shared:
            owners[index] = votes[work.place].most_common(1)[0][0]
    is_guess = any(len(by_id.get(number, {})) > 1 for number in of_id)
    return Owners(owners, is_guess)
