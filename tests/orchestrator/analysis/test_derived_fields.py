"""Derived fields are computed in the order of what they need, and left out if that is missing."""

from __future__ import annotations

from graphlib import CycleError

import pandas as pd
import pytest

from orchestrator.analysis.derived_fields import (
    DERIVED_FIELDS,
    DerivedField,
    add_derived_fields,
)


def double(source: str) -> DerivedField:
    return DerivedField(
        f"double_{source}", "", needs=(source,), compute=lambda cells: 2 * cells[source]
    )


def test_a_field_that_needs_another_one_is_computed_after_it() -> None:
    fields = [double("double_ms"), double("ms")]
    cells = add_derived_fields(pd.DataFrame({"ms": [1.0, 2.0]}), fields)
    assert cells["double_double_ms"].tolist() == [4.0, 8.0]


def test_a_field_is_left_out_without_a_column_that_it_needs() -> None:
    assert list(add_derived_fields(pd.DataFrame({"bytes": [1]}), [double("ms")])) == ["bytes"]


def test_an_optional_column_is_computed_first() -> None:
    optional = DerivedField(
        "total", "", needs=("double_ms?",), compute=lambda cells: cells["double_ms"] + 1
    )
    cells = add_derived_fields(pd.DataFrame({"ms": [1.0]}), [optional, double("ms")])
    assert cells["total"].tolist() == [3.0]


def test_a_field_may_make_several_columns() -> None:
    field = DerivedField("{what}_copy", "", compute=lambda cells: cells.add_suffix("_copy"))
    assert list(add_derived_fields(pd.DataFrame({"a": [1], "b": [2]}), [field])) == [
        "a",
        "b",
        "a_copy",
        "b_copy",
    ]


def test_fields_that_need_each_other_are_refused() -> None:
    first = DerivedField("first", "", needs=("second",), compute=lambda cells: cells["second"])
    second = DerivedField("second", "", needs=("first",), compute=lambda cells: cells["first"])
    with pytest.raises(CycleError):
        add_derived_fields(pd.DataFrame({"first": [1]}), [first, second])


def test_every_declared_field_has_a_description() -> None:
    assert all(field.doc for field in DERIVED_FIELDS)
    assert len({field.name for field in DERIVED_FIELDS}) == len(DERIVED_FIELDS)
