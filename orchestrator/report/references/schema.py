"""What a file of `writeups` may say. Strict: an unknown word is an error, so that each number names a cell as we name it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.report.references.devices import devices
from tasks.spec.registry import value_order

Phase = Literal["", "built", "forward", "backward", "optimizer", "step"]
Statistic = Literal["mean", "median", "min", "max", "sd", "rounded"]
Unit = Literal["s", "ms", "us", "ns", "B", "MiB", "GiB", "%", "1"]
Kind = Literal[
    "timings",
    "memory",
    "attention",
    "kernels",
    "gemm-share",
    "softmax",
    "accumulation",
    "allocations",
    "calculation",
]
Metric = Literal[
    "duration", "total", "warmup_total",  # of a phase; of all steps together; of the warm-up together
    "peak", "peak_more", "held", "held_more", "held_per_pair", "saved", "saved_and_state", "saved_squares",
    "tensor", "tensor_more",
    "kernel_time", "launches", "share", "top_share", "gemm_share", "softmax_over_matmul",
    "speed_up", "parameters", "sum", "absolute_error",
]  # fmt: skip
Cell = bool | int | Decimal | str | list[str]

ABSENT = ("N/A", "-")  # a cell of a table that says nothing
OUT_OF_MEMORY = "OOM"
# What tells rows apart and is no axis of ours, or not one to compare by. among: which kernels are ranked; each: what a
# time is of, if not of all layers.
LABELS = ("part", "kernel", "device", "rank", "among", "each")
_COUNTS = (
    "context_length", "batch_size", "d_model", "d_ff", "num_layers", "num_heads", "d_head",
    "warmup_steps", "measured_steps", "count",
)  # fmt: skip
_SWITCHES = ("upcast", "at_once", "projections", "causal")
_WORDS: Mapping[str, Sequence[str]] = {
    axis: value_order(axis)
    for axis in (
        "size",
        "precision",
        "compile",
        "compile_mode",
        "attention",
        "accumulator",
        "addend",
        "pass",
        "optimizer",
    )
}


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())


class Said(_Strict):
    """What the write-up itself says, in its words or next to them. What it does not say is left out."""

    precision: str | None = None
    batch_size: str | None = None
    steps: str | None = Field(None, description="warm-up and measured")
    optimizer: str | None = Field(None, description="or what a step consists of")
    size: str | None = None
    kernel: str | None = None
    torch: str | None = None


class Measure(_Strict):
    """A column of numbers.

    unit: what they are taken as, of one pass. unit_said: what is printed, where that is not the same. over: so many passes
    are in each number. or_unit: what else an unsaid unit could be. params: what names the cell beyond the table's params.
    variant: what tells it from another column of the same cell.
    """

    metric: Metric
    phase: Phase = ""
    statistic: Statistic = "mean"
    unit: Unit
    unit_said: str | None = None
    over: int = 1
    or_unit: Literal["ms"] | None = None
    params: dict[str, Cell] = Field(default_factory=dict)
    variant: str = ""
    doubts: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _known_params(self) -> Self:
        check_params(self.params)
        return self


class RowDoubt(_Strict):
    """A doubt about the rows that have these values."""

    where: dict[str, Cell]
    says: str


class Table(_Strict):
    """A table as it was published.

    params: what names the cell of all its numbers, in the words of our axes; a list where it may be any of several, nothing
    where it is not said. columns: an axis, a label or a Measure. repeats: the table whose numbers it prints once more.
    """

    name: str
    title: str
    kind: Kind
    task: Literal["train_step", "attention", "accumulation"]
    device: str
    device_said: str | None = None
    repeats: str | None = None
    said: Said = Said()
    params: dict[str, Cell]
    doubts: list[str] = Field(default_factory=list)
    row_doubts: list[RowDoubt] = Field(default_factory=list)
    columns: list[str | Measure]
    rows: list[list[Cell]]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        check_params(self.params)
        if self.device not in devices():
            raise ValueError(f"{self.name}: device {self.device!r} is not one of devices.toml")
        keys = [column for column in self.columns if isinstance(column, str)]
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"{self.name}: a row of {len(row)} cells under {len(self.columns)} columns: {row}"
                )
            check_params(
                dict(
                    zip(
                        keys,
                        (c for c, of in zip(row, self.columns, strict=True) if isinstance(of, str)),
                        strict=True,
                    )
                )
            )
        return self


class Writeup(_Strict):
    """name: as a table of the report shows it. year: of the course, whose sizes are meant."""

    name: str
    title: str
    source: str
    year: int
    table: list[Table]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [table.name for table in self.table]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: two tables have the same name")
        unknown = {table.repeats for table in self.table} - {*names, None}
        if unknown:
            raise ValueError(f"{self.name}: repeats {unknown}, which is no table")
        return self


def check_params(params: Mapping[str, Any]) -> None:
    """Raises ValueError for what is no axis or label, or none of its values."""
    for axis, given in params.items():
        for value in given if isinstance(given, list) else [given]:
            if value not in ABSENT and not _may_be(axis, value):
                raise ValueError(f"{axis} = {value!r}: no such axis or no such value of it")


def _may_be(axis: str, value: Any) -> bool:
    if axis in _SWITCHES:
        return isinstance(value, bool)
    if axis in _COUNTS:
        return isinstance(value, int) and not isinstance(value, bool)
    if axis == "value":
        return isinstance(value, Decimal)
    return isinstance(value, int | str) if axis in LABELS else value in _WORDS.get(axis, ())


@cache
def writeups() -> tuple[Writeup, ...]:
    """Every file of `writeups`, in the order of their names. Numbers keep the digits that are printed."""
    files = sorted(
        resources.files(__package__).joinpath("writeups").iterdir(), key=lambda file: file.name
    )
    return tuple(
        Writeup.model_validate(tomllib.loads(file.read_text(encoding="utf-8"), parse_float=Decimal))
        for file in files
        if file.name.endswith(".toml")
    )
