"""The parameters that every task shares. A task's own parameters are the fields it adds: each field is an axis."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Device = Literal["cuda", "cpu", "mps"]
PositiveInt = Annotated[int, Field(ge=1)]


class Params(BaseModel):
    """One point of a task's space. Frozen, strict, and unknown names are errors."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", populate_by_name=True, protected_namespaces=())

    device: Device = Field("cuda", description="where the cell is measured")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="of the weights and of the inputs")
    memory_limit_gib: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="cap of the process's allocator, in GiB, so that a large GPU stands in for a smaller one; "
        "on the CPU, of what the process may allocate after start-up",
    )

    def values(self) -> dict[str, Any]:
        """Every parameter under its name in the config, as JSON can hold it."""
        return self.model_dump(mode="json", by_alias=True)

    def non_default(self) -> dict[str, Any]:
        """What differs from the defaults: what a cell's identity is made of."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def default_values(params: type[Params]) -> dict[str, Any]:
    """What each axis is where nothing is said."""
    return {field.alias or name: field.get_default(call_default_factory=True) for name, field in params.model_fields.items()}


def axis_names(params: type[Params]) -> list[str]:
    """The names of a task's axes as a config writes them."""
    return [field.alias or name for name, field in params.model_fields.items()]
