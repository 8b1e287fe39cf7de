"""A workload: a task prepared for one cell. One `step` serves every instrument."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tasks.harness.device import Device
from tasks.harness.progress import Progress

PhaseMarker = Callable[[str], AbstractContextManager[None]]


class Watcher(Protocol):
    """What an instrument hands to a step: it is told when each phase begins and ends."""

    def enter(self, phase: str) -> None: ...

    def leave(self, phase: str) -> None: ...


@dataclass(frozen=True)
class Workload:
    """`step(phase)` does one repetition and wraps each of its parts in `with phase(name):`.

    tokens: how many a step processes; flops: what each phase must compute, by its closed form, or None where there
    is none; facts: what was read back after building (precision flags, dtypes, parameter count).
    """

    step: Callable[[PhaseMarker], None]
    phases: tuple[str, ...]
    device: Device
    tokens: int
    compiled: bool = False
    flops: Mapping[str, int] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def run_step(workload: Workload, progress: Progress, *watchers: Watcher) -> None:
    """One step. The first watcher is the innermost: it is entered last and left first."""

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        progress.phase = name
        for watcher in reversed(watchers):
            watcher.enter(name)
        yield
        for watcher in watchers:
            watcher.leave(name)

    workload.step(phase)
    progress.phase = ""
