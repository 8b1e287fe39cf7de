"""Turn labelled allocations into rows: contents at one moment, and live bytes by role over time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tasks.snapshots.attribution import Labelled, Role, RoleEvidence, live_at
from tasks.snapshots.frames import call_chain
from tasks.snapshots.replay import Record
from tasks.spec.tables import AllocationRow, LiveRow

PEAK, OUT_OF_MEMORY = "peak", "out of memory"  # the moments that rows describe

_MOST_POINTS = 250
_US_PER_MS = 1e3


def to_rows(
    labelled: Sequence[Labelled], at: int, moment: str, phase: str, slack_bytes: int
) -> list[AllocationRow]:
    """Return rows of what lives after the event `at`, the largest first.

    Allocations with the same role, part, stack and size share a row. slack_bytes: size of the
    allocator's blocks minus the requested sizes, a separate row without a count.
    """
    alike: Counter[tuple[Role, str, RoleEvidence, str, str, int]] = Counter()
    for one in live_at(labelled, at):
        chain = call_chain(one.allocation.frames)
        alike[one.role, one.part, one.how, one.made_in, chain, one.allocation.size_bytes] += 1
    rows = [
        AllocationRow(
            moment,
            phase,
            str(role),
            part,
            str(how),
            made_in,
            chain,
            size_bytes,
            count,
            size_bytes * count,
        )
        for (role, part, how, made_in, chain, size_bytes), count in alike.items()
    ]
    slack = AllocationRow(
        moment,
        phase,
        str(Role.SLACK),
        "",
        str(RoleEvidence.NONE),
        "",
        "",
        slack_bytes,
        0,
        slack_bytes,
    )
    return sorted([*rows, slack], key=lambda row: -row.total_bytes)


def unlabelled_bytes(rows: Sequence[AllocationRow]) -> int:
    return sum(row.total_bytes for row in rows if row.role == Role.UNLABELLED)


def to_curve(record: Record, labelled: Sequence[Labelled]) -> list[LiveRow]:
    """Return the live bytes of each role over the last step, at most at about 250 moments.

    Each moment is the highest of its interval, so that the curve contains the peak.
    """
    live = record.live_bytes()
    moments = [max(span, key=live.__getitem__) for span in _spans(record)]
    curves = _by_role(record, labelled)
    began_us = record.times_us[record.begin] if moments else 0
    return [
        LiveRow(
            moment,
            (record.times_us[moment] - began_us) / _US_PER_MS,
            record.phase_at(moment),
            str(role),
            curve[moment],
        )
        for moment in moments
        for role, curve in curves.items()
    ]


def _spans(record: Record) -> Iterator[range]:
    """Yield intervals of the last step's events, which do not cross phase boundaries."""
    edges = {
        record.begin,
        record.entries,
        *(min(edge, record.entries) for p in record.step for edge in (p.start, p.end)),
    }
    length = max(1, -(-(record.entries - record.begin) // (_MOST_POINTS - len(edges))))
    ordered = sorted(edges)
    for begin, end in pairwise(ordered):
        yield from (range(start, min(start + length, end)) for start in range(begin, end, length))


def _by_role(record: Record, labelled: Sequence[Labelled]) -> dict[Role, list[int]]:
    """Return the live bytes after each event, for each role that occurs in the last step."""
    changes: dict[Role, list[int]] = defaultdict(lambda: [0] * (record.entries + 1))
    for one in labelled:
        allocation = one.allocation
        if allocation.end > record.begin:
            of_role = changes[one.role]
            of_role[max(allocation.start, 0)] += allocation.size_bytes
            of_role[min(allocation.end, record.entries)] -= allocation.size_bytes
    return {role: _summed(changes[role]) for role in Role if role in changes}


def _summed(changes: Sequence[int]) -> list[int]:
    total, sums = 0, []
    for change in changes:
        total += change
        sums.append(total)
    return sums
