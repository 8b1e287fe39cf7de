"""How well a median is known, by the samples' order alone: no distribution is assumed.

The number of samples below the median is Binomial(n, 1/2), so that of n independent samples in their order x(1) … x(n) the
interval [x(k), x(n+1-k)] covers the median with a probability that depends on n and k only (H. A. David and H. N. Nagaraja,
Order Statistics, 3rd edition, section 7.1). Both what measures and what reports go by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import median

CONFIDENCE = 0.95
FEWEST = 6  # samples whose interval, from the least to the greatest, reaches the confidence


@cache
def median_rank(n: int) -> int:
    """The rank k for which [x(k), x(n+1-k)] covers the median with at least 95 % confidence.

    Fewer than six samples cannot reach 95 %; their interval is from the least to the greatest, and `coverage` says
    how much that is.
    """
    best = 1
    for k in range(2, n // 2 + 1):
        if coverage(n, k) >= CONFIDENCE:
            best = k
    return best


@cache
def coverage(n: int, k: int) -> float:
    """The probability that the median lies in [x(k), x(n+1-k)] of n independent samples."""
    return float(1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n)


def half_width(samples: Sequence[float]) -> float:
    """Half of the interval of the median, as a fraction of the median. Raises IndexError without a sample."""
    ordered, rank = sorted(samples), median_rank(len(samples))
    return (ordered[-rank] - ordered[rank - 1]) / 2 / median(ordered)
