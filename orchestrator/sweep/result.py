"""The result of one sweep, computed at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.common.errors import SweepError
from orchestrator.planning.attempt_queue import QueueState
from orchestrator.planning.preflight import Exclusion
from orchestrator.sweep.interruption import StopReason
from tasks.spec.status import Status


@dataclass(frozen=True)
class SweepResult:
    """The outcome of a sweep: stored attempts, remaining cells, and why it ended.

    folder: the results folder as the command line names it.
    counts: stored outcomes by status; with repetitions, a cell has several.
    measured_cells: cells that were measured at least once.
    queue: what was left.
    excluded: cells that the preflight excluded.
    before: cells by status before the sweep. exhausted: cells that had failed too often before.
    quality: measured cells by quality flag.
    recovered: outcomes of an earlier driver that was killed.
    stop_reason: what interrupted the sweep. error: what made it impossible to continue.
    """

    folder: str = ""
    counts: Mapping[Status, int] = field(default_factory=dict)
    measured_cells: int = 0
    queue: QueueState = field(default_factory=QueueState)
    excluded: tuple[Exclusion, ...] = ()
    before: Mapping[str, int] = field(default_factory=dict)
    exhausted: int = 0
    quality: Mapping[str, int] = field(default_factory=dict)
    recovered: int = 0
    stop_reason: StopReason | None = None
    error: SweepError | None = None

    @property
    def is_cut_short(self) -> bool:
        """True if the sweep ended before its last cell."""
        return bool(self.stop_reason or self.error or self.queue.skipped_for_time)

    @property
    def predicted_oom(self) -> int:
        """The number of cells that were skipped because they are predicted to run out of memory."""
        return sum(not exclusion.is_deferred for exclusion in self.excluded)

    @property
    def measured_counts(self) -> dict[Status, int]:
        """The stored outcomes by status, without those that were inferred."""
        counts = dict(self.counts)
        counts.pop(Status.OOM_INFERRED, None)
        return counts
