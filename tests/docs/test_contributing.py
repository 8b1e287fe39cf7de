"""Tests of the programs in CONTRIBUTING.md: each is run as it stands there, and then put to use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated

import pandas as pd
import pytest
from pydantic import Field

from orchestrator.analysis import column_docs, derived_fields
from orchestrator.analysis.derived_fields import DerivedField, add_derived_fields, derived
from orchestrator.report.tables import formatters as show
from tasks.attention import AttentionParams as AttentionAxisParams
from tasks.spec.axes import WORK, axis
from tests.conftest import ROOT

AXIS, _, COLUMN = re.findall(
    r"```python\n(.+?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL
)


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DerivedField]]:
    """A list of derived fields that is empty at first, and forgotten after the test."""
    fields: list[DerivedField] = []
    monkeypatch.setattr(derived_fields, "DERIVED_FIELDS", fields)
    monkeypatch.setattr(column_docs, "DERIVED_FIELDS", fields)
    column_docs.cell_columns.cache_clear()
    yield fields
    column_docs.cell_columns.cache_clear()


def test_the_derived_column_is_computed_and_shown(declared: list[DerivedField]) -> None:
    exec(COLUMN, {"derived": derived, "pd": pd})
    peaks = {"peak_allocated_bytes": [3.0], "peak_reserved_bytes": [4.0]}
    cells = pd.DataFrame({"status": ["ok"], **peaks})
    (row,) = add_derived_fields(cells, declared).to_dict("records")
    title, value = show.col("fragmentation")
    assert (title, value(row).text) == ("fragmentation", "25.0%")


def test_the_axis_is_declared_with_a_default_and_a_limit() -> None:
    names: Mapping[str, object] = {
        "AttentionAxisParams": AttentionAxisParams, "Annotated": Annotated, "Field": Field,
        "axis": axis, "WORK": WORK, "__name__": __name__,
    }  # fmt: skip
    exec(AXIS, made := dict(names))
    params = made["AttentionParams"]
    assert params().dropout == 0
    with pytest.raises(ValueError, match="less than 1"):
        params(dropout=1)
