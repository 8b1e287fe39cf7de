"""Measure how much of a step is communication that nothing hides, on each rank.

All ranks profile the same steps at the same time, device activity only. The k-th collective of all
ranks is the same call, so that their durations separate transfer from waiting (see
tasks/traces/overlap.py). Without a profiler, steps in which the calls alone are left out tell how
much they add. The steps of ddp without communication lack the copies into its buckets too;
zero1_torch and fsdp2 have no such steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from statistics import median

from torch.profiler import ProfilerActivity, profile

from tasks.harness.stage import Session, Stage
from tasks.instruments.kernel_time import REFUSED, device_events
from tasks.instruments.timing import pipelined_step_ms, timed_step_ms
from tasks.process.gc_pause import uncollected
from tasks.spec.tables import Sample
from tasks.traces.overlap import by_kind, divide, transfers_of

_STEPS = 3
_NS_PER_MS = 1e6


def measure_overlap(session: Session) -> Iterator[Sample]:
    """Yield the parts of a step, mean of three, and the exposed communication without a profiler."""
    if reason := _why_not(session):
        yield _sample("profiled_step", None, reason)
        return
    yield from _exposed_by_difference(session)
    session.step()  # a warm-up, because no other stage may have run a step
    session.group.wait_for_all("overlap")
    kernels = by_kind(_profile(session))
    durations = [end - begin for begin, end in kernels.collectives]
    try:
        parts = divide(kernels, transfers_of(session.group.gather("durations", durations)))
    except ValueError as error:
        yield _sample("profiled_step", None, str(error))
        return
    if not parts.profiled_step:
        yield _sample("profiled_step", None, f"the profiler saw no kernels: {REFUSED}")
        return
    for name, ns in asdict(parts).items():
        yield _sample(name, ns / _STEPS / _NS_PER_MS)


def _why_not(session: Session) -> str:
    if session.workload.device.kind != "cuda":
        return "only a GPU has kernels"
    return "" if session.group.ranks > 1 else "a single GPU does not communicate"


def _exposed_by_difference(session: Session) -> Iterator[Sample]:
    """Yield by how much communication lengthens a step without a profiler."""
    without_transfers = session.workload.without_transfers
    if without_transfers is None:
        yield _sample("exposed_off", None, "it cannot compute without communication")
        return
    with_it = timed_step_ms(session)
    with without_transfers():
        without = pipelined_step_ms(session)
    yield _sample("exposed_off", median(with_it) - median(without))


def _profile(session: Session) -> Iterator[tuple[str, int, int]]:
    """Yield name, begin and end in ns of each kernel of some steps that do not wait."""
    device = session.workload.device
    device.synchronize()
    with uncollected(), profile(activities=[ProfilerActivity.CUDA]) as watched:
        for _ in range(_STEPS):
            session.step()
        device.synchronize()
    for event in device_events(watched):
        begin = event.start_ns()
        yield event.name(), begin, begin + event.duration_ns()


def _sample(metric: str, value: float | None, note: str = "") -> Sample:
    return Sample("overlap", metric, "ms", value, note=note)


# After all timing, because a process is slower once it has profiled.
STAGES = (Stage("overlap", 79, measure_overlap),)
