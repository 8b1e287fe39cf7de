"""Settings of the process that change what is measured, and how a cell's code has changed them.

They are read before the model is imported and after each stage. What the cell itself asks for, such
as its precision, is checked in `tasks/harness/precision.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from tasks.process.cpu_affinity import spans
from tasks.spec.axes import FrozenValues, Values

THREADS = "threads of torch"


def _usable_cores() -> str | None:
    if not hasattr(os, "sched_getaffinity"):
        return None
    return spans(sorted(os.sched_getaffinity(0)))


# By the name that a reader sees. A new setting is one line here.
_SETTINGS: Mapping[str, Callable[[], object]] = MappingProxyType(
    {
        THREADS: torch.get_num_threads,
        "anomaly mode of torch.autograd": torch.is_anomaly_enabled,
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
        "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
        "torch.backends.cudnn.enabled": lambda: torch.backends.cudnn.enabled,
        "threads of torch between operations": torch.get_num_interop_threads,
        "niceness": lambda: os.nice(0),
        "CPU cores": _usable_cores,
    }
)


def read_settings() -> Values:
    """Return the present value of each setting by its name."""
    return {name: read() for name, read in _SETTINGS.items()}


def changed_settings(before: FrozenValues) -> str:
    """Return what has changed since, such as `niceness 0 → 10`, or an empty text."""
    changes = []
    for name, value in read_settings().items():
        if value != before[name]:
            changes.append(f"{name} {before[name]} → {value}")
    return ", ".join(changes)
