from __future__ import annotations

import numpy as np
import pytest

from tasks.spec.order_statistics import CONFIDENCE, FEWEST, coverage, half_width, median_rank


@pytest.mark.parametrize(
    ("n", "rank"), [(1, 1), (5, 1), (6, 1), (10, 2), (20, 6), (50, 18), (10_000, 4902)]
)
def test_the_rank_of_the_median_interval_follows_from_the_number_of_samples(
    n: int, rank: int
) -> None:
    assert median_rank(n) == rank


@pytest.mark.parametrize(("n", "nominal"), [(5, 0.9375), (6, 0.96875), (10, 0.9785), (20, 0.9586)])
def test_coverage_is_what_binomial_says(n: int, nominal: float) -> None:
    assert coverage(n, median_rank(n)) == pytest.approx(nominal, abs=1e-4)
    assert (coverage(n, median_rank(n)) >= CONFIDENCE) == (n >= FEWEST)


@pytest.mark.parametrize("n", [6, 10, 20])
def test_the_interval_covers_the_median_as_often_as_it_says(n: int) -> None:
    """Of skewed samples with spikes, as timings are."""
    rng = np.random.default_rng(0)
    trials = 4000
    values = np.sort(
        rng.lognormal(size=(trials, n)) + (rng.random((trials, n)) < 0.03) * 50, axis=1
    )
    true_median = np.median(rng.lognormal(size=2_000_000) + (rng.random(2_000_000) < 0.03) * 50)
    k = median_rank(n)
    covered = np.mean((values[:, k - 1] <= true_median) & (true_median <= values[:, n - k]))
    assert covered == pytest.approx(coverage(n, k), abs=0.012)


def test_half_of_the_interval_against_the_median() -> None:
    assert half_width([103.0, 97.0, 100.0, 100.0, 99.0, 101.0]) == pytest.approx(
        0.03
    )  # of six from the least to the greatest
    assert half_width(
        [1.0, 98.0, 99.0, 100.0, 100.0, 100.0, 100.0, 101.0, 102.0, 999.0]
    ) == pytest.approx(0.02)  # x(2) to x(9)
