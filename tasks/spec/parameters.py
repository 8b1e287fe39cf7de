"""The parameters that every task shares. A task's own parameters are the fields it adds: each field is an axis."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator, model_validator

from tasks.spec.order_statistics import FEWEST
from tasks.spec.stopping import StopRule

AttentionName = Literal[
    "naive",
    "torch_softmax",
    "weights_only",
    "recompute",
    "sdpa",
    "math",
    "efficient",
    "flash",
    "cudnn",
    "flex",
]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16_pure"]
Device = Literal["cuda", "cpu", "mps"]
LARGEST_INT = (
    2**63 - 1
)  # in magnitude: columns of tables, and torch's own sizes and seeds, have 64 bits with the sign
# GiB. Of less, torch's allocator on a GPU could not have one of its smallest blocks, 2 MiB. More, a pebibyte, no host has; from
# 2³³ GiB on no operating system takes the limit, which is in bytes and has 63 bits.
FEWEST_GIB, MOST_GIB = 2 / 1024, 1e6
PositiveInt = Annotated[int, Field(ge=1)]


class Axes(BaseModel):
    """What holds of the values of any axis. Frozen, strict, and unknown names are errors; numbers are finite, and integers are
    those that a table's column can hold."""

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
    def _fits_a_column(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > LARGEST_INT:
            raise ValueError("integers must fit in 63 bits")
        return value


class Params(Axes):
    """One point of a task's space."""

    # Axes along which a cell never takes less memory: numbers (), or words in their order. All that is inferred rests on it.
    more_memory_with: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    device: Device = Field("cuda", description="where the cell is measured")
    gpu_kind: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="the kind of GPU that the cell is measured on, such as H100, where there are several; null: any",
    )
    seed: Annotated[int, Field(ge=0)] = Field(0, description="of the weights and of the inputs")
    memory_limit_gib: Annotated[float, Field(ge=FEWEST_GIB, le=MOST_GIB)] | None = Field(
        None,
        description="cap of the process's allocator, in GiB, so that a large GPU stands in for a smaller one; "
        "on the CPU, of what the process may allocate after start-up",
    )

    @model_validator(mode="before")
    @classmethod
    def _only_a_gpu_has_a_kind(cls, values: Any) -> Any:
        """So that a grid of kinds gives one cell on the CPU and not one a kind. What is no text stays, to be refused."""
        return _on_a_gpu_alone(values, "gpu_kind", str)

    @property
    def compiled(self) -> bool:
        """Whether the cell needs torch's compiler."""
        return False

    @property
    def caps_host(self) -> bool:
        """Whether its cap is on memory of the host: what the process may allocate."""
        return self.memory_limit_gib is not None and self.device == "cpu"

    @property
    def gpu_count(self) -> int:
        """How many GPUs the cell has to itself."""
        return int(getattr(self, "gpus", 1)) if self.device == "cuda" else 0

    def values(self) -> dict[str, Any]:
        """Every parameter under its name in the config, as JSON can hold it."""
        return dict(self._values)

    @cached_property
    def _values(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)

    def non_default(self) -> dict[str, Any]:
        """What differs from the defaults: what a cell's identity is made of."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


class MultiGpuParams(Params):
    """Of tasks that use all the GPUs that they are given. Others have no such axis: a row that says two would be of one."""

    gpus: PositiveInt = Field(
        1,
        description="how many GPUs of one host the cell has to itself, all in CUDA_VISIBLE_DEVICES",
    )

    @model_validator(mode="before")
    @classmethod
    def _only_gpus_are_counted(cls, values: Any) -> Any:
        """So that a grid of numbers gives one cell on the CPU. What is no number stays, to be refused."""
        return _on_a_gpu_alone(values, "gpus", int)


def _on_a_gpu_alone(values: Any, axis: str, of: type) -> Any:
    """Without the axis where the cell is on no GPU. What is not of its type stays."""
    if (
        isinstance(values, dict)
        and values.get("device", "cuda") != "cuda"
        and isinstance(values.get(axis), of)
    ):
        return {name: value for name, value in values.items() if name != axis}
    return values


Timing = Literal["fixed", "adaptive"]
_OF_FIXED = ("warmup_steps", "measured_steps")
_OF_ADAPTIVE = {"half_width": 0.01, "most_steps": 100, "most_seconds": 5.0}
OF_TIMING = (*_OF_FIXED, *_OF_ADAPTIVE)  # the axes that are null with the other `timing`


class TimedParams(Params):
    """Of tasks that repeat a step in some precision."""

    precision: Precision = Field(
        "fp32", description="bf16 and fp16 by autocast; bf16_pure: everything stored in it"
    )
    timing: Timing = Field(
        "fixed", description="adaptive: as many steps as it takes until the median is known"
    )
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        5, description="null with adaptive timing"
    )
    measured_steps: PositiveInt | None = Field(10, description="null with adaptive timing")
    half_width: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="of adaptive timing: it stops where the 95 % interval of the median is this fraction of it to each side",
    )
    most_steps: Annotated[int, Field(ge=FEWEST)] | None = Field(
        None, description="of adaptive timing: it takes no more"
    )
    most_seconds: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="of adaptive timing: it stops when the steps took so long, after six of them, or when that would not do",
    )

    @property
    def stop_rule(self) -> StopRule | None:
        """None where the number of steps is fixed."""
        if self.half_width is None or self.most_steps is None or self.most_seconds is None:
            return None
        return StopRule(self.half_width, self.most_steps, self.most_seconds)

    @model_validator(mode="before")
    @classmethod
    def _of_one_timing(cls, values: Any) -> Any:
        """What is of the other timing is null, so that a grid of both gives one adaptive cell. What is no number stays, to be
        refused."""
        if not isinstance(values, dict):
            return values
        adaptive = values.get("timing", "fixed") == "adaptive"
        others = _OF_FIXED if adaptive else _OF_ADAPTIVE
        kept = {
            name: value
            for name, value in values.items()
            if name not in others or isinstance(value, str | list | dict)
        }
        if not adaptive:
            return kept
        said = {name: value for name, value in kept.items() if value is not None}
        return dict.fromkeys(_OF_FIXED) | _OF_ADAPTIVE | said

    @model_validator(mode="after")
    def _fixed_is_counted(self) -> Self:
        if self.timing == "fixed" and None in (self.warmup_steps, self.measured_steps):
            raise ValueError(
                "without warmup_steps and measured_steps there is timing: adaptive only"
            )
        return self


CompileMode = Literal["default", "reduce-overhead", "max-autotune"]
CUDA_GRAPH_MODES = (
    "reduce-overhead",
    "max-autotune",
)  # where torch records CUDA graphs, of which each is one launch
CompileCache = Literal["shared", "cold"]
_OF_COMPILED = {"compile_mode": get_args(CompileMode), "compile_cache": get_args(CompileCache)}


class CompiledParams(TimedParams):
    """Of tasks that torch.compile can be applied to. A task narrows `compile` to what it knows."""

    compile: str = "eager"
    compile_mode: CompileMode = Field("default", description="of torch.compile")
    compile_cache: CompileCache = Field(
        "shared",
        description="cold: the cell compiles into a folder of its own, as if for the first time",
    )

    @property
    def compiled(self) -> bool:
        return self.compile != "eager"

    @model_validator(mode="before")
    @classmethod
    def _eager_is_not_compiled_in_any_mode(cls, values: Any) -> Any:
        """So that a grid of modes gives one eager cell and not one a mode. A word that is no mode stays, to be refused.

        Eager flex is compiled, in no mode but torch's own; of the cache it has its choice.
        """
        if not isinstance(values, dict) or values.get("compile", "eager") != "eager":
            return values
        kept = ("compile_cache",) if values.get("attention") == "flex" else ()
        return {
            name: value
            for name, value in values.items()
            if name in kept or value not in _OF_COMPILED.get(name, ())
        }


class AttentionAxisParams(CompiledParams):
    """Of tasks that attend."""

    attention: AttentionName = Field(
        "naive", description="how attention is computed: see model/attention.py"
    )

    @property
    def compiled(self) -> bool:
        """Flex is nothing else than compiled."""
        return super().compiled or self.attention == "flex"


def default_values(params: type[Params]) -> dict[str, Any]:
    """What each axis is where nothing is said."""
    return {
        field.alias or name: field.get_default(call_default_factory=True)
        for name, field in params.model_fields.items()
    }


def check_value(params: type[Params], axis: str, value: Any) -> None:
    """Raises pydantic.ValidationError for what is no value of this axis, whatever the others are."""
    _alone(params, axis).model_validate({axis: value})


@cache
def _alone(params: type[Params], axis: str) -> type[Axes]:
    """Without the other axes, and without the rules between them, by which some values are dropped unread."""
    fields: dict[str, Any] = {
        name: (field.annotation, field)
        for name, field in params.model_fields.items()
        if axis == (field.alias or name)
    }
    return create_model(f"{params.__name__}.{axis}", __base__=Axes, **fields)


def axis_names(params: type[Params]) -> list[str]:
    """The names of a task's axes as a config writes them."""
    return [field.alias or name for name, field in params.model_fields.items()]
