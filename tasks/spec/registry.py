"""Finds tasks: every module directly in `tasks` that defines `TASK`. Adding one is adding a file."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tasks.spec.cell import Cell
from tasks.spec.parameters import Params

if TYPE_CHECKING:
    from tasks.harness.workload import Finding, Workload


@dataclass(frozen=True)
class Task:
    """A named kind of measurement.

    version: to be raised when the numbers of an unchanged cell would come out differently: older results are then
    other cells. build: imports torch, prepares the cell, raises `Skip` where it cannot be measured. work: how much a
    cell computes, in any unit that is proportional to its time, for estimates.
    """

    name: str
    version: int
    params: type[Params]
    build: Callable[[Any], Workload | Finding]
    work: Callable[[Any], float]


@cache
def all_tasks() -> Mapping[str, Task]:
    """Tasks by name. Importing them must not import torch: planning has no need of it."""
    import tasks

    names = [module.name for module in pkgutil.iter_modules(tasks.__path__) if not module.ispkg]
    modules = [importlib.import_module(f"tasks.{name}") for name in names if name != "__main__"]
    found: list[Task] = [module.TASK for module in modules if hasattr(module, "TASK")]
    return {task.name: task for task in found}


def make_cell(task_name: str, values: Mapping[str, Any]) -> Cell:
    """Validates `values` against the task's parameters. Raises KeyError or pydantic.ValidationError."""
    task = all_tasks()[task_name]
    return Cell(task.name, task.version, task.params.model_validate(dict(values)))
