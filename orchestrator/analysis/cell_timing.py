"""Timings of the cells of one run, as a comparison needs them.

The samples of all valid attempts enter; a `CellTiming` for each cell leaves: its time, the interval
of that time, and what the time may depend on.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from orchestrator.analysis.cells import valid_attempts
from orchestrator.analysis.cpu_bound import BoundBy, bound_by, depends_on_cpu
from orchestrator.analysis.metric_columns import summarise
from orchestrator.analysis.results import Results, load_with_samples, read_attempts
from orchestrator.analysis.timing_columns import step_attempts, step_kernel_times
from orchestrator.store.run import Run

AGREEMENT = 0.02
LARGE_DIFFERENCE = 0.25  # a difference that anybody would call one
# As wide as from half to twice the time. In 120 pairs of equal cells on an H200, the ends of the
# interval differed by a factor of at most 2.8.
_VAGUE_FACTOR = 4.0
_MIN_COVERAGE = 0.95  # with fewer than six steps, the interval has less


class RatioInterval(NamedTuple):
    """Ratio of two times, between the least and the greatest that their intervals allow."""

    low: float
    middle: float
    high: float

    @property
    def agrees(self) -> bool:
        """True if the times are within AGREEMENT of each other or their intervals overlap.

        Very wide intervals overlap although the times differ a lot.
        """
        if self.is_large and self.is_vague:
            return False
        return self.low <= 1 <= self.high or abs(self.middle - 1) <= AGREEMENT

    @property
    def is_large(self) -> bool:
        """True if the times differ by more than LARGE_DIFFERENCE."""
        return abs(math.log(self.middle)) > math.log1p(LARGE_DIFFERENCE)

    @property
    def is_vague(self) -> bool:
        """True if the interval is so wide that it says nothing about the ratio."""
        return self.high > _VAGUE_FACTOR * self.low


@dataclass(frozen=True)
class CellTiming:
    """Time of a cell as one run measured it.

    medians_ms: the median of each attempt.
    low_ms, high_ms: ends of the interval of such a median, each the median over the attempts. With
        fewer than six steps it is the range of the attempts, and NaN for a single attempt.
    clock_mhz: clock of the GPU after the timing.
    depends_on_cpu: true if a slower CPU makes the steps longer.
    waited_for_core: share of the timing in which a thread waited for a core, 0 if the time does not
        depend on the CPU.
    dispatch_rates: least and greatest speed of the CPU, in small operations per ms, before and
        after the timing.
    kernels: times of the kernels of a step.
    """

    medians_ms: tuple[float, ...]
    # Medians over the attempts, as `ms` is: one disturbed attempt then moves none of the three.
    low_ms: float
    high_ms: float
    clock_mhz: float | None = None
    bound_by: BoundBy | None = None
    depends_on_cpu: bool = False
    waited_for_core: float = 0.0
    dispatch_rates: tuple[float, float] | None = None
    kernels: CellTiming | None = None

    @property
    def ms(self) -> float:
        """The median of the attempts."""
        return statistics.median(self.medians_ms)

    @property
    def mean_ms(self) -> float:
        """The geometric mean of the attempts, to whose error `Noise` applies."""
        return statistics.geometric_mean(self.medians_ms)

    def over(self, other: CellTiming) -> RatioInterval:
        """Return the ratio of this time to another."""
        low, high = self.low_ms / other.high_ms, self.high_ms / other.low_ms
        return RatioInterval(low, self.ms / other.ms, high)


@dataclass(frozen=True)
class RunTimings:
    """Timings of the steps and of the steps' kernels in one run, by cell."""

    results: Results
    steps: dict[str, CellTiming]
    kernels: dict[str, CellTiming]


def load_timings(run: Run) -> RunTimings:
    """Read the timings of all cells of a run, over all valid attempts."""
    results, samples = load_with_samples(run, every_version=True)
    attempts = read_attempts(run, ["cell", "attempt", "status", "replaces"])
    samples = samples.merge(valid_attempts(attempts, run.marks())[["cell", "attempt"]])
    cells = results.cells
    clocks = _values_by_cell(cells, "sm_clock_after")
    kernels = _timings(step_kernel_times(samples), clocks)
    dependent = cells[depends_on_cpu(cells)]
    waited = _values_by_cell(dependent, "waited_for_core")
    limits = dict(zip(cells["cell"], bound_by(cells), strict=True))
    rates = _dispatch_rates(samples)
    dependent_ids = set(dependent["cell"])
    all_kernels = _profiled_kernels(cells) | kernels
    steps = {}
    for cell, timing in _timings(step_attempts(samples), clocks).items():
        steps[cell] = replace(
            timing,
            bound_by=limits.get(cell),
            depends_on_cpu=cell in dependent_ids,
            waited_for_core=waited.get(cell, 0.0),
            dispatch_rates=rates.get(cell),
            kernels=all_kernels.get(cell),
        )
    return RunTimings(results, steps, kernels)


def _timings(durations: pd.DataFrame, clocks: dict[str, float]) -> dict[str, CellTiming]:
    summary = summarise(durations, ["cell", "attempt"])
    # A time that is not above 0 is not a measurement, and has no ratio to another.
    summary = summary[(summary["ci_low"] > 0) & np.isfinite(summary["ci_high"])]
    # A frame for each of 360 cells, with medians of a few values, took a third of `sweep compare`.
    by_cell: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    rows = summary[["median", "ci_low", "ci_high", "coverage"]]
    for (cell, _), *values in rows.itertuples():
        by_cell[str(cell)].append(tuple(values))
    timings = {}
    for cell, attempts in by_cell.items():
        medians, *others = zip(*attempts, strict=True)
        low, high, coverage = map(statistics.median, others)
        if coverage < _MIN_COVERAGE:
            low = high = math.nan
            if len(medians) > 1:
                low, high = min(medians), max(medians)
        timings[cell] = CellTiming(medians, low, high, clocks.get(cell))
    return timings


def _profiled_kernels(cells: pd.DataFrame) -> dict[str, CellTiming]:
    # One step of one attempt was profiled, so the interval has no width.
    profiled = _values_by_cell(cells, "step_kernel_time_ms_median")
    return {cell: CellTiming((ms,), ms, ms) for cell, ms in profiled.items()}


def _values_by_cell(cells: pd.DataFrame, column: str) -> dict[str, float]:
    """Return the known values of a column."""
    if column not in cells:
        return {}
    values = cells.set_index("cell")[column].dropna().astype(float)
    return {str(cell): value for cell, value in values.items()}


def _dispatch_rates(samples: pd.DataFrame) -> dict[str, tuple[float, float]]:
    rows = samples[(samples["metric"] == "host_pace") & samples["value"].notna()]
    extremes = rows.groupby("cell")["value"].agg(["min", "max"])
    return {str(cell): (least, most) for cell, least, most in extremes.itertuples()}
