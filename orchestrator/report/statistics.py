"""Statistics of raw samples. Computed when reported, never stored beside them."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pandas as pd

CONFIDENCE = 0.95
STATISTICS = ("n", "mean", "sd", "min", "median", "ci_low", "ci_high", "coverage")  # the columns of `summarise`


@cache
def median_rank(n: int) -> int:
    """The rank k for which [x(k), x(n+1-k)] covers the median with at least 95 % confidence.

    By order statistics, without assuming a distribution: the number of samples below the median is Binomial(n, 1/2).
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


def summarise(samples: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """One row a group: n, mean, sd (n - 1), min, median, and the 95 % interval of the median with its coverage."""
    ordered = samples.sort_values([*keys, "value"], kind="stable")
    groups = ordered.groupby(keys, sort=True, observed=True)["value"]
    summary = pd.DataFrame(
        {"n": groups.size(), "mean": groups.mean(), "sd": groups.std(), "min": groups.min(), "median": groups.median()}
    )
    counts = summary["n"].to_numpy()
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(int)
    ranks = np.array([median_rank(int(n)) for n in counts], dtype=int)
    values = ordered["value"].to_numpy()
    summary["ci_low"] = values[starts + ranks - 1]
    summary["ci_high"] = values[starts + counts - ranks]
    summary["coverage"] = [coverage(int(n), int(k)) for n, k in zip(counts, ranks, strict=True)]
    return summary
