"""Rows of tables that belong to the shown attempts."""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.cells import rows_of


def test_rows_of_a_cell_without_an_attempt_are_left_out() -> None:
    """A driver that is killed leaves samples of a cell whose attempt is not recorded."""
    rows = pd.DataFrame({"cell": pd.Categorical(["a", "a", "b"]), "attempt": [1, 2, 1]})
    attempts = pd.DataFrame({"cell": ["a"], "attempt": pd.array([2], dtype="Int32")})
    assert rows_of(rows, attempts).to_dict("records") == [{"cell": "a", "attempt": 2}]
