"""Memory, peak rates and bandwidth of known GPUs, from gpus.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from orchestrator.common.errors import ConfigError, suggestion
from orchestrator.common.units import MIB

# fp16 and pure bf16 use the same tensor cores at the same rate as bf16.
_PEAK_ENTRY = {"fp16": "bf16", "bf16_pure": "bf16"}


@dataclass(frozen=True)
class GpuMemoryClass:
    """The known GPUs of one memory size. `compute_capability` is the lowest among them."""

    name: str
    usable_bytes: int
    compute_capability: float


@dataclass(frozen=True)
class GpuModel:
    """A GPU that a prediction is made for. `usable_bytes` excludes the CUDA context."""

    name: str
    usable_bytes: int
    compute_capability: float | None


@cache
def known_gpus() -> tuple[GpuMemoryClass, ...]:
    """Return the memory classes of known GPUs, smallest first."""
    classes = [
        GpuMemoryClass(gpu["name"], _usable_bytes(gpu), min(gpu["cards"].values()))
        for gpu in _data()["gpu"]
    ]
    return tuple(sorted(classes, key=lambda gpu: gpu.usable_bytes))


@cache
def _known_models() -> tuple[GpuModel, ...]:
    return tuple(
        GpuModel(name, _usable_bytes(gpu), capability)
        for gpu in _data()["gpu"]
        for name, capability in gpu["cards"].items()
    )


def _usable_bytes(gpu: dict[str, Any]) -> int:
    return int(gpu["memory_mib"] - _data()["context_mib"]) * MIB


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("gpus.toml").read_text())


def find_gpu(name: str) -> GpuModel:
    """Return the known GPU with this name, with or without NVIDIA and GeForce.

    Raises ConfigError.
    """
    models = {model.name: model for model in _known_models()}
    short = _without_maker(name)
    for known, model in models.items():
        if known.lower() == short.lower():
            return model
    alike = [known for known in models if matches_kind(known, name)]
    remedy = f"Say which: {', '.join(alike)}" if alike else suggestion(short, models)
    raise ConfigError(f"--gpu {name}: no such GPU is known", remedy)


def gpu_from_driver(name: str, memory_bytes: int) -> GpuModel:
    """Return the model of a GPU that exists here, with the memory that its driver reports."""
    alike = [model for model in _known_models() if matches_kind(name, model.name)]
    capability = alike[0].compute_capability if alike else None
    return GpuModel(name, memory_bytes - _data()["context_mib"] * MIB, capability)


def driver_name(model: GpuModel) -> str | None:
    """Return the driver's name of a GPU with known peaks, or None without any."""
    words = set(_words(model.name))
    for peak in _data()["peak"]:
        if words <= set(_words(peak["device"])):
            return str(peak["device"])
    return None


def matches_kind(device: str, kind: str) -> bool:
    """Return True if the name of a GPU contains all words of this kind, such as `RTX 5090`.

    Args:
        device: the name as the driver or Ray writes it, such as `GeForce-RTX-5090`.
    """
    return set(_words(_without_maker(kind))) <= set(_words(device))


def _without_maker(name: str) -> str:
    return " ".join(word for word in name.split() if word.lower() not in ("nvidia", "geforce"))


def _words(name: str) -> list[str]:
    return name.lower().replace("-", " ").split()


def peak_tflops(device: str | None, precision: str | None) -> float | None:
    """Return the dense peak of matrix products in this precision, or None if no source is known."""
    return _figure(device, _PEAK_ENTRY.get(str(precision), str(precision)))


def _figure(device: str | None, name: str) -> float | None:
    for peak in _data()["peak"]:
        if peak["device"] == device and name in peak:
            return float(peak[name])
    return None


def smallest_fitting(peak_bytes: float, precision: str | None = None) -> str:
    """Return the smallest memory class that holds `peak_bytes` and computes in this precision."""
    required = _data()["least_capability"].get(str(precision), 0.0)
    for gpu in known_gpus():
        if gpu.usable_bytes >= peak_bytes and gpu.compute_capability >= required:
            return gpu.name
    return "none known"
