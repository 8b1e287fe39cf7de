"""Read the counters of GPU and CPU before the first step and after the timing.

GPU: clocks, power, temperature, throttling and energy, through NVML. CPU: how long a thread of
this process waited for a core that another process used. Linux counts the waiting time of each
thread, and the busy time of each core to a hundredth of a second (proc(5)). Threads of one
process also wait for each other; the busy time of other processes limits the result to what
they can explain. A process that uses a core half of the time shows as 0.5; one at niceness 19
hardly shows. Each counter is read once, in milliseconds: nothing polls during the measurement.
A counter that is refused, as in many containers, is null with the reason.

Linux does not see load outside of a virtual machine, unless the hypervisor reports it.
`host_pace` is a hint at it: how many small operations per ms the CPU dispatches, before the
timing and after.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pynvml

from tasks.harness.stage import Session, Stage
from tasks.process.cpu_speed import dispatch_rate
from tasks.spec.tables import Sample

_Handle = Any
_THREADS, _CORES = Path("/proc/self/task"), Path("/proc/stat")

COUNTERS: dict[str, tuple[str, Callable[[_Handle], float]]] = {
    "sm_clock": ("MHz", lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
    "sm_clock_max": (
        "MHz",
        lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    ),
    "memory_clock": ("MHz", lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM)),
    "temperature": (
        "°C",
        lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
    ),
    "power": ("W", lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    "power_limit": ("W", lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000),
    "energy": ("J", lambda gpu: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000),
    "throttle_reasons": (
        "bit mask",
        lambda gpu: pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
    ),
    "power_capped": ("ns", lambda gpu: pynvml.nvmlDeviceGetViolationStatus(gpu, 0).violationTime),
    "thermal_capped": ("ns", lambda gpu: pynvml.nvmlDeviceGetViolationStatus(gpu, 1).violationTime),
}


def read_before(session: Session) -> list[Sample]:
    return list(_read(session, "before"))


def read_after(session: Session) -> list[Sample]:
    return list(_read(session, "after"))


def look_at_cores(session: Session) -> list[Sample]:
    session.shelf["cores"] = list(_cores())
    return []


def tell_waits(session: Session) -> Iterator[Sample]:
    """Yield `waited_for_core`: the share of the time since `look_at_cores` that a thread waited.

    The thread that waited longest counts. The value is at most the share of other processes in
    the busy time of the cores that this process may use.
    """
    before, now = (
        {(one.metric, one.step): one.value or 0.0 for one in looked}
        for looked in (session.shelf.pop("cores"), _cores())
    )
    passed = {key: value - before.get(key, 0.0) for key, value in now.items()}
    waited = [value for (metric, _), value in passed.items() if metric == "waited"]
    at_work = [value for (metric, _), value in passed.items() if metric == "at work"]
    share, note = None, "this system does not report it"
    if waited and at_work:
        of_others = max(0.0, sum(at_work) - passed["own", None])
        share, note = min(max(waited), of_others) / passed["clock", None], ""
    yield Sample("telemetry", "waited_for_core", "", share, "timing", note=note)


def pace_before(session: Session) -> list[Sample]:
    return [_pace("before")]


def pace_after(session: Session) -> list[Sample]:
    return [_pace("after")]


def _pace(mode: str) -> Sample:
    return Sample("telemetry", "host_pace", "1/ms", dispatch_rate(), mode)


def _cores() -> Iterator[Sample]:
    """Yield the clock, this process's CPU time, the waiting time of each thread since it began, and
    the busy time of each core that the process may use. All are in ns.
    """
    yield Sample("telemetry", "clock", "ns", float(time.perf_counter_ns()))
    yield Sample("telemetry", "own", "ns", float(time.process_time_ns()))
    for path in sorted(_THREADS.glob("*/schedstat")):
        with suppress(OSError, IndexError, ValueError):  # that has just ended
            yield Sample(
                "telemetry",
                "waited",
                "ns",
                float(path.read_text().split()[1]),
                step=int(path.parent.name),
            )
    with suppress(OSError, IndexError, ValueError):
        lines = (
            _CORES.read_text().splitlines()
        )  # first: what has no such file has none of the following either
        allowed, tick_ns = os.sched_getaffinity(0), 1e9 / os.sysconf("SC_CLK_TCK")
        for name, *numbers in map(str.split, lines):
            if re.fullmatch(r"cpu\d+", name) and (core := int(name[3:])) in allowed:
                user, nice, system = map(float, numbers[:3])
                yield Sample(
                    "telemetry", "at work", "ns", (user + nice + system) * tick_ns, step=core
                )


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
    Stage("pace before", 22, pace_before),
    Stage("cores before", 22, look_at_cores),
    Stage("cores after", 26, tell_waits),
    Stage("pace after", 26, pace_after),
    Stage("telemetry after", 30, read_after),
)
