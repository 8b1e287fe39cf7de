"""Which GPU is large enough, and how fast one could be: the data of gpus.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from orchestrator.common.errors import ConfigError, nearest

_MIB = 1024**2


@dataclass(frozen=True)
class GpuMemoryClass:
    """The GPUs of one size. compute_capability: the least of them."""

    name: str
    usable_bytes: int
    compute_capability: float


@dataclass(frozen=True)
class GpuModel:
    """A GPU that a prediction is made for. usable_bytes: beside the CUDA context."""

    name: str
    usable_bytes: int
    compute_capability: float | None


@cache
def known_gpus() -> tuple[GpuMemoryClass, ...]:
    """Ascending by memory; usable is what is left beside the CUDA context."""
    data = _data()
    gpus = [
        GpuMemoryClass(
            gpu["name"],
            (gpu["memory_mib"] - data["context_mib"]) * _MIB,
            min(gpu["cards"].values()),
        )
        for gpu in data["gpu"]
    ]
    return tuple(sorted(gpus, key=lambda gpu: gpu.usable_bytes))


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("gpus.toml").read_text())


def find_gpu(name: str) -> GpuModel:
    """A known GPU by its name, with or without the maker's. Raises ConfigError."""
    cards = {card.name: card for card in _known_cards()}
    short = _short(name)
    for known, card in cards.items():
        if known.lower() == short.lower():
            return card
    alike = [known for known in cards if matches_kind(known, name)]
    raise ConfigError(
        f"--gpu {name}: no such GPU is known",
        f"Say which: {', '.join(alike)}" if alike else nearest(short, cards),
    )


def gpu_from_driver(name: str, memory_bytes: int) -> GpuModel:
    """A GPU of this machine or cluster, as its driver tells it."""
    alike = [card for card in _known_cards() if matches_kind(name, card.name)]
    capability = alike[0].compute_capability if alike else None
    return GpuModel(name, memory_bytes - _data()["context_mib"] * _MIB, capability)


@cache
def _known_cards() -> tuple[GpuModel, ...]:
    return tuple(
        GpuModel(name, (gpu["memory_mib"] - _data()["context_mib"]) * _MIB, capability)
        for gpu in _data()["gpu"]
        for name, capability in gpu["cards"].items()
    )


def _short(name: str) -> str:
    return " ".join(word for word in name.split() if word.lower() not in ("nvidia", "geforce"))


def driver_name(card: GpuModel) -> str | None:
    """What the driver calls a GPU that has a peak here; None for one that has none."""
    words = set(_words(card.name))
    return next(
        (peak["device"] for peak in _data()["peak"] if words <= set(_words(peak["device"]))), None
    )


def matches_kind(device: str, kind: str) -> bool:
    """Whether a GPU is of a kind: all words of that are in its name. device: as its driver, or Ray, calls it."""
    return set(_words(_short(kind))) <= set(_words(device))


def _words(name: str) -> list[str]:
    return name.lower().replace("-", " ").split()


_PEAK_OF = {"fp16": "bf16", "bf16_pure": "bf16"}  # the same units at the same rate


def peak_tflops(device: str | None, precision: str | None) -> float | None:
    """Dense peak of matrix products in this precision. None for a GPU or a precision that no source is known for."""
    return _figure(device, _PEAK_OF.get(str(precision), str(precision)))


def bandwidth_gb_s(device: str | None) -> float | None:
    """Of the GPU's memory, in 10⁹ bytes a second. None for a GPU that no source is known for."""
    return _figure(device, "bandwidth")


def _figure(device: str | None, name: str) -> float | None:
    figures: dict[str, Any] = next(
        (peak for peak in _data()["peak"] if peak["device"] == device), {}
    )
    return float(figures[name]) if name in figures else None


def smallest_fitting(peak_bytes: float, precision: str | None = None) -> str:
    """The name of the smallest known GPU that holds `peak_bytes` and has the units of this precision."""
    capability = _data()["least_capability"].get(str(precision), 0.0)
    found = (
        gpu.name
        for gpu in known_gpus()
        if gpu.usable_bytes >= peak_bytes and gpu.compute_capability >= capability
    )
    return next(found, "none known")
