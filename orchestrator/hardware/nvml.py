"""GPUs of this host through NVML: names, UUIDs, NUMA node, and whether they still answer.

NVML answers within milliseconds and creates no CUDA context, so the driver of a sweep can ask it
while a cell is measured.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from orchestrator.hardware.host import VISIBLE_GPUS

# Texts of CUDA, or of torch about CUDA, for a device that no longer exists.
_DEVICE_GONE = (
    r"CUDA (error: )?unknown error|busy or unavailable|no CUDA-capable device"
    r"|No CUDA GPUs|CUDA driver initialization failed"
)
# Texts that may also mean a device that no longer computes although NVML reports no fault.
_MAY_BE_BROKEN = re.compile(rf"{_DEVICE_GONE}|uncorrectable|hardware|initialization error")
_MASK_BITS = 64  # NVML fills the affinity mask in unsigned longs


def gpu_names() -> Sequence[str]:
    """Return the names of the GPUs that CUDA would see here. Without a driver there are none."""
    return list(_query_each("nvmlDeviceGetName").values())


def gpu_uuids() -> Mapping[str, str]:
    """Return the UUIDs of these GPUs by their names in CUDA_VISIBLE_DEVICES."""
    return _query_each("nvmlDeviceGetUUID")


def _query_each(function: str) -> Mapping[str, str]:
    import pynvml

    try:
        pynvml.nvmlInit()
        query = getattr(pynvml, function)
        handles = _visible_handles(pynvml.nvmlDeviceGetCount())
        return {name: query(handle) for name, handle in handles.items()}
    except pynvml.NVMLError:
        return {}


def _visible_handles(count: int) -> dict[str, object]:
    """Return NVML's handles of the GPUs that CUDA would see, by name.

    Like CUDA, stop at the first name that does not exist.
    """
    import pynvml

    visible = os.environ.get(VISIBLE_GPUS)
    if visible is None:
        names = list(map(str, range(count)))
    else:
        names = list(map(str.strip, visible.split(",")))
    found: dict[str, object] = {}
    with suppress(pynvml.NVMLError):
        for name in names:
            found[name] = _handle(name, count)
    return found


def _handle(name: str, count: int) -> object:
    """Return the handle of the GPU with this index or UUID. Raises NVMLError."""
    import pynvml

    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    # CUDA accepts an abbreviated UUID if it is unique, NVML does not.
    if name.startswith("GPU-"):
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(count))
        matching = [gpu for gpu in handles if pynvml.nvmlDeviceGetUUID(gpu).startswith(name)]
        if len(matching) == 1:
            return matching[0]
    return pynvml.nvmlDeviceGetHandleByUUID(name)


def near_cores(uuid: str) -> frozenset[int] | None:
    """Return the CPU cores of the GPU's NUMA node, or None where NVML does not report them."""
    import pynvml

    mask_count = -(-(os.cpu_count() or 1) // _MASK_BITS)
    try:
        masks = pynvml.nvmlDeviceGetCpuAffinity(handle_by_uuid(uuid), mask_count)
    except pynvml.NVMLError:
        return None
    cores = set()
    for core in range(len(masks) * _MASK_BITS):
        index, bit = divmod(core, _MASK_BITS)
        if masks[index] >> bit & 1:
            cores.add(core)
    return frozenset(cores) or None


@dataclass(frozen=True)
class Refusal:
    """NVML's reason for not answering about a GPU.

    `is_lost` means that the GPU has fallen off the bus or works only after a reset.
    """

    text: str
    is_lost: bool


def refusal(uuid: str) -> Refusal | None:
    """Return why NVML does not answer about this GPU, or None if it answers."""
    import pynvml

    lost = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
    try:
        pynvml.nvmlDeviceGetMemoryInfo(handle_by_uuid(uuid))
    except pynvml.NVMLError as error:
        return Refusal(str(error), error.value in lost)
    return None


class GpuHealthWatch:
    """Compares what NVML reports about a GPU before a cell with what it reports afterwards.

    NVML does not always call a GPU that fell off the bus lost: often it reports an unknown error
    or does not find it. For a working GPU in a container, or for a MIG instance, it may report the
    same. Such an error therefore counts only if the GPU answered before the cell, or if CUDA
    reported a missing device too.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._answered = refusal(uuid) is None

    def fault(self, message: str) -> str | None:
        """Return what is wrong with the GPU, or None. `message` is the cell's last error."""
        now = refusal(self._uuid)
        if now is None:
            return None
        is_gone = self._answered or re.search(_DEVICE_GONE, message) is not None
        return now.text if now.is_lost or is_gone else None


def may_be_broken(message: str) -> bool:
    """Return True if a cell's last error may come from a broken GPU instead of from its code."""
    return _MAY_BE_BROKEN.search(message) is not None


def handle_by_uuid(uuid: str) -> object:
    """Return NVML's handle of a GPU, with or without `GPU-` in its UUID. Raises NVMLError."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
