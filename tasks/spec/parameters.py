"""The axes that tasks share. A task's own axes are the fields that its parameters add."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator, model_validator

from tasks.spec.axes import (
    REQUIRED,
    Affects,
    Choice,
    FrozenValues,
    Values,
    axis,
    leave_out,
)
from tasks.spec.messages import is_utf8
from tasks.spec.order_statistics import FEWEST
from tasks.spec.source_digest import HUB

T = TypeVar("T")
AttentionName = Literal[
    "naive", "torch_softmax", "weights_only", "recompute",
    "math", "efficient", "flash", "cudnn", "flex", "sdpa",
]  # fmt: skip
Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16_pure"]
Device = Literal["cuda", "cpu", "mps"]
Timing = Literal["fixed", "adaptive"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune"]
CompileCache = Literal["shared", "cold"]
# Absolute limit of integers: columns of tables, and torch's sizes and seeds, are signed 64-bit.
LARGEST_INT = 2**63 - 1
# Torch's allocator needs one of its smallest blocks on a GPU, 2 MiB. A pebibyte is more than any
# host has; from 2³³ GiB on the limit in bytes does not fit into 63 bits.
FEWEST_GIB, MOST_GIB = 2 / 1024, 1e6
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
# The modes in which torch records CUDA graphs; replaying one is a single launch.
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
# Compiled cells are predicted as eager ones, except for those that have their own code generated
# (`generates_code` in tasks/prediction/records.py).
NOT_MEMORY = Affects.ALL & ~Affects.MEMORY
PASS = "what a step computes: {}; forward is inference without gradients"
MEASURED_STEPS = "measured steps: synced ones, and on a GPU as many pipelined; null if adaptive"


class Axes(BaseModel):
    """Rules for the values of all axes.

    Values are frozen and strict, unknown names are errors, numbers are finite, and integers fit
    into a column of a table.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        populate_by_name=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @field_validator("*")
    @classmethod
    def _fits_a_column(cls, value: object) -> object:
        if isinstance(value, int) and abs(value) > LARGEST_INT:
            raise ValueError("integers must fit in 63 bits")
        _require_json(value, "")
        return value

    def model_copy(self, *, update: FrozenValues | None = None, deep: bool = False) -> Self:
        """Return a copy with other values, which are not checked."""
        copied = super().model_copy(update=update, deep=deep)
        # pydantic copies cached properties, too, which would still have the values of the original.
        for name in vars(copied).keys() - type(self).model_fields:
            del vars(copied)[name]
        return copied


def _require_json(value: object, place: str) -> None:
    """Raise ValueError for a value that JSON or UTF-8 would change: cells are stored as both."""
    if isinstance(value, str):
        if not value.isascii() and not is_utf8(value):
            raise ValueError(f"{place}: {value!r} has half of a surrogate pair, which is no UTF-8")
    elif isinstance(value, dict):
        for key, one in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{place}: the key {key!r} is not a text. Write it in quotes")
            _require_json(key, place)
            _require_json(one, f"{place}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            _require_json(one, f"{place}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place}: {value} is not finite. Write a number")


# Axes that mean nothing on other devices, with the types of their values.
_OF_DEVICE: dict[str, dict[str, type]] = {
    "cuda": {"gpu_kind": str, "gpus": int},
    "cpu": {"processes": int},
}


class Params(Axes):
    """The values of a task's axes: what a cell measures."""

    device: Device = axis("cuda", "device that the cell is measured on: cuda, cpu or mps")
    gpu_kind: Annotated[str, Field(min_length=1)] | None = axis(
        None, "kind of GPU, such as H100, if there are several; null: any", affects=NOT_MEMORY
    )
    seed: NonNegativeInt = axis(0, "seed of the weights and of the inputs", affects=Affects.NONE)
    memory_limit_gib: Annotated[float, Field(ge=FEWEST_GIB, le=MOST_GIB)] | None = axis(
        None,
        "cap of the process's allocator, so that a large GPU stands in for a smaller one; on the "
        "CPU, of what the process allocates after start-up; null: none",
        unit="GiB",
        affects=Affects.NONE,
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_axes_of_other_devices(cls, values: object) -> object:
        """Drop axes of other devices: a grid over kinds of GPU gives one cell on the CPU.

        A value of another type remains and is refused later.
        """
        if not isinstance(values, dict):
            return values
        dropped: set[str] = set()
        for device, axes in _OF_DEVICE.items():
            if device != values.get("device", "cuda"):
                dropped |= {name for name, kind in axes.items() if type(values.get(name)) is kind}
        return leave_out(values, dropped & cls.model_fields.keys())

    @property
    def compiled(self) -> bool:
        """True if the cell needs torch's compiler."""
        return False

    @property
    def caps_host(self) -> bool:
        """True if the cell's cap is on the host's memory: what the process may allocate."""
        return self.memory_limit_gib is not None and self.device == "cpu"

    @property
    def ranks(self) -> int:
        """Number of processes that measure the cell together."""
        return 1

    @property
    def gpu_count(self) -> int:
        """Number of GPUs that the cell has to itself: one for each rank."""
        return self.ranks if self.device == "cuda" else 0

    @property
    def slots(self) -> int:
        """Number of slots that the cell takes: its GPUs, or one on the CPU."""
        return max(1, self.gpu_count)

    def values(self) -> FrozenValues:
        """Return every parameter under its name in the config, as JSON can hold it."""
        return self._values

    @cached_property
    def _values(self) -> Values:
        return self.model_dump(mode="json", by_alias=True)

    @cached_property
    def non_default(self) -> FrozenValues:
        """The parameters that differ from their defaults: the cell's id is made of them."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


class RankedParams(Params):
    """Parameters of tasks whose ranks communicate. Other tasks have no axes `gpus` and `processes`.

    A rank is a process of the cell, with a GPU or a share of the CPU's cores for itself.
    """

    gpus: PositiveInt = axis(
        1, "number of GPUs of one host, each with a process of the cell", choice=Choice.SAME
    )
    processes: PositiveInt = axis(1, "number of processes of a cell on the CPU")

    @property
    def ranks(self) -> int:
        return {"cuda": self.gpus, "cpu": self.processes}.get(self.device, 1)


class ImportedParams(Params):
    """Parameters of a cell that another program measured."""

    # Nsys names its files report1, report2 and so on in every folder, so the name is not enough.
    file: str = axis(REQUIRED, "name of the imported file")
    content: str = axis(REQUIRED, "digest of the file: another content is another cell")
    rank: str = axis("", "process and GPU, if the file has several")


@dataclass(frozen=True)
class StopRule:
    """Rule of adaptive timing for the end of measuring.

    half_width: stop when half the width of the median's 95 % interval, divided by the median, is at
        most this.
    most_steps, most_seconds: stop at this limit, or as soon as it is clear that the interval would
        still be too wide there. The seconds are the sum of the durations of the steps.
    """

    half_width: float
    most_steps: int
    most_seconds: float


_OF_FIXED = ("warmup_steps", "measured_steps")
_OF_ADAPTIVE = {"half_width": 0.01, "most_steps": 100, "most_seconds": 5.0}
TIMING_AXES = (*_OF_FIXED, *_OF_ADAPTIVE)  # those that are null with the other `timing`


class TimedParams(Params):
    """Parameters of tasks that repeat a step in some precision."""

    precision: Precision = axis(
        "fp32",
        "fp32, tf32, bf16 and fp16 (by autocast, which keeps weights, gradients and optimizer state "
        "in fp32; fp16 with a gradient scaler), or bf16_pure "
        "(everything stored in it)",
        choice=Choice.OTHER_NUMBERS,
    )
    timing: Timing = axis(
        "fixed",
        "fixed: a fixed number of steps; adaptive: steps until the median is known well enough",
        affects=Affects.NONE,
    )
    warmup_steps: NonNegativeInt | None = axis(
        5,
        "steps before the measured ones; null with adaptive timing",
        unit="steps",
        affects=Affects.NONE,
    )
    measured_steps: PositiveInt | None = axis(
        10, MEASURED_STEPS, unit="steps", affects=Affects.NONE
    )
    half_width: Annotated[float, Field(gt=0, lt=1)] | None = axis(
        None,
        "adaptive timing: stop at this half-width of the median's 95 % interval, a fraction of "
        "the median",
        affects=Affects.NONE,
    )
    most_steps: Annotated[int, Field(ge=FEWEST)] | None = axis(
        None, "adaptive timing: largest number of steps", unit="steps", affects=Affects.NONE
    )
    most_seconds: Annotated[float, Field(gt=0)] | None = axis(
        None,
        "adaptive timing: stop when six or more steps have taken this long together, or when the "
        "interval would remain too wide",
        unit="s",
        affects=Affects.NONE,
    )

    @property
    def autocasts(self) -> bool:
        """True if bf16 and fp16 are torch's autocast, not the mixed precision of something else."""
        return True

    @property
    def stop_rule(self) -> StopRule | None:
        """The rule of adaptive timing; None if the number of steps is fixed."""
        if self.half_width is None or self.most_steps is None or self.most_seconds is None:
            return None
        return StopRule(self.half_width, self.most_steps, self.most_seconds)

    @model_validator(mode="before")
    @classmethod
    def _drop_other_timing(cls, values: object) -> object:
        """Drop the axes of the other `timing`, so that a grid of both gives one adaptive cell.

        A value that is not a number remains and is refused later.
        """
        if not isinstance(values, dict):
            return values
        is_adaptive = values.get("timing", "fixed") == "adaptive"
        others = _OF_FIXED if is_adaptive else _OF_ADAPTIVE
        own = {}
        for name, value in values.items():
            if name not in others or isinstance(value, str | list | dict):
                own[name] = value
        if not is_adaptive:
            return own
        given = {name: value for name, value in own.items() if value is not None}
        return dict.fromkeys(_OF_FIXED) | _OF_ADAPTIVE | given

    @model_validator(mode="after")
    def _require_counts(self) -> Self:
        if self.timing == "fixed" and None in (self.warmup_steps, self.measured_steps):
            raise ValueError("timing: fixed needs warmup_steps and measured_steps")
        return self


_OF_COMPILED = {"compile_mode": get_args(CompileMode), "compile_cache": get_args(CompileCache)}


class CompiledParams(TimedParams):
    """Parameters of tasks that can be compiled. A task narrows `compile` to what it supports."""

    compile: str = axis(
        "eager",
        "eager; blocks: one block by torch.compile, whose code serves all blocks; model: the whole "
        "model",
        affects=NOT_MEMORY,
        choice=Choice.SAME,
    )
    compile_mode: CompileMode = axis(
        "default",
        "mode of torch.compile: default, reduce-overhead or max-autotune",
        affects=NOT_MEMORY,
        choice=Choice.SAME,
    )
    compile_cache: CompileCache = axis(
        "shared",
        "shared by the cells of the run; cold: the cell compiles into an empty folder",
        affects=Affects.SPEED,
    )

    @property
    def compiled(self) -> bool:
        return self.compile != "eager"

    @model_validator(mode="before")
    @classmethod
    def _drop_mode_of_eager(cls, values: object) -> object:
        """Drop the compiler's axes from eager cells: a grid of modes then gives one eager cell.

        A word that is no mode remains and is refused later.
        """
        if not isinstance(values, dict) or values.get("compile", "eager") != "eager":
            return values
        # Eager flex attention is compiled, in torch's default mode, but its cache can be chosen.
        chosen = ("compile_cache",) if values.get("attention") == "flex" else ()
        own = {}
        for name, value in values.items():
            if name in chosen or value not in _OF_COMPILED.get(name, ()):
                own[name] = value
        return own


class AttentionAxisParams(CompiledParams):
    """Parameters of tasks that compute attention."""

    attention: AttentionName = axis(
        "naive",
        "naive (each step makes a square), torch_softmax, weights_only, recompute; torch's own: "
        "math, efficient, flash, cudnn, flex, or sdpa, which chooses (see model/attention.py)",
        choice=Choice.SAME,
    )

    @property
    def compiled(self) -> bool:
        """True if something is compiled; flex attention always is."""
        return self.compile != "eager" or self.attention == "flex"


def computes_own_attention(model: object) -> bool:
    """Return True if a model is code of the user, for which `attention` means nothing."""
    return isinstance(model, str) and not model.startswith(HUB)


def default_values(params: type[Params]) -> Values:
    """Return the default of each axis, under its name in the config."""
    defaults = {}
    for name, field in params.model_fields.items():
        defaults[field.alias or name] = field.get_default(call_default_factory=True)
    return defaults


def check_value(params: type[Params], name: str, value: object) -> None:
    """Raise pydantic.ValidationError if an axis cannot have this value, whatever the others are."""
    _single_axis(params, name).model_validate({name: value})


@cache
def _single_axis(params: type[Params], axis_name: str) -> type[Axes]:
    """Return a model of one axis, without the validators that drop values of other axes unread."""
    fields: Values = {}
    for name, field in params.model_fields.items():
        if axis_name == (field.alias or name):
            fields[name] = (field.annotation, field)
    return create_model(f"{params.__name__}.{axis_name}", __base__=Axes, **fields)
