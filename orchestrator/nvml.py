"""What NVIDIA's management library says of this host's GPUs without waking them: no CUDA, no torch, some milliseconds."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# How CUDA, or torch for it, puts that a device is not there any more.
_GONE = r"CUDA (error: )?unknown error|busy or unavailable|no CUDA-capable device|No CUDA GPUs|CUDA driver initialization failed"
_WORD_BITS = 64  # of the masks that it fills


def gpu_names() -> Sequence[str]:
    """The GPUs that CUDA would see here, by the names that their driver gives; none where there is no driver."""
    return _of_each("nvmlDeviceGetName")


def gpu_uuids() -> Sequence[str]:
    """Of as many GPUs as CUDA would see here, not always of the same."""
    return _of_each("nvmlDeviceGetUUID")


def _of_each(question: str) -> Sequence[str]:
    import pynvml

    try:
        pynvml.nvmlInit()
        ask = getattr(pynvml, question)
        answers = [ask(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return answers if visible is None else answers[: len([name for name in visible.split(",") if name.strip()])]


def near_cores(uuid: str) -> frozenset[int] | None:
    """The processor cores of the NUMA node that a GPU hangs on. None where that is not told."""
    import pynvml

    try:
        gpu = _open(uuid)
        words = pynvml.nvmlDeviceGetCpuAffinity(gpu, -(-(os.cpu_count() or 1) // _WORD_BITS))
    except pynvml.NVMLError:
        return None
    bits = ((word, bit) for word in range(len(words)) for bit in range(_WORD_BITS))
    return frozenset(word * _WORD_BITS + bit for word, bit in bits if words[word] >> bit & 1) or None


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
        return Refusal(str(error), error.value in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED))
    return None


class Watch:
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
        is_lost = now is not None and (now.is_lost or self._answered or re.search(_GONE, said) is not None)
        return now.text if now is not None and is_lost else None


def _open(uuid: str) -> Any:
    """Its handle. Raises NVMLError."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
