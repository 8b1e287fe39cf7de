"""The strict format of the files in `writeups/`, which hold the published tables of others.

An unknown axis, value, unit or field is an error. Each transcribed number therefore names its cell
in the words that our own axes use, and a slip of the transcription fails the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.common.reference_devices import DEVICES
from orchestrator.report.references.records import EMPTY_CELLS, LABELS, TableCell
from tasks.spec.registry import value_order

Phase = Literal["", "built", "forward", "backward", "communication", "optimizer", "step"]
Statistic = Literal["mean", "median", "min", "max", "sd", "rounded"]
Unit = Literal["s", "ms", "us", "ns", "B", "MiB", "GiB", "%", "1", "tokens/s"]
Metric = Literal[
    "duration", "total", "warmup_total",  # of a phase; of all steps; of all warm-up steps
    "peak", "peak_more", "held", "held_more", "held_per_pair",
    "saved", "saved_and_state", "saved_squares",
    "tensor", "allocation", "allocation_more",
    "kernel_share", "kernel_time", "kernel_launches", "kernel_duration",
    "part_time", "part_share", "gemm_share", "softmax_over_matmul",
    "call", "communication_share", "tokens_per_gpu", "speed_up", "parameters", "sum", "absolute_error",
]  # fmt: skip
_COUNTS = (
    "context_length", "batch_size", "d_model", "d_ff", "num_layers", "num_heads", "d_head",
    "warmup_steps", "measured_steps", "count", "gpus", "processes", "bucket_mb",
)  # fmt: skip
_SWITCHES = ("upcast", "at_once", "projections", "causal")
_CHOICES = (
    "size", "precision", "compile", "compile_mode", "attention", "accumulator", "addend", "pass",
    "optimizer", "collective", "dtype", "call", "parallel", "batch",
)  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())


class StrictQuantity(_Strict):
    """Column of numbers."""

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


class StrictRowNote(_Strict):
    """Note for some rows of a table."""

    where: dict[str, TableCell]
    note: str


class StrictTable(_Strict):
    """Published table."""

    name: str
    title: str
    task: Literal["train_step", "attention", "accumulation", "collectives"]
    device: str
    repeats: str | None = None
    cell: dict[str, TableCell]
    notes: list[str] = Field(default_factory=list)
    row_notes: list[StrictRowNote] = Field(default_factory=list)
    columns: list[str | StrictQuantity]
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


class StrictWriteup(_Strict):
    """File of a write-up."""

    name: str
    title: str
    source: str
    year: int
    table: list[StrictTable]

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
    if axis in ("value", "size_mb"):
        return isinstance(value, Decimal)
    if axis in LABELS:
        return isinstance(value, int | str)
    return axis in _CHOICES and value in value_order(axis)
