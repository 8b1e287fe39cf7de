"""Memory, peak rates and bandwidth of known GPUs, from gpus.toml."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources

from orchestrator.common.errors import ConfigError
from orchestrator.common.units import GIB, MIB
from tasks.spec.axes import Values

# fp16 and pure bf16 use the same tensor cores at the same rate as bf16.
_PEAK_ENTRY = {"fp16": "bf16", "bf16_pure": "bf16"}
_BRANDS = frozenset({"nvidia", "geforce", "tesla", "quadro", "rtx", "gtx", "amd", "instinct"})
# These have less memory than the GPU whose name they follow.
_VARIANTS = frozenset({"laptop", "mobile", "mig"})
_MEMORY = re.compile(r"(?<![\w.])(\d{1,6}(?:\.\d{1,3})?)[ -]?gi?b?\b", re.IGNORECASE)
_NOMINAL = 0.1  # a GPU of 80 GB has 79.6 GiB, a T4 of 16 GB has 15


@dataclass(frozen=True)
class GpuMemoryClass:
    """The known GPUs of one memory size. `compute_capability` is the lowest among them."""

    name: str
    usable_bytes: int
    compute_capability: float


@dataclass(frozen=True)
class GpuModel:
    """A GPU that a prediction is made for. `usable_bytes` excludes the CUDA context.

    device: the name in gpus.toml of the variant whose peaks are used; None: any variant's.
    """

    name: str
    usable_bytes: int
    compute_capability: float | None
    device: str | None = field(default=None, compare=False)


@cache
def known_gpus() -> tuple[GpuMemoryClass, ...]:
    """Return the memory classes of known GPUs, smallest first."""
    classes = []
    for gpu in _data()["gpu"]:
        if "name" in gpu:
            usable, capabilities = _usable_bytes(gpu["memory_mib"]), gpu["cards"].values()
            classes.append(GpuMemoryClass(gpu["name"], usable, min(capabilities)))
    return tuple(sorted(classes, key=lambda gpu: gpu.usable_bytes))


@cache
def _known_models() -> tuple[GpuModel, ...]:
    models = []
    for gpu in _data()["gpu"]:
        for name, capability in gpu["cards"].items():
            models.append(GpuModel(name, _usable_bytes(gpu["memory_mib"]), capability))
    return tuple(models)


def _usable_bytes(memory_mib: int) -> int:
    return int(memory_mib - _data()["context_mib"]) * MIB


@cache
def _data() -> Values:
    return tomllib.loads(resources.files(__package__).joinpath("gpus.toml").read_text())


def find_gpu(name: str) -> GpuModel:
    """Return the GPU with this name, or any GPU with this memory, such as `24GiB`.

    The name may be that in gpus.toml, the driver's, or another spelling. Raises ConfigError.
    """
    if size := _MEMORY.fullmatch(name.strip()):
        usable_bytes = int(float(size[1]) * GIB) - _data()["context_mib"] * MIB
        if usable_bytes > 0:
            return GpuModel(f"GPU of {size[1]} GiB", usable_bytes, None)
    models = _models_named(name)
    if not models:
        remedy = "Give its memory: --gpu 24GiB, or --set memory_limit_gib=24"
        raise ConfigError(f"--gpu {name}: is not known", remedy)
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise ConfigError(f"--gpu {name}: there are several", f"Say which: {names}")
    return replace(models[0], device=_closest_device(name, models[0]))


def gpu_from_driver(name: str, memory_bytes: int) -> GpuModel:
    """Return the model of a GPU that exists here, with the memory that its driver reports."""
    alike = [model for model in _known_models() if matches_kind(name, model.name)]
    capability = alike[0].compute_capability if alike else None
    return GpuModel(name, memory_bytes - _data()["context_mib"] * MIB, capability, name)


def driver_name(model: GpuModel) -> str | None:
    """Return the driver's name of a GPU with known peaks, or None without any."""
    return model.device or _closest_device(model.name, model)


def matches_kind(device: str, kind: str) -> bool:
    """Return True if the name of a GPU contains all words of this kind, such as `RTX 5090`.

    Args:
        device: the name as the driver or Ray writes it, such as `GeForce-RTX-5090`.
    """
    memory_gb = _memory_gb(kind)
    is_same_size = memory_gb is None or memory_gb == _memory_gb(device)
    return is_same_size and _words(kind) <= _words(device)


def _models_named(name: str) -> list[GpuModel]:
    """Return the known GPUs that a name may mean: those with the most words in common."""
    letters, words = _letters(name), _words(name)
    exact = [model for model in _known_models() if _letters(model.name) == letters]
    if exact or words & _VARIANTS:
        return exact
    by_count: dict[int, list[GpuModel]] = defaultdict(list)
    for model in _known_models():
        if _is_named(model, words, _memory_gb(name)):
            by_count[len(_words(model.name))].append(model)
    return by_count[max(by_count, default=0)]


def _is_named(model: GpuModel, words: frozenset[str], memory_gb: float | None) -> bool:
    if not _words(model.name) <= words:
        return False
    if memory_gb is None:
        return True
    total_bytes = model.usable_bytes + _data()["context_mib"] * MIB
    difference_gb: float = abs(total_bytes / GIB - memory_gb)
    return difference_gb <= _NOMINAL * memory_gb


def _closest_device(name: str, model: GpuModel) -> str | None:
    """Return the device in gpus.toml that is this GPU, with the most words of a name."""
    devices = [str(peak["device"]) for peak in _data()["peak"]]
    same = [device for device in devices if model in _models_named(device)]
    return max(same, key=lambda device: len(_words(device) & _words(name)), default=None)


def _memory_gb(name: str) -> float | None:
    size = _MEMORY.search(name)
    return float(size[1]) if size else None


def _letters(name: str) -> str:
    """Return a name without its brand and separators: `RTX-4090` and `4090` are the same."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(rf"^(?:{'|'.join(_BRANDS)})+", "", letters)


def _words(name: str) -> frozenset[str]:
    """Return the words of a name that distinguish GPUs: without the brand and the memory."""
    without_memory = _MEMORY.sub(" ", name.lower())
    # `RTX4090` is `RTX 4090`.
    parted = re.sub(r"\b(rtx|gtx)(?=\w)", r"\1 ", without_memory)
    words = frozenset(re.findall(r"[a-z0-9]+", parted))
    return words - _BRANDS or words


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
