"""Summarise work as rows by kernel, and as samples: attributed shares, busy share of the device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from tasks.spec.tables import OUTSIDE_OPERATORS, UNKNOWN_CLASS, KernelRow, Sample
from tasks.traces.attribution import Work
from tasks.traces.timeline import covered_ns

_NS_PER_MS = 1e6
Key = tuple[str, str, str, str, str, str]  # phase, part, kind, how, operator, name


def to_rows(works: Iterable[Work], steps: int | None) -> list[KernelRow]:
    """Return one row per kernel, operator, phase and module, the longest total first.

    steps: number of steps in the trace, if known.
    """
    durations: dict[Key, list[int]] = defaultdict(list)
    for work in works:
        key = (work.phase, work.part, work.kind, str(work.how), work.operator, work.name)
        durations[key].append(work.duration_ns)
    rows = [_row(key, sorted(found), steps) for key, found in durations.items()]
    return sorted(rows, key=lambda row: -row.total_ns)


def _row(key: Key, found: Sequence[int], steps: int | None) -> KernelRow:
    """Return the row of durations, given in ascending order."""
    count, total_ns = len(found), sum(found)
    mean_ns, sd_ns = total_ns / count, None
    if count > 1:
        # Not `statistics.stdev`: it computes with fractions, and takes ten times as long.
        sd_ns = math.sqrt(math.fsum((value - mean_ns) ** 2 for value in found) / (count - 1))
    return KernelRow(
        *key,
        steps=steps,
        count=count,
        total_ns=total_ns,
        mean_ns=mean_ns,
        median_ns=(found[(count - 1) // 2] + found[count // 2]) / 2,
        min_ns=found[0],
        max_ns=found[-1],
        sd_ns=sd_ns,
    )


def to_samples(works: Sequence[Work], steps: int | None, on_device: bool) -> Iterator[Sample]:
    """Yield time by phase, attributed shares, and for a device its busy share.

    Times are means per step, and null if `steps` is unknown.
    """
    inside = [work for work in works if work.name != OUTSIDE_OPERATORS]
    scale = _NS_PER_MS * steps if steps else math.nan
    by_phase: dict[str, list[Work]] = defaultdict(list)
    for work in inside:
        by_phase[work.phase].append(work)
    for phase, members in by_phase.items():
        yield _per_step("kernel_time", _total(members), scale, phase or "outside")
    yield from _coverage(inside)
    if on_device:
        yield from _busy_by_phase(by_phase)
        yield from _gaps(inside, scale)


def _per_step(metric: str, ns: int, scale: float, phase: str = "") -> Sample:
    if math.isnan(scale):
        note = "the number of steps in the trace is not known"
        return Sample("kernels", metric, "ms", None, phase=phase, note=note)
    return _sample(metric, "ms", ns / scale, phase)


def _sample(metric: str, unit: str, value: float | None, phase: str = "") -> Sample:
    return Sample("kernels", metric, unit, value, phase=phase)


def _total(works: Iterable[Work]) -> int:
    return sum(work.duration_ns for work in works)


def _coverage(works: Sequence[Work]) -> Iterator[Sample]:
    """Yield the shares of all time that have a phase, a module and a class."""
    total = _total(works)
    attributed_ns = {
        "phase": _total(work for work in works if work.phase),
        "module": _total(work for work in works if work.part),
        "class": _total(work for work in works if work.kind != UNKNOWN_CLASS),
    }
    for name, ns in attributed_ns.items():
        yield _sample(f"attributed_to_{name}", "ratio", ns / total if total else None)


def _busy_by_phase(by_phase: dict[str, list[Work]]) -> Iterator[Sample]:
    """Yield for each phase the busy share of the time from its first to its last kernel."""
    for phase, members in by_phase.items():
        # Each occurrence separately: other phases run between two of them.
        occurrences: dict[int, list[Work]] = defaultdict(list)
        for work in members:
            occurrences[work.occurrence].append(work)
        busy_ns = sum(map(_busy_ns, occurrences.values()))
        span_ns = sum(map(_span_ns, occurrences.values()))
        if phase:
            yield _sample("busy", "ratio", busy_ns / span_ns, phase)


def _gaps(works: Sequence[Work], scale: float) -> Iterator[Sample]:
    """Yield the device's busy share, its idle time, and the idle time that the host caused."""
    if not works:
        return
    idle_ns = late_ns = 0
    ordered = sorted(works, key=attrgetter("start_ns"))
    reached_ns = ordered[0].end_ns
    for work in ordered[1:]:
        gap_ns = max(0, work.start_ns - reached_ns)
        idle_ns += gap_ns
        # The host causes a gap if it launches the next work after the gap began. The whole gap
        # counts, with the latency of the launch.
        if work.launched_ns is not None and work.launched_ns > reached_ns:
            late_ns += gap_ns
        reached_ns = max(reached_ns, work.end_ns)
    yield _sample("busy", "ratio", _busy_ns(works) / _span_ns(works))
    yield _per_step("idle", idle_ns, scale)
    yield _per_step("idle_for_host", late_ns, scale)


def _span_ns(works: Sequence[Work]) -> int:
    last_ns = max(work.end_ns for work in works)
    return max(1, last_ns - min(work.start_ns for work in works))


def _busy_ns(works: Sequence[Work]) -> int:
    return covered_ns((work.start_ns, work.end_ns) for work in works)
