"""Descriptions of all columns, for `run.columns` of a loaded run and the page docs/columns.md.

They are generated from declarations: stored tables, metrics, facts and axes in tasks/spec, and
derived fields in orchestrator/analysis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from orchestrator.analysis.cells import RUN_FIELDS
from orchestrator.analysis.derived_fields import DERIVED_FIELDS, DerivedField
from tasks.spec.facts import FACT_COLUMNS
from tasks.spec.fields import Fact, Field, name_pattern
from tasks.spec.metrics import METRICS, PREDICTED_METRICS, CellColumn
from tasks.spec.registry import all_axes
from tasks.spec.tables import ATTEMPT, STORED_TABLES

PARAMETER = "a parameter of the cell"  # of a task that is not part of this program
# Columns of `attempts` that are columns of `cells` too.
_STORED = (
    "cell", "task", "status", "stage", "phase", "attempt", "started_at", "wall_s", "commit",
)  # fmt: skip


@dataclass(frozen=True)
class ColumnDoc:
    """The description of a column, or of several if the name has a placeholder."""

    name: str
    unit: str
    doc: str

    def matches(self, column: str) -> bool:
        if "{" not in self.name:  # most names, and compiling 200 patterns takes time
            return self.name == column
        return name_pattern(self.name).fullmatch(column) is not None


@cache
def cell_columns() -> tuple[ColumnDoc, ...]:
    """Return the descriptions of all columns of `cells` that are not parameters."""
    (attempts,) = (table for table in STORED_TABLES if table.name == "attempts")
    stored = {field.name: field for field in (*attempts.fields, ATTEMPT)}
    declared: list[Field | Fact | CellColumn | DerivedField] = [stored[name] for name in _STORED]
    declared += [*RUN_FIELDS, *DERIVED_FIELDS, *FACT_COLUMNS]
    for metric in (*METRICS, *PREDICTED_METRICS):
        declared += metric.columns
    by_name: dict[str, ColumnDoc] = {}
    for one in declared:
        by_name.setdefault(one.name, ColumnDoc(one.name, one.unit or "", one.doc))
    return tuple(by_name.values())


@cache
def parameter_columns() -> tuple[ColumnDoc, ...]:
    """Return the descriptions of the parameters of all tasks."""
    return tuple(ColumnDoc(name, axis.unit, axis.doc) for name, axis in all_axes().items())


def declared_unit(column: str) -> str:
    """Return the unit of a column of `cells`. Raise LookupError if the column is not declared."""
    found = _describe(column)
    if found.doc == PARAMETER:
        raise LookupError(f"no column {column!r} is declared")
    return found.unit


def describe_columns(names: Iterable[str]) -> list[ColumnDoc]:
    """Return the description of each column of `cells`.

    A column that is described nowhere is a parameter of a task of the user's own.
    """
    return [_describe(name) for name in names]


def _describe(name: str) -> ColumnDoc:
    for columns in (cell_columns, parameter_columns):  # the second imports all tasks
        for one in columns():
            if one.matches(name):
                return ColumnDoc(name, one.unit, one.doc)
    return ColumnDoc(name, "", PARAMETER)
