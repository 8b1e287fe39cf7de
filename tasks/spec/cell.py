"""A cell: one point of a grid, and its identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tasks.spec.parameters import Params

ID_LENGTH = 12


@dataclass(frozen=True)
class Cell:
    """A task with its parameters.

    The id hashes the task's name, its version and the parameters that differ from their defaults, so that an axis
    added later with a default orphans no result.
    """

    task: str
    version: int
    params: Params

    @cached_property
    def id(self) -> str:
        identity = json.dumps([self.task, self.version, self.params.non_default()], sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()[:ID_LENGTH]

    def __hash__(self) -> int:
        return hash(self.id)  # parameters may hold what has no hash

    def describe(self, axes: Iterable[str] | None = None) -> str:
        """For people: the task and the named axes, or whatever differs from the defaults."""
        values = self.params.values()
        shown = (
            self.params.non_default() if axes is None else {name: values.get(name) for name in axes}
        )
        return in_a_line(
            " ".join(
                [
                    self.task,
                    *(f"{name}={value}" for name, value in shown.items() if value is not None),
                ]
            )
        )


def in_a_line(text: str) -> str:
    """What would break or darken a line, or command a terminal, as Python writes it."""
    return (
        text
        if text.isprintable()
        else "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    )


def varying_axes(cells: Iterable[Cell]) -> list[str]:
    """The axes in which some of the cells differ."""
    first: dict[str, Any] = {}
    varying: dict[str, None] = {}
    for cell in cells:
        for name, value in cell.params.values().items():
            if first.setdefault(name, value) != value:
                varying[name] = None
    return [name for name in first if name in varying]
