from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from orchestrator.report.statistics import CONFIDENCE, coverage, median_rank, summarise


@pytest.mark.parametrize(("n", "rank"), [(1, 1), (5, 1), (6, 1), (10, 2), (20, 6), (50, 18)])
def test_ranks(n: int, rank: int) -> None:
    assert median_rank(n) == rank


@pytest.mark.parametrize(("n", "nominal"), [(5, 0.9375), (6, 0.96875), (10, 0.9785), (20, 0.9586)])
def test_coverage_is_what_binomial_says(n: int, nominal: float) -> None:
    assert coverage(n, median_rank(n)) == pytest.approx(nominal, abs=1e-4)
    assert (coverage(n, median_rank(n)) >= CONFIDENCE) == (n >= 6)


@pytest.mark.parametrize("n", [6, 10, 20])
def test_the_interval_covers_the_median_as_often_as_it_says(n: int) -> None:
    """Of skewed samples with spikes, as timings are."""
    rng = np.random.default_rng(0)
    trials = 4000
    values = np.sort(rng.lognormal(size=(trials, n)) + (rng.random((trials, n)) < 0.03) * 50, axis=1)
    true_median = np.median(rng.lognormal(size=2_000_000) + (rng.random(2_000_000) < 0.03) * 50)
    k = median_rank(n)
    covered = np.mean((values[:, k - 1] <= true_median) & (true_median <= values[:, n - k]))
    assert covered == pytest.approx(coverage(n, k), abs=0.012)


def test_summary_against_pandas() -> None:
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"cell": rng.choice(list("abc"), 200), "value": rng.random(200)})
    summary = summarise(frame, ["cell"])
    for name, group in frame.groupby("cell")["value"]:
        row, ordered, k = summary.loc[name], np.sort(group), median_rank(len(group))
        assert row["mean"] == pytest.approx(group.mean())
        assert row["sd"] == pytest.approx(group.std(ddof=1))
        assert (row["median"], row["n"], row["min"]) == (group.median(), len(group), group.min())
        assert (row["ci_low"], row["ci_high"]) == (ordered[k - 1], ordered[-k])


def test_one_sample_has_no_spread() -> None:
    summary = summarise(pd.DataFrame({"cell": ["a"], "value": [3.0]}), ["cell"])
    assert summary["sd"].isna().all()
    assert summary["coverage"].iloc[0] == 0
