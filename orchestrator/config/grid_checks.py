"""Combinations of a grid's axes, and the checks of a grid before it is expanded.

A factor is the list of values of one axis, or of the axes of one zip group, which advance together.
The combinations are the product of the factors. `--set` replaces the values of axes, in a group for
all of its axes. The checks refuse unknown axes, impossible values and too many combinations, each at
its place in the file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import or_

from pydantic import ValidationError

from orchestrator.common.errors import ConfigError
from orchestrator.common.suggestions import suggestion
from orchestrator.common.text import counted
from orchestrator.config.hints import LONGEST_VALUE, quoted, unknown_axis
from orchestrator.config.schema import Grid, SweepConfig
from orchestrator.config.selection import CELL, TOKENS, Selection
from orchestrator.config.yaml_source import KeyPath, Source, config_error
from tasks.spec.axes import V, Values, select
from tasks.spec.messages import shorten
from tasks.spec.parameters import Params, check_value, default_values
from tasks.spec.registry import all_tasks

Lists = Mapping[str, Sequence[object]]  # the values of axes
Factor = list[Values]

MAX_COMBINATIONS = 100_000  # more is probably a mistake: it would measure for days


def check_axes(config: SweepConfig, source: Source, sets: Mapping[str, Sequence[object]]) -> None:
    """Raise ConfigError for an axis that does not exist, or a condition that can never be met.

    sets: the values of `--set`.
    """
    for number, grid in enumerate(config.grids):
        _check_zip(grid, number, source, sets)
        for place, values in (*_assignments(grid, number), *_conditions(grid, number)):
            for name in values:
                if not has_axis(grid, name):
                    where = source.where((*place, name))
                    known = default_values(task_params(grid))
                    raise ConfigError(*unknown_axis(where, grid.task, name, known))
    for name in config.defaults:
        if not _grids_with(config, name):
            problem = f"{source.where(('defaults', name))}: no task has {quoted(name)}"
            raise ConfigError(problem, suggestion(name, _all_axes(config)))
    for number, grid in enumerate(config.grids):
        for place, condition in _conditions(grid, number):
            for name, wanted in condition.items():
                _check_condition(grid, (*place, name), wanted, source)


def check_selection(config: SweepConfig, selection: Selection) -> None:
    """Raise ConfigError for an axis, or a value of one, that no task of the sweep allows."""
    for option, selected in (("--set", selection.set), ("--where", selection.where)):
        for name in selected:
            is_of_cell = option == "--where" and name in ("task", CELL, TOKENS)
            if not _grids_with(config, name) and not is_of_cell:
                where = f"{option} {shorten(name, LONGEST_VALUE)}"
                problem = f"{where}: no task of this sweep has such an axis"
                raise ConfigError(problem, suggestion(name, _all_axes(config)))
    for option, selected in (("--set", selection.set), ("--where", selection.where)):
        for name, wanted in selected.items():
            _check_selected(config, option, name, wanted)


def _check_selected(config: SweepConfig, option: str, name: str, wanted: Sequence[object]) -> None:
    grids = _grids_with(config, name)
    for value in wanted:
        refusals = [error for grid in grids if (error := _refusal(grid, name, value))]
        if refusals and len(refusals) == len(grids):
            raise config_error(refusals[0], Source(option, None)) from refusals[0]


def _all_axes(config: SweepConfig) -> list[str]:
    return sorted({name for grid in config.grids for name in default_values(task_params(grid))})


def _check_zip(
    grid: Grid, number: int, source: Source, sets: Mapping[str, Sequence[object]]
) -> None:
    """Raise ConfigError for a zipped axis that is given twice, or that cannot be zipped."""
    seen = dict.fromkeys(grid.fixed, "fixed") | dict.fromkeys(grid.axes, "axes")
    for index, group in enumerate(grid.zip):
        place: KeyPath = ("grids", number, "zip", index)
        for name in group:
            if name in seen:
                where = source.where((*place, name))
                raise ConfigError(f"{where}: is also under {seen[name]}", "Leave one of them out")
        seen |= dict.fromkeys(group, f"zip[{index}]")
        check_group(source.where(place), group, sets)


def _assignments(grid: Grid, number: int) -> Iterator[tuple[KeyPath, Values]]:
    """Yield the mappings of a grid that give values to axes, with their places in the file."""
    yield ("grids", number, "axes"), grid.axes
    for i, group in enumerate(grid.zip):
        yield ("grids", number, "zip", i), group
    yield ("grids", number, "fixed"), grid.fixed
    for i, clause in enumerate(grid.include):
        yield ("grids", number, "include", i), clause
    for i, override in enumerate(grid.override):
        yield ("grids", number, "override", i, "set"), override.set


def _conditions(grid: Grid, number: int) -> Iterator[tuple[KeyPath, Values]]:
    for i, clause in enumerate(grid.exclude):
        yield ("grids", number, "exclude", i), clause
    for i, override in enumerate(grid.override):
        yield ("grids", number, "override", i, "when"), override.when


def _check_condition(grid: Grid, place: KeyPath, wanted: object, source: Source) -> None:
    if wanted == []:
        raise ConfigError(
            f"{source.where(place)}: an empty list matches nothing", "Name a value, or several"
        )
    places = {place: wanted}
    if isinstance(wanted, list):
        places = {(*place, number): value for number, value in enumerate(wanted)}
    for at, value in places.items():
        if error := _refusal(grid, str(place[-1]), value):
            raise config_error(error, source, partial(_within, at)) from error


def _within(place: KeyPath, loc: KeyPath) -> KeyPath:
    return (*place, *loc[1:])  # the first step of a validation error is the axis


def _refusal(grid: Grid, name: str, value: object) -> ValidationError | None:
    axis, _, key = name.partition(".")
    try:
        check_value(task_params(grid), axis, {key: value} if key else value)
    except ValidationError as error:
        return error
    return None


def check_size(config: SweepConfig, source: Source, sets: Mapping[str, Sequence[object]]) -> None:
    """Raise ConfigError for too many combinations, without forming them."""
    total = 0
    for number, grid in enumerate(config.grids):
        narrowed = own_axes(grid, sets)
        total += math.prod(map(len, grid_factors(grid.axes, grid.zip, narrowed)))
        if grid.include:
            total += len(grid.include) * math.prod(map(len, include_factors(grid.zip, narrowed)))
        if total > MAX_COMBINATIONS:
            raise ConfigError(
                f"{source.where(('grids', number))}: more than {MAX_COMBINATIONS:,} combinations",
                "Split the sweep, or narrow it with --set",
            )


def own_axes(grid: Grid, values: Mapping[str, V]) -> dict[str, V]:
    """Return the values of axes that a grid's task has."""
    return {name: value for name, value in values.items() if has_axis(grid, name)}


def _grids_with(config: SweepConfig, name: str) -> list[Grid]:
    """Return the grids whose task has an axis."""
    return [grid for grid in config.grids if has_axis(grid, name)]


def has_axis(grid: Grid, name: str) -> bool:
    """Return True for an axis of a grid's task, and for a key of one whose values are mappings."""
    axis, dot, key = name.partition(".")
    defaults = default_values(task_params(grid))
    return axis in defaults and (not dot or (bool(key) and isinstance(defaults[axis], dict)))


def task_params(grid: Grid) -> type[Params]:
    """Return the parameters class of a grid's task."""
    return all_tasks()[grid.task].params


def grid_factors(axes: Lists, groups: Iterable[Lists], sets: Lists) -> list[Factor]:
    """Return the factors of a grid: their `product` has all combinations.

    groups: axes that advance together. sets: the values of `--set`, which replace those of axes.
    """
    remaining = dict(sets)
    replaced = []
    for group in groups:
        replaced.append({name: remaining.pop(name, values) for name, values in group.items()})
    factors = []
    for group in (*({name: values} for name, values in {**axes, **remaining}.items()), *replaced):
        if group:
            rows = zip(*group.values(), strict=True)
            factors.append([dict(zip(group, row, strict=True)) for row in rows])
    return factors


def include_factors(groups: Iterable[Lists], sets: Lists) -> list[Factor]:
    """Return the factors by which `--set` multiplies each cell of `include`."""
    return grid_factors({}, [select(group, sets) for group in groups], sets)


def product(factors: Sequence[Factor]) -> Iterator[Values]:
    """Yield the values of each combination."""
    for parts in itertools.product(*factors):
        yield reduce(or_, parts, {})


def check_group(where: str, group: Lists, sets: Lists) -> None:
    """Raise ConfigError for a group whose axes cannot advance together.

    where: the place of the group in the config. sets: the values of `--set`.
    """
    _require_one_length(where, group)
    given = select(sets, group)
    left = ", ".join(name for name in group if name not in given)
    if given and left:
        verb = "are" if ", " in left else "is"
        how_many = "both" if len(group) == 2 else "all"
        raise ConfigError(
            f"--set: {left} {verb} zipped with {', '.join(given)}",
            f"Set {how_many}, or use --where",
        )
    _require_one_length("--set", given)


def _require_one_length(where: str, group: Lists) -> None:
    lengths = {name: len(values) for name, values in group.items()}
    first, *others = lengths or ("",)
    for name in others:
        if lengths[name] != lengths[first]:
            values = counted(lengths[first], "value")
            raise ConfigError(
                f"{where}: {first} has {values}, but {name} has {lengths[name]}",
                "The lists of one group must have the same length",
            )
