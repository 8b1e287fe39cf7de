"""Registry of tasks: every module directly in `tasks` that defines `TASK` is one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeAlias

from tasks.spec.axes import Axis, axes_of, words_of
from tasks.spec.cell import Cell
from tasks.spec.parameters import ImportedParams, Params, RankedParams

# The parameters of one task: its functions take its own subclass of Params.
OwnParams: TypeAlias = Any


class HasFacts(Protocol):
    """A device that reports facts about itself."""

    def facts(self) -> Mapping[str, object]: ...


class Built(Protocol):
    """A cell that is ready to be measured: see `tasks/harness/workload.py` for its two kinds.

    facts: what was read back after the build, such as dtypes and the parameter count.
    """

    @property
    def device(self) -> HasFacts: ...

    @property
    def facts(self) -> Mapping[str, object]: ...


@dataclass(frozen=True)
class Task:
    """A named kind of measurement.

    version: raise it when an unchanged cell would be measured differently. The version is part of a
        cell's id, so that older results then belong to other cells.
    build: imports torch and builds what the cell measures. Raises `Skip` if the device cannot measure it.
    work: the FLOPs of one step of a cell, on each of its ranks, or None if no formula is known.
    """

    name: str
    version: int
    params: type[Params]
    build: Callable[[OwnParams], Built]
    work: Callable[[OwnParams], float | None]


@cache
def all_tasks() -> Mapping[str, Task]:
    """Return all tasks by name."""
    # Imported by name: the contract in tasks/spec does not depend on the tasks that fulfil it. None
    # of these modules may import torch, because planning does not need it.
    folder = importlib.import_module("tasks").__path__
    found: dict[str, Task] = {}
    for file in pkgutil.iter_modules(folder):
        if not file.ispkg and file.name != "__main__":
            module = importlib.import_module(f"tasks.{file.name}")
            if hasattr(module, "TASK"):
                found[module.TASK.name] = module.TASK
    return found


@cache
def all_axes() -> Mapping[str, Axis]:
    """Return the axes of all tasks by name. The first declaration of a name counts."""
    found: dict[str, Axis] = {}
    for params in (*_all_params(), RankedParams, ImportedParams):
        for name, declared in axes_of(params).items():
            found.setdefault(name, declared)
    return found


@cache
def value_order(name: str) -> tuple[str, ...]:
    """Return the words of an axis in their order: those of the task that has the most of them."""
    return max((words_of(params, name) for params in _all_params()), key=len)


def _all_params() -> list[type[Params]]:
    return [task.params for task in all_tasks().values()]


def make_cell(task_name: str, values: Mapping[str, object]) -> Cell:
    """Return the cell with these parameters. Raises KeyError or pydantic.ValidationError."""
    task = all_tasks()[task_name]
    return Cell(task.name, task.version, task.params.model_validate(dict(values)))
