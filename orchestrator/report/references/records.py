"""From tables to records: one a number, with all that says which cell it is of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from typing import Any

from model.config import SIZES
from orchestrator.report.references.devices import ALL
from orchestrator.report.references.schema import (
    ABSENT,
    LABELS,
    OUT_OF_MEMORY,
    Cell,
    Measure,
    Table,
    Writeup,
    writeups,
)

Params = Mapping[
    str, tuple[Any, ...]
]  # by axis, the values that it may have: one where the write-up says it

_FACTORS = {
    "s": Decimal(1000), "us": Decimal("0.001"), "ns": Decimal("0.000001"),
    "MiB": Decimal(1024**2), "GiB": Decimal(1024**3), "GB": Decimal(1024**3), "%": Decimal("0.01"),
}  # fmt: skip
_WITH_UNIT = re.compile(r"(-?[\d.]+) (s|ms|μs|us|ns|MiB|GiB|GB)")
_DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads")


@dataclass(frozen=True)
class Number:
    """One published number, or that a cell ran out of memory (`value` null).

    value, unit: as printed, or as taken where the unit is not said. said: what the write-up itself says of the table, by
    subject. doubts: a sentence each, typed in with the table.
    """

    writeup: str
    table: str
    title: str
    kind: str
    task: str
    device: str
    year: int
    params: Params
    labels: Mapping[str, str]
    metric: str
    phase: str
    statistic: str
    variant: str
    value: Decimal | None
    unit: str
    over: int = 1
    or_unit: str | None = None
    said: tuple[tuple[str, str], ...] = ()
    doubts: tuple[str, ...] = ()
    repeats: bool = False
    row: int = 0

    @property
    def amount(self) -> float | None:
        """Of one pass, in ms, bytes or as a plain number."""
        return self.amount_in(self.unit)

    def amount_in(self, unit: str) -> float | None:
        """Had it been printed in `unit`, of one pass."""
        if self.value is None:
            return None
        passes = self.over if unit == self.unit else 1
        return float(self.value * _FACTORS.get(unit, Decimal(1)) / passes)

    def one(self, axis: str) -> Any:
        """The value of an axis, if only one is possible."""
        values = self.params.get(axis, ())
        return values[0] if len(values) == 1 else None


@cache
def published() -> tuple[Number, ...]:
    """Every number of every write-up."""
    return tuple(
        number
        for writeup in writeups()
        for table in writeup.table
        for number in _numbers(writeup, table)
    )


def published_on(device: str) -> tuple[Number, ...]:
    """device: one of them, or ALL."""
    return tuple(number for number in published() if device in (number.device, ALL))


def _numbers(writeup: Writeup, table: Table) -> Iterator[Number]:
    for place, row in enumerate(table.rows):
        keys = {
            column: cell
            for column, cell in zip(table.columns, row, strict=True)
            if isinstance(column, str)
        }
        said = {
            axis: value for axis, value in {**table.params, **keys}.items() if value not in ABSENT
        }
        for column, cell in zip(table.columns, row, strict=True):
            if isinstance(column, Measure) and cell not in ABSENT:
                yield _number(writeup, table, column, cell, {**said, **column.params}, place)


def _holds(where: Mapping[str, Cell], said: Mapping[str, Cell]) -> bool:
    return all(said.get(axis) == value for axis, value in where.items())


def _number(
    writeup: Writeup, table: Table, column: Measure, cell: Cell, said: Mapping[str, Cell], row: int
) -> Number:
    of_row = [doubt.says for doubt in table.row_doubts if _holds(doubt.where, said)]
    value, unit = _value(cell, column.unit)
    number = Number(
        writeup=writeup.name,
        table=table.name,
        title=table.title,
        kind=table.kind,
        task=table.task,
        device=table.device,
        year=writeup.year,
        params={axis: _values(value) for axis, value in said.items() if axis not in LABELS},
        labels={label: str(said[label]) for label in LABELS if label in said},
        metric=column.metric,
        phase=column.phase,
        statistic=column.statistic,
        variant=column.variant,
        value=value,
        unit=unit,
        over=column.over,
        or_unit=column.or_unit,
        said=tuple(table.said.model_dump(exclude_none=True).items()),
        doubts=(*table.doubts, *column.doubts, *of_row),
        repeats=table.repeats is not None,
        row=row,
    )
    return replace(number, params=_with_size(number.params, writeup.year))


def _value(cell: Cell, unit: str) -> tuple[Decimal | None, str]:
    """What a cell says. One with a unit of its own, such as `873 ns`, has it before the column's. Raises ValueError."""
    if cell == OUT_OF_MEMORY:
        return None, unit
    if isinstance(cell, int | Decimal) and not isinstance(cell, bool):
        return Decimal(cell), unit
    found = _WITH_UNIT.fullmatch(str(cell))
    if not found:
        raise ValueError(f"{cell!r} is no number")
    return Decimal(found[1]), found[2].replace("μ", "u")


def _values(given: Cell) -> tuple[Any, ...]:
    return (
        tuple(given)
        if isinstance(given, list)
        else (float(given) if isinstance(given, Decimal) else given,)
    )


def _with_size(params: Params, year: int) -> Params:
    """The size by its name, where a model is spelled out. Raises ValueError where the two disagree, or there is no such size."""
    spelled = {name: params[name][0] for name in _DIMENSIONS if name in params}
    if len(spelled) < len(_DIMENSIONS):
        return {axis: values for axis, values in params.items() if axis not in _DIMENSIONS}
    alike = [
        size
        for size, dims in SIZES[year].items()
        if all(getattr(dims, name) == spelled[name] for name in _DIMENSIONS)
    ]
    if not alike or params.get("size", (alike[0],)) != (alike[0],):
        raise ValueError(f"{params.get('size')} is not {spelled} in {year}")
    return {
        "size": (alike[0],),
        **{axis: values for axis, values in params.items() if axis not in _DIMENSIONS},
    }
