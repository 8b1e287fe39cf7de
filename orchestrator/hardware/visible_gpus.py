"""Names and UUIDs of the GPUs that CUDA_VISIBLE_DEVICES lets a process see."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.hardware.host import HostInfo

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

GpuUuids = Mapping[str, str]  # UUID by the name that a GPU has in CUDA_VISIBLE_DEVICES


def split_gpu_names(visible: str) -> tuple[str, ...]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names."""
    return tuple(filter(None, map(str.strip, visible.split(","))))


def visible_gpu_uuids(host: HostInfo) -> dict[str, str]:
    """Return the UUIDs of a host's GPUs by their names in CUDA_VISIBLE_DEVICES.

    Without that variable the names are indices: "0", "1", …
    """
    names = split_gpu_names(host.visible_devices or "")
    if not names:
        names = tuple(map(str, range(len(host.gpus))))
    # CUDA ignores the first name that does not exist and all names after it, so there may be more
    # names than GPUs.
    return {name: gpu.uuid for name, gpu in zip(names, host.gpus, strict=False)}
