"""The environment that is recorded for each attempt, and its fingerprint."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tasks.spec.axes import select


def read_environment() -> dict[str, object]:
    """Return versions, host and process facts, without allocating memory on a GPU."""
    cudnn = None
    if torch.cuda.is_available():
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "cpu": _cpu_model(),
        "cores": _core_count(),
        "nice": os.nice(0),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        **_driver(),
    }


def probe() -> dict[str, object]:
    """Return a host's environment, its GPUs (memory in bytes), and `fingerprints`.

    These are, for each device, one fingerprint for each kind of GPU.
    """
    environment = read_environment()
    gpus = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        gpus.append({"name": gpu.name, "memory_bytes": gpu.total_memory, "uuid": str(gpu.uuid)})
    kinds: dict[str, Sequence[str | None]] = {"cpu": [None]}
    if gpus:
        kinds["cuda"] = sorted({str(gpu["name"]) for gpu in gpus})
    if torch.backends.mps.is_available():
        kinds["mps"] = ["Apple MPS"]
    fingerprints = {}
    for device, names in kinds.items():
        fingerprints[device] = [fingerprint({**environment, "gpu": name}) for name in names]
    return {**environment, "gpus": gpus, "fingerprints": fingerprints}


def fingerprint(environment: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that must be equal for two times to be comparable.

    On a CPU these are the processor and its number of cores, on a GPU the GPU and its driver. A
    patch release of Python is ignored.
    """
    python = ".".join(str(environment["python"]).split(".")[:2])
    names = ["torch", "cpu", "cores"]
    if environment.get("gpu"):
        names = ["torch", "cuda", "driver", "gpu"]
    return {"python": python, **select(environment, names)}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def _core_count() -> int | None:
    # os.cpu_count() ignores affinity: in a container it names the cores of the host.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _driver() -> dict[str, str | None]:
    import pynvml

    try:
        pynvml.nvmlInit()
        return {"driver": pynvml.nvmlSystemGetDriverVersion()}
    except pynvml.NVMLError as error:
        return {"driver": None, "driver_note": str(error)}
