"""Predict how fast cells train from those that were measured, and what measuring another may gain.

A Bayesian linear model of the logarithm of a duration: a guess, an effect of each group, effects of
each value of each searched axis, in all groups and in one, and what no effect explains. A group is
all cells that differ along the searched axes alone; groups that differ little have similar effects.
The constants fit the training cells of configs/full.yaml on an H200: benchmarks/best.py repeats
searches in them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

# Standard deviations of the logarithm.
_GROUP = 0.6
_SHARED_BY_GROUPS = 0.3  # share of its variance
_VALUE, _VALUE_IN_GROUP = 0.35, 0.2
_SCALE = 10.0  # of guesses that only compare candidates
_REST, _REST_OF_LAUNCHES = 0.06, 0.13
# Effects on steps that the GPU limits, and on those that launches limit, are hardly the same.
_BETWEEN_REGIMES = 0.3
# Logarithm by which the correlation of two groups falls with each step of a value, such as the next
# size, and with each doubling of a number.
_STEP_APART = 0.35
# Two axes whose values act together.
_TOGETHER = (("precision", "compile"),)


@dataclass(frozen=True)
class Candidate:
    """A configuration that may be measured.

    group: position of its group along each other axis: an index, or the logarithm of a number to
        the base 2. options: its values of the searched axes.
    estimated_s: guessed duration of the work. is_launch_bound: True if launches decide the guess.
    scale: what the guess is relative to, such as an own model whose FLOPs are unknown; empty if it
        is in seconds.
    """

    group: tuple[float, ...]
    options: Mapping[str, object]
    estimated_s: float
    is_launch_bound: bool = False
    scale: str = ""


class SpeedModel:
    """The joint distribution of the logarithms of the durations of all candidates."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._mean = np.log([one.estimated_s for one in candidates])
        rest = [_REST_OF_LAUNCHES if one.is_launch_bound else _REST for one in candidates]
        self._prior = _covariance(candidates) + np.diag(np.square(rest))

    def posterior(self, measured: Mapping[int, float]) -> tuple[Array, Array]:
        """Return mean and standard deviation of each logarithm, after durations by candidate in s."""
        prior = self._prior
        if not measured:
            return self._mean, np.sqrt(np.diag(prior))
        seen = np.array(sorted(measured))
        found = np.log([measured[index] for index in seen]) - self._mean[seen]
        gain = np.linalg.solve(prior[np.ix_(seen, seen)], prior[seen]).T
        mean = self._mean + gain @ found
        variance = np.diag(prior) - np.einsum("ij,ij->i", gain, prior[:, seen])
        return mean, np.sqrt(np.maximum(variance, 0.0))


def expected_gain(mean: Array, deviation: Array, limit_s: float) -> Array:
    """Return the expected share of `limit_s` by which each is shorter: 0 where it is longer.

    mean, deviation: of the logarithms of durations, which are normal.
    """
    deviation = np.maximum(deviation, 1e-9)
    shorter = (math.log(limit_s) - mean) / deviation
    mass = np.exp(mean + deviation**2 / 2 - math.log(limit_s))
    return np.maximum(_normal(shorter) - mass * _normal(shorter - deviation), 0.0)


def _normal(values: Array) -> Array:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values])


def _covariance(candidates: Sequence[Candidate]) -> Array:
    groups = np.array([one.group for one in candidates], dtype=np.float64)
    apart = np.abs(groups[:, None, :] - groups[None, :, :]).sum(axis=2)
    near = np.exp(-_STEP_APART * apart)
    total = _GROUP**2 * (_SHARED_BY_GROUPS + (1 - _SHARED_BY_GROUPS) * near)
    for values in _columns(candidates):
        total = total + _equal(values) * (_VALUE**2 + _VALUE_IN_GROUP**2 * near)
    regimes = _equal([one.is_launch_bound for one in candidates])
    total = total * np.where(regimes, 1.0, _BETWEEN_REGIMES)
    # One measured candidate shows the scale of all that share it.
    is_relative = np.array([bool(one.scale) for one in candidates])
    scales = _equal([one.scale for one in candidates])
    return np.asarray(total + _SCALE**2 * scales * is_relative, dtype=np.float64)


def _equal(values: Sequence[object]) -> Array:
    codes: Any = np.array([repr(value) for value in values])
    return np.asarray(codes[:, None] == codes[None, :], dtype=np.float64)


def _columns(candidates: Sequence[Candidate]) -> list[list[object]]:
    """Return the values of each searched axis, and of each pair that acts together."""
    names = list(candidates[0].options) if candidates else []
    columns: list[list[object]] = [[one.options[name] for one in candidates] for name in names]
    for pair in _TOGETHER:
        if all(name in names for name in pair):
            columns.append([tuple(one.options[name] for name in pair) for one in candidates])
    return columns
