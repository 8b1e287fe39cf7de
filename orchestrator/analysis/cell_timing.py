"""A cell as one run measured it: what is held against another side of it, its time and what that
may depend on.

a run ─the attempts that count─→ samples ─by cell─→ sides, of its steps or of what their kernels
take
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from orchestrator.analysis.cells import valid_attempts
from orchestrator.analysis.cpu_bound import BoundBy, bound_by, depends_on_cpu
from orchestrator.analysis.results import Results, load_with_samples
from orchestrator.analysis.statistics import summarise
from orchestrator.analysis.timing_columns import step_attempts, step_kernel_times
from orchestrator.store.run import Run

AGREEMENT = 0.02


class Interval(NamedTuple):
    """Of the median, over the attempts: the medians of each."""

    low: float
    middle: float
    high: float

    def over(self, other: Interval) -> Interval:
        return Interval(self.low / other.high, self.middle / other.middle, self.high / other.low)

    @property
    def holds_one(self) -> bool:
        """Or is within 2 % of it."""
        return self.low <= 1 <= self.high or abs(self.middle - 1) <= AGREEMENT


@dataclass(frozen=True)
class Side:
    """A cell as one run measured it: the median of each attempt's steps in ms, and the interval of
    such a median.

    low_ms, high_ms: the medians, over the attempts, of the ends of their intervals: one attempt in
    trouble moves neither. clock_mhz: of the GPU after the timing, null where it is not known.
    decides: whose speed its time is, where that is known. needs_host: whether a slower host makes
    its steps longer. waited_for_core: where it does, the share of the timing that a thread waited
    for a core. paces: the least and the greatest that was seen of the host's speed, in operations a
    ms. kernels_ms: what the kernels of a step take, where they were watched. is_of_kernels: whether
    its times themselves are of these, since no step was timed.
    """

    medians_ms: tuple[float, ...]
    low_ms: float
    high_ms: float
    clock_mhz: float | None = None
    decides: BoundBy | None = None
    needs_host: bool = False
    waited_for_core: float = 0.0
    paces: tuple[float, float] | None = None
    kernels_ms: Interval | None = None
    is_of_kernels: bool = False

    @property
    def ms(self) -> float:
        """The median of the attempts, as the ends of the interval are."""
        return statistics.median(self.medians_ms)

    @property
    def mean_ms(self) -> float:
        """The geometric mean of the attempts, of which the noise tells how far it lies off."""
        return math.exp(sum(map(math.log, self.medians_ms)) / len(self.medians_ms))


def load_counted(run: Run) -> tuple[Results, pd.DataFrame]:
    """Its results, and the samples of every success that counts."""
    results, samples = load_with_samples(run, every_version=True)
    well = valid_attempts(run.read("attempts", ["cell", "attempt", "status", "replaces"]))[
        ["cell", "attempt"]
    ]
    return results, samples.merge(well, on=["cell", "attempt"])


def sides_of(results: Results, samples: pd.DataFrame) -> dict[str, Side]:
    """By cell, of samples of every success that counts."""
    steps = step_attempts(samples)
    if steps.empty:
        return {}
    cells = results.cells
    clocks, deciding = (
        _known(cells, "sm_clock_after"),
        dict(zip(cells["cell"], bound_by(cells), strict=True)),
    )
    needing = cells[depends_on_cpu(cells)]
    waited, paces = _known(needing, "waited_for_core"), _paces(samples)
    needs = set(map(str, needing["cell"]))
    kernels = _kernels(cells, samples)
    return {
        cell: Side(
            *times,
            clocks.get(cell),
            deciding.get(cell),
            cell in needs,
            waited.get(cell, 0.0),
            paces.get(cell),
            kernels.get(cell),
        )
        for cell, times in _times(steps).items()
    }


def kernel_sides_of(results: Results, samples: pd.DataFrame) -> dict[str, Side]:
    """The same, of what the kernels of its steps take."""
    watched, clocks = step_kernel_times(samples), _known(results.cells, "sm_clock_after")
    return {
        cell: Side(*times, clocks.get(cell), is_of_kernels=True)
        for cell, times in _times(watched).items()
    }


def _times(steps: pd.DataFrame) -> dict[str, tuple[tuple[float, ...], float, float]]:
    """By cell, of steps of every attempt: the median of each, and the medians of the ends of their
    intervals.
    """
    summary = summarise(steps, ["cell", "attempt"])
    return {
        str(cell): (tuple(own["median"]), own["ci_low"].median(), own["ci_high"].median())
        for cell, own in summary.groupby(level="cell")
    }


def _intervals(steps: pd.DataFrame) -> dict[str, Interval]:
    return {
        cell: Interval(low, statistics.median(medians), high)
        for cell, (medians, low, high) in _times(steps).items()
    }


def _kernels(cells: pd.DataFrame, samples: pd.DataFrame) -> dict[str, Interval]:
    """Where one step alone was profiled, by the attempt that counts, the interval has no width."""
    profiled = {
        cell: Interval(ms, ms, ms)
        for cell, ms in _known(cells, "step_kernel_time_ms_median").items()
    }
    return profiled | _intervals(step_kernel_times(samples))


def _known(cells: pd.DataFrame, column: str) -> dict[str, float]:
    """The number in it by cell, where there is one."""
    known = cells[cells[column].notna()] if column in cells else cells.iloc[:0]
    return {
        str(cell): float(value)
        for cell, value in zip(known["cell"], known.get(column, ()), strict=True)
    }


def _paces(samples: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """By cell, the least and the greatest of all its attempts."""
    read = samples[(samples["metric"] == "host_pace") & samples["value"].notna()].groupby("cell")[
        "value"
    ]
    return {
        str(cell): (least, greatest)
        for cell, least, greatest in read.agg(["min", "max"]).itertuples()
    }
