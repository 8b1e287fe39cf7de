"""Statistics of samples. They are computed when a run is read and never stored."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tasks.spec.order_statistics import coverage, median_rank

INTERVAL_STATISTICS = ("median", "ci_low", "ci_high", "coverage")
STATISTICS = ("n", "mean", "sd", "min", *INTERVAL_STATISTICS)  # the columns of `summarise`


def summarise(samples: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return one row per group: n, mean, sd (with n - 1), min, median, and its interval.

    ci_low and ci_high are order statistics between which the median of all steps lies with a
    probability of `coverage`, at least 95 % if there are enough samples. They assume no
    distribution: step times have a long tail.
    """
    ordered = samples.sort_values([*keys, "value"], kind="stable")
    groups = ordered.groupby(keys, sort=True, observed=True)["value"]
    with np.errstate(over="ignore", invalid="ignore"):  # sums of abnormal values may be infinite
        summary = pd.DataFrame(
            {
                "n": groups.size(),
                "mean": groups.mean(),
                "sd": groups.std(),
                "min": groups.min(),
                "median": groups.median(),
            }
        )
    counts = summary["n"].to_numpy()
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(int)
    ranks = np.array(list(map(median_rank, counts.tolist())), dtype=int)
    values = ordered["value"].to_numpy()
    summary["ci_low"] = values[starts + ranks - 1]
    summary["ci_high"] = values[starts + counts - ranks]
    summary["coverage"] = list(map(coverage, counts.tolist(), ranks.tolist()))
    return summary
