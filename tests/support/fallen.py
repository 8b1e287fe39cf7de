"""Runs `sweep` on a host with two fake GPUs that can fail under a cell.

    python -m tests.support.fallen FALLEN run CONFIG

A file FALLEN/N makes GPU N fail under the next cell that runs on it. If the file contains
`silently`, NVML still answers, and no process can compute on the GPU. If it contains `late`, the GPU
fails under the first cell whose seed is 4 or more. Other cells give one sample, and their GPU as facts.
NVML, the probe and the measurement are replaced.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml

from orchestrator.execution import measurement
from orchestrator.execution.events import Event
from orchestrator.hardware.host import GpuInfo, HostInfo
from orchestrator.scheduling import ray_scheduler, ray_session, ray_task, serial
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import Sample

GPUS = {"0": "aaaa", "1": "bbbb"}
FOLDER = "FALLEN_GPUS"
SILENTLY, LATE, _FAILED = "silently", "late", "it has failed"
real_supervise = ray_task.supervise


def play(folder: Path) -> None:
    os.environ[FOLDER] = str(folder)
    ray_session.probe_here = ray_scheduler.probe_here = serial.probe_here = probe
    ray_scheduler.supervise = supervise
    ray_scheduler.import_ahead = prepare_nothing
    play_gpus()


def play_gpus() -> None:
    """Replace NVML and the measurement in the driver or in a supervisor."""
    measurement.execute = measure
    measurement.gpu_failure = lambda gpu: "CUDA error: unknown error" if has_failed(gpu) else None
    pynvml.nvmlInit = lambda: None
    pynvml.nvmlDeviceGetHandleByUUID = handle_of
    pynvml.nvmlDeviceGetMemoryInfo = lambda gpu: None
    pynvml.nvmlDeviceGetCpuAffinity = refuse


def probe(server: object = None) -> HostInfo:
    gpus = tuple(GpuInfo("Test GPU", 80 * 1024**3, uuid) for uuid in GPUS.values())
    fingerprints = {"cuda": [{"gpu": "Test GPU"}]}
    return HostInfo(name=socket.gethostname(), gpus=gpus, fingerprints=fingerprints)


def prepare_nothing(*arguments: Any) -> None: ...


def supervise(attempt: Attempt, *arguments: Any) -> Iterator[Event]:
    play_gpus()
    yield from real_supervise(attempt, *arguments)


def measure(attempt: Attempt) -> Outcome:
    gpu = attempt.settings.env.get("CUDA_VISIBLE_DEVICES") or os.environ.get(
        "CUDA_VISIBLE_DEVICES", "0"
    )
    time.sleep(0.2)
    facts = {
        "visible_devices": gpu,
        "host": socket.gethostname(),
        "gpu_uuid": GPUS.get(gpu),
        "gpu": "Test GPU",
    }
    began = time.time() - 0.2
    if mark(gpu).exists() and (
        has_failed(gpu) or LATE not in mark(gpu).read_text() or attempt.cell.params.seed >= 4
    ):
        mark(gpu).write_text(f"{mark(gpu).read_text()} {_FAILED}")
        evidence = {"message": "CUDA error: unknown error"}
        return Outcome(attempt, Status.FAILED, "build", "", evidence, facts, (), began, 0.2)
    return Outcome(
        attempt,
        Status.OK,
        "",
        "",
        {},
        facts,
        (Sample("timing", "duration", "ms", 1.0, "synced", "step", 0),),
        began,
        0.2,
    )


def handle_of(uuid: str) -> str:
    (gpu,) = (name for name, own in GPUS.items() if uuid == f"GPU-{own}")
    if has_failed(gpu) and SILENTLY not in mark(gpu).read_text():
        refuse()
    return gpu


def refuse(*_: object) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)


def has_failed(gpu: str) -> bool:
    return mark(gpu).exists() and _FAILED in mark(gpu).read_text()


def mark(gpu: str) -> Path:
    return Path(os.environ[FOLDER]) / gpu


def main() -> None:
    from orchestrator.cli.main import main as sweep

    play(Path(sys.argv[1]))
    sweep(sys.argv[2:], prog_name="sweep")


if __name__ == "__main__":
    # A Ray worker cannot import functions of __main__.
    from tests.support import fallen

    fallen.main()
