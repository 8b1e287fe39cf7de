"""A host of two GPUs, some of which fall off while a cell is measured on them: NVML, the probe and the measuring are played.

    python -m tests.support.fallen FALLEN run CONFIG

Where there is a file FALLEN/N, GPU N falls off under the first cell that comes to it; where that says `silently`, NVML goes on
answering, and no process computes there; where it says `late`, it falls off under the first whose seed is 4 or more. Cells that
are not struck give one sample, and where they came to as facts.
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

from orchestrator.execution import supervisor
from orchestrator.execution.events import Event
from orchestrator.hardware.host import GpuInfo, HostInfo
from orchestrator.scheduling import ray_scheduler as schedulers
from orchestrator.scheduling import serial
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import Sample

GPUS = {"0": "aaaa", "1": "bbbb"}
FOLDER = "FALLEN_GPUS"
SILENTLY, LATE, _FALLEN = "silently", "late", "it has fallen"
real_supervise = supervisor.supervise


def play(folder: Path) -> None:
    os.environ[FOLDER] = str(folder)
    schedulers.probe_here = serial.probe_here = probe
    schedulers.supervise = supervise
    schedulers.prepare_slot = prepare_nothing
    play_gpus()


def play_gpus() -> None:
    """In the driver, and in each of its supervisors."""
    supervisor.execute_or_lose = measure
    supervisor.gpu_failure = lambda gpu: "CUDA error: unknown error" if has_fallen(gpu) else None
    pynvml.nvmlInit = lambda: None
    pynvml.nvmlDeviceGetHandleByUUID = handle_of
    pynvml.nvmlDeviceGetMemoryInfo = lambda gpu: None
    pynvml.nvmlDeviceGetCpuAffinity = refuse


def probe() -> HostInfo:
    gpus = tuple(GpuInfo("Test GPU", 80 * 1024**3, uuid) for uuid in GPUS.values())
    fingerprints = {"cuda": [{"gpu": "Test GPU"}]}
    return HostInfo(name=socket.gethostname(), gpus=gpus, fingerprints=fingerprints)


def prepare_nothing(*told: Any) -> None: ...


def supervise(attempt: Attempt, *told: Any) -> Iterator[Event]:
    play_gpus()
    yield from real_supervise(attempt, *told)


def measure(attempt: Attempt, slot: supervisor.Slot) -> Outcome:
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
        has_fallen(gpu) or LATE not in mark(gpu).read_text() or attempt.cell.params.seed >= 4
    ):
        mark(gpu).write_text(f"{mark(gpu).read_text()} {_FALLEN}")
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
    if has_fallen(gpu) and SILENTLY not in mark(gpu).read_text():
        refuse()
    return gpu


def refuse(*_: object) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)


def has_fallen(gpu: str) -> bool:
    return mark(gpu).exists() and _FALLEN in mark(gpu).read_text()


def mark(gpu: str) -> Path:
    return Path(os.environ[FOLDER]) / gpu


def main() -> None:
    from orchestrator.cli.main import main as sweep

    play(Path(sys.argv[1]))
    sweep(sys.argv[2:], prog_name="sweep")


if __name__ == "__main__":
    from tests.support.fallen import (
        main as main_of_the_module,  # by which a Ray worker can import what it is given
    )

    main_of_the_module()
