"""Declarations of the columns of `cells` that are computed from other columns.

A function with `@derived` declares one: its name, its unit, from which its notation in tables
follows, and a description for docs/columns.md. A ratio of two columns is an entry of
`DERIVED_FIELDS` without a function. Nothing else has to be changed for a new column,
except that a table may show it.
Columns that are measured are declared in tasks/spec/metrics.py and tasks/spec/facts.py.

One abnormal cell costs only its own values, and no other cell's: see `apply_to_sound_cells`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from graphlib import TopologicalSorter
from typing import TypeVar

import numpy as np
import pandas as pd

from tasks.spec.fields import name_pattern

Derived = TypeVar("Derived")
Compute = Callable[[pd.DataFrame], pd.Series | pd.DataFrame]


@dataclass(frozen=True)
class DerivedField:
    """A column of `cells`, or several if the name has a placeholder such as `{phase}`.

    needs: columns that must exist, or the field is left out. A name with `?` may be missing;
        it is computed first if it is a derived field itself.
    compute: None for a ratio, and for a column that `derive_cells` takes from the attempts.
    ratio: the field is the first of its needed columns over the second, times this number, which
        converts units.
    """

    name: str
    doc: str
    unit: str = ""
    needs: tuple[str, ...] = ()
    compute: Compute | None = None
    ratio: float | None = None


DERIVED_FIELDS: list[DerivedField] = []  # in the order of their declarations


def derived(
    name: str, doc: str, unit: str = "", needs: Sequence[str] = ()
) -> Callable[[Compute], Compute]:
    """Declare the decorated function as a derived field. It takes the cells and returns a column.

    If `name` has a placeholder, the function returns a frame of columns, which may be empty.
    """

    def declare(compute: Compute) -> Compute:
        DERIVED_FIELDS.append(DerivedField(name, doc, unit, tuple(needs), compute))
        return compute

    return declare


def add_derived_fields(
    cells: pd.DataFrame, declared: Sequence[DerivedField] = DERIVED_FIELDS
) -> pd.DataFrame:
    """Return the cells with every derived field whose needed columns exist.

    Raise CycleError if fields need each other.
    """
    cells = cells.copy()
    # An index of Arrow's strings is converted for each new column before a name is found in it.
    cells.columns = cells.columns.astype(object)
    for field in _in_order(tuple(declared)):
        required = [name for name in field.needs if not name.endswith("?")]
        if any(name not in cells for name in required):
            continue
        if field.ratio is not None:
            numerator, denominator = (cells[name] for name in field.needs)
            columns: pd.Series | pd.DataFrame = quotients(numerator, denominator) * field.ratio
        elif field.compute is not None:
            columns = apply_to_sound_cells(field.compute, cells)
        else:
            continue
        if isinstance(columns, pd.Series):
            columns = columns.to_frame(field.name)
        for name, column in columns.items():
            cells[str(name)] = column
    return cells


@lru_cache(maxsize=4)
def _in_order(declared: tuple[DerivedField, ...]) -> list[DerivedField]:
    """Return the fields in an order in which each follows those that it needs."""
    # A template such as `{phase}_ms` provides every column that its pattern matches.
    patterns = [name_pattern(field.name) for field in declared]
    graph = TopologicalSorter[int]()
    for index, field in enumerate(declared):
        graph.add(index)
        for needed in field.needs:
            for other, pattern in enumerate(patterns):
                if other != index and pattern.fullmatch(needed.removesuffix("?")):
                    graph.add(index, other)
    return [declared[index] for index in graph.static_order()]


def apply_to_sound_cells(compute: Callable[[pd.DataFrame], Derived], rows: pd.DataFrame) -> Derived:
    """Return compute(rows), leaving out each cell for which the computation fails by itself.

    rows: have the column `cell`. Raise the error of `compute` if no single cell causes it.
    """
    try:
        with np.errstate(all="ignore"):
            return compute(rows)
    except Exception:
        unsound = []
        for cell, own in rows.groupby("cell", observed=True, sort=False):
            try:
                compute(own)
            except Exception:
                unsound.append(cell)
        if not unsound:
            raise
    return compute(rows[~rows["cell"].isin(unsound)])


def quotients(numerator: pd.Series[float], denominator: pd.Series[float]) -> pd.Series[float]:
    """Return the quotients, null where the divisor is not above 0 or the result is not finite."""
    above = pd.to_numeric(numerator, errors="coerce").astype("float64")
    below = pd.to_numeric(denominator, errors="coerce").astype("float64")
    quotient = above / below.where(below > 0)
    return quotient.where(quotient.abs() < float("inf"))
