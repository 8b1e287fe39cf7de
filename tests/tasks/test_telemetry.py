"""Counters that are refused, and a GPU that is gone, are nulls with their reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from tasks.instruments import telemetry


def session() -> Any:
    device = SimpleNamespace(kind="cuda", facts=lambda: {"gpu_uuid": "GPU-1"})
    return SimpleNamespace(workload=SimpleNamespace(device=device))


def test_a_gpu_that_falls_off_in_the_middle_is_null_from_there_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fall_off(handle: object) -> int:
        raise pynvml.NVMLError_GpuIsLost()

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: object())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda handle, clock: 1980)
    for name in vars(pynvml):
        if name.startswith("nvmlDeviceGet") and name not in ("nvmlDeviceGetHandleByUUID", "nvmlDeviceGetClockInfo"):
            monkeypatch.setattr(pynvml, name, lambda handle, *more: fall_off(handle))
    samples = {sample.metric: sample for sample in telemetry.read_before(session())}
    assert set(samples) == set(telemetry.COUNTERS)
    assert samples["sm_clock"].value == 1980
    assert samples["power"].value is None
    assert "GPU is lost" in samples["power"].note


def test_a_gpu_that_is_gone_is_all_nulls(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise pynvml.NVMLError_GpuIsLost()

    monkeypatch.setattr(pynvml, "nvmlInit", gone)
    samples = telemetry.read_after(session())
    assert len(samples) == len(telemetry.COUNTERS)
    assert all(sample.value is None and "GPU is lost" in sample.note for sample in samples)
