"""The format of the files in `writeups/`, which hold the published tables of others.

The format is strict: an unknown axis, value, unit or field is an error. Each transcribed number
therefore names its cell in the words that our own axes use, and a slip of the transcription
shows when the files are loaded.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.common.reference_devices import DEVICES
from tasks.spec.registry import value_order

Phase = Literal["", "built", "forward", "backward", "optimizer", "step"]
Statistic = Literal["mean", "median", "min", "max", "sd", "rounded"]
Unit = Literal["s", "ms", "us", "ns", "B", "MiB", "GiB", "%", "1"]
Metric = Literal[
    "duration", "total", "warmup_total",  # of a phase; of all steps; of all warm-up steps
    "peak", "peak_more", "held", "held_more", "held_per_pair",
    "saved", "saved_and_state", "saved_squares",
    "tensor", "allocation", "allocation_more",
    "kernel_share", "kernel_time", "kernel_launches", "kernel_duration",
    "part_time", "part_share", "gemm_share", "softmax_over_matmul",
    "speed_up", "parameters", "sum", "absolute_error",
]  # fmt: skip
TableCell = bool | int | Decimal | str | list[str]

EMPTY_CELLS = ("N/A", "-")
OUT_OF_MEMORY = "OOM"
# Columns that identify a row and are no axis of ours. `among`: the kernels that are ranked;
# `each`: what a time is for,
# if not for all layers; `device`: the part of the machine (cpu, mps or cuda).
LABELS = ("part", "kernel", "device", "rank", "among", "each")
_COUNTS = (
    "context_length", "batch_size", "d_model", "d_ff", "num_layers", "num_heads", "d_head",
    "warmup_steps", "measured_steps", "count",
)  # fmt: skip
_SWITCHES = ("upcast", "at_once", "projections", "causal")
_CHOICES = (
    "size", "precision", "compile", "compile_mode", "attention", "accumulator", "addend", "pass",
    "optimizer",
)  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())


class ReferenceQuantity(_Strict):
    """A column of numbers.

    unit: the unit of the printed numbers. over: the number of passes that one number covers.
    cell: axes that hold for this column in addition to those of the table. variant:
    distinguishes two columns about the same cell.
    """

    metric: Metric
    phase: Phase = ""
    statistic: Statistic = "mean"
    unit: Unit
    over: int = 1
    cell: dict[str, TableCell] = Field(default_factory=dict)
    variant: str = ""

    @model_validator(mode="after")
    def _check_cell(self) -> Self:
        check_cell(self.cell)
        return self


class RowNote(_Strict):
    """A note for the rows that have these values."""

    where: dict[str, TableCell]
    note: str


class ReferenceTable(_Strict):
    """One published table.

    cell: axes that hold for all rows. A list means that the write-up leaves open which of the
    values it was; a missing axis means that the write-up does not state it. notes: why its
    numbers may not be comparable. columns: an axis, a label or a ReferenceQuantity. repeats: the
    table of the same write-up whose numbers it prints again.
    """

    name: str
    title: str
    task: Literal["train_step", "attention", "accumulation"]
    device: str
    repeats: str | None = None
    cell: dict[str, TableCell]
    notes: list[str] = Field(default_factory=list)
    row_notes: list[RowNote] = Field(default_factory=list)
    columns: list[str | ReferenceQuantity]
    rows: list[list[TableCell]]

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_cell(self.cell)
        if self.device not in DEVICES:
            raise ValueError(f"{self.name}: unknown device {self.device!r}")
        for row in self.rows:
            if len(row) != len(self.columns):
                size = f"{len(row)} cells for {len(self.columns)} columns"
                raise ValueError(f"{self.name}: a row has {size}: {row}")
            check_cell(self.axes_of(row))
        return self

    def axes_of(self, row: list[TableCell]) -> dict[str, TableCell]:
        """Return the axes and labels that a row states."""
        pairs = zip(self.columns, row, strict=True)
        return {column: value for column, value in pairs if isinstance(column, str)}


class Writeup(_Strict):
    """The tables of one write-up. year: of the course, which defines the model sizes."""

    name: str
    title: str
    source: str
    year: int
    table: list[ReferenceTable]

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [table.name for table in self.table]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: two tables have the same name")
        unknown = {table.repeats for table in self.table} - {*names, None}
        if unknown:
            raise ValueError(f"{self.name}: `repeats` names unknown tables: {unknown}")
        return self


def check_cell(cell: Mapping[str, object]) -> None:
    """Raise ValueError for an unknown axis or label, or a value that its axis lacks."""
    for axis, given in cell.items():
        for value in given if isinstance(given, list) else [given]:
            if value not in EMPTY_CELLS and not _is_possible(axis, value):
                raise ValueError(f"{axis} = {value!r}: no such axis, or no such value of it")


def _is_possible(axis: str, value: object) -> bool:
    if axis in _SWITCHES:
        return isinstance(value, bool)
    if axis in _COUNTS:
        return isinstance(value, int) and not isinstance(value, bool)
    if axis == "value":
        return isinstance(value, Decimal)
    if axis in LABELS:
        return isinstance(value, int | str)
    return axis in _CHOICES and value in value_order(axis)


@cache
def writeups() -> tuple[Writeup, ...]:
    """Return all write-ups by file name. Decimal preserves the printed digits."""
    folder = resources.files(__package__).joinpath("writeups")
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    texts = [file.read_text(encoding="utf-8") for file in files if file.name.endswith(".toml")]
    return tuple(Writeup.model_validate(tomllib.loads(text, parse_float=Decimal)) for text in texts)
