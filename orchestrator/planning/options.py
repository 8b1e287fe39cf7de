"""The options of a command: which cells it measures (RunOptions), and how (ExecutionOptions)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from orchestrator.store.run import INCOMPLETE
from tasks.spec.attempt import StartMethod
from tasks.spec.axes import Values, select
from tasks.spec.cell import Cell
from tasks.spec.status import Status

PENDING = "pending"  # the status of a cell without an attempt
UNMEASURED = (PENDING, INCOMPLETE)

# Doubts about a success: words of --retry, and the columns of `cells` that show them.
QUALITY_FLAGS: Mapping[str, str] = {
    "cpu-contended": "cpu_contended",
    "interval-wide": "interval_wide",
}

_STORED = ("infer_oom", "repeat", "retry", "only", "fresh")  # keys of run.json


@dataclass(frozen=True)
class ResumedCell:
    """A cell that an interrupted --retry or --fresh has already measured again.

    repetitions: successes that the cell had before the command; it gets no fewer.
    misses: failures that it had before, which do not count as tries of the command.
    failed: every try of the command failed.
    """

    repetitions: int
    misses: int = 0
    failed: bool = False


@dataclass(frozen=True)
class RunOptions:
    """The options that select cells. `retry` and `only` hold statuses, `retry` also quality flags.

    repeat: how often each cell is measured in all; repetitions show the noise of the machine.
    infer_oom: skip cells that need at least as much memory as one that ran out of it.
    resumed: cells that this command measured before it was interrupted, by id.
    """

    retry: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()
    repeat: int = 1
    fresh: bool = False
    infer_oom: bool = False
    resumed: Mapping[str, ResumedCell] = field(default_factory=dict)

    @property
    def measures_again(self) -> bool:
        """True if cells are selected that have a result already."""
        return self.fresh or bool(self.retry | self.only)

    def for_resumed(self, cell: Cell) -> RunOptions:
        """Return the options for a cell that the command has already measured again."""
        repeat = max(self.repeat, self.resumed[cell.id].repetitions)
        return replace(self.without_repeated_work(), repeat=repeat)

    def without_repeated_work(self) -> RunOptions:
        """Return the options of a second run: only what is missing or failed."""
        return replace(self, fresh=False, retry=frozenset(), only=frozenset())

    def to_json(self) -> Values:
        """Return the options as run.json stores them."""
        sets = {"retry": sorted(self.retry), "only": sorted(self.only)}
        return select(vars(self), _STORED) | sets

    @classmethod
    def from_json(cls, stored: Values) -> RunOptions:
        """Read stored options, without those that only another version knows."""
        read = select(stored, _STORED)
        for name in {"retry", "only"} & read.keys():
            read[name] = frozenset(read[name])
        if "retry" in read:
            # Older versions had further words, which have no effect now.
            read["retry"] &= {*Status, *UNMEASURED, *QUALITY_FLAGS}
        return cls(**read)


@dataclass(frozen=True)
class ExecutionOptions:
    """The options that say where and how cells run.

    address: a running Ray cluster; None: a private Ray on this machine.
    cpu_cells: CPU cells that run at the same time.
    start_method: of the measuring processes; None: fork where possible.
    allow_mixed: results of other hardware or software may share the folder.
    take_over: write to a bucket folder although another driver seems to write to it.
    """

    time_limit_s: float | None = None
    scheduler: Literal["ray", "serial"] = "ray"
    address: str | None = None
    cpu_cells: int = 1
    start_method: StartMethod | None = None
    allow_mixed: bool = False
    take_over: bool = False
    skip_predicted_oom: bool = False
