"""Published tables as records: one ReferenceNumber for each number, with the cell it belongs to.

A file of `writeups/` has `name`, `title`, `source`, `year` and one `table` for each published one:

- `task`, `device`, and `cell`: the axes that hold for all rows. A list means that the write-up
  leaves open which of the values it was; a missing axis means that the write-up does not state it.
- `columns`: each is an axis, a label, or the fields of a number, with further axes as `cell`.
- `notes`: why its numbers may not be comparable; `row_notes`: a `note` for the rows `where` some
  values are; `repeats`: the table of the same write-up whose numbers it prints again.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Any

from model.config import SIZES, Dimensions
from orchestrator.common.reference_devices import ALL

TableCell = bool | int | Decimal | str | list[str]
EMPTY_CELLS = ("N/A", "-")
OUT_OF_MEMORY = "OOM"
# Columns that identify a row and are no axis of ours. `among`: the kernels that are ranked;
# `each`: what a time is for, if not for all layers; `device`: the part of the machine (cpu, mps or
# cuda).
LABELS = ("part", "kernel", "device", "rank", "among", "each")
Content = Mapping[str, Any]  # of a file, or of one of its tables
# The possible values of each axis. There is one where the write-up is clear about it.
Axes = Mapping[str, tuple[Any, ...]]

_FACTORS = {
    "s": Decimal(1000), "us": Decimal("0.001"), "ns": Decimal("0.000001"),
    "MiB": Decimal(1024**2), "GiB": Decimal(1024**3), "GB": Decimal(1024**3), "%": Decimal("0.01"),
}  # fmt: skip
# nsys prints the unit of a time in each cell, such as `873 ns`.
_WITH_UNIT = re.compile(r"(-?[\d.]+) (s|ms|μs|us|ns|MiB|GiB|GB)")
DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads")


@dataclass(frozen=True, kw_only=True)
class ReferenceNumber:
    """One published number of a quantity, or a cell that ran out of memory (`value` is None).

    value, unit: as printed. over: the number of passes that one number covers. axes: a missing one
    is not stated by the write-up. variant: distinguishes two columns about the same cell. notes:
    why it may not be comparable. sd: the standard deviation in the same row, in the unit of
    `amount`. row: position in its table. year: of the course, which defines the model sizes.
    """

    writeup: str
    table: str
    title: str
    task: str
    device: str
    year: int
    metric: str
    unit: str
    value: Decimal | None
    axes: Axes
    labels: Mapping[str, str]
    phase: str = ""
    statistic: str = "mean"
    over: int = 1
    variant: str = ""
    notes: tuple[str, ...] = ()
    is_repeated: bool = False
    row: int = 0
    sd: float | None = None

    @property
    def amount(self) -> float | None:
        """The value for one pass, in milliseconds, bytes or as a plain number."""
        if self.value is None:
            return None
        return float(self.value * _FACTORS.get(self.unit, Decimal(1)) / self.over)

    def only(self, axis: str) -> Any:
        """Return the value of an axis, or None if the write-up leaves it open."""
        values = self.axes.get(axis, ())
        return values[0] if len(values) == 1 else None


@cache
def writeups() -> tuple[Content, ...]:
    """Return the content of each file in `writeups/`. Decimal preserves the printed digits."""
    folder = resources.files(__package__).joinpath("writeups")
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    texts = [file.read_text(encoding="utf-8") for file in files]
    return tuple(tomllib.loads(text, parse_float=Decimal) for text in texts)


@cache
def published() -> tuple[ReferenceNumber, ...]:
    """Return every number of every write-up."""
    tables = [(writeup, table) for writeup in writeups() for table in writeup["table"]]
    return tuple(number for writeup, table in tables for number in numbers_of(writeup, table))


def published_on(device: str) -> tuple[ReferenceNumber, ...]:
    """Return the numbers of one device, or of every device for ALL."""
    return tuple(number for number in published() if device in (number.device, ALL))


def numbers_of(writeup: Content, table: Content) -> Iterator[ReferenceNumber]:
    """Yield the numbers of a table, row by row. Raise ValueError for a text that is no number."""
    ranks: Counter[object] = Counter()
    for index in range(len(table["rows"])):
        numbers = list(_row_numbers(writeup, table, index))
        deviations = {_measured(one): one.amount for one in numbers if one.statistic == "sd"}
        for number in numbers:
            if number.statistic == "mean":
                number = replace(number, sd=deviations.get(_measured(number)))
            if number.metric == "kernel_share":
                # A table lists the kernels of a cell in the order of their share: that is the rank.
                cell = (number.phase, tuple(sorted(number.axes.items())))
                ranks[cell] += 1
                number = replace(number, labels={**number.labels, "rank": str(ranks[cell])})
            yield number


def _row_numbers(writeup: Content, table: Content, index: int) -> Iterator[ReferenceNumber]:
    cells = zip(table["columns"], table["rows"][index], strict=True)
    filled = [(column, printed) for column, printed in cells if printed not in EMPTY_CELLS]
    of_row = {column: printed for column, printed in filled if isinstance(column, str)}
    for quantity, printed in filled:
        if isinstance(quantity, str):
            continue
        value, unit = _parse_value(printed, quantity["unit"])
        stated = {**table["cell"], **of_row, **quantity.get("cell", {})}
        axes = {}
        for axis in (axis for axis in stated if axis not in LABELS):
            values = stated[axis] if isinstance(stated[axis], list) else [stated[axis]]
            axes[axis] = tuple(float(one) if isinstance(one, Decimal) else one for one in values)
        notes = list(table.get("notes", ()))
        for one in table.get("row_notes", ()):
            if one["where"].items() <= stated.items():
                notes.append(one["note"])
        described = {name: quantity[name] for name in quantity if name not in ("cell", "unit")}
        yield ReferenceNumber(
            **described,
            **{name: table[name] for name in ("title", "task", "device")},
            writeup=writeup["name"],
            table=table["name"],
            year=writeup["year"],
            unit=unit,
            value=value,
            axes=_with_size(axes, writeup["year"]),
            labels={label: str(stated[label]) for label in LABELS if label in stated},
            notes=tuple(notes),
            is_repeated="repeats" in table,
            row=index,
        )


def _measured(number: ReferenceNumber) -> tuple[object, ...]:
    """Return what a mean and its standard deviation have in common within a row."""
    return number.metric, number.phase, number.variant, tuple(sorted(number.axes.items()))


def _parse_value(printed: TableCell, unit: str) -> tuple[Decimal | None, str]:
    """Return value and unit of a table cell, whose own unit overrides that of its column."""
    if printed == OUT_OF_MEMORY:
        return None, unit
    if isinstance(printed, int | Decimal) and not isinstance(printed, bool):
        return Decimal(printed), unit
    found = _WITH_UNIT.fullmatch(str(printed))
    if not found:
        raise ValueError(f"{printed!r} is no number")
    return Decimal(found[1]), found[2].replace("μ", "u")


def _with_size(axes: Axes, year: int) -> Axes:
    """Replace the dimensions of a model by the name of its size.

    Raise ValueError if no size has these dimensions, or if the table names another size.
    """
    dimensions = {name: axes[name][0] for name in DIMENSIONS if name in axes}
    others = {axis: values for axis, values in axes.items() if axis not in DIMENSIONS}
    if len(dimensions) < len(DIMENSIONS):
        return others
    for size, known in SIZES[year].items():
        if known == Dimensions(**dimensions) and others.get("size", (size,)) == (size,):
            return {"size": (size,), **others}
    raise ValueError(f"{axes.get('size')} is not {dimensions} in {year}")
