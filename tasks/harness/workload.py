"""A workload: a task built for one cell. All instruments watch the same `step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from tasks.harness.device import Device
from tasks.process.phase_file import Progress
from tasks.spec.tables import Sample

PhaseMarker = Callable[[str], AbstractContextManager[None]]


class Watcher(Protocol):
    """An instrument's observer of a step, called when each phase begins and ends."""

    def enter(self, phase: str) -> None: ...

    def leave(self, phase: str) -> None: ...


@dataclass(frozen=True)
class Workload:
    """A built step: `step(phase)` runs it once, with each phase inside `with phase(name):`."""

    step: Callable[[PhaseMarker], None]
    phases: tuple[str, ...]  # in the order in which they first run
    device: Device
    tokens: int | None  # that a step processes
    micro_batches: int = 1  # of a step: as often run the forward and the backward phase
    compiled: bool = False
    flops: Mapping[str, int] | None = None  # of each phase, by the closed form
    facts: Mapping[str, object] = field(default_factory=dict)  # read back after the build
    # Runs before each phase, untimed; the step's time is then the sum of its phases.
    before_phase: Callable[[], object] | None = None
    # Shape (sequences, length, length) of a tensor over all pairs of positions, by which saved
    # tensors are recognised; None if other tensors have that shape, too.
    square: tuple[int, int, int] | None = None
    # Tensors that exist before and after a step, such as parameters and inputs.
    resident: tuple[Tensor, ...] = ()
    # For tasks that train. The modules of the model divide a step into parts.
    model: nn.Module | None = None
    optimizers: tuple[Optimizer, ...] = ()
    # Counts the steps in which the optimizer changed parameters.
    optimizer_steps: Callable[[], int] | None = None
    # Returns a context in which steps send nothing; None if they cannot compute without.
    without_transfers: Callable[[], AbstractContextManager[None]] | None = None
    # Runs after the timed steps. Raises RuntimeError if the ranks do not have what they should.
    verify: Callable[[], None] | None = None
    # Facts that steps may change. They are read after each stage.
    read_facts: Callable[[], Mapping[str, object]] = dict

    @property
    def phase_runs(self) -> int:
        """The largest number of phases that one step runs."""
        return len(self.phases) * self.micro_batches


@dataclass(frozen=True)
class StaticResult:
    """Numbers and facts of a task that computes them once. No instrument watches it."""

    samples: tuple[Sample, ...]
    device: Device
    facts: Mapping[str, object] = field(default_factory=dict)


def run_step(workload: Workload, progress: Progress, *watchers: Watcher) -> None:
    """Run one step. The first watcher is the innermost: it is entered last and left first."""

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
