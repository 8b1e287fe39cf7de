"""Memory and peak rates of known GPUs, from gpus.toml, and the rules by which a name finds one."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import resources

from orchestrator.common.errors import ConfigError
from orchestrator.common.text import letters_of
from orchestrator.common.units import GIB, MIB
from tasks.spec.axes import Values

_MEMORY = re.compile(r"(?<![\w.])(\d{1,6}(?:\.\d{1,3})?)[ -]?gi?b?\b", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,3}(?:\.\d{1,3})?")  # a size without its unit
_NUMBERED = re.compile(r"[a-z]*\d+")
_MISTYPED = re.compile(r"\d{3}[1-9]")  # the numbers of all GPUs with four digits end with 0
_LINK = re.compile(r"((?:NVLink|PCIe) [\d.]+) × (\d+)(, graphics card)?")
_LARGER = frozenset({"ti", "super"})
_LAST_DIGIT = re.compile(r"(?<=\d\d)\d$")
_NOMINAL = 0.1  # a GPU of 80 GB has 79.6 GiB, a T4 of 16 GB has 15
_SIZE = "the size: --gpu 24GiB"
# What a prediction for an AMD card adds: it is made with CUDA's allocator and workspaces.
UNTESTED_ON_AMD = "modelled with the allocator and libraries of CUDA, which is untested on AMD"
# Operations per cycle of one SM of a GeForce; see the head of gpus.toml.
_GEFORCE_RATES = {"fp32": 256, "tf32": 256, "bf16": 512}


@dataclass(frozen=True)
class GpuMemoryClass:
    """The known GPUs of one memory size. `compute_capability` is the lowest among them."""

    name: str
    usable_bytes: int
    compute_capability: float


@dataclass(frozen=True)
class GpuModel:
    """A GPU that a prediction is made for. `usable_bytes` excludes the CUDA context.

    device: the name that the driver gives it; None if only its size is known.
    """

    name: str
    usable_bytes: int
    compute_capability: float | None
    device: str | None = field(default=None, compare=False)

    @property
    def is_amd(self) -> bool:
        return self.device is not None and self.device.startswith("AMD ")


@dataclass(frozen=True)
class _Card:
    """An entry of gpus.toml. `peaks` are dense TFLOP/s by precision.

    other_sizes: memory of the cards of this name that are no entry, such as `8GiB`.
    """

    name: str
    memory_mib: int
    compute_capability: float | None
    devices: tuple[str, ...]
    aliases: tuple[str, ...]
    other_sizes: tuple[str, ...]
    peaks: dict[str, float]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str.lower, (self.name, *self.devices, *self.aliases)))

    @property
    def model(self) -> GpuModel:
        usable = _usable_bytes(self.memory_mib)
        return GpuModel(self.name, usable, self.compute_capability, self.devices[0])


@cache
def known_gpus() -> tuple[GpuMemoryClass, ...]:
    """Return the memory classes of known GPUs, smallest first."""
    by_name = {card.name: card for card in _cards()}
    classes = []
    for name, members in _data()["memory_classes"].items():
        cards = [by_name[member] for member in members]
        usable = _usable_bytes(min(card.memory_mib for card in cards))
        capability = min(card.compute_capability or 0.0 for card in cards)
        classes.append(GpuMemoryClass(name, usable, capability))
    return tuple(sorted(classes, key=lambda gpu: gpu.usable_bytes))


@cache
def _cards() -> tuple[_Card, ...]:
    cards = []
    for entry in _data()["card"]:
        card = _Card(
            entry["name"],
            entry["memory_mib"],
            entry.get("compute_capability"),
            tuple(entry["devices"]),
            tuple(entry.get("aliases", ())),
            tuple(entry.get("other_sizes", ())),
            _peaks_of(entry),
        )
        cards.append(card)
    return tuple(cards)


def _peaks_of(entry: Values) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for name in ("fp32", "tf32", "fp16", "bf16"):
        if name in entry:
            peaks[name] = entry[name]
        elif "sms" in entry and name in _GEFORCE_RATES:
            operations_per_ns = entry["sms"] * entry["boost_ghz"] * _GEFORCE_RATES[name]
            peaks[name] = round(operations_per_ns / 1e3, 1)
    return peaks


def _usable_bytes(memory_mib: int) -> int:
    return int(memory_mib - _data()["context_mib"]) * MIB


def nccl_bytes() -> int:
    """Return the memory that is reserved for NCCL on each GPU of a cell with several."""
    return int(_data()["nccl_mib"]) * MIB


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
    words = _words(name)
    if words & set(_data()["shared_memory_words"]):
        remedy = "Give the free memory instead, for example --gpu 32GiB"
        raise ConfigError(f"--gpu {name}: this GPU shares the host's memory", remedy)
    cards = _cards_named(name)
    if not cards:
        raise ConfigError(f"--gpu {name}: is not known", _nearest(name, words))
    others = cards[0].other_sizes if _memory_gb(name) is None else ()
    if len(cards) > 1 or others:
        sizes = ", ".join([*(card.name for card in cards), *others])
        remedy = f"Choose one of: {sizes}; or give {_SIZE}"
        raise ConfigError(f"--gpu {name}: comes in several sizes", remedy)
    return cards[0].model


def gpu_from_driver(name: str, memory_bytes: int) -> GpuModel:
    """Return the model of a GPU that exists here, with the memory that its driver reports."""
    cards = _cards_named(name)
    capability = cards[0].compute_capability if cards else None
    return GpuModel(name, memory_bytes - _data()["context_mib"] * MIB, capability, name)


def matches_kind(device: str, kind: str | None) -> bool:
    """Return True if the name of a GPU contains all words of this kind, or if there is no kind.

    A word such as `Ti` or `Laptop` in the name alone makes it another GPU.

    Args:
        device: the name as the driver or Ray writes it, such as `GeForce-RTX-5090`.
        kind: as in a config, such as `RTX 5090`.
    """
    if kind is None:
        return True
    memory_gb = _memory_gb(kind)
    is_same_size = memory_gb is None or memory_gb == _memory_gb(device)
    more_words = _words(device) - _words(kind)
    is_variant = bool(more_words & set(_data()["variant_words"]))
    return is_same_size and _words(kind) <= _words(device) and not is_variant


def _cards_named(name: str) -> list[_Card]:
    """Return the known GPUs that a name may mean.

    A name or alias as it is written comes first, then the cards with the most words of the name.
    No card is meant if a word is left that may name another one.
    """
    asked = name.strip().lower()
    exact = [card for card in _cards() if asked in card.names]
    if exact:
        return exact
    words, memory_gb = _words(name), _memory_gb(name)
    found: list[_Card] = []
    most = 0
    for card in _cards():
        count = _words_in_common(card, words)
        if count < max(most, 1) or not _has_size(card, memory_gb):
            continue
        if count > most:
            found, most = [], count
        found.append(card)
    return found


def _words_in_common(card: _Card, words: frozenset[str]) -> int:
    """Return how many words one of a card's names shares with these, or 0 for another GPU."""
    most = 0
    for name in card.names:
        own = _words(name)
        unknown = words - own - set(_data()["harmless_words"])
        if own <= words and not unknown:
            most = max(most, len(own))
    return most


def _has_size(card: _Card, memory_gb: float | None) -> bool:
    if memory_gb is None:
        return True
    difference_gb: float = abs(card.memory_mib * MIB / GIB - memory_gb)
    return difference_gb <= _NOMINAL * memory_gb


def _nearest(name: str, words: frozenset[str]) -> str:
    """Return the text that names the known GPUs nearest to a name, and the way without one."""
    cards = {card.name.lower(): card.name for card in _cards()}
    near: list[str] = []
    # With another number it is another GPU, however similar the rest of the name is.
    same = [lower for lower in cards if _numbers(_words(lower)) == _numbers(words)]
    if words & _LARGER and same and not words & set(_data()["variant_words"]) - _LARGER:
        return f"Known with this number: {_or([cards[name] for name in same])}. Or give {_SIZE}"
    # A laptop's or a part of a GPU has less memory than the card whose name it carries.
    if words and not words & set(_data()["variant_words"]):
        near = [lower for lower in cards if words <= _words(lower)]
        if not near and _NUMBER.fullmatch(name.strip()):
            return f"Give the size: --gpu {name.strip()}GiB"
        near = near or [lower for lower in cards if letters_of(lower) == letters_of(name)]
        near = near or get_close_matches(name.lower(), same, n=3, cutoff=0.5)
        if not near and any(map(_MISTYPED.fullmatch, words)):
            near = get_close_matches(name.lower(), cards, n=1, cutoff=0.6)
    if not near:
        return f"Give {_SIZE}"
    return f"Did you mean {_or([cards[name] for name in near[:3]])}? Or give {_SIZE}"


def _numbers(words: frozenset[str]) -> set[str]:
    """Return the numbers of a name with the letters before them, such as `mi25#` of `MI250X`.

    The last digit of three is left out, since it may be mistyped; GPUs differ in the others.
    """
    numbers = [found[0] for found in map(_NUMBERED.match, words) if found]
    return {_LAST_DIGIT.sub("#", number) for number in numbers}


def _or(names: list[str]) -> str:
    *first, last = names
    return " or ".join(filter(None, [", ".join(first), last]))


def _memory_gb(name: str) -> float | None:
    size = _MEMORY.search(name.replace("_", " "))
    return float(size[1]) if size else None


def _words(name: str) -> frozenset[str]:
    """Return the words of a name that distinguish GPUs: without the brand and the memory."""
    without_memory = _MEMORY.sub(" ", name.lower().replace("_", " "))
    # `RTX4070Ti` is `RTX 4070 Ti`; `L40S` stays one word.
    parted = re.sub(r"\b(rtx|gtx)(?=\w)|(?<=\d)(?=ti\b|super\b|tisuper\b)", r"\1 ", without_memory)
    parted = parted.replace("tisuper", "ti super")
    words = frozenset(re.findall(r"[a-z0-9]+", parted))
    return words - set(_data()["harmless_words"]) or words


@cache
def peak_tflops(device: str | None, precision: str | None) -> float | None:
    """Return the dense peak of matrix products in this precision, or None if no source is known.

    Args:
        device: the name that the driver gives.
        precision: fp16 and pure bf16 run at the rate of bf16, unless fp16 has its own.
    """
    entry = str(precision).removesuffix("_pure")
    for card in _cards():
        if device in card.devices:
            return card.peaks.get(entry, card.peaks.get("bf16") if entry == "fp16" else None)
    return None


def link_peak_gb_s(links: str) -> float | None:
    """Return the peak of the slowest link that `describe_links` names, in GB/s each way.

    Return None if one of them is not known, and for direct links of more than two GPUs: a ring uses
    all of them, so that the peak of a pair is no bound.
    """
    peaks: list[float] = []
    if ", direct" in links:
        return None
    for link in links.split("; "):
        found = _LINK.match(link)
        of_one = _data()["link_gb_s"].get(found[1] + (found[3] or "")) if found else None
        if found is None or of_one is None:
            return None
        peaks.append(of_one * int(found[2]))
    return min(peaks)


def smallest_fitting(peak_bytes: float, precision: str | None = None) -> str:
    """Return the smallest memory class that holds `peak_bytes` and computes in this precision."""
    required = _data()["least_capability"].get(str(precision), 0.0)
    for gpu in known_gpus():
        if gpu.usable_bytes >= peak_bytes and gpu.compute_capability >= required:
            return gpu.name
    return "none known"
