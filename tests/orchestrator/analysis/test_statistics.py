from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from orchestrator.analysis.metric_columns import summarise
from tasks.spec.order_statistics import median_rank


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
