"""A cell: one point of a grid, and its identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from tasks.spec.axes import FrozenValues, Values
from tasks.spec.messages import assignments, escape_unprintable
from tasks.spec.parameters import Params

ID_LENGTH = 12


@dataclass(frozen=True)
class Cell:
    """A task with its parameters."""

    task: str
    version: int
    params: Params

    @cached_property
    def id(self) -> str:
        """Hash of task, version and non-default parameters."""
        # Without defaults, so that a new axis, whose default is what was measured before, does not
        # change the ids of stored results.
        identity = json.dumps([self.task, self.version, self.params.non_default], sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()[:ID_LENGTH]

    def __hash__(self) -> int:
        return hash(self.id)  # parameters may hold a dict, which has no hash

    def describe(self) -> str:
        """Return a line for people: the task with its non-default parameters."""
        words = [self.task, *assignments(self.params.non_default)]
        return escape_unprintable(" ".join(words))


def device_types(cells: Iterable[Cell]) -> list[str]:
    """Return the types of device that cells run on, each once."""
    return sorted({cell.params.device for cell in cells})


def varying_names(rows: Collection[FrozenValues]) -> list[str]:
    """Return the names in which some rows differ. A row without a name differs from one with it."""
    found: dict[str, list[object]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    varying = []
    for name, values in found.items():
        if len(values) < len(rows) or any(value != values[0] for value in values):
            varying.append(name)
    return varying


def dotted_values(values: FrozenValues) -> Values:
    """Return the values with `model_args.layers` for each key of a mapping such as `model_args`."""
    dotted: Values = {}
    for name, value in values.items():
        if isinstance(value, dict):
            dotted |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            dotted[name] = value
    return dotted
