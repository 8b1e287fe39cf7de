"""Counters that are refused, and a GPU that is gone, are nulls with their reason; a neighbour on the host shows."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
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


def waited_for_core() -> Any:
    """While this process had half a second of work for one core."""
    here = SimpleNamespace(shelf={})
    assert telemetry.look_at_cores(here) == []  # type: ignore[arg-type]
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass
    (sample,) = telemetry.tell_waits(here)  # type: ignore[arg-type]
    assert (sample.metric, sample.mode, here.shelf) == ("waited_for_core", "timing", {})
    return sample


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux, which counts it")
def test_a_neighbour_that_takes_the_core_shows() -> None:
    cores = os.sched_getaffinity(0)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for pid in (0, *(other.pid for other in others)):
            os.sched_setaffinity(pid, {min(cores)})
        time.sleep(0.3)
        assert waited_for_core().value > 0.4  # three in turns
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.wait()


def test_a_thread_that_began_meanwhile_counts_and_no_share_is_where_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = SimpleNamespace(shelf={})
    telemetry.look_at_cores(here)  # type: ignore[arg-type]
    idle = threading.Event()
    thread = threading.Thread(target=idle.wait)
    thread.start()
    (sample,) = telemetry.tell_waits(here)  # type: ignore[arg-type]
    idle.set()
    thread.join()
    assert sample.value is None or sample.value >= 0
    monkeypatch.setattr(telemetry, "_THREADS", tmp_path)
    sample = waited_for_core()
    assert (sample.value, sample.note) == (None, "not told by this system")
