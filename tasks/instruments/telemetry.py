"""What the machine says of itself before and after the timing.

Of the GPU clocks, power, temperature, throttling and energy, through NVML. Of the host how long it let a thread of this process
wait for a core: Linux counts that for each thread (Documentation/scheduler/sched-stats.rst). A neighbour that takes a core half
of the time shows as 0.5, one at niceness 19 hardly. Read once each, some milliseconds: nothing polls beside the measurement.
A counter that is refused, as in many containers, is null with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pynvml

from tasks.harness.records import Sample
from tasks.harness.stage import Session, Stage

_Handle = Any
_THREADS = Path("/proc/self/task")

COUNTERS: dict[str, tuple[str, Callable[[_Handle], float]]] = {
    "sm_clock": ("MHz", lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
    "sm_clock_max": ("MHz", lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
    "memory_clock": ("MHz", lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM)),
    "temperature": ("°C", lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
    "power": ("W", lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    "power_limit": ("W", lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000),
    "energy": ("J", lambda gpu: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000),
    "throttle_reasons": ("bit mask", lambda gpu: pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)),
    "power_capped": ("ns", lambda gpu: pynvml.nvmlDeviceGetViolationStatus(gpu, 0).violationTime),
    "thermal_capped": ("ns", lambda gpu: pynvml.nvmlDeviceGetViolationStatus(gpu, 1).violationTime),
}


def read_before(session: Session) -> list[Sample]:
    return list(_read(session, "before"))


def read_after(session: Session) -> list[Sample]:
    return list(_read(session, "after"))


def look_at_cores(session: Session) -> list[Sample]:
    session.shelf["cores"] = list(_waits())
    return []


def tell_waits(session: Session) -> Iterator[Sample]:
    """`waited_for_core`: of the thread that waited longest since `look_at_cores`, as a fraction of that time."""
    before = {sample.step: sample.value or 0.0 for sample in session.shelf.pop("cores")}
    now = {sample.step: sample.value or 0.0 for sample in _waits()}
    passed = now.pop(None) - before.pop(None)
    waited = [value - before.get(thread, 0.0) for thread, value in now.items()]
    share, note = (max(waited) / passed, "") if waited else (None, "not told by this system")
    yield Sample("telemetry", "waited_for_core", "", share, "timing", note=note)


def _waits() -> Iterator[Sample]:
    """The clock, and by its number what each thread has waited since it began."""
    yield Sample("telemetry", "clock", "ns", float(time.perf_counter_ns()))
    for path in sorted(_THREADS.glob("*/schedstat")):
        with suppress(OSError, IndexError, ValueError):  # that has just ended
            yield Sample("telemetry", "waited", "ns", float(path.read_text().split()[1]), step=int(path.parent.name))


def _read(session: Session, mode: str) -> Iterator[Sample]:
    if session.workload.device.kind != "cuda":
        return
    handle, refusal = _open(session.workload.device.facts()["gpu_uuid"])
    for metric, (unit, read) in COUNTERS.items():
        value, note = (None, refusal) if handle is None else _try(read, handle)
        yield Sample("telemetry", metric, unit, value, mode, note=note)


def _open(uuid: str) -> tuple[_Handle | None, str]:
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}"), ""
    except pynvml.NVMLError as error:
        return None, str(error)


def _try(read: Callable[[_Handle], float], handle: _Handle) -> tuple[float | None, str]:
    try:
        return float(read(handle)), ""
    except pynvml.NVMLError as error:
        return None, str(error)


STAGES = (
    Stage("telemetry before", 15, read_before),
    Stage("cores before", 22, look_at_cores),
    Stage("cores after", 26, tell_waits),
    Stage("telemetry after", 30, read_after),
)
