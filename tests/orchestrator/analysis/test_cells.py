"""Rows of the shown attempts, and a column for each key of a mapping such as `model_args`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis.axes import key_axes
from orchestrator.analysis.cells import rows_of
from orchestrator.analysis.results import Results, choose_where, load_results
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.sweep.outcome_log import store_cells
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.registry import make_cell
from tests.support.fake_sweep import outcome_of


def test_rows_of_a_cell_without_an_attempt_are_left_out() -> None:
    """A driver that is killed leaves samples of a cell whose attempt is not recorded."""
    rows = pd.DataFrame({"cell": pd.Categorical(["a", "a", "b"]), "attempt": [1, 2, 1]})
    attempts = pd.DataFrame({"cell": ["a"], "attempt": pd.array([2], dtype="Int32")})
    assert rows_of(rows, attempts).to_dict("records") == [{"cell": "a", "attempt": 2}]


def results_with(folder: Path, *model_args: dict[str, Any]) -> Results:
    """Return the results of one cell of a user's model for each of these arguments."""
    run = Run(folder / "run")
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "test"})
        for arguments in model_args:
            values = {"device": "cpu", "model": "mine:Gpt", "model_args": arguments}
            cell = make_cell("train_step", values)
            writer.append(outcome_of(Attempt(cell, 1, "/nowhere", Settings())), None)
        store_cells(writer)
    return load_results(run)


def test_each_key_of_a_mapping_is_an_axis(tmp_path: Path) -> None:
    results = results_with(tmp_path, {"depth": 2, "bias": True}, {"depth": 12, "bias": True}, {})
    assert key_axes(results) == ["context_length", "model_args.depth", "model_args.bias"]
    assert results.cells["model_args.depth"].tolist()[:2] == [2, 12]
    assert choose_where(results, {"model_args.depth": [12]}).cells["model_args"].tolist() == [
        '{"depth": 12, "bias": true}'
    ]


@pytest.mark.parametrize(
    "values", [(1, "a"), (True, 2), ([1], {"a": 2}), ([1], 2), (10**19, 1), ("a", None)]
)
def test_values_of_a_key_may_have_several_types(tmp_path: Path, values: tuple[Any, ...]) -> None:
    cells = results_with(tmp_path, *({"key": value} for value in values)).cells
    found = cells["model_args.key"].dropna()
    assert found.map(type).nunique() == 1  # Parquet columns have one type
    texts = found.astype(str)
    assert texts.nunique() == len([value for value in values if value is not None])
