"""Turn labelled allocations into rows: contents at one moment, and live bytes by role over time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, takewhile

from tasks.snapshots.attribution import Labelled, Role, RoleEvidence
from tasks.snapshots.frames import call_chain
from tasks.snapshots.replay import Frames, Record
from tasks.spec.tables import WHOLE_STEP, AllocationRow, LiveRow

# The moments that rows describe.
PEAK, OUT_OF_MEMORY, AT_END_OF_RECORD = "peak", "out of memory", "end of the record"

# The backward pass runs on a thread without Python frames, so its chains are those of the forward.
_FORWARD, _BACKWARD = "forward", "backward"
_MOST_POINTS = 250
_US_PER_MS = 1e3


def to_rows(
    labelled: Sequence[Labelled], at: int, moment: str, phase: str, slack_bytes: int | None
) -> list[AllocationRow]:
    """Return rows of what lives after the event `at`, the largest first.

    Allocations with the same role, part, stack and size share a row. slack_bytes: size of the
    allocator's blocks minus the requested sizes, which is a separate row without a count; None if
    unknown.
    """
    of_forward = _forward_chains(labelled)
    groups: Counter[tuple[Role, str, RoleEvidence, str, str, int]] = Counter()
    chains: dict[int, str] = {}  # by stack, which many allocations share
    for one in labelled:
        allocation = one.allocation
        if allocation.start <= at < allocation.end:
            stack = id(allocation.frames)
            if stack not in chains:
                chains[stack] = call_chain(allocation.frames)
            chain = chains[stack]
            if not chain and one.made_in == _BACKWARD and of_forward.get(allocation.part):
                chain = f"backward of {of_forward[allocation.part]}"
            groups[one.role, one.part, one.how, one.made_in, chain, allocation.size_bytes] += 1
    when, none = (moment, phase), str(RoleEvidence.NONE)
    rows: list[AllocationRow] = []
    if slack_bytes is not None:
        sizes = (slack_bytes, 0, slack_bytes)
        rows.append(AllocationRow(*when, str(Role.SLACK), "", none, "", "", *sizes))
    for (role, part, how, made_in, chain, size), n in groups.items():
        row = AllocationRow(*when, str(role), part, str(how), made_in, chain, size, n, size * n)
        rows.append(row)
    return sorted(rows, key=lambda row: -row.total_bytes)


def largest_of_parts(record: Record, labelled: Sequence[Labelled]) -> list[AllocationRow]:
    """Return the largest allocation of each role and part that lives in the last step, whenever.

    Count and total size of these rows are 0, so that sums over all rows are those of the peak.
    """
    largest: dict[tuple[Role, str], Labelled] = {}
    for one in labelled:
        allocation, key = one.allocation, (one.role, one.part)
        if allocation.start < record.entries and allocation.end > record.begin:
            known = largest.setdefault(key, one)
            if allocation.size_bytes > known.allocation.size_bytes:
                largest[key] = one
    rows = []
    for (role, part), one in largest.items():
        evidence = (str(one.how), one.made_in, call_chain(one.allocation.frames))
        size = one.allocation.size_bytes
        rows.append(AllocationRow(WHOLE_STEP, "", str(role), part, *evidence, size, 0, 0))
    return sorted(rows, key=lambda row: -row.size_bytes)


def _forward_chains(labelled: Sequence[Labelled]) -> dict[str, str]:
    """Return the calls that the forward allocations of each part of the model have in common."""
    common: dict[str, Frames] = {}
    for one in labelled:
        part, frames = one.allocation.part, one.allocation.frames
        if one.made_in == _FORWARD and part and frames:
            pairs = zip(reversed(frames), reversed(common.get(part, frames)), strict=False)
            shared = [frame for frame, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
            common[part] = shared[::-1]
    return {part: call_chain(frames) for part, frames in common.items()}


def unlabelled_bytes(rows: Sequence[AllocationRow]) -> int:
    """Return the bytes of rows whose role is not known."""
    return sum(row.total_bytes for row in rows if row.role == Role.UNLABELLED)


def to_curve(record: Record, labelled: Sequence[Labelled]) -> list[LiveRow]:
    """Return the live bytes of each role over the last step, at most at about 250 moments.

    Each moment is the highest of its interval, so that the curve contains the peak.
    """
    live = record.live_bytes()
    curves = _by_role(record, labelled)
    rows: list[LiveRow] = []
    for span in _spans(record):
        moment = max(span, key=live.__getitem__)
        at_ms = (record.times_us[moment] - record.times_us[record.begin]) / _US_PER_MS
        phase = record.phase_at(moment)
        rows += [LiveRow(moment, at_ms, phase, str(role), curves[role][moment]) for role in curves]
    return rows


def _spans(record: Record) -> Iterator[range]:
    """Yield intervals of the last step's events, which do not cross phase boundaries."""
    edges = {record.begin, record.entries}
    for phase in record.step:
        edges |= {min(phase.start, record.entries), min(phase.end, record.entries)}
    points = max(1, _MOST_POINTS - len(edges))
    length = max(1, -(-(record.entries - record.begin) // points))
    for begin, end in pairwise(sorted(edges)):
        for start in range(begin, end, length):
            yield range(start, min(start + length, end))


def _by_role(record: Record, labelled: Sequence[Labelled]) -> dict[Role, list[int]]:
    """Return the live bytes after each event, for each role that occurs in the last step."""
    changes: dict[Role, list[int]] = defaultdict(lambda: [0] * (record.entries + 1))
    for one in labelled:
        allocation = one.allocation
        if allocation.end > record.begin:
            of_role = changes[one.role]
            of_role[max(allocation.start, 0)] += allocation.size_bytes
            of_role[min(allocation.end, record.entries)] -= allocation.size_bytes
    return {role: list(accumulate(changes[role])) for role in Role if role in changes}
