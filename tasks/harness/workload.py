"""A workload: a task prepared for one cell. One `step` serves every instrument."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from tasks.harness.device import Device
from tasks.process.phase_file import Progress
from tasks.spec.tables import Sample

PhaseMarker = Callable[[str], AbstractContextManager[None]]


class Watcher(Protocol):
    """What an instrument hands to a step: it is told when each phase begins and ends."""

    def enter(self, phase: str) -> None: ...

    def leave(self, phase: str) -> None: ...


@dataclass(frozen=True)
class Workload:
    """`step(phase)` does one repetition and wraps each of its parts in `with phase(name):`.

    tokens: how many a step processes; flops: what each phase must compute, by its closed form, or None where there
    is none; facts: what was read back after building (precision flags, dtypes, parameter count). before_phase: done
    before each phase and never timed: the time of a whole step is then the sum of its phases. square: the shape
    (sequences, length, length) of a tensor of all pairs of positions, to tell those among what is saved; None where
    other tensors have that shape too. resident: what is there before a step and stays, such as parameters and inputs.
    model, optimizer: what is trained and by what, where the task trains something; its modules are the parts that a step
    can be divided into.
    """

    step: Callable[[PhaseMarker], None]
    phases: tuple[str, ...]
    device: Device
    tokens: int | None
    compiled: bool = False
    flops: Mapping[str, int] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    before_phase: Callable[[], object] | None = None
    square: tuple[int, int, int] | None = None
    resident: tuple[Tensor, ...] = ()
    model: nn.Module | None = None
    optimizer: Optimizer | None = None


@dataclass(frozen=True)
class StaticResult:
    """What a task that is no repetition comes to: numbers and facts, found once. No instrument watches it."""

    samples: tuple[Sample, ...]
    device: Device
    facts: Mapping[str, Any] = field(default_factory=dict)


def run_step(workload: Workload, progress: Progress, *watchers: Watcher) -> None:
    """One step. The first watcher is the innermost: it is entered last and left first."""

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        progress.phase = name
        if workload.before_phase is not None:
            workload.before_phase()
        for watcher in reversed(watchers):
            watcher.enter(name)
        yield
        for watcher in watchers:
            watcher.leave(name)

    workload.step(phase)
    progress.phase = ""
