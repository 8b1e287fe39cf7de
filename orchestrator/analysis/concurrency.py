"""Number of other attempts that ran on the same host, from the begin and the duration of each."""

from __future__ import annotations

import numpy as np
import pandas as pd

# Attempts that shared a host with at least this many others, on average over their time, count as
# having had company. A short overlap with the next attempt's start is not enough.
SOME = 0.5


def concurrent_attempts(attempts: pd.DataFrame) -> pd.Series[float]:
    """Return how many other attempts ran on the host of each attempt, on average over its time.

    `attempts` has the columns host, started_at and wall_s. The result is null if the host is
    unknown.
    """
    concurrent = pd.Series(np.nan, index=attempts.index)
    since_epoch = pd.to_datetime(attempts["started_at"], utc=True) - pd.Timestamp(0, tz="UTC")
    begins = since_epoch.dt.total_seconds()
    is_known = (attempts["host"] != "") & np.isfinite(attempts["wall_s"]) & begins.notna()
    for _, on_host in attempts[is_known].groupby("host"):
        begin = begins[on_host.index].to_numpy()
        concurrent[on_host.index] = _mean_concurrency(begin, on_host["wall_s"].to_numpy())
    return concurrent


def _mean_concurrency(begin_s: np.ndarray, wall_s: np.ndarray) -> np.ndarray:
    """Return the mean number of other intervals that are open during each interval."""
    # The number of open intervals is a step function of time. Its integral at an interval's end
    # less that at its begin is the time spent by all of them, including `wall_s` by itself.
    edges = np.concatenate([begin_s, begin_s + wall_s])
    order = np.argsort(edges, kind="stable")
    open_after = np.cumsum(np.repeat([1, -1], len(begin_s))[order])
    integral = np.cumsum(open_after[:-1] * np.diff(edges[order]))
    spent = np.interp(edges, edges[order], np.concatenate([[0.0], integral]))
    by_others = spent[len(begin_s) :] - spent[: len(begin_s)] - wall_s
    mean = np.divide(by_others, wall_s, out=np.zeros_like(wall_s), where=wall_s > 0)
    concurrent: np.ndarray = np.maximum(mean, 0)
    return concurrent
