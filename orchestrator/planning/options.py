"""The options of a command: which cells it measures (RunOptions), and how (ExecutionOptions)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from orchestrator.store.cell_state import PENDING
from orchestrator.store.run import INCOMPLETE
from tasks.spec.attempt import StartMethod
from tasks.spec.axes import Values, select

UNMEASURED = (PENDING, INCOMPLETE)

# Doubts about a success: words of --retry, and the columns of `cells` that show them.
QUALITY_FLAGS: Mapping[str, str] = {
    "cpu-contended": "cpu_contended",
    "interval-wide": "interval_wide",
}

_STORED = ("infer_oom", "repeat", "retry", "only", "fresh")  # keys of run.json


@dataclass(frozen=True)
class RunOptions:
    """The options that select cells. `retry` and `only` hold statuses, `retry` also quality flags.

    repeat: how often each cell is measured in all; repetitions show the noise of the machine.
    infer_oom: skip cells that need at least as much memory as one that ran out of it.
    continued: ids of the cells that this command has marked already, before it was interrupted.
    """

    retry: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()
    repeat: int = 1
    fresh: bool = False
    infer_oom: bool = False
    continued: frozenset[str] = frozenset()

    def to_json(self) -> Values:
        """Return the options as run.json stores them."""
        sets = {"retry": sorted(self.retry), "only": sorted(self.only)}
        return select(vars(self), _STORED) | sets

    @classmethod
    def from_json(cls, stored: Values) -> RunOptions:
        """Read stored options, without those that measure cells again: their marks are stored."""
        return cls(**select(stored, ("infer_oom", "repeat")))


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
