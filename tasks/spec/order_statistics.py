"""Confidence intervals of a median from the order of the samples, without assuming a distribution.

The number of samples below the median is Binomial(n, 1/2). For n independent samples in ascending
order x(1) … x(n), the interval [x(k), x(n+1-k)] therefore covers the median with a probability that
depends on n and k only (H. A. David and H. N. Nagaraja, Order Statistics, 3rd edition, section
7.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count, islice, takewhile
from statistics import median

CONFIDENCE = 0.95
FEWEST = 6  # samples: with five, even the interval from least to greatest covers less than 95 %


@cache
def median_rank(n: int) -> int:
    """Return the largest rank k for which [x(k), x(n+1-k)] covers the median with 95 % confidence.

    Fewer than six samples cannot reach 95 %. Their interval is from the least to the greatest, and
    `coverage` returns its confidence.
    """
    coverages = (1 - 2 * ways / 2**n for ways in _ways_below(n))
    # The coverage falls with k, so the first ranks are those that are wide enough.
    reached = takewhile(lambda share: share >= CONFIDENCE, islice(coverages, n // 2))
    return max(1, len(list(reached)))


@cache
def coverage(n: int, k: int) -> float:
    """Return the probability that the median is in [x(k), x(n+1-k)] of n independent samples."""
    return float(1 - 2 * next(islice(_ways_below(n), k - 1, None)) / 2**n)


def _ways_below(n: int) -> Iterator[int]:
    """Yield, for k = 1, 2, …, in how many of 2ⁿ outcomes fewer than k samples are below it."""
    # Integers, because binomial coefficients overflow floats.
    ways, term = 0, 1
    for k in count(1):
        ways += term
        yield ways
        term = term * (n - k + 1) // k


def half_width(samples: Sequence[float]) -> float:
    """Return half of the median's interval as a fraction of the median.

    Raise IndexError without samples.
    """
    ordered, rank = sorted(samples), median_rank(len(samples))
    return (ordered[-rank] - ordered[rank - 1]) / 2 / median(ordered)
