"""The stages of an attempt after the build, contributed by the instruments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.harness.workload import Watcher, Workload, run_step
from tasks.process.phase_file import Progress
from tasks.spec.parameters import Params
from tasks.spec.tables import AllocationRow, KernelRow, LiveRow, Sample


@dataclass
class Session:
    """One measuring process at work: what every stage may use.

    on_first_step: watchers that want to see the very first step, whichever stage runs it; on_last_warm_up: the last of
    those that are not measured, where there is one after the first. They are told outside of what is timed. shelf: what a
    stage leaves for a later stage of the same instrument. facts: what a stage found out that is no number; the row of the
    cell keeps it. kernels, allocations, live: rows of a stage that watched them, too many to be samples. folder: where a
    stage leaves artifacts; None where nobody keeps them. on_error: asked in turn when a stage ends in an error, with
    that; evidence: what they know of it.
    """

    workload: Workload
    params: Params
    progress: Progress
    on_first_step: list[Watcher] = field(default_factory=list)
    on_last_warm_up: list[Watcher] = field(default_factory=list)
    shelf: dict[str, list[Sample]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    kernels: list[KernelRow] = field(default_factory=list)
    allocations: list[AllocationRow] = field(default_factory=list)
    live: list[LiveRow] = field(default_factory=list)
    folder: Path | None = None
    on_error: list[Callable[[Exception], None]] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)
    steps: int = 0  # that were run

    def count(self, name: str) -> int:
        """A parameter that counts something, such as `measured_steps`."""
        return int(getattr(self.params, name))

    def step(self, *watchers: Watcher) -> None:
        """Runs one step. `watchers[0]` is the innermost."""
        first, self.on_first_step = self.on_first_step, []
        self.steps += 1
        run_step(self.workload, self.progress, *watchers, *first)


@dataclass(frozen=True)
class Stage:
    """A part of an attempt. Stages of all chosen instruments run by `order`; each gives the samples it took."""

    name: str
    order: int
    run: Callable[[Session], Iterable[Sample]]
