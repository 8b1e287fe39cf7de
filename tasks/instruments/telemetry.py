"""Read the counters of GPU and CPU before the first step and after the timing.

GPU: clocks, power, temperature, throttling and energy, through NVML. CPU: the time that a thread
of this process waited for a core that another process used, and `host_pace`, the rate at which the
CPU dispatches small operations. Each counter is read once, in milliseconds: nothing polls during
the measurement. A counter that is refused, as in many containers, is null with the reason.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pynvml

from tasks.harness.stage import Session, Stage
from tasks.process import clock
from tasks.process.cpu_speed import dispatch_rate
from tasks.spec.tables import Sample

_SM, _MEMORY = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
_CORE = pynvml.NVML_TEMPERATURE_GPU
# The counter of energy moves every 20 to 100 ms: in half a second it is off by a fifth at most.
_LEAST_S = 0.5
_POWER, _THERMAL = 0, 1  # policies of nvmlDeviceGetViolationStatus
# Linux counts the waiting time of each thread, and the busy time of each core in steps of 10 ms.
_THREADS, _CORES = Path("/proc/self/task"), Path("/proc/stat")

# The violation times are cumulative, so two readings give the share of a cell's time.
COUNTERS: dict[str, tuple[str, Callable[[object], float]]] = {
    "sm_clock": ("MHz", lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, _SM)),
    "sm_clock_max": ("MHz", lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, _SM)),
    "memory_clock": ("MHz", lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, _MEMORY)),
    "temperature": ("°C", lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, _CORE)),
    "power": ("W", lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    "power_limit": ("W", lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000),
    "energy": ("J", lambda gpu: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000),
    "throttle_reasons": (
        "bit mask",
        lambda gpu: pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
    ),
    "power_capped": ("ns", lambda gpu: _violation_ns(gpu, _POWER)),
    "thermal_capped": ("ns", lambda gpu: _violation_ns(gpu, _THERMAL)),
}


def _violation_ns(gpu: object, policy: int) -> float:
    return float(pynvml.nvmlDeviceGetViolationStatus(gpu, policy).violationTime)


def read_before(session: Session) -> list[Sample]:
    return list(_read(session, "before"))


def read_after(session: Session) -> list[Sample]:
    return list(_read(session, "after"))


def look_at_cores(session: Session) -> list[Sample]:
    session.shelf["cores"] = list(_cores())
    return []


def compute_waits(session: Session) -> Iterator[Sample]:
    """Yield `waited_for_core`: the share of the time since `look_at_cores` that a thread waited.

    The thread that waited longest counts.
    """
    before = {(one.metric, one.step): one.value or 0.0 for one in session.shelf.pop("cores")}
    passed: dict[str, list[float]] = defaultdict(list)  # of each thread or core, by metric
    for one in _cores():
        passed[one.metric].append((one.value or 0.0) - before.get((one.metric, one.step), 0.0))
    waited, busy = passed["waited"], passed["busy"]
    share, note = None, "this system does not report it"
    if waited and busy:
        # Threads of one process also wait for each other, so the value is limited to the busy time
        # of other processes. One that uses a core half of the time shows as 0.5; one at niceness 19
        # hardly shows.
        of_others = max(0.0, sum(busy) - passed["own"][0])
        share, note = min(max(waited), of_others) / passed["clock"][0], ""
    yield Sample("telemetry", "waited_for_core", "", share, "timing", note=note)


def look_at_energy(session: Session) -> list[Sample]:
    session.shelf["energy"] = list(_energy(session))
    return []


def compute_power(session: Session) -> Iterator[Sample]:
    """Yield `timed_power`: the energy since `look_at_energy` over the time since then."""
    before, after = session.shelf.pop("energy"), list(_energy(session))
    for earlier, later in zip(before, after, strict=True):
        seconds = ((later.step or 0) - (earlier.step or 0)) / 1e9
        power, note = None, later.note or earlier.note
        if earlier.value is not None and later.value is not None:
            note = f"timed for {seconds:.2f} s, too short for the GPU's counter"
            if seconds >= _LEAST_S:
                power, note = (later.value - earlier.value) / seconds, ""
        yield Sample("telemetry", "timed_power", "W", power, "timing", note=note)


def _energy(session: Session) -> Iterator[Sample]:
    """Yield the GPU's count of its energy; its step is the time in ns. A CPU has none."""
    if session.workload.device.kind != "cuda":
        return
    handle, note = _open(str(session.workload.device.facts()["gpu_uuid"]))
    value = None
    if handle is not None:
        value, note = _try(COUNTERS["energy"][1], handle)
    yield Sample("telemetry", "energy", "J", value, step=clock.perf_counter_ns(), note=note)


def pace_before(session: Session) -> list[Sample]:
    return [_pace("before")]


def pace_after(session: Session) -> list[Sample]:
    return [_pace("after")]


def _pace(mode: str) -> Sample:
    # Linux does not see load outside of a virtual machine, unless the hypervisor reports it. The
    # pace is a hint at it: on hosts with an H200 it jumped between two levels, one about half.
    return Sample("telemetry", "host_pace", "1/ms", dispatch_rate(), mode)


def _cores() -> Iterator[Sample]:
    """Yield the clock, this process's CPU time, the waiting time of each thread since it began, and
    the busy time of each core that the process may use. All are in ns.
    """
    yield _counter("clock", clock.perf_counter_ns())
    yield _counter("own", clock.process_time_ns())
    for path in sorted(_THREADS.glob("*/schedstat")):
        with suppress(OSError, IndexError, ValueError):  # the thread has just ended
            yield _counter("waited", int(path.read_text().split()[1]), int(path.parent.name))
    with suppress(OSError, IndexError, ValueError):
        # The file comes first: systems without it, such as macOS, lack the functions below, too.
        lines = _CORES.read_text().splitlines()
        allowed, tick_ns = os.sched_getaffinity(0), 1e9 / os.sysconf("SC_CLK_TCK")
        for name, *numbers in map(str.split, lines):
            if re.fullmatch(r"cpu\d+", name) and int(name[3:]) in allowed:
                user, nice, system = map(float, numbers[:3])
                yield _counter("busy", (user + nice + system) * tick_ns, int(name[3:]))


def _counter(metric: str, ns: float, step: int | None = None) -> Sample:
    return Sample("telemetry", metric, "ns", float(ns), step=step)


def _read(session: Session, mode: str) -> Iterator[Sample]:
    if session.workload.device.kind != "cuda":
        return
    handle, refusal = _open(str(session.workload.device.facts()["gpu_uuid"]))
    for metric, (unit, read) in COUNTERS.items():
        value, note = (None, refusal) if handle is None else _try(read, handle)
        yield Sample("telemetry", metric, unit, value, mode, note=note)


def _open(uuid: str) -> tuple[object, str]:
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}"), ""
    except pynvml.NVMLError as error:
        return None, str(error)


def _try(read: Callable[[object], float], handle: object) -> tuple[float | None, str]:
    try:
        return float(read(handle)), ""
    except pynvml.NVMLError as error:
        return None, str(error)


STAGES = (
    Stage("telemetry before", 15, read_before),
    # The pace takes time on a core, which must not count between the two looks at the cores.
    Stage("pace before", 22, pace_before),
    Stage("cores before", 22, look_at_cores),
    Stage("energy before", 22, look_at_energy),
    Stage("energy after", 26, compute_power),
    Stage("cores after", 26, compute_waits),
    Stage("pace after", 26, pace_after),
    Stage("telemetry after", 30, read_after),
)
