"""Attempts that ran at the same time on one host count for each other."""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.cpu_bound import concurrent_attempts


def test_attempts_count_by_the_share_of_time_that_they_have_in_common() -> None:
    begins = pd.to_datetime([0.0, 5.0, 0.0, None], unit="s", utc=True)
    columns = {"host": ["a", "a", "b", "a"], "started_at": begins, "wall_s": [10.0, 10.0, 5.0, 9.0]}
    found = concurrent_attempts(pd.DataFrame(columns))
    assert found[:3].to_list() == [0.5, 0.5, 0.0]
    assert found.isna().to_list() == [False, False, False, True]
