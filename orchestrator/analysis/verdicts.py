"""Verdicts on the times of many cells in two versions of a program, from rounds of measurements.

A round measures A and B once each, in processes of their own. Its log ratio is log(B / A) of the
medians of the two processes. The log ratios of each cell enter; one decision for each cell leaves.

A cell is SLOWER if the median of its log ratios reaches the threshold, and their mean is above zero
in a one-sided t-test. The tests of all cells together have the probability of a false alarm that is
asked for, by Holm's correction. FASTER is the mirrored rule. A cell is SAME if its median is below
the threshold and a change of twice the threshold is excluded with a confidence of 95 %. All others
are UNDECIDED.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Cells say something about the noise of other cells if they have this many rounds, and if there are
# this many cells. Where the noise of cells differs by a factor of three, a test without a threshold
# had 2.8 % false alarms with two rounds instead of 1 %.
MIN_ROUNDS = 3
_MIN_CELLS = 8
_CONFIDENCE = 0.95  # of SAME, for each cell by itself
# Two repetitions that happen to be equal to the last digit do not prove that there is no noise.
_MIN_DEVIATION = 1e-5
# Degrees of freedom that other cells add to the noise of a cell. Cells that are alike by chance
# would otherwise count as infinitely many.
_MAX_PRIOR_DEGREES = 60.0
_MAX_ROUNDS = 1000


class Verdict(StrEnum):
    """Result of a check. Times are SAME, FASTER or SLOWER; memory, counts and status the others."""

    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    BETTER = "BETTER"
    WORSE = "WORSE"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True)
class Noise:
    """Standard deviation of a logarithm, and the degrees of freedom of that estimate."""

    deviation: float
    degrees_of_freedom: float

    @property
    def squares(self) -> float:
        """The sum of squared deviations that the estimate is made from."""
        return self.degrees_of_freedom * self.deviation**2

    def of_ratio(self) -> Noise:
        """Return the noise of the log ratio of two processes that each have this noise."""
        return Noise(self.deviation * math.sqrt(2), self.degrees_of_freedom)


UNKNOWN = Noise(0.0, 0.0)


@dataclass(frozen=True)
class Rounds:
    """The log ratios of one cell, one for each round.

    threshold: relative change from which a cell is SLOWER or FASTER.
    kind: what was measured; the noise of cells of one kind is alike.
    prior: noise of one log ratio, as other measurements showed it. It counts if the cells of this
        comparison are too few to show their own.
    """

    log_ratios: tuple[float, ...]
    threshold: float
    kind: str = ""
    prior: Noise = UNKNOWN


@dataclass(frozen=True)
class RoundsDecision:
    """Verdict on one cell.

    log_ratio: median over the rounds. half_width: of its interval, at the confidence that holds for
        all cells together; infinite if the noise is not known. noise: of one log ratio.
    """

    verdict: Verdict
    log_ratio: float
    half_width: float
    noise: Noise

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the simultaneous interval of B / A."""
        # An exponential of infinity is infinite, but one of a large number raises an error.
        low, high = self.log_ratio - self.half_width, self.log_ratio + self.half_width
        return float(np.exp(low)), float(np.exp(high))


def decide(cells: Sequence[Rounds], false_alarm: float) -> list[RoundsDecision]:
    """Return the decision on each cell.

    false_alarm: probability that any cell is SLOWER if nothing changed, and the same for FASTER.
    """
    if not cells:
        return []
    # Imported late: scipy.stats takes about a second, and most commands compare nothing.
    from scipy.special import stdtr, stdtrit

    noises = noise_of_cells(cells)
    deviations = np.array([noise.deviation for noise in noises])
    degrees = np.array([noise.degrees_of_freedom for noise in noises])
    counts = np.array([len(cell.log_ratios) for cell in cells])
    means = np.array([np.mean(cell.log_ratios) for cell in cells])
    medians = np.array([np.median(cell.log_ratios) for cell in cells])
    thresholds = np.log1p([cell.threshold for cell in cells])
    errors = np.where(degrees > 0, deviations / np.sqrt(counts), np.inf)
    known = np.maximum(degrees, 1.0)  # without degrees of freedom, the error is infinite
    half_widths = -stdtrit(known, false_alarm / len(cells)) * errors
    is_slower = holm(stdtr(known, -means / errors), false_alarm) & (medians >= thresholds)
    is_faster = holm(stdtr(known, means / errors), false_alarm) & (medians <= -thresholds)
    bounds = np.abs(means) + stdtrit(known, _CONFIDENCE) * errors
    is_same = (np.abs(medians) < thresholds) & (bounds <= 2 * thresholds)
    verdicts = np.select(
        [is_slower, is_faster, is_same],
        [Verdict.SLOWER, Verdict.FASTER, Verdict.SAME],
        Verdict.UNDECIDED,
    )
    decisions = []
    for found in zip(verdicts, medians, half_widths, noises, strict=True):
        verdict, median, half_width, noise = found
        decisions.append(RoundsDecision(Verdict(verdict), float(median), float(half_width), noise))
    return decisions


def holm(p_values: Floats, false_alarm: float) -> NDArray[np.bool_]:
    """Return which hypotheses Holm's procedure rejects at a family-wise error rate."""
    order = np.argsort(p_values, kind="stable")
    limits = false_alarm / np.arange(len(p_values), 0, -1)
    # All before the first one that is above its limit.
    is_rejected = np.logical_and.accumulate(p_values[order] <= limits)
    rejected = np.zeros(len(p_values), dtype=bool)
    rejected[order] = is_rejected
    return rejected


def rounds_needed(noise: Noise, threshold: float, cells: int, false_alarm: float) -> int:
    """Return how many rounds a change as large as the threshold needs to be seen, at least 2."""
    from scipy.special import stdtrit

    degrees = max(noise.degrees_of_freedom, 1.0)
    for rounds in range(2, _MAX_ROUNDS):
        quantile = -stdtrit(degrees + rounds - 1, false_alarm / cells)
        if quantile * noise.deviation / math.sqrt(rounds) <= math.log1p(threshold):
            return rounds
    return _MAX_ROUNDS


def power_of_plan(
    noise: Noise, rounds: int, threshold: float, cells: int, false_alarm: float
) -> float:
    """Return the relative slow-down that planned rounds find with a probability of 90 %."""
    from scipy.special import stdtrit

    degrees = noise.degrees_of_freedom + rounds - 1
    half_width = -stdtrit(degrees, false_alarm / cells) * noise.deviation / math.sqrt(rounds)
    planned = RoundsDecision(Verdict.UNDECIDED, 0.0, float(half_width), noise)
    return detectable(planned, rounds, threshold)


def median_noise(cells: Sequence[Rounds]) -> Noise:
    """Return the median of the noise of cells, each by itself; UNKNOWN without repeated rounds."""
    own = [_own_noise(cell.log_ratios) for cell in cells if len(cell.log_ratios) > 1]
    if not own:
        return UNKNOWN
    # The degrees of freedom are those of one cell: another cell may be noisier.
    deviation = float(np.median([noise.deviation for noise in own]))
    return Noise(deviation, float(np.median([noise.degrees_of_freedom for noise in own])))


def detectable(decision: RoundsDecision, rounds: int, threshold: float) -> float:
    """Return the relative slow-down that the rule finds with a probability of 90 %."""
    # The median of normal values has 1.25 times the standard error of their mean.
    quantile, of_median = 1.2816, 1.2533 if rounds > 2 else 1.0
    error = decision.noise.deviation / math.sqrt(rounds)
    by_median = math.log1p(threshold) + quantile * of_median * error
    return math.expm1(max(by_median, decision.half_width + quantile * error))


def noise_of_cells(cells: Sequence[Rounds]) -> list[Noise]:
    """Return the noise of one log ratio of each cell.

    A few rounds estimate it badly, so each estimate is moved towards the noise that the cells have
    in common, the further the more alike they are; with few cells, towards the cell's prior.
    """
    own = [_own_noise(cell.log_ratios) for cell in cells]
    repeated: dict[str, list[Noise]] = defaultdict(list)
    for cell, noise in zip(cells, own, strict=True):
        if len(cell.log_ratios) >= MIN_ROUNDS:
            repeated[cell.kind].append(noise)
    common = {
        kind: _common_noise(known) for kind, known in repeated.items() if len(known) >= _MIN_CELLS
    }
    noises = []
    for cell, noise in zip(cells, own, strict=True):
        prior = cell.prior
        if len(cell.log_ratios) >= MIN_ROUNDS:
            prior = common.get(cell.kind, prior)
        squares = noise.squares + prior.squares
        degrees = noise.degrees_of_freedom + prior.degrees_of_freedom
        deviation = math.sqrt(squares / degrees) if degrees else 0.0
        noises.append(Noise(max(deviation, _MIN_DEVIATION), degrees))
    return noises


def _own_noise(log_ratios: Sequence[float]) -> Noise:
    if len(log_ratios) < 2:
        return UNKNOWN
    return Noise(float(np.std(log_ratios, ddof=1)), len(log_ratios) - 1)


def _common_noise(noises: Iterable[Noise]) -> Noise:
    """Return the noise that the cells have in common; the more alike they are, the more degrees.

    Source: the moments of the logarithms of the variances, G. K. Smyth, Linear models and empirical
    Bayes methods for assessing differential expression in microarray experiments, 2004,
    section 6.2.
    """
    from scipy.optimize import brentq
    from scipy.special import digamma, polygamma

    known = [(one.deviation, one.degrees_of_freedom) for one in noises]
    deviations, degrees = np.array(known).T
    half = degrees / 2
    logs = 2 * np.log(np.maximum(deviations, _MIN_DEVIATION)) - digamma(half) + np.log(half)
    excess = float(logs.var(ddof=1) - polygamma(1, half).mean())
    most = _MAX_PRIOR_DEGREES / 2
    if excess <= polygamma(1, most):
        pooled = math.sqrt(float((degrees * deviations**2).sum() / degrees.sum()))
        return Noise(max(pooled, _MIN_DEVIATION), _MAX_PRIOR_DEGREES)
    # The trigamma function falls steadily, so the equation has one solution.
    root = brentq(lambda x: float(polygamma(1, x)) - excess, 1e-3, most)
    return Noise(math.exp((logs.mean() + digamma(root) - math.log(root)) / 2), 2 * root)
