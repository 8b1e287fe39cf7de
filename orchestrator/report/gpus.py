"""Which GPU is large enough: the data of gpus.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

_MIB = 1024**2


@dataclass(frozen=True)
class Gpu:
    name: str
    usable_bytes: int


@cache
def known_gpus() -> tuple[Gpu, ...]:
    """Ascending by memory; usable is what is left beside the CUDA context."""
    data = tomllib.loads(resources.files(__package__).joinpath("gpus.toml").read_text())
    gpus = [Gpu(gpu["name"], (gpu["memory_mib"] - data["context_mib"]) * _MIB) for gpu in data["gpu"]]
    return tuple(sorted(gpus, key=lambda gpu: gpu.usable_bytes))


def smallest_fitting(peak_bytes: float) -> str:
    """The name of the smallest known GPU that holds `peak_bytes`."""
    return next((gpu.name for gpu in known_gpus() if gpu.usable_bytes >= peak_bytes), "none known")
