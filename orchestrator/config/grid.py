"""From a config to its cells."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from pydantic import ValidationError

from orchestrator.common.errors import ConfigError
from orchestrator.config.grid_checks import (
    check_axes,
    check_clauses,
    check_size,
    check_values,
    task_params,
)
from orchestrator.config.schema import Grid, SweepConfig
from orchestrator.config.selection import Selection, choose_sample, matches
from orchestrator.config.yaml_source import KeyPath, Source, Values, config_error
from tasks.spec.cell import Cell, varying_axes
from tasks.spec.parameters import axis_names, default_values
from tasks.spec.registry import make_cell


@dataclass(frozen=True)
class Expansion:
    """The cells of a config in its order, each once; `duplicates` were named by more than one combination. idle: the axes that
    `--set` names and of which no cell has a value of these, such as one of another `timing`.
    """

    cells: tuple[Cell, ...]
    duplicates: int = 0
    idle: frozenset[str] = frozenset()

    def label(self, cell: Cell) -> str:
        """The task and what tells the cell from the others of its task."""
        return cell.describe(self._varying[cell.task])

    @cached_property
    def _varying(self) -> Mapping[str, list[str]]:
        by_task: dict[str, list[Cell]] = {}
        for cell in self.cells:
            by_task.setdefault(cell.task, []).append(cell)
        return {task: varying_axes(cells) for task, cells in by_task.items()}


def expand(config: SweepConfig, source: Source, selection: Selection) -> Expansion:
    """Raises ConfigError for what is no axis or no value, and for a sweep without a cell."""
    check_axes(config, source, selection)
    check_clauses(config, source)
    check_values(config, "--set", selection.set)
    check_values(config, "--where", selection.where)
    check_size(config, source, selection)
    cells: dict[str, Cell] = {}
    named, idle = 0, set(selection.set)
    for number, grid in enumerate(config.grids):
        for cell in _expand_grid(grid, ("grids", number), config, source, selection):
            named += 1
            cells.setdefault(cell.id, cell)
            idle -= {name for name in idle if cell.params.values().get(name) in selection.set[name]}
    if not named:
        remedy = "Nothing matches --where" if selection.where else "Every combination is excluded"
        raise ConfigError(f"{source.name}: the grid is empty", remedy)
    chosen = (
        choose_sample(cells.values(), selection.sample)
        if selection.sample
        else tuple(cells.values())
    )
    return Expansion(chosen, named - len(cells), frozenset(idle))


def require_effect(expansion: Expansion) -> None:
    """Raises ConfigError for what `--set` names in vain: the sweep would be another than the one that was asked for."""
    for name in sorted(expansion.idle):
        raise ConfigError(
            f"--set {name}: no cell of these has it",
            "Leave it out, or set what it goes with, such as timing, device or compile",
        )


def require_matches(config: SweepConfig, source: Source) -> None:
    """Raises ConfigError for an `exclude` or an `override` that matches no cell of its grid as that is written, before `--set`: a
    slip of the pen. Of a config that is no sweep but for what `--set` makes of it nothing is said.
    """
    try:
        check_size(config, source, Selection({}, {}))
        idle = [
            place
            for number, grid in enumerate(config.grids)
            for place in _idle_clauses(grid, number, config, source)
        ]
    except ConfigError:
        return
    for place in idle:
        raise ConfigError(
            f"{source.where(place)}: matches no cell of the grid", "Correct it, or leave it out"
        )


def _expand_grid(
    grid: Grid, place: KeyPath, config: SweepConfig, source: Source, selection: Selection
) -> Iterator[Cell]:
    for cell, _ in _made_cells(grid, place, config, source, selection.set):
        actual = _actual(cell)
        if any(matches(actual, excluded) for excluded in grid.exclude) or not matches(
            actual, selection.where
        ):
            continue
        yield cell


def _idle_clauses(grid: Grid, number: int, config: SweepConfig, source: Source) -> list[KeyPath]:
    """Where those stand that match no cell of the grid as it is written."""
    base: KeyPath = ("grids", number)
    excludes, overrides = set(range(len(grid.exclude))), set(range(len(grid.override)))
    for cell, overridden in (
        _made_cells(grid, base, config, source, {}) if excludes or overrides else ()
    ):
        actual = _actual(cell)
        excludes -= {i for i in excludes if matches(actual, grid.exclude[i])}
        overrides -= overridden
        if not excludes and not overrides:
            break
    return [
        *((*base, "exclude", i) for i in sorted(excludes)),
        *((*base, "override", i, "when") for i in sorted(overrides)),
    ]


def _made_cells(
    grid: Grid,
    place: KeyPath,
    config: SweepConfig,
    source: Source,
    sets: Mapping[str, Sequence[Any]],
) -> Iterator[tuple[Cell, set[int]]]:
    """Those that are excluded as well; with the numbers of the overrides that match each."""
    known, defaults = axis_names(task_params(grid)), default_values(task_params(grid))
    shared = {name: value for name, value in config.defaults.items() if name in known} | grid.fixed
    narrowed = {name: list(values) for name, values in sets.items() if name in known}
    points = [(place, shared | point) for point in _product({**grid.axes, **narrowed})]
    for i, included in enumerate(grid.include):
        points += [
            ((*place, "include", i), shared | included | point) for point in _product(narrowed)
        ]
    for at, values in points:
        overridden = set[int]()
        for i, override in enumerate(grid.override):
            if matches({**defaults, **values}, override.when):
                values |= {
                    name: value for name, value in override.set.items() if name not in narrowed
                }
                overridden.add(i)
        yield (
            _make_cell(grid, values, partial(_written, grid, at, values, narrowed), source),
            overridden,
        )


def _actual(cell: Cell) -> Values:
    """What a condition may name."""
    return {**cell.params.values(), "task": cell.task}


def _product(axes: Mapping[str, Sequence[Any]]) -> Iterator[Values]:
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _make_cell(
    grid: Grid, values: Values, written: Callable[[KeyPath], KeyPath], source: Source
) -> Cell:
    try:
        return make_cell(grid.task, values)
    except ValidationError as error:
        raise config_error(
            error, source, written, lambda _: axis_names(task_params(grid))
        ) from error


def _written(
    grid: Grid, at: KeyPath, values: Values, narrowed: Collection[str], complaint: KeyPath
) -> KeyPath:
    """Where that part of the parameters of a cell stands in the file. at: of the grid, or of what it includes."""
    if not complaint or complaint[0] in narrowed or complaint[0] not in values:
        return (*at, *complaint)
    name, within = str(complaint[0]), complaint[1:]
    grid_at, is_included = at[:2], len(at) > 2
    for i, override in reversed(list(enumerate(grid.override))):
        if name in override.set and override.set[name] is values[name]:
            return (*grid_at, "override", i, "set", *complaint)
    if is_included and name in grid.include[int(at[-1])]:
        return (*at, *complaint)
    if not is_included and name in grid.axes:
        return (*grid_at, "axes", name, _index(grid.axes[name], values[name]), *within)
    return (*grid_at, "fixed", *complaint) if name in grid.fixed else ("defaults", *complaint)


def _index(values: Sequence[Any], wanted: Any) -> int:
    return next((place for place, value in enumerate(values) if value is wanted), 0)
