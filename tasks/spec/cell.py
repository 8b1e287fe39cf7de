"""A cell: one point of a grid, and its identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tasks.spec.messages import escape_unprintable
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
        identity = json.dumps([self.task, self.version, self.params.non_default()], sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()[:ID_LENGTH]

    def __hash__(self) -> int:
        return hash(self.id)  # parameters may hold a dict, which has no hash

    def describe(self, axes: Iterable[str] | None = None) -> str:
        """Return a line for people: the task with these axes, or with the non-default ones."""
        values = self.params.values()
        shown = self.params.non_default()
        if axes is not None:
            shown = {name: values.get(name) for name in axes}
        words = [f"{name}={value}" for name, value in shown.items() if value is not None]
        return escape_unprintable(" ".join([self.task, *words]))


def varying_axes(cells: Iterable[Cell]) -> list[str]:
    """Return the axes in which some of the cells differ."""
    first: dict[str, Any] = {}
    varying: set[str] = set()
    for cell in cells:
        for name, value in cell.params.values().items():
            if first.setdefault(name, value) != value:
                varying.add(name)
    return [name for name in first if name in varying]
