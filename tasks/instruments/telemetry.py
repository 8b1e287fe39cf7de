"""What the GPU says of itself before and after the timing: clocks, power, temperature, throttling, energy.

Read through NVML, once each, some milliseconds: no thread polls beside the measurement. A counter that is refused,
as in many containers, is null with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pynvml

from tasks.harness.records import Sample
from tasks.harness.stage import Session, Stage

_Handle = Any

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


STAGES = (Stage("telemetry before", 15, read_before), Stage("telemetry after", 30, read_after))
