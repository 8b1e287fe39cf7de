"""Instruments, one file each: a module with `STAGES` measures something about a step."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.harness.stage import Stage


@cache
def instrument_names() -> tuple[str, ...]:
    """Return the names of all instruments from file names: importing one would import torch."""
    return tuple(module.name for module in pkgutil.iter_modules(__path__))


def stages_of(names: Iterable[str]) -> list[Stage]:
    """Return the stages of the named instruments in the order in which they run."""
    stages: list[Stage] = []
    for name in names:
        stages += importlib.import_module(f"{__name__}.{name}").STAGES
    return sorted(stages, key=lambda stage: stage.order)
