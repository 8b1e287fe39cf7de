"""What NVIDIA's management library says of this host's GPUs without waking them: no CUDA, no torch, some milliseconds."""

from __future__ import annotations

import os
from collections.abc import Sequence

_WORD_BITS = 64  # of the masks that it fills


def gpu_names() -> Sequence[str]:
    """The GPUs that CUDA would see here, by the names that their driver gives; none where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        names = [pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[: len([name for name in visible.split(",") if name.strip()])]


def near_cores(uuid: str) -> frozenset[int] | None:
    """The processor cores of the NUMA node that a GPU hangs on. None where that is not told."""
    import pynvml

    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        words = pynvml.nvmlDeviceGetCpuAffinity(gpu, -(-(os.cpu_count() or 1) // _WORD_BITS))
    except pynvml.NVMLError:
        return None
    bits = ((word, bit) for word in range(len(words)) for bit in range(_WORD_BITS))
    return frozenset(word * _WORD_BITS + bit for word, bit in bits if words[word] >> bit & 1) or None
