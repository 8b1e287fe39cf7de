"""What NVIDIA's management library says of this host's GPUs without waking them: no CUDA, no torch, some milliseconds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# How CUDA, or torch for it, puts that a device is not there any more.
_GONE = r"CUDA (error: )?unknown error|busy or unavailable|no CUDA-capable device|No CUDA GPUs|CUDA driver initialization failed"
# And what may be of a device that does not compute any more, though NVML has nothing to say of it.
_BROKEN = re.compile(rf"{_GONE}|uncorrectable|hardware|initialization error")
_WORD_BITS = 64  # of the masks that it fills


def gpu_names() -> Sequence[str]:
    """The GPUs that CUDA would see here, by the names that their driver gives; none where there is no driver."""
    return list(_of_each("nvmlDeviceGetName").values())


def gpu_uuids() -> Mapping[str, str]:
    """Of the same, by the names that they have in CUDA_VISIBLE_DEVICES."""
    return _of_each("nvmlDeviceGetUUID")


def _of_each(question: str) -> Mapping[str, str]:
    import pynvml

    try:
        pynvml.nvmlInit()
        ask = getattr(pynvml, question)
        return {name: ask(handle) for name, handle in _visible(pynvml.nvmlDeviceGetCount()).items()}
    except pynvml.NVMLError:
        return {}


def _visible(count: int) -> dict[str, Any]:
    """By name, the handles of the GPUs that CUDA would see of so many: all, or as told, up to the first that is not there."""
    import pynvml

    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        [str(index) for index in range(count)]
        if told is None
        else [name.strip() for name in told.split(",")]
    )
    found: dict[str, Any] = {}
    with suppress(pynvml.NVMLError):
        for name in names:
            found[name] = (
                pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdecimal()
                else _named(name, count)
            )
    return found


def _named(name: str, count: int) -> Any:
    """By its UUID, of which CUDA takes the beginning for the whole."""
    import pynvml

    gpus = {
        pynvml.nvmlDeviceGetUUID(gpu): gpu
        for gpu in map(pynvml.nvmlDeviceGetHandleByIndex, range(count))
    }
    meant = [gpu for uuid, gpu in gpus.items() if name.startswith("GPU-") and uuid.startswith(name)]
    return meant[0] if len(meant) == 1 else pynvml.nvmlDeviceGetHandleByUUID(name)


def near_cores(uuid: str) -> frozenset[int] | None:
    """The processor cores of the NUMA node that a GPU hangs on. None where that is not told."""
    import pynvml

    try:
        gpu = _open(uuid)
        words = pynvml.nvmlDeviceGetCpuAffinity(gpu, -(-(os.cpu_count() or 1) // _WORD_BITS))
    except pynvml.NVMLError:
        return None
    bits = ((word, bit) for word in range(len(words)) for bit in range(_WORD_BITS))
    return (
        frozenset(word * _WORD_BITS + bit for word, bit in bits if words[word] >> bit & 1) or None
    )


@dataclass(frozen=True)
class Refusal:
    """Why a GPU does not answer. is_lost: for it fell off the bus, or works no more before it is reset."""

    text: str
    is_lost: bool


def refusal(uuid: str) -> Refusal | None:
    """None of a GPU that answers."""
    import pynvml

    try:
        pynvml.nvmlDeviceGetMemoryInfo(_open(uuid))
    except pynvml.NVMLError as error:
        return Refusal(
            str(error),
            error.value in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED),
        )
    return None


class GpuHealthWatch:
    """One GPU, asked before a cell is measured on it and again where that goes wrong.

    A GPU that fell off is not always called lost: often NVML has an unknown error for it, or does not find it any more. In a
    container, or of a part of a GPU, it may say the same of one in order. So that counts of a GPU that answered before, or
    of one that CUDA has nothing better to say of.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._answered = refusal(uuid) is None

    def fault(self, said: str) -> str | None:
        """What has become of the GPU; None while nothing is known to be wrong with it. said: the cell's own last word."""
        now = refusal(self._uuid)
        is_lost = now is not None and (
            now.is_lost or self._answered or re.search(_GONE, said) is not None
        )
        return now.text if now is not None and is_lost else None


def may_be_broken(said: str) -> bool:
    """Whether a cell's last word may be of its GPU, and not of what the cell did."""
    return _BROKEN.search(said) is not None


def _open(uuid: str) -> Any:
    """Its handle. Raises NVMLError."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
