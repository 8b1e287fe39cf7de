"""Result of one attempt, as it is stored."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.spec.attempt import Attempt
from tasks.spec.axes import Values
from tasks.spec.status import Status
from tasks.spec.tables import AllocationRow, KernelRow, LiveRow, RankRow, Sample


@dataclass(frozen=True)
class Outcome:
    """An attempt with its result.

    stage, phase: where it ended; empty if it succeeded. started_at: seconds since the epoch.
    wall_s: duration with everything around the steps.
    """

    attempt: Attempt
    status: Status
    stage: str
    phase: str
    evidence: Values
    facts: Values
    samples: tuple[Sample, ...]
    started_at: float
    wall_s: float
    kernels: tuple[KernelRow, ...] = ()
    allocations: tuple[AllocationRow, ...] = ()
    live: tuple[LiveRow, ...] = ()
    ranks: tuple[RankRow, ...] = ()
