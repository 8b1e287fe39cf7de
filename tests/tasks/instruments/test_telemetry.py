"""Counters that are refused, and a GPU that is gone, are nulls with their reason; a neighbour on the host shows."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from tasks.instruments import telemetry
from tasks.process import clock
from tasks.process.cpu_speed import dispatch_rate


def session() -> Any:
    device = SimpleNamespace(kind="cuda", facts=lambda: {"gpu_uuid": "GPU-1"})
    return SimpleNamespace(workload=SimpleNamespace(device=device))


def test_a_gpu_that_falls_off_in_the_middle_is_null_from_there_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fall_off(handle: object) -> int:
        raise pynvml.NVMLError_GpuIsLost()

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: object())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda handle, clock: 1980)
    for name in vars(pynvml):
        if name.startswith("nvmlDeviceGet") and name not in (
            "nvmlDeviceGetHandleByUUID",
            "nvmlDeviceGetClockInfo",
        ):
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


@pytest.mark.parametrize(
    ("seconds", "watts", "note"),
    [(2.0, 350.0, ""), (0.4, None, "timed for 0.40 s, too short for the GPU's counter")],
)
def test_the_mean_power_is_the_energy_over_the_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, watts: float | None, note: str
) -> None:
    """A short time is not measured: the counter moves too seldom."""
    millijoules = iter([1_000_000, 1_000_000 + int(seconds * 350_000)])
    nanoseconds = iter([5 * 10**9, int((5 + seconds) * 1e9)])
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: object())
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda handle: next(millijoules)
    )
    monkeypatch.setattr(clock, "perf_counter_ns", lambda: next(nanoseconds))
    here = session()
    here.shelf = {}
    assert telemetry.look_at_energy(here) == []
    (sample,) = telemetry.compute_power(here)
    assert (sample.metric, sample.unit, sample.mode) == ("timed_power", "W", "timing")
    assert sample.value == (pytest.approx(watts) if watts else None)
    assert sample.note == note


def test_the_power_of_a_gpu_that_is_gone_is_null_and_a_cpu_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone() -> None:
        raise pynvml.NVMLError_GpuIsLost()

    monkeypatch.setattr(pynvml, "nvmlInit", gone)
    here = session()
    here.shelf = {}
    telemetry.look_at_energy(here)
    (sample,) = telemetry.compute_power(here)
    assert sample.value is None
    assert "GPU is lost" in sample.note
    here.workload.device.kind = "cpu"
    telemetry.look_at_energy(here)
    assert list(telemetry.compute_power(here)) == []


def waited_for_core() -> Any:
    """While this process had half a second of work for one core."""
    here = SimpleNamespace(shelf={})
    assert telemetry.look_at_cores(here) == []  # type: ignore[arg-type]
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass
    (sample,) = telemetry.compute_waits(here)  # type: ignore[arg-type]
    assert (sample.metric, sample.mode, here.shelf) == ("waited_for_core", "timing", {})
    return sample


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="needs Linux, which counts it"
)
def test_a_neighbour_that_takes_the_core_shows() -> None:
    cores = os.sched_getaffinity(0)
    busy = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    others = [subprocess.Popen(busy, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for other in others:
            assert other.stdout is not None
            assert other.stdout.readline()  # it has begun
        for pid in (0, *(other.pid for other in others)):
            os.sched_setaffinity(pid, {min(cores)})
        assert waited_for_core().value > 0.4  # three in turns
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.communicate()


def test_waiting_for_a_core_is_null_where_the_system_does_not_report_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = SimpleNamespace(shelf={})
    telemetry.look_at_cores(here)  # type: ignore[arg-type]
    idle = threading.Event()
    thread = threading.Thread(target=idle.wait)
    thread.start()
    (sample,) = telemetry.compute_waits(here)  # type: ignore[arg-type]
    idle.set()
    thread.join()
    assert sample.value is None or sample.value >= 0
    for name in ("_THREADS", "_CORES"):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(telemetry, name, tmp_path / "nothing")
            if name == "_CORES":
                elsewhere.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
            sample = waited_for_core()
            assert (sample.value, sample.note) == (None, "this system does not report it")


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="needs Linux, which counts it"
)
def test_waiting_for_a_core_counts_only_while_other_processes_use_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As two threads of torch do on one core; the cores are stood in for, since on this host others may be at work."""
    cores = tmp_path / "stat"
    monkeypatch.setattr(telemetry, "_CORES", cores)
    here = SimpleNamespace(shelf={})

    def at_work(ticks: int) -> None:
        lines = (
            f"cpu{core} {ticks} 5 {ticks} 700 80 9 1 0 0 0"
            for core in sorted(os.sched_getaffinity(0))
        )
        cores.write_text(
            "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 77 8 9", "ctxt 123"])
        )

    at_work(0)
    telemetry.look_at_cores(here)  # type: ignore[arg-type]
    (waits,) = {one.step for one in here.shelf["cores"] if one.metric == "waited"} & {
        threading.get_native_id()
    }
    here.shelf["cores"] = [
        replace(one, value=-1e12) if one.step == waits else one for one in here.shelf["cores"]
    ]  # for long
    (alone,) = telemetry.compute_waits(here)  # type: ignore[arg-type]
    assert alone.value == 0.0  # the cores were at work for nobody else
    telemetry.look_at_cores(here)  # type: ignore[arg-type]
    here.shelf["cores"] = [
        replace(one, value=-1e12) if one.step == waits else one for one in here.shelf["cores"]
    ]
    at_work(100)
    (other,) = telemetry.compute_waits(here)  # type: ignore[arg-type]
    assert other.value is not None
    assert other.value > 1.0  # a second of each, in no time


def test_a_pace_is_operations_a_ms_and_a_chunk_that_was_held_up_does_not_move_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each chunk of 50 takes 100 µs, every third ten times as long."""
    passed = itertools.chain.from_iterable(
        (0, 1_000_000 if chunk % 3 == 0 else 100_000) for chunk in itertools.count()
    )
    monkeypatch.setattr(clock, "perf_counter_ns", partial(next, itertools.accumulate(passed)))
    assert dispatch_rate() == pytest.approx(500.0)
