"""Tests of the notation of values."""

from __future__ import annotations

import pytest

from orchestrator.report.tables import formatters as show


@pytest.mark.parametrize(
    ("column", "found", "expected"),
    [
        ("mfu", 0.4213, "42.1%"),
        ("drain_ms", 12.346, "12.35"),
        ("peak_reserved_bytes", 3 * 2**29, "1.50"),
        ("power_capped_ns", 2.5e9, "2.5"),
        ("tokens_per_s", 20480.4, "20,480"),
        ("wall_s", 4.859, "4.86"),
        ("compile_graphs", 3, "3"),
        ("matmul_allow_tf32", True, "yes"),
        ("attention_seen", "flash", "flash"),
    ],
)
def test_the_declared_unit_of_a_column_says_how_it_is_shown(
    column: str, found: object, expected: str
) -> None:
    title, value = show.col(column)
    assert title == column.replace("_", " ")
    assert value({"status": "ok", column: found}).text == expected
    assert value({"status": "oom", column: None}).text == "OOM"


def test_a_table_cannot_show_a_column_that_is_not_declared() -> None:
    with pytest.raises(LookupError, match="fragmentation"):
        show.col("fragmentation")
