"""Is it faster, or is it noise? Two runs, or two cells, held against each other.

What a process measures scatters within it, which the interval of its median tells, and from process
to process, which only repetitions tell (`sweep run --repeat`): on an H200 CPU-bound cells differ by
several percent between two processes that do the same, others by less than a thousandth. A
difference counts where the intervals of the two sides leave a gap *and* it is larger than that
cell's noise from process to process; in clock cycles as well, where the clocks differed, and where
a cell depends on the CPU in operations of that, as fast as it was seen to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import axis_text, axis_texts, key_axes, sort_cells
from orchestrator.analysis.cell_timing import (
    Interval,
    Side,
    kernel_sides_of,
    load_counted,
    sides_of,
)
from orchestrator.analysis.cpu_bound import MOST_WAITED, BoundBy
from orchestrator.analysis.results import Results
from orchestrator.common.errors import RunError
from orchestrator.common.provenance import PROGRAM_SOURCE
from orchestrator.store.run import Run, find_cell

SIGNIFICANCE = 0.01  # how often cells that do not differ may be called faster or slower
ASSUMED_NOISE = (
    0.05  # where nothing was repeated: what CPU-bound cells differ by from process to process
)
RESOLUTION = 0.005  # what is less is no difference: two runs of the same, minutes apart, may lie so far from each other
_FINEST_SD = 1e-5  # repetitions that are equal to the last digit do not say that there is no noise
_MOST_FREEDOM = 1e6
_MOST_NOISE = 0.25  # beyond which it hides what anybody would call a difference
_CLOCKS_DIFFER = 0.01
_TASK = "task"
_FINGERPRINT = ("gpu", "cpu", "torch", "cuda", "driver", "python", "commit", PROGRAM_SOURCE)


class Verdict(StrEnum):
    SAME = "SAME"  # no difference beyond the noise
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    # Beyond the noise, and yet within the intervals, or explained by the clock or by others on the host; or such that repetitions
    # do not agree on it.
    AMBIGUOUS = "AMBIGUOUS"


@dataclass(frozen=True)
class Noise:
    """From process to process: the standard deviation of the logarithm of a time, from so many
    degrees of freedom.

    With none nothing was repeated, and nothing is known.
    """

    sd: float
    freedom: float

    def moderated(self, prior: Noise) -> Noise:
        """This cell's own, drawn towards that of the others by what that counts for."""
        freedom = self.freedom + prior.freedom
        squares = self.freedom * self.sd**2 + prior.freedom * prior.sd**2
        return Noise(math.sqrt(squares / freedom), freedom) if freedom else self

    def floor(self, first: int, second: int) -> float:
        """How far apart, as a fraction, the means of so many attempts lie by chance, once in 1 /
        SIGNIFICANCE times.

        By Student's t, since the noise itself is only estimated.
        """
        if self.freedom == 0:
            return ASSUMED_NOISE
        from scipy.stats import t

        quantile = float(t.ppf(1 - SIGNIFICANCE / 2, self.freedom))
        return max(RESOLUTION, math.expm1(quantile * self.sd * math.sqrt(1 / first + 1 / second)))


@dataclass(frozen=True)
class Comparison:
    """ratio: B's time over A's, with the interval that both sides' intervals leave; reason: of an
    ambiguous verdict.
    """

    label: str
    before: Side
    after: Side
    noise: Noise
    verdict: Verdict
    reason: str = ""

    @property
    def floor(self) -> float:
        return self.noise.floor(len(self.before.medians_ms), len(self.after.medians_ms))

    @property
    def ratio(self) -> float:
        return self.after.ms / self.before.ms

    @property
    def interval(self) -> tuple[float, float]:
        return self.after.low_ms / self.before.high_ms, self.after.high_ms / self.before.low_ms

    @property
    def agrees(self) -> bool:
        """Whether the intervals meet, or the times are within 2 % of each other."""
        low, high = self.interval
        return Interval(low, self.ratio, high).holds_one

    @property
    def of_kernels(self) -> Interval | None:
        """B's over A's; None where they were not watched on both sides."""
        if self.before.kernels_ms is None or self.after.kernels_ms is None:
            return None
        return self.after.kernels_ms.over(self.before.kernels_ms)

    @property
    def bound_by(self) -> BoundBy | None:
        """CPU-bound if either side is, GPU-bound if both sides are, and None if that is unknown."""
        sides = (self.before.decides, self.after.decides)
        if BoundBy.CPU in sides:
            return BoundBy.CPU
        return None if None in sides else BoundBy.GPU

    @property
    def differs(self) -> bool:
        return self.verdict in (Verdict.FASTER, Verdict.SLOWER)


@dataclass(frozen=True)
class ComparisonReport:
    """The comparison of two runs, or of two cells.

    comparisons: one for each cell that both runs measured. noise: pooled over all cells.
    differences: parameters of two named cells, and how the runs were measured. only_before,
    only_after: how many cells one run alone measured, if all cells were to be compared.
    """

    comparisons: tuple[Comparison, ...]
    noise: Noise
    differences: Mapping[str, tuple[str, str]]
    only_before: int
    only_after: int

    @property
    def geometric_mean(self) -> float:
        """Of the ratios. Raises ZeroDivisionError without any."""
        return math.exp(
            sum(math.log(one.ratio) for one in self.comparisons) / len(self.comparisons)
        )


def compare(before: Run, after: Run, cells: tuple[str, str] | None = None) -> ComparisonReport:
    """Compare the steps of every cell that both runs measured, or of two cells.

    If a run timed no steps and both runs watched kernels, the times of the kernels are compared.
    cells: how the id of each cell begins, the first in `before` and the second in `after`.
    Raises RunError if there is nothing to compare.
    """
    (first, in_first), (second, in_second) = (
        load_counted(before.require()),
        load_counted(after.require()),
    )
    sides = sides_of(first, in_first), sides_of(second, in_second)
    if not all(sides):
        of_kernels = kernel_sides_of(first, in_first), kernel_sides_of(second, in_second)
        sides = of_kernels if all(of_kernels) else sides
    for run, own in zip((before, after), sides, strict=True):
        if not own:
            raise RunError(
                f"{run}: has no cell that was timed and ended well",
                "`sweep status` says what it has",
            )
    what = "measured cell"
    named = (
        (find_cell(cells[0], sides[0], before, what), find_cell(cells[1], sides[1], after, what))
        if cells
        else None
    )
    apart = _parameters_apart(first, second, *named) if named else {}
    labels = _labels(first, apart)
    both = sides[0].keys() & sides[1].keys() & labels.keys()
    pairs = [named] if named else [(cell, cell) for cell in labels if cell in both]
    if not pairs:
        raise RunError(
            f"{before} and {after}: have no measured cell in common", "Name cells as RUN:CELL"
        )
    everything = [side.medians_ms for own in sides for side in own.values()]
    held = [(sides[0][a], sides[1][b]) for a, b in pairs]
    noise, noises = noise_of(everything), noises_of(held, everything)
    return ComparisonReport(
        tuple(
            judge(labels[a], *two, own)
            for (a, _), two, own in zip(pairs, held, noises, strict=True)
        ),
        noise,
        {**apart, **_differences(first.cells, second.cells, pairs)},
        0 if named else len(sides[0]) - len(pairs),
        0 if named else len(sides[1]) - len(pairs),
    )


def judge(label: str, before: Side, after: Side, noise: Noise) -> Comparison:
    """Holds one cell's two sides against each other."""

    def so(verdict: Verdict, reason: str = "") -> Comparison:
        return Comparison(label, before, after, noise, verdict, reason)

    floor = noise.floor(len(before.medians_ms), len(after.medians_ms))
    verdict = Verdict.SLOWER if after.ms > before.ms else Verdict.FASTER
    apart = _apart(before, after, verdict)
    by_median, by_mean = math.log(after.ms / before.ms), math.log(after.mean_ms / before.mean_ms)
    differs = [abs(log) > math.log1p(floor) for log in (by_median, by_mean)]
    if not any(differs):
        is_hidden = floor > _MOST_NOISE and (apart or abs(by_median) > math.log1p(_MOST_NOISE))
        return (
            so(Verdict.AMBIGUOUS, "repetitions differ by as much")
            if is_hidden
            else so(Verdict.SAME)
        )
    if not all(differs) or by_median * by_mean < 0:
        return so(Verdict.AMBIGUOUS, "one repetition says otherwise")
    if not apart:
        return so(Verdict.AMBIGUOUS, "the intervals overlap")
    if _clocks_differ(before, after) and not _apart(_in_cycles(before), _in_cycles(after), verdict):
        return so(
            Verdict.AMBIGUOUS, f"the clock: {before.clock_mhz:.0f} → {after.clock_mhz:.0f} MHz"
        )
    if reason := _of_the_host(before, after, verdict):
        return so(Verdict.AMBIGUOUS, reason)
    return so(verdict)


def noises_of(
    pairs: Iterable[tuple[Side, Side]], everything: Sequence[Sequence[float]]
) -> list[Noise]:
    """Of each pair. everything: the attempts of each cell of either run, which say how alike cells
    are in this.

    What was not repeated has the noise of all of them together.
    """
    prior, pooled = _prior([noise_of([medians]) for medians in everything]), noise_of(everything)
    own = [noise_of(side.medians_ms for side in pair) for pair in pairs]
    return [noise.moderated(prior) if noise.freedom else pooled for noise in own]


def _prior(noises: Iterable[Noise]) -> Noise:
    """What the noise of the others says of a cell's own: much, where they are alike.

    By the moments of the logarithms of their variances (G. K. Smyth, Linear models and empirical
    Bayes methods for assessing differential expression in microarray experiments, 2004, section
    6.2).
    """
    from scipy.optimize import brentq
    from scipy.special import digamma, polygamma

    known = [noise for noise in noises if noise.freedom]
    if len(known) < 2:
        return Noise(0.0, 0)
    logs = [
        2 * math.log(max(one.sd, _FINEST_SD)) - digamma(one.freedom / 2) + math.log(one.freedom / 2)
        for one in known
    ]
    mean = sum(logs) / len(logs)
    expected = sum(polygamma(1, one.freedom / 2) for one in known) / len(known)
    excess = sum((one - mean) ** 2 for one in logs) / (len(logs) - 1) - expected
    if excess <= polygamma(1, _MOST_FREEDOM / 2):
        return Noise(math.exp(mean / 2), _MOST_FREEDOM)
    half = brentq(lambda x: float(polygamma(1, x)) - excess, 1e-3, _MOST_FREEDOM / 2)
    return Noise(math.exp((mean + digamma(half) - math.log(half)) / 2), 2 * half)


def noise_of(repetitions: Iterable[Sequence[float]]) -> Noise:
    """Pooled over all cells that were measured more than once."""
    squares, freedom = 0.0, 0
    for medians in repetitions:
        logs = [math.log(median) for median in medians]
        mean = sum(logs) / len(logs)
        squares += sum((value - mean) ** 2 for value in logs)
        freedom += len(logs) - 1
    return Noise(math.sqrt(squares / freedom), freedom) if freedom else Noise(0.0, 0)


def _apart(before: Side, after: Side, verdict: Verdict) -> bool:
    """Whether a gap is between the intervals, on the side that the verdict says."""
    return (
        after.low_ms > before.high_ms
        if verdict is Verdict.SLOWER
        else after.high_ms < before.low_ms
    )


def _clocks_differ(before: Side, after: Side) -> bool:
    if not before.clock_mhz or not after.clock_mhz:
        return False
    return abs(after.clock_mhz / before.clock_mhz - 1) > _CLOCKS_DIFFER


def _in_cycles(side: Side) -> Side:
    clock = side.clock_mhz or 1.0
    return _scaled(side, clock, clock)


def _in_operations(side: Side) -> Side:
    """How many of the host's the step takes: its speed is known before the timing and after, and
    not between.
    """
    return _scaled(side, *(side.paces or (1.0, 1.0)))


def _scaled(side: Side, low: float, high: float) -> Side:
    return Side(side.medians_ms, side.low_ms * low, side.high_ms * high)


def _of_the_host(before: Side, after: Side, verdict: Verdict) -> str:
    """What the slower side's CPU did that explains the difference; else nothing."""
    slower, faster = (after, before) if verdict is Verdict.SLOWER else (before, after)
    if _had_slower_host(slower, faster) and not _apart(
        _in_operations(before), _in_operations(after), verdict
    ):
        return f"the CPU: {_told(before)} → {_told(after)} operations a ms"
    if slower.waited_for_core > MOST_WAITED:
        return f"something else had the cores {slower.waited_for_core:.0%} of the time"
    return ""


def _had_slower_host(slower: Side, faster: Side) -> bool:
    """Of a cell that needs its host."""
    if not slower.paces or not faster.paces:
        return False
    return (slower.needs_host or faster.needs_host) and slower.paces[0] < faster.paces[0]


def _told(side: Side) -> str:
    return " to ".join(dict.fromkeys(f"{pace:.0f}" for pace in side.paces or ()))


def _labels(results: Results, apart: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """By cell, in the order in which tables show them. apart: what is on either side, instead of
    what the cell has.
    """
    axes, sides = key_axes(results), {name: " → ".join(values) for name, values in apart.items()}
    labels = {}
    for row in sort_cells(results.cells, axes).to_dict("records"):
        texts = dict(zip(axes, axis_texts(row, axes), strict=True)) | sides
        task = texts.pop(_TASK, str(row[_TASK]))
        labels[str(row["cell"])] = " ".join(
            [task, *(f"{axis}={text}" for axis, text in texts.items())]
        )
    return labels


def _parameters_apart(
    before: Results, after: Results, one: str, other: str
) -> dict[str, tuple[str, str]]:
    """Of each parameter in which two cells differ, or of their task, what either has."""
    mine, theirs = (
        results.cells.set_index("cell").loc[cell].to_dict()
        for results, cell in ((before, one), (after, other))
    )
    names = dict.fromkeys([_TASK, *before.axes, *after.axes])
    found = {name: (axis_text(mine.get(name)), axis_text(theirs.get(name))) for name in names}
    return {name: values for name, values in found.items() if values[0] != values[1]}


def _differences(
    before: pd.DataFrame, after: pd.DataFrame, pairs: Sequence[tuple[str, str]]
) -> dict[str, tuple[str, str]]:
    """The fields of the fingerprint in which the compared cells differ."""
    mine, theirs = (
        frame[frame["cell"].isin(ids)]
        for frame, ids in zip((before, after), zip(*pairs, strict=True), strict=True)
    )
    found = {name: (_values(mine, name), _values(theirs, name)) for name in _FINGERPRINT}
    apart = {name: values for name, values in found.items() if values[0] != values[1]}
    if PROGRAM_SOURCE not in apart and all(
        PROGRAM_SOURCE in own and own[PROGRAM_SOURCE].notna().all() for own in (mine, theirs)
    ):
        apart.pop("commit", None)
    return apart


def _values(cells: pd.DataFrame, column: str) -> str:
    values: list[Any] = (
        sorted({str(value) for value in cells[column].dropna()}) if column in cells else []
    )
    return ", ".join(values) or "unknown"
