"""Stages of an attempt after the build, and the session that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tasks.harness.group import Group
from tasks.harness.workload import Watcher, Workload, run_step
from tasks.process.phase_file import Progress
from tasks.spec.parameters import Params
from tasks.spec.tables import AllocationRow, KernelRow, LiveRow, Sample

T = TypeVar("T")


@dataclass
class Session:
    """State that the stages of one attempt share."""

    workload: Workload
    params: Params
    progress: Progress
    group: Group = field(default_factory=Group)  # with which this process takes its steps
    # Watchers of the next step and of the one after it, in whatever stage they run, and of the last
    # step before the measured ones, if there are at least two. They work outside of the timed
    # intervals. Until the first step, the next one is the first.
    on_first_step: list[Watcher] = field(default_factory=list)
    on_second_step: list[Watcher] = field(default_factory=list)
    on_last_warm_up: list[Watcher] = field(default_factory=list)
    # Samples that a stage leaves for a later stage of the same instrument.
    shelf: dict[str, list[Sample]] = field(default_factory=dict)
    # Results of the current stage that are not samples.
    facts: dict[str, object] = field(default_factory=dict)
    kernels: list[KernelRow] = field(default_factory=list)
    allocations: list[AllocationRow] = field(default_factory=list)
    live: list[LiveRow] = field(default_factory=list)
    beaten_ms: float | None = None  # see Settings
    folder: Path | None = None  # for artifacts; None if the cell is measured by hand
    # Functions that are called with the error that ends a stage; they fill the evidence.
    on_error: list[Callable[[Exception], None]] = field(default_factory=list)
    evidence: dict[str, object] = field(default_factory=dict)
    steps: int = 0  # run so far
    decisions: int = 0  # on which the ranks agreed so far

    def count(self, name: str) -> int:
        """Return a parameter that is a count, such as `measured_steps`."""
        return int(getattr(self.params, name))

    def agree(self, value: T) -> T:
        """Return the value of rank 0, for all ranks to take as many steps. JSON can hold it."""
        self.decisions += 1
        return self.group.agree(f"decision {self.decisions}", value)

    def step(self, *watchers: Watcher) -> None:
        """Run one step. `watchers[0]` is the innermost."""
        first = self.on_first_step
        self.on_first_step, self.on_second_step = self.on_second_step, []
        self.steps += 1
        run_step(self.workload, self.progress, *watchers, *first)


@dataclass(frozen=True)
class Stage:
    """A stage of an attempt. The stages of all instruments run in ascending `order`."""

    name: str
    order: int
    run: Callable[[Session], Iterable[Sample]]
