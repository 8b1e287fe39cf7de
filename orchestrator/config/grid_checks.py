"""Checks of a config's grids before they are expanded: unknown axes, impossible values, too many combinations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError

from orchestrator.common.errors import ConfigError, suggestion
from orchestrator.config.schema import Grid, SweepConfig
from orchestrator.config.selection import Selection
from orchestrator.config.yaml_source import KeyPath, Source, Values, config_error
from tasks.spec.parameters import axis_names, check_value
from tasks.spec.registry import all_tasks

MAX_COMBINATIONS = 100_000  # of a sweep: more is a slip of the pen, or years of measuring


def check_axes(config: SweepConfig, source: Source, selection: Selection) -> None:
    """Unknown names are found before anything is multiplied out."""
    for number, grid in enumerate(config.grids):
        known = axis_names(task_params(grid))
        base: KeyPath = ("grids", number)
        written: list[tuple[KeyPath, Values]] = [
            ((*base, "axes"), grid.axes),
            ((*base, "fixed"), grid.fixed),
        ]
        written += [((*base, "exclude", i), clause) for i, clause in enumerate(grid.exclude)]
        written += [((*base, "include", i), clause) for i, clause in enumerate(grid.include)]
        for i, override in enumerate(grid.override):
            written += [
                ((*base, "override", i, "when"), override.when),
                ((*base, "override", i, "set"), override.set),
            ]
        for place, values in written:
            for name in values:
                if name not in known:
                    where = source.where((*place, name))
                    raise ConfigError(
                        f"{where}: {grid.task} has no axis {name!r}", suggestion(name, known)
                    )
    anywhere = sorted({name for grid in config.grids for name in axis_names(task_params(grid))})
    for name in config.defaults:
        if name not in anywhere:
            raise ConfigError(
                f"{source.where(('defaults', name))}: no task has {name!r}",
                suggestion(name, anywhere),
            )
    for option, names in (("--set", list(selection.set)), ("--where", list(selection.where))):
        for name in names:
            if name not in anywhere and (option, name) != ("--where", "task"):
                raise ConfigError(
                    f"{option} {name}: no task of this sweep has such an axis",
                    suggestion(name, anywhere),
                )


def check_clauses(config: SweepConfig, source: Source) -> None:
    """What a clause asks for must be a value of its axis: else it would match nothing, and say nothing."""
    for number, grid in enumerate(config.grids):
        base: KeyPath = ("grids", number)
        clauses: list[tuple[KeyPath, Values]] = [
            ((*base, "exclude", i), clause) for i, clause in enumerate(grid.exclude)
        ]
        clauses += [
            ((*base, "override", i, "when"), override.when)
            for i, override in enumerate(grid.override)
        ]
        for place, clause in clauses:
            for name, wanted in clause.items():
                _check_clause(grid, name, wanted, place, source)


def _check_clause(grid: Grid, name: str, wanted: Any, place: KeyPath, source: Source) -> None:
    if wanted == []:
        raise ConfigError(
            f"{source.where((*place, name))}: an empty list matches nothing",
            "Name a value, or several",
        )
    several = isinstance(wanted, list)
    for number, value in enumerate(wanted if several else [wanted]):
        error = _refusal(grid, name, value)
        if error:
            at = (*place, name, number) if several else (*place, name)
            raise config_error(error, source, partial(_within, at), lambda _: ()) from error


def _within(at: KeyPath, complaint: KeyPath) -> KeyPath:
    """at: of the parameter that is complained of."""
    return (*at, *complaint[1:])


def check_values(config: SweepConfig, option: str, selected: Mapping[str, Sequence[Any]]) -> None:
    """Of several tasks that have the axis it is enough that one has the value."""
    for name, wanted in selected.items():
        grids = [grid for grid in config.grids if name in axis_names(task_params(grid))]
        for value in wanted if grids else ():
            refusals = [_refusal(grid, name, value) for grid in grids]
            if all(refusals) and refusals[0]:
                raise config_error(
                    refusals[0], Source(option, None), (), lambda _: ()
                ) from refusals[0]


def _refusal(grid: Grid, name: str, value: Any) -> ValidationError | None:
    try:
        check_value(task_params(grid), name, value)
    except ValidationError as error:
        return error
    return None


def check_size(config: SweepConfig, source: Source, selection: Selection) -> None:
    """Also before anything is multiplied out."""
    asked = 0
    for number, grid in enumerate(config.grids):
        narrowed = {
            name: values
            for name, values in selection.set.items()
            if name in axis_names(task_params(grid))
        }
        asked += _combinations({**grid.axes, **narrowed}) + len(grid.include) * _combinations(
            narrowed
        )
        if asked > MAX_COMBINATIONS:
            where = source.where(("grids", number))
            raise ConfigError(
                f"{where}: more than {MAX_COMBINATIONS:,} combinations",
                "Split the sweep, or narrow it with --set",
            )


def _combinations(axes: Mapping[str, Sequence[Any]]) -> int:
    return math.prod(len(values) for values in axes.values())


def task_params(grid: Grid) -> Any:
    return all_tasks()[grid.task].params
