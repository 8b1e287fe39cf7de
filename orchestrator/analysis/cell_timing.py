"""Timings of the cells of one run, as a comparison needs them.

The samples of all valid attempts enter; a `CellTiming` for each cell leaves: the time of each
attempt in several units, and what it depends on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from orchestrator.analysis.cells import valid_attempts
from orchestrator.analysis.cpu_bound import FILLED, BoundBy, bound_by
from orchestrator.analysis.results import Results, load_with_samples, read_attempts
from orchestrator.analysis.timing_columns import ATTEMPT_KEY, step_attempts, step_kernel_times
from orchestrator.store.run import Run

Medians = dict[str, tuple[float, ...]]  # by cell, one for each attempt, oldest first


@dataclass(frozen=True)
class CellTiming:
    """Times of a cell as one run measured it, one for each attempt: medians over its steps.

    steps_ms: whole steps. kernels_ms: kernels of a step.
    operations: small operations that the CPU could have launched in the time of a step.
    clocks_mhz: clock of the GPU after the timing.
    host_ahead: what limits the step by the lead of the CPU, of one attempt.
    compiles: an attempt compiled code that it did not find in the compiler's cache.
    """

    steps_ms: tuple[float, ...] = ()
    kernels_ms: tuple[float, ...] = ()
    operations: tuple[float, ...] = ()
    clocks_mhz: tuple[float, ...] = ()
    host_ahead: BoundBy | None = None
    compiles: bool = False

    @property
    def bound_by(self) -> BoundBy | None:
        """The limit of the step. It is the CPU, too, if the kernels fill the steps of some attempts only."""
        if len(self.steps_ms) == len(self.kernels_ms):
            times = zip(self.kernels_ms, self.steps_ms, strict=True)
            if len({kernels >= FILLED * step for kernels, step in times}) == 2:
                return BoundBy.CPU
        return self.host_ahead

    def first(self, attempts: int | None) -> CellTiming:
        """Return the times of the first attempts; of all for None."""
        return replace(
            self,
            steps_ms=self.steps_ms[:attempts],
            kernels_ms=self.kernels_ms[:attempts],
            operations=self.operations[:attempts],
            clocks_mhz=self.clocks_mhz[:attempts],
        )


@dataclass(frozen=True)
class RunTimings:
    """The results of a run, and the timings of the cells that it timed."""

    results: Results
    timings: dict[str, CellTiming]


def load_timings(run: Run) -> RunTimings:
    """Read the timings of all cells of a run, over all valid attempts."""
    results, samples = load_with_samples(run, every_version=True)
    attempts = read_attempts(run, ["cell", "attempt", "status", "replaces", "facts"])
    samples = samples.merge(valid_attempts(attempts, run.marks())[ATTEMPT_KEY])
    cells = results.cells
    steps = _medians(step_attempts(samples))
    # The speed of the CPU is known before and after the timing.
    speeds = samples[(samples["metric"] == "host_pace") & samples["value"].notna()]
    speed = speeds.groupby(ATTEMPT_KEY, observed=True)["value"].mean()
    operations = (steps * speed).dropna()
    profiled = _values_by_cell(cells, "step_kernel_time_ms_median")
    kernels: Medians = {cell: (ms,) for cell, ms in profiled.items()}
    kernels |= _by_cell(_medians(step_kernel_times(samples)))
    steps_ms, by_operations = _by_cell(steps), _by_cell(operations)
    is_clock = (samples["metric"] == "sm_clock") & (samples["mode"] == "after")
    clocks = _by_cell(_medians(samples[is_clock]))
    limits = dict(zip(cells["cell"], bound_by(cells), strict=True))
    compiling = set(attempts["cell"][attempts["facts"].fillna("").map(_compiles)])
    timings = {}
    for cell in dict.fromkeys([*steps_ms, *kernels]):
        timings[cell] = CellTiming(
            steps_ms.get(cell, ()),
            kernels.get(cell, ()),
            by_operations.get(cell, ()),
            clocks.get(cell, ()),
            limits.get(cell),
            cell in compiling,
        )
    return RunTimings(results, timings)


def _compiles(facts: str) -> bool:
    """Return True if an attempt with these facts found not all of its compiled code in the cache."""
    name = "compile_cache_seen"
    return name in facts and json.loads(facts).get(name) in ("cold", "mixed")


def _medians(durations: pd.DataFrame) -> pd.Series[float]:
    """Return the median of each attempt, by cell and attempt."""
    medians: pd.Series[float] = durations.groupby(ATTEMPT_KEY, observed=True)["value"].median()
    # A time that is not above 0 is not a measurement, and has no ratio to another.
    return medians[(medians > 0) & np.isfinite(medians)].sort_index()


def _by_cell(medians: pd.Series[float]) -> Medians:
    found: dict[str, list[float]] = {}
    cells = medians.index.get_level_values("cell")
    for cell, value in zip(cells, medians, strict=True):
        found.setdefault(str(cell), []).append(float(value))
    return {cell: tuple(values) for cell, values in found.items()}


def _values_by_cell(cells: pd.DataFrame, column: str) -> dict[str, float]:
    """Return the known values of a column that are above 0."""
    if column not in cells:
        return {}
    values = cells.set_index("cell")[column].dropna().astype(float)
    return {str(cell): value for cell, value in values.items() if value > 0}
