"""Declaration of an axis: everything that the program knows about a parameter of a cell.

A field of a task's parameters is an axis. `axis()` declares its default, its description, and what
it affects. The order of values in tables, what a prediction or an estimate may ignore, and along
which axes memory grows, follow from the declarations through the functions below. The axes are in
parameters.py, if tasks share them, and otherwise with their task.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum, Flag, auto
from functools import cache
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    get_origin,
)

from pydantic import Field

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

T = TypeVar("T")
V = TypeVar("V")
# Values by name: of parameters, of a config, or of stored JSON. Each name has another type.
Values: TypeAlias = dict[str, Any]
FrozenValues: TypeAlias = Mapping[str, Any]  # that no reader changes


def select(values: Mapping[str, V], names: Iterable[str]) -> dict[str, V]:
    """Return the values of these names, in their order, without names that have none."""
    return {name: values[name] for name in names if name in values}


def select_fields(row: type[DataclassInstance], stored: FrozenValues) -> Values:
    """Return the stored values of a dataclass's fields, without keys that only others know."""
    return select(stored, [one.name for one in fields(row)])


def leave_out(values: Mapping[str, V], names: Container[str]) -> dict[str, V]:
    """Return the values of all other names."""
    return {name: value for name, value in values.items() if name not in names}


class Affects(Flag):
    """Quantities that may change along an axis."""

    NONE = 0
    MEMORY = auto()  # memory of a cell that is not compiled, as it is predicted
    SPEED = auto()  # time for the same amount of work (`Task.work`), not only the amount
    GRAPH = auto()  # what torch.compile traces
    ALL = MEMORY | SPEED | GRAPH


# The axis changes how much is computed, but not how fast.
WORK = Affects.ALL & ~Affects.SPEED


class Choice(Enum):
    """Change of a training along an axis, for a search."""

    NONE = auto()  # another model, another amount of work, or another way to measure it
    SAME = auto()  # the same training, up to rounding
    OTHER_NUMBERS = auto()  # the same model, trained with other numbers: the loss may differ


@dataclass(frozen=True)
class Axis:
    """Properties of an axis in addition to its type and its default.

    unit: of a number, such as `tokens`.
    affects: what it may change.
    memory_order: None if memory may shrink along the axis. Otherwise a cell needs at least as much
        memory with a later value: `()` for larger numbers, or the words in their order.
    choice: how a search for the fastest cell may change it.
    alike: values of a choice of other numbers that compute the same, such as kernels of AdamW.
    """

    doc: str
    unit: str = ""
    # If in doubt, more: a wrong Affects.MEMORY costs time, a missing one gives a wrong prediction.
    affects: Affects = Affects.ALL
    memory_order: tuple[str, ...] | None = None
    choice: Choice = Choice.NONE
    alike: tuple[str, ...] = ()

    def __call__(self, schema: Values) -> None:
        """Add the unit to the axis's JSON Schema."""
        if self.unit:
            schema["x-unit"] = self.unit


class AxisProperties(TypedDict, total=False):
    """The optional attributes of `Axis`."""

    unit: str
    affects: Affects
    memory_order: tuple[str, ...] | None
    choice: Choice
    alike: tuple[str, ...]


class _OfWork(TypedDict):
    affects: Affects
    memory_order: tuple[str, ...]


# More of the axis is more to compute, and never less memory.
MORE_WORK: _OfWork = {"affects": WORK, "memory_order": ()}
REQUIRED: Any = ...


def axis(
    default: T, doc: str, *, alias: str | None = None, **declared: Unpack[AxisProperties]
) -> T:
    """Declare an axis as the default of a parameter's field; REQUIRED stands for no default.

    The default of a new axis must be what was measured before: cell ids hash only what differs from
    the defaults, so that stored results then belong to the same cells.

    declared: further attributes of `Axis`.
    """
    # Pydantic calls `json_schema_extra` to complete the schema; here it also carries the record.
    extra: Callable[[Values], None] = Axis(doc, **declared)
    return Field(default, alias=alias, description=doc, json_schema_extra=extra)


@cache
def axes_of(params: type[BaseModel]) -> Mapping[str, Axis]:
    """Return the axes of a task by their names in a config.

    A subclass that narrows an axis (`compile: Literal[...] = "eager"`) inherits the declaration.
    Raise TypeError for a parameter without one.
    """
    found = {}
    for attribute, field in params.model_fields.items():
        for base in params.__mro__:
            fields: Mapping[str, FieldInfo] = getattr(base, "model_fields", {})
            declared = fields[attribute].json_schema_extra if attribute in fields else None
            if isinstance(declared, Axis):
                found[field.alias or attribute] = declared
                break
        else:
            raise TypeError(f"{params.__name__}.{attribute} is not declared with axis(...)")
    return found


@cache
def memory_orders(params: type[BaseModel]) -> Mapping[str, tuple[str, ...]]:
    """Return the axes along which a cell never needs less memory, with the order of their words.

    Inferred out-of-memory rests on these: a cell that needs at least as much as one that ran out of
    memory runs out of memory, too.
    """
    axes = axes_of(params).items()
    return {name: one.memory_order for name, one in axes if one.memory_order is not None}


@cache
def axes_without(params: type[BaseModel], effect: Affects) -> frozenset[str]:
    """Return the axes of a task that do not affect something."""
    return frozenset(axes_of(params)).difference(axes_with(params, effect))


@cache
def axes_with(params: type[BaseModel], effect: Affects) -> tuple[str, ...]:
    """Return the axes of a task that affect something."""
    return tuple(name for name, one in axes_of(params).items() if one.affects & effect)


@cache
def words_of(params: type[BaseModel], name: str) -> tuple[str, ...]:
    """Return the words that an axis may have, in the order of its `Literal`; empty for others."""
    for attribute, field in params.model_fields.items():
        if name == (field.alias or attribute):
            return tuple(_words(field.annotation))
    return ()


def _words(annotation: object) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from (word for word in get_args(annotation) if isinstance(word, str))
        return
    for inner in get_args(annotation):
        yield from _words(inner)
