"""The result of one sweep."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from orchestrator.common.errors import SweepError
from tasks.spec.cell import Cell
from tasks.spec.status import Status


@dataclass
class Summary:
    """What a run did. stopped: why it ended before its cells did, if so; late: cells not begun for want of time.

    elsewhere: those that cannot be measured here. late_s: what the shortest of the late ones is expected to take. before: the
    statuses of all cells when it began.
    given_up: how many cells were left alone since they had failed too often.
    broken: what ended it before, where that is for the user to mend. cells: how many it measured, however often; left: how many
    it did not, or not as often as it was to.
    flaws: by flaw, how many of the cells that it measured have it; `concurrent` counts CPU-bound cells
    that ran while others used their host.
    foreseen: cells left out because they were predicted to run out of memory. inferred: those that were inferred to, and not
    measured; verified: those that were measured all the same, now or inferred before; refuted: which of them fit.
    """

    statuses: Counter[Status] = field(default_factory=Counter)
    recovered: int = 0
    stopped: str = ""
    broken: SweepError | None = None
    late: int = 0
    elsewhere: int = 0
    late_s: float | None = None
    before: Counter[str] = field(default_factory=Counter)
    cells: int = 0
    left: int = 0
    given_up: int = 0
    flaws: Counter[str] = field(default_factory=Counter)
    foreseen: int = 0
    inferred: int = 0
    verified: int = 0
    refuted: tuple[Cell, ...] = ()

    @property
    def is_at_its_end(self) -> bool:
        """Whether nothing is left that another run would do."""
        return not (self.stopped or self.broken or self.late or self.elsewhere)

    @property
    def measured(self) -> Counter[Status]:
        """By status, what was measured."""
        return Counter(
            {
                status: count
                for status, count in self.statuses.items()
                if status is not Status.OOM_INFERRED
            }
        )
