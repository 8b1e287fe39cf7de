"""Which GPU is large enough, and how fast one could be: the data of gpus.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

_MIB = 1024**2


@dataclass(frozen=True)
class Gpu:
    name: str
    usable_bytes: int


@cache
def known_gpus() -> tuple[Gpu, ...]:
    """Ascending by memory; usable is what is left beside the CUDA context."""
    data = _data()
    gpus = [Gpu(gpu["name"], (gpu["memory_mib"] - data["context_mib"]) * _MIB) for gpu in data["gpu"]]
    return tuple(sorted(gpus, key=lambda gpu: gpu.usable_bytes))


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("gpus.toml").read_text())


_PEAK_OF = {"fp16": "bf16", "bf16_pure": "bf16"}  # the same units at the same rate


def peak_tflops(device: str | None, precision: str | None) -> float | None:
    """Dense peak of matrix products in this precision. None for a GPU or a precision that no source is known for."""
    peaks: dict[str, Any] = next((peak for peak in _data()["peak"] if peak["device"] == device), {})
    found = peaks.get(_PEAK_OF.get(str(precision), str(precision)))
    return None if found is None else float(found)


def smallest_fitting(peak_bytes: float) -> str:
    """The name of the smallest known GPU that holds `peak_bytes`."""
    return next((gpu.name for gpu in known_gpus() if gpu.usable_bytes >= peak_bytes), "none known")
