"""How well a median is known, by the samples' order alone: no distribution is assumed.

The number of samples below the median is Binomial(n, 1/2), so that of n independent samples in their order x(1) … x(n) the
interval [x(k), x(n+1-k)] covers the median with a probability that depends on n and k only (H. A. David and H. N. Nagaraja,
Order Statistics, 3rd edition, section 7.1). Both what measures and what reports go by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count, islice, takewhile
from statistics import median

CONFIDENCE = 0.95
FEWEST = 6  # samples whose interval, from the least to the greatest, reaches the confidence


@cache
def median_rank(n: int) -> int:
    """The rank k for which [x(k), x(n+1-k)] covers the median with at least 95 % confidence.

    Fewer than six samples cannot reach 95 %; their interval is from the least to the greatest, and `coverage` says
    how much that is.
    """
    covered = (1 - 2 * ways / 2**n for ways in _ways_below(n))
    reached = takewhile(
        lambda share: share >= CONFIDENCE, islice(covered, n // 2)
    )  # it falls with k
    return max(1, sum(1 for _ in reached))


@cache
def coverage(n: int, k: int) -> float:
    """The probability that the median lies in [x(k), x(n+1-k)] of n independent samples."""
    return float(1 - 2 * next(islice(_ways_below(n), k - 1, None)) / 2**n)


def _ways_below(n: int) -> Iterator[int]:
    """In how many of the 2ⁿ ways in which n samples lie about the median fewer than k are below it, for k = 1, 2, …"""
    ways, term = 0, 1
    for k in count(1):
        ways += term
        yield ways
        term = term * (n - k + 1) // k


def half_width(samples: Sequence[float]) -> float:
    """Half of the interval of the median, as a fraction of the median. Raises IndexError without a sample."""
    ordered, rank = sorted(samples), median_rank(len(samples))
    return (ordered[-rank] - ordered[rank - 1]) / 2 / median(ordered)
