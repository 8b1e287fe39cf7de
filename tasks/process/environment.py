"""Where a cell ran: what is recorded in each row, and the part of it that must match for rows to be comparable."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def read_environment() -> dict[str, Any]:
    """Versions, host and devices of this process, without touching a GPU's memory."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,  # type: ignore[no-untyped-call]
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "nice": os.nice(0),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        **_driver(),
    }


def probe() -> dict[str, Any]:
    """What a run must know of a host before it starts: the environment, and the devices it could measure on.

    `fingerprints` holds, for each device, one for each kind of GPU.
    """
    environment = read_environment()
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds: dict[str, list[str | None]] = {"cpu": [None]}
    if gpus:
        kinds["cuda"] = [*sorted({gpu.name for gpu in gpus})]
    if torch.backends.mps.is_available():
        kinds["mps"] = ["Apple MPS"]
    return {
        **environment,
        "gpus": [
            {"name": gpu.name, "memory_bytes": gpu.total_memory, "uuid": str(gpu.uuid)}
            for gpu in gpus
        ],
        "fingerprints": {
            device: [fingerprint({**environment, "gpu": gpu}) for gpu in names]
            for device, names in kinds.items()
        },
    }


def fingerprint(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an environment that decide whether its numbers may stand beside another's.

    For a cell on the CPU the processor and its core count decide, for one on a GPU the GPU and its driver.
    """
    python = ".".join(str(environment["python"]).split(".")[:2])
    names = (
        ("torch", "cuda", "driver", "gpu") if environment.get("gpu") else ("torch", "cpu", "cores")
    )
    return {"python": python, **{name: environment[name] for name in names}}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = (
        re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if cpuinfo.exists()
        else None
    )
    return found[1] if found else platform.processor() or platform.machine()


def _driver() -> dict[str, Any]:
    import pynvml

    try:
        pynvml.nvmlInit()
        return {"driver": pynvml.nvmlSystemGetDriverVersion()}
    except pynvml.NVMLError as error:
        return {"driver": None, "driver_note": str(error)}
