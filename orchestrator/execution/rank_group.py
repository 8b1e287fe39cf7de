"""Joins what the ranks of a cell report: whose fault an end is, the group's samples, and a row for each.

A step ends when its slowest rank has ended it, and memory runs out on the rank that needs most: of
both, the group's value is the largest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from tasks.process.flight_record import Collective, last_collective
from tasks.process.journal import FinalStatus, JournalContents
from tasks.process.log_file import tail
from tasks.process.minder import REPORT, REPORT_BYTES, RankExits
from tasks.spec.attempt import FLIGHT_FILE, LOG_FILE, Attempt, rank_file
from tasks.spec.status import Status
from tasks.spec.tables import RankRow, Sample

# What gloo, NCCL and the store of the rendezvous say of a rank that does not arrive.
_LATE = rf"Timed out waiting|{REPORT}|timed out after \d+ ?(ms|s)"
# What they say of a rank that has ended.
_GONE = r"Connection closed by peer|Connection reset by peer|remote process exited|Broken pipe"
_OF_ENDS = ("signal", "exit_code")
# Energy and power of a cell are those of all its GPUs.
_SUMMED = ("power", "timed_power", "power_limit", "energy")
_TIMED_MODES = ("pipelined", "synced")


def find_cause(journals: Sequence[JournalContents], exits: RankExits) -> int:
    """Return the rank that ended the attempt: of those that ended by themselves, the cause.

    A rank that only reports that another one has gone is never the cause of its end.
    """
    if exits.missing:
        return exits.missing[0]
    if exits.over_memory_bytes is not None:
        return exits.over_memory_rank
    left = [rank for rank, code in enumerate(exits.codes) if not code]
    for rank in (*exits.failed, *left):
        if journals[rank].final is None:  # killed, or exited
            return rank
    if not exits.failed:
        return next((rank for rank, one in enumerate(journals) if one.final is None), 0)

    def order(rank: int) -> tuple[bool, float]:
        final, began = journals[rank].final, journals[rank].started_at
        is_echo = final is not None and re.search(_GONE, str(final.evidence.get("message")))
        return bool(is_echo), began + journals[rank].wall_s

    return min(exits.failed, key=order)


def blame(
    attempt: Attempt, rank: int, final: FinalStatus, wall_s: float
) -> tuple[int, FinalStatus]:
    """Return the rank at fault and the end of the attempt, by the flight records of all ranks.

    A rank that waited in vain for another one has reported the fault of that one.

    Args:
        rank: the one that ended first.
        wall_s: duration of the attempt. In less than the limit of a collective, no rank has waited
            in vain.
    """
    ranks = range(attempt.cell.params.ranks)
    flights = {one: _last_collective(attempt, one) for one in ranks}
    known = {one: flight for one, flight in flights.items() if flight is not None}
    evidence = {**final.evidence, "rank": rank}
    if known:
        arrived = {str(one): f"{flight.name} {flight.number}" for one, flight in known.items()}
        evidence["arrived"] = arrived
    log = tail(rank_file(attempt.path / LOG_FILE, rank), REPORT_BYTES)
    message = str(final.evidence.get("message"))
    # No rank has ended, so one has closed its connections: mostly because it waited in vain.
    is_gone = bool(re.search(_GONE, message))
    is_late = is_gone or bool(re.search(_LATE, f"{message} {log}"))
    is_beyond = "timeout_s" in evidence  # the limit of the attempt, which says nothing of a rank
    if is_beyond:
        del evidence["rank"]
    if not known or not (is_late or is_beyond) or "collective" in evidence:
        return rank, FinalStatus(final.status, evidence)
    latest = max(flight.number for flight in known.values())
    there = {one: flight for one, flight in known.items() if flight.number == latest}
    missing = [one for one in ranks if one not in there]
    if is_beyond:
        if missing:
            evidence["rank"] = missing[0]
        return missing[0] if missing else rank, FinalStatus(final.status, evidence)
    called = {(one.name, one.shape) for one in there.values() if one.shape}
    first = there[min(there)]
    # The signal by which a rank was ended while it waited is no evidence.
    evidence = {name: value for name, value in evidence.items() if name not in _OF_ENDS}
    evidence["collective"] = f"{first.name} {first.number}"
    if len(called) > 1:
        calls = [f"rank {one} {flight.name} of {flight.shape}" for one, flight in there.items()]
        message = f"ranks called different collectives as number {latest}: {'; '.join(calls)}"
        return rank, FinalStatus(Status.FAILED, {**evidence, "message": message})
    if not missing:
        message = f"all ranks arrived at {evidence['collective']}, which did not end: link or NCCL"
        return rank, FinalStatus(Status.TIMEOUT, {**evidence, "message": message})
    limit_s, names = attempt.settings.collective_timeout_s, ", ".join(map(str, missing))
    status = Status.TIMEOUT
    message = f"rank {names} did not arrive at {evidence['collective']} within {limit_s:g} s"
    if is_gone and wall_s < limit_s:
        status = Status.FAILED
        message = f"rank {names} closed its connections before {evidence['collective']}"
    evidence |= {"rank": missing[0], "message": message}
    return missing[0], FinalStatus(status, evidence)


def _last_collective(attempt: Attempt, rank: int) -> Collective | None:
    """Return the latest collective of a rank: by its flight record, or by NCCL's watchdog.

    The watchdog aborts the process of a rank that waited in vain, which then writes no record.
    """
    flight = last_collective(rank_file(attempt.path / FLIGHT_FILE, rank))
    if flight is not None:
        return flight
    found = re.search(REPORT, tail(rank_file(attempt.path / LOG_FILE, rank), REPORT_BYTES))
    return Collective(int(found[1]), found[2].lower(), "") if found else None


def group_samples(ranks: Sequence[Sequence[Sample]]) -> tuple[Sample, ...]:
    """Return the samples of the group, in the order of the first rank's.

    A duration or a size is the largest of all ranks, and a power their sum. Everything else is of
    the rank with the slowest steps. A step that a rank did not finish is not the group's.
    """
    if len(ranks) == 1:
        return tuple(ranks[0])
    by_key = [{_key(sample): sample for sample in samples} for samples in ranks]
    slowest = max(range(len(ranks)), key=lambda rank: step_ms(ranks[rank]) or 0.0)
    joined = []
    for key in by_key[slowest]:
        samples = [samples[key] for samples in by_key if key in samples]
        if len(samples) == len(ranks) or by_key[slowest][key].step is None:
            joined.append(_joined(samples, by_key[slowest][key]))
    return tuple(joined)


def _key(sample: Sample) -> tuple[object, ...]:
    # The counter of energy has the time at which it was read as its step.
    step = sample.step if sample.instrument != "telemetry" else None
    return sample.instrument, sample.metric, sample.unit, sample.mode, sample.phase, step


def _joined(samples: Sequence[Sample], of_slowest: Sample) -> Sample:
    values = [sample.value for sample in samples if sample.value is not None]
    if len(values) < len(samples):
        return of_slowest
    if of_slowest.metric in _SUMMED:
        return replace(of_slowest, value=sum(values))
    if of_slowest.metric == "duration" or of_slowest.unit == "bytes":
        return replace(of_slowest, value=max(values))
    return of_slowest


def _durations(samples: Iterable[Sample]) -> list[float]:
    """Return the durations of the timed steps in ms: pipelined ones, or synced without those."""
    for mode in _TIMED_MODES:
        found = []
        for one in samples:
            if (one.metric, one.mode, one.phase) == ("duration", mode, "step"):
                found.append(one.value or 0.0)
        if found:
            return found
    return []


def step_ms(samples: Iterable[Sample]) -> float | None:
    """Return the median of the timed steps in ms, or None if none were timed."""
    durations = _durations(samples)
    return median(durations) if durations else None


def skew_facts(journals: Sequence[JournalContents]) -> dict[str, object]:
    """Return by how much durations of a step differ between ranks, and which is slowest most often."""
    steps = _durations_of_steps(journals)
    if not steps:
        return {}
    slowest = Counter(durations.index(max(durations)) for durations in steps)
    [(rank, count)] = slowest.most_common(1)
    return {
        "step_skew_ms": median(max(durations) - min(durations) for durations in steps),
        "slowest_rank": rank,
        "slowest_rank_share": count / len(steps),
    }


def _durations_of_steps(journals: Sequence[JournalContents]) -> list[tuple[float, ...]]:
    """Return the durations of each step that all ranks finished, in the order of the ranks."""
    return list(zip(*(_durations(journal.samples) for journal in journals), strict=False))


def rank_rows(journals: Sequence[JournalContents]) -> tuple[RankRow, ...]:
    """Return a row for each rank."""
    steps = _durations_of_steps(journals)
    rows = []
    for rank, journal in enumerate(journals):
        facts = journal.facts
        rows.append(
            RankRow(
                rank=rank,
                gpu_uuid=_text(facts.get("gpu_uuid")),
                pinned_cores=_text(facts.get("pinned_cores")),
                status=str(journal.final.status) if journal.final else "",
                step_ms=step_ms(journal.samples),
                slowest=sum(durations.index(max(durations)) == rank for durations in steps),
                peak_allocated_bytes=_largest(journal.samples, "peak_allocated_bytes"),
                peak_reserved_bytes=_largest(journal.samples, "peak_reserved_bytes"),
                sm_clock=_last(journal.samples, "sm_clock"),
                power=_last(journal.samples, "timed_power"),
                wait_ms=_last(journal.samples, "wait"),
            )
        )
    return tuple(rows)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _values(samples: Iterable[Sample], metric: str) -> list[float]:
    return [one.value for one in samples if one.metric == metric and one.value is not None]


def _largest(samples: Iterable[Sample], metric: str) -> int | None:
    return max(map(int, _values(samples, metric)), default=None)


def _last(samples: Iterable[Sample], metric: str) -> float | None:
    return next(reversed(_values(samples, metric)), None)
