"""Columns that metrics declare, from samples."""

from __future__ import annotations

import pandas as pd
import pytest

from orchestrator.analysis.metric_columns import metric_columns, role_name
from tasks.spec.fields import Aggregate
from tasks.spec.metrics import CellColumn, Metric

CELL = "a1"


def samples(*rows: tuple[str, str, float | None, int, str]) -> pd.DataFrame:
    """Return samples of the metric `size` of one cell: mode, phase, value, step and note."""
    columns = ["mode", "phase", "value", "step", "note"]
    frame = pd.DataFrame(rows, columns=columns).assign(cell=CELL, instrument="test", metric="size")
    categories = dict.fromkeys(
        ("cell", "instrument", "metric", "mode", "phase", "note"), "category"
    )
    return frame.astype(categories)


def columns_of(rows: pd.DataFrame, *declared: CellColumn) -> dict[str, object]:
    metric = Metric("test", "size", "bytes", "a size", columns=declared)
    found = metric_columns(rows, [metric])
    return found.loc[CELL].to_dict() if len(found) else {}


def test_a_column_takes_only_samples_of_its_mode_and_phase() -> None:
    rows = samples(("first", "forward", 1, 0, ""), ("steady", "forward", 2, 0, ""))
    assert columns_of(rows, CellColumn("steady_size", "", mode="steady")) == {"steady_size": 2}
    assert columns_of(rows, CellColumn("backward_size", "", phase="backward")) == {}


def test_each_phase_has_a_column_of_a_template() -> None:
    rows = samples(("", "forward", 1, 0, ""), ("", "backward", 2, 0, ""), ("", "", 3, 0, ""))
    by_phase = CellColumn("{phase}_size", "", Aggregate.MAX)
    whole = CellColumn("size", "", Aggregate.MAX)
    assert columns_of(rows, by_phase, whole) == {"forward_size": 1, "backward_size": 2, "size": 3}


def test_ranks_and_notes_name_columns() -> None:
    rows = samples(("", "", 8, 1, "softmax"), ("", "", 4, 2, "scores"))
    names = CellColumn("saved_{rank}_operation", "", Aggregate.NOTE)
    assert columns_of(rows, names, CellColumn("saved_{rank}_bytes", "")) == {
        "saved_1_operation": "softmax",
        "saved_2_operation": "scores",
        "saved_1_bytes": 8,
        "saved_2_bytes": 4,
    }


def test_roles_that_share_a_column_are_added() -> None:
    rows = samples(
        ("", "", 1, 0, "activations: ffn"),
        ("", "", 2, 0, "activations: head"),
        ("", "", 4, 0, "activations: attention squares"),
    )
    column = CellColumn("of_{role}_bytes", "", Aggregate.SUM)
    assert columns_of(rows, column) == {
        "of_activations_bytes": 3,
        "of_attention_squares_bytes": 4,
    }
    assert role_name("optimizer state") == "optimizer_state"


def test_a_difference_is_unknown_if_a_reading_is() -> None:
    column = CellColumn("energy", "", Aggregate.DIFFERENCE)
    before, after = ("before", "", 5.0, 0, ""), ("after", "", 7.5, 0, "")
    assert columns_of(samples(before, after), column) == {"energy": 2.5}
    unknown = columns_of(samples(before, ("after", "", None, 0, "refused")), column)
    assert pd.isna(unknown["energy"])


def test_a_summary_has_a_column_per_statistic() -> None:
    rows = samples(*(("synced", "forward", value, 0, "") for value in (1.0, 2.0, 3.0)))
    found = columns_of(rows, CellColumn("{phase}_ms_{statistic}", "", Aggregate.SUMMARY))
    assert found["forward_ms_n"] == 3
    assert found["forward_ms_median"] == 2.0
    assert found["forward_ms_sd"] == pytest.approx(1.0)
    interval = columns_of(rows, CellColumn("{phase}_ms_{statistic}", "", Aggregate.INTERVAL))
    assert list(interval) == [
        "forward_ms_median",
        "forward_ms_ci_low",
        "forward_ms_ci_high",
        "forward_ms_coverage",
    ]
