"""Comparison of two runs, or of two cells: a real difference, or noise?

A difference is real if the intervals of both times leave a gap and it exceeds the cell's noise from
process to process, which is known if both were measured several times. If the GPU clocks
differ, that must also hold in clock cycles; if the cell depends on the CPU, it must hold in
operations of the CPU, at the speeds that were measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from types import MappingProxyType

import pandas as pd

from orchestrator.analysis.axes import axis_text, axis_texts, key_axes, sort_cells
from orchestrator.analysis.cell_timing import (
    LARGE_DIFFERENCE,
    CellTiming,
    RatioInterval,
    RunTimings,
    load_timings,
)
from orchestrator.analysis.cpu_bound import MAX_CORE_WAIT, BoundBy
from orchestrator.analysis.noise import SIGNIFICANCE, Noise, noise_per_cell, pooled_noise
from orchestrator.analysis.results import Results
from orchestrator.common.errors import RunError
from orchestrator.common.provenance import PROGRAM_SOURCE
from orchestrator.common.text import shell_path
from orchestrator.store.run import Run, find_cell
from tasks.spec.messages import assignments

# If all attempts of two equal cells are drawn from any one distribution, those of one side are all
# longer in 2 of 252 cases, less than SIGNIFICANCE. With 4 on each side it is 2 of 70.
_DISTRIBUTION_FREE_ATTEMPTS = 5
_CLOCK_TOLERANCE = 0.01
_TASK = "task"
_FINGERPRINT = ("gpu", "cpu", "torch", "cuda", "driver", "python", "commit", PROGRAM_SOURCE)


class Change(StrEnum):
    """Result of the comparison of one cell."""

    SAME = "SAME"  # no difference beyond the noise
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    # The noise is unknown; or too large to call a large difference one; or the difference is beyond
    # it, but the intervals overlap, the repetitions disagree, or the clock or other processes
    # explain it.
    AMBIGUOUS = "AMBIGUOUS"


@dataclass(frozen=True)
class Comparison:
    """Comparison of one cell.

    settings: its task and the axes that tell it apart. reason: why the change is AMBIGUOUS.
    """

    settings: Mapping[str, str]
    a: CellTiming
    b: CellTiming
    noise: Noise
    change: Change
    reason: str = ""

    @property
    def noise_is_known(self) -> bool:
        """True if both sides were repeated.

        Processes that do the same differ by 0.1 % on one machine and by 100 % on another, and from
        cell to cell, so nothing can be assumed of a cell that was measured once.
        """
        return _are_repeated(self.a, self.b)

    @property
    def noise_threshold(self) -> float:
        """The relative difference that noise alone may cause."""
        return _noise_threshold(self.a, self.b, self.noise)

    @property
    def ratio(self) -> RatioInterval:
        """B's time over A's."""
        return self.b.over(self.a)

    @property
    def kernel_ratio(self) -> RatioInterval | None:
        """B's kernel time over A's, or None if one of them is unknown."""
        if self.a.kernels is None or self.b.kernels is None:
            return None
        return self.b.kernels.over(self.a.kernels)

    @property
    def bound_by(self) -> BoundBy | None:
        """CPU-bound if either time is, GPU-bound if both are, and None if that is unknown."""
        limits = (self.a.bound_by, self.b.bound_by)
        if BoundBy.CPU in limits:
            return BoundBy.CPU
        return None if None in limits else BoundBy.GPU

    @property
    def differs(self) -> bool:
        """True if the difference is real."""
        return self.change in (Change.FASTER, Change.SLOWER)

    @property
    def is_distribution_free(self) -> bool:
        """True if the difference is real whatever the distribution of the noise is."""
        a, b = self.a.medians_ms, self.b.medians_ms
        is_apart = max(a) < min(b) or max(b) < min(a)
        fewest = min(len(a), len(b))
        return self.differs and is_apart and fewest >= _DISTRIBUTION_FREE_ATTEMPTS


@dataclass(frozen=True)
class ComparisonReport:
    """Comparison of two runs, or of two cells.

    comparisons: one for each cell that both runs measured.
    noise: pooled over all cells.
    differences: parameters of two named cells, and how the runs were measured.
    unmatched: number of cells that only one of the runs measured, if all cells are compared.
    of_kernels: true if kernel times are compared, because a run timed no steps.
    """

    comparisons: tuple[Comparison, ...]
    noise: Noise
    differences: Mapping[str, tuple[str, str]]
    unmatched: int
    of_kernels: bool

    @property
    def differing_by_chance(self) -> float:
        """The expected number of false FASTER and SLOWER cells if nothing changed."""
        judged = sum(one.noise_is_known for one in self.comparisons)
        return SIGNIFICANCE * judged

    @property
    def geometric_mean(self) -> float:
        """The geometric mean of the ratios. There is at least one."""
        return statistics.geometric_mean(one.ratio.middle for one in self.comparisons)


def compare_runs(a: Run, b: Run, cells: tuple[str, str] | None = None) -> ComparisonReport:
    """Compare the steps of every cell that both runs measured, or of two cells.

    If a run timed no steps and both runs have kernel times, those are compared.
    cells: how the id of each cell begins, the first in `a` and the second in `b`.
    Raise RunError if there is nothing to compare.
    """
    first, second = load_timings(a.require()), load_timings(b.require())
    of_kernels = not (first.steps and second.steps) and bool(first.kernels and second.kernels)
    timings = (first.kernels, second.kernels) if of_kernels else (first.steps, second.steps)
    for run, measured in zip((a, b), timings, strict=True):
        if not measured:
            remedy = (
                f"`sweep show {shell_path(run)}` lists its cells;"
                " traces are compared with --table kernel-diff"
            )
            raise RunError(f"{run}: has no cell that was timed", remedy)
    parameters: dict[str, tuple[str, str]] = {}
    if cells:
        kind = "measured cell"
        named = (find_cell(cells[0], timings[0], a, kind), find_cell(cells[1], timings[1], b, kind))
        pairs, unmatched = [named], 0
        parameters = _differing_parameters(first.results, second.results, named)
        settings = _cell_settings(first.results, parameters)
    else:
        settings = _cell_settings(first.results)
        common = timings[0].keys() & timings[1].keys()
        pairs = [(cell, cell) for cell in settings if cell in common]
        unmatched = len(timings[0]) + len(timings[1]) - 2 * len(pairs)
    if not pairs:
        problem = f"{a} and {b}: have no measured cell in common"
        raise RunError(problem, "Name cells as RUN:CELL")
    medians = [one.medians_ms for measured in timings for one in measured.values()]
    paired = [(timings[0][one].medians_ms, timings[1][other].medians_ms) for one, other in pairs]
    noises = noise_per_cell(paired, medians)
    comparisons = []
    for (one, other), noise in zip(pairs, noises, strict=True):
        comparisons.append(compare_cell(settings[one], timings[0][one], timings[1][other], noise))
    differences = parameters | _differing_fingerprints(first, second, pairs)
    return ComparisonReport(
        tuple(comparisons), pooled_noise(medians), differences, unmatched, of_kernels
    )


def compare_cell(
    settings: Mapping[str, str], a: CellTiming, b: CellTiming, noise: Noise
) -> Comparison:
    """Compare two timings of one cell."""
    change, reason = _change(a, b, noise)
    return Comparison(settings, a, b, noise, change, reason)


def _change(a: CellTiming, b: CellTiming, noise: Noise) -> tuple[Change, str]:
    """Return the change, and why it is AMBIGUOUS."""
    if not _are_repeated(a, b):
        return Change.AMBIGUOUS, _measured_once(a, b)
    relative = _noise_threshold(a, b, noise)
    threshold = math.log1p(relative)
    change = Change.SLOWER if b.ms > a.ms else Change.FASTER
    has_gap = _has_gap(a, b, change)
    # The median resists one disturbed attempt, but the noise is that of the mean: both must agree.
    by_median = math.log(b.ms / a.ms)
    by_mean = math.log(b.mean_ms / a.mean_ms)
    differ = abs(by_median) > threshold, abs(by_mean) > threshold
    if not any(differ):
        ratio = b.over(a)
        if relative > LARGE_DIFFERENCE and (has_gap or ratio.is_large):
            return Change.AMBIGUOUS, "repetitions differ by as much"
        if ratio.is_vague:
            return Change.AMBIGUOUS, "the interval is too wide"
        return Change.SAME, ""
    if not all(differ) or by_median * by_mean < 0:
        return Change.AMBIGUOUS, "median and mean disagree"
    if not has_gap:
        return Change.AMBIGUOUS, "the intervals overlap"
    reason = _clock_explanation(a, b, change) or _cpu_explanation(a, b, change)
    if reason:
        return Change.AMBIGUOUS, reason
    return change, ""


def _are_repeated(a: CellTiming, b: CellTiming) -> bool:
    return min(len(a.medians_ms), len(b.medians_ms)) > 1


def _noise_threshold(a: CellTiming, b: CellTiming, noise: Noise) -> float:
    return noise.threshold(len(a.medians_ms), len(b.medians_ms))


def _measured_once(a: CellTiming, b: CellTiming) -> str:
    if len(a.medians_ms) == len(b.medians_ms) == 1:
        return "measured once on each side"
    if len(a.medians_ms) == 1:
        return "measured once in A"
    return "measured once in B"


def _has_gap(a: CellTiming, b: CellTiming, change: Change) -> bool:
    """Return True if there is a gap between the intervals, in the direction of the change."""
    if change is Change.SLOWER:
        return b.low_ms > a.high_ms
    return b.high_ms < a.low_ms


def _clock_explanation(a: CellTiming, b: CellTiming, change: Change) -> str:
    """Return why the GPU clock may explain the difference, or an empty string."""
    first, second = a.clock_mhz, b.clock_mhz
    if not first or not second or abs(second / first - 1) <= _CLOCK_TOLERANCE:
        return ""
    if _has_gap(_scaled(a, first, first), _scaled(b, second, second), change):
        return ""
    return f"GPU clock: {first:.0f} → {second:.0f} MHz"


def _cpu_explanation(a: CellTiming, b: CellTiming, change: Change) -> str:
    """Return why the CPU of the slower time may explain the difference, or an empty string."""
    faster, slower = sorted((a, b), key=attrgetter("ms"))
    depends = slower.depends_on_cpu or faster.depends_on_cpu
    # The speed is known at both ends of the timing, but not in between: the whole range counts.
    if depends and slower.dispatch_rates and faster.dispatch_rates:
        had_slower_cpu = slower.dispatch_rates[0] < faster.dispatch_rates[0]
        if had_slower_cpu and not _has_gap(_in_operations(a), _in_operations(b), change):
            return f"CPU speed: {_rates(a)} → {_rates(b)} operations per ms"
    if slower.waited_for_core > MAX_CORE_WAIT:
        return f"other processes used the cores {slower.waited_for_core:.0%} of the time"
    return ""


def _in_operations(timing: CellTiming) -> CellTiming:
    return _scaled(timing, *(timing.dispatch_rates or (1.0, 1.0)))


def _scaled(timing: CellTiming, low: float, high: float) -> CellTiming:
    return CellTiming(timing.medians_ms, timing.low_ms * low, timing.high_ms * high)


def _rates(timing: CellTiming) -> str:
    return " to ".join(dict.fromkeys(f"{rate:.0f}" for rate in timing.dispatch_rates or ()))


def cell_labels(results: Results) -> dict[str, str]:
    """Return a text for each cell, in the order of the tables."""
    labels = {}
    for cell, settings in _cell_settings(results).items():
        task, *others = settings
        words = assignments({name: settings[name] for name in others})
        labels[cell] = " ".join([settings[task], *words])
    return labels


def _cell_settings(
    results: Results, differing: Mapping[str, tuple[str, str]] = MappingProxyType({})
) -> dict[str, dict[str, str]]:
    """Return the task and the axes of each cell, in the order of the tables.

    `differing` shows both values.
    """
    axes = key_axes(results)
    replaced = {name: " → ".join(values) for name, values in differing.items()}
    settings = {}
    for row in sort_cells(results.cells, axes).to_dict("records"):
        texts = dict(zip(axes, axis_texts(row, axes), strict=True)) | replaced
        settings[str(row["cell"])] = {_TASK: str(row[_TASK])} | texts
    return settings


def _differing_parameters(
    a: Results, b: Results, cells: tuple[str, str]
) -> dict[str, tuple[str, str]]:
    """Return both values of the task, and of each parameter, in which two cells differ."""
    first = a.cells.set_index("cell").loc[cells[0]].to_dict()
    second = b.cells.set_index("cell").loc[cells[1]].to_dict()
    differing = {}
    for name in dict.fromkeys([_TASK, *a.axes, *b.axes]):
        values = axis_text(first.get(name)), axis_text(second.get(name))
        if values[0] != values[1]:
            differing[name] = values
    return differing


def _differing_fingerprints(
    a: RunTimings, b: RunTimings, pairs: list[tuple[str, str]]
) -> dict[str, tuple[str, str]]:
    """Return both values of each fact about hardware and software in which the cells differ."""
    cells_a, cells_b = zip(*pairs, strict=True)
    first = a.results.cells[a.results.cells["cell"].isin(cells_a)]
    second = b.results.cells[b.results.cells["cell"].isin(cells_b)]
    differing = {}
    for name in _FINGERPRINT:
        values = _distinct_values(first, name), _distinct_values(second, name)
        if values[0] != values[1]:
            differing[name] = values
    # Equal digests of the measuring code are the same program, though the commits differ: a commit
    # may change nothing but documentation. Older programs wrote no digest, only the commit.
    if PROGRAM_SOURCE not in differing and _has_digests(first) and _has_digests(second):
        differing.pop("commit", None)
    return differing


def _has_digests(cells: pd.DataFrame) -> bool:
    return PROGRAM_SOURCE in cells and bool(cells[PROGRAM_SOURCE].notna().all())


def _distinct_values(cells: pd.DataFrame, column: str) -> str:
    if column not in cells:
        return "unknown"
    return ", ".join(sorted(set(cells[column].dropna().map(str)))) or "unknown"
