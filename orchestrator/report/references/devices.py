"""The devices that numbers were published of. Known without pandas, so that the command line can name them at once."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from orchestrator.common.errors import ConfigError, suggestion

ALL = "all"  # in place of a device


@dataclass(frozen=True)
class Device:
    """limit: the GPU of gpus.toml that it is no faster than."""

    name: str
    limit: str | None = None
    memory_gib: int | None = None


@cache
def devices() -> Mapping[str, Device]:
    """By the word that the command line takes."""
    text = resources.files(__package__).joinpath("devices.toml").read_text(encoding="utf-8")
    return {word: Device(**entry) for word, entry in tomllib.loads(text).items()}


def find_device(word: str) -> str:
    """A device, or ALL. Raises ConfigError for a word that is no device of a write-up."""
    if word not in (*devices(), ALL):
        allowed = f"Published are {', '.join(devices())}; {ALL} stands for every one"
        close = suggestion(word, [*devices(), ALL])
        raise ConfigError(
            f"--against {word}: no write-up is of it",
            f"{close} {allowed}" if close.startswith("Did") else allowed,
        )
    return word
