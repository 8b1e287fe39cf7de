"""Noise of step times from process to process, estimated from repeated attempts.

The interval of a median covers how steps scatter within one process. How the medians of processes
scatter shows only in repetitions (`sweep run --repeat`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

SIGNIFICANCE = 0.01  # share of equal cells that may be called faster or slower
# Other cells say something about the noise of a cell if both sides have this many attempts, and if
# there are this many cells. Where the noise of cells differs by a factor of three, two attempts
# gave 2.8 % false alarms instead of 1 %, and three attempts of 2 cells 2.1 %, but of 8 cells 1.1 %.
_MIN_ATTEMPTS = 3
_MIN_CELLS = 8
# Two runs of the same cells a few minutes apart may differ by this much, however small their noise.
RESOLUTION = 0.005
# Two repetitions that happen to be equal to the last digit do not prove that there is no noise.
_MIN_DEVIATION = 1e-5
# Stands for infinitely many: the cells do not differ in their noise.
_MAX_DEGREES = 1e6


@dataclass(frozen=True)
class Noise:
    """Standard deviation of the logarithm of a time, and the degrees of freedom of that estimate.

    Without degrees of freedom nothing was repeated, so the noise is unknown: every difference may
    be noise.
    """

    deviation: float
    degrees_of_freedom: float

    @property
    def squares(self) -> float:
        """The sum of squared deviations that the estimate is made from."""
        return self.degrees_of_freedom * self.deviation**2

    def threshold(self, attempts_before: int, attempts_after: int) -> float:
        """Return the relative difference of two means that chance exceeds in SIGNIFICANCE of cases.

        Student's t accounts for the error of the estimated noise.
        """
        if self.degrees_of_freedom == 0:
            return math.inf
        # Imported late, because most commands compare nothing. scipy.stats, which calls the same
        # function, takes a second to import.
        from scipy.special import stdtrit

        quantile = float(stdtrit(self.degrees_of_freedom, 1 - SIGNIFICANCE / 2))
        error = self.deviation * math.sqrt(1 / attempts_before + 1 / attempts_after)
        return max(RESOLUTION, math.expm1(quantile * error))


_UNKNOWN = Noise(0.0, 0)


def pooled_noise(repetitions: Iterable[Sequence[float]]) -> Noise:
    """Return the common noise of all cells. `repetitions`: the medians of each cell's attempts."""
    squares, degrees = 0.0, 0
    for medians in repetitions:
        logs = np.log(medians)
        squares += float(((logs - logs.mean()) ** 2).sum())
        degrees += len(logs) - 1
    return _noise(squares, degrees)


def _noise(squares: float, degrees: float) -> Noise:
    if not degrees:
        return _UNKNOWN
    return Noise(math.sqrt(squares / degrees), degrees)


def noise_per_cell(
    cells: Iterable[Sequence[Sequence[float]]], repetitions: Sequence[Sequence[float]]
) -> list[Noise]:
    """Return the noise of each cell. `cells`: the medians of each cell in both runs.

    A few repetitions estimate it badly, so each estimate is moved towards the noise of all cells,
    the further the more alike the cells are. It has at most the degrees of freedom of all cells
    together. Few attempts, or few cells, have their own noise alone. `repetitions`: the medians of
    all cells of both runs.
    """
    pooled = pooled_noise(repetitions)
    repeated = [pooled_noise([medians]) for medians in repetitions if len(medians) > 1]
    prior = _prior(repeated, pooled) if len(repeated) >= 2 * _MIN_CELLS else _UNKNOWN
    noises = []
    for medians_of_runs in cells:
        own = pooled_noise(medians_of_runs)
        if min(map(len, medians_of_runs)) < _MIN_ATTEMPTS:
            noises.append(own)
            continue
        degrees = own.degrees_of_freedom + prior.degrees_of_freedom
        mixed = _noise(own.squares + prior.squares, degrees)
        # Cells that are alike by chance would otherwise count as infinitely many.
        noises.append(Noise(mixed.deviation, min(degrees, pooled.degrees_of_freedom)))
    return noises


def _prior(noises: Iterable[Noise], pooled: Noise) -> Noise:
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
    if excess <= polygamma(1, _MAX_DEGREES / 2):
        return Noise(max(pooled.deviation, _MIN_DEVIATION), _MAX_DEGREES)
    # The trigamma function falls steadily, so the equation has one solution.
    root = brentq(lambda x: float(polygamma(1, x)) - excess, 1e-3, _MAX_DEGREES / 2)
    return Noise(math.exp((logs.mean() + digamma(root) - math.log(root)) / 2), 2 * root)
