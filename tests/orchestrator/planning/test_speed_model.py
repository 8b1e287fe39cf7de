"""The distribution of speeds, against other ways to compute it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from orchestrator.planning import speed_model
from orchestrator.planning.speed_model import Candidate, SpeedModel, expected_gain

OPTIONS = [
    {"precision": precision, "compile": how}
    for precision, how in itertools.product(("fp32", "tf32", "bf16"), ("eager", "blocks"))
]
CANDIDATES = [
    Candidate((float(size), 9.0), options, 0.1 * (size + 1), is_launch_bound=size == 0)
    for size in range(2)
    for options in OPTIONS
]


def test_the_posterior_is_that_of_the_joint_distribution() -> None:
    measured = {0: 0.2, 3: 0.05, 8: 0.4}
    mean, deviation = SpeedModel(CANDIDATES).posterior(measured)
    # The conditional distribution by the inverse of the whole covariance.
    prior_mean, prior_deviation = SpeedModel(CANDIDATES).posterior({})
    rest = np.array([0.13 if one.is_launch_bound else 0.06 for one in CANDIDATES])
    joint = speed_model._covariance(CANDIDATES) + np.diag(rest**2)
    assert np.sqrt(np.diag(joint)) == pytest.approx(prior_deviation)
    precision = np.linalg.inv(joint)
    seen, left = sorted(measured), [one for one in range(12) if one not in measured]
    within = np.linalg.inv(precision[np.ix_(left, left)])
    difference = np.log([measured[one] for one in seen]) - prior_mean[seen]
    expected = prior_mean[left] - within @ precision[np.ix_(left, seen)] @ difference
    assert mean[left] == pytest.approx(expected)
    assert deviation[left] == pytest.approx(np.sqrt(np.diag(within)))
    assert deviation[seen] == pytest.approx(np.zeros(3), abs=1e-6)


def test_the_order_of_candidates_changes_nothing() -> None:
    order = [7, 2, 11, 0, 5, 1, 9, 3, 10, 4, 8, 6]
    measured = {2: 0.3, 9: 0.6}
    mean, deviation = SpeedModel(CANDIDATES).posterior(measured)
    moved = {order.index(one): value for one, value in measured.items()}
    other = SpeedModel([CANDIDATES[one] for one in order]).posterior(moved)
    assert other[0] == pytest.approx(mean[order])
    assert other[1] == pytest.approx(deviation[order], abs=1e-9)


@pytest.mark.parametrize(
    ("mean", "deviation"), [(-2.0, 0.3), (-1.0, 0.5), (0.5, 0.2), (-1.2, 1e-12)]
)
def test_the_expected_gain_is_an_integral(mean: float, deviation: float) -> None:
    limit_s = 0.3
    points = mean + deviation * np.linspace(-10, 10, 400_001)
    density = np.exp(-0.5 * ((points - mean) / deviation) ** 2)
    gains = np.maximum(0.0, 1 - np.exp(points) / limit_s)
    expected = float((gains * density).sum() / density.sum())
    found = expected_gain(np.array([mean]), np.array([deviation]), limit_s)
    assert found[0] == pytest.approx(expected, abs=2e-5)


def test_a_value_that_is_fast_in_one_group_is_expected_to_be_fast_in_another() -> None:
    slow, fast = 0, 4  # bf16 eager
    before, _ = SpeedModel(CANDIDATES).posterior({})
    after, _ = SpeedModel(CANDIDATES).posterior({slow: 0.1, fast: 0.02})
    gained = after - before
    assert gained[6 + fast] < gained[6 + slow]


def test_groups_far_apart_tell_less_about_each_other() -> None:
    def learned(distance: float) -> float:
        pair = [
            Candidate((0.0,), {"compile": "eager"}, 1.0),
            Candidate((distance,), {"compile": "eager"}, 1.0),
        ]
        return float(SpeedModel(pair).posterior({0: math.e})[0][1])

    assert 1.0 > learned(0.0) > learned(1.0) > learned(4.0) > 0.0
