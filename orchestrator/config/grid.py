"""From a config to its cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from orchestrator.common.errors import ConfigError, nearest
from orchestrator.common.hashing import text_digest
from orchestrator.config.schema import Grid, Place, Source, SweepConfig, Values, config_error, plain
from tasks.spec.cell import Cell, varying_axes
from tasks.spec.parameters import axis_names, check_value, default_values
from tasks.spec.registry import all_tasks, make_cell

MAX_COMBINATIONS = 100_000  # of a sweep: more is a slip of the pen, or years of measuring
_SEVERAL = "Name one or several values as axis=value,value"


@dataclass(frozen=True)
class Selection:
    """What the command line says about a config: `set` narrows or replaces axes, `where` picks cells, and of those `sample`, a
    fraction, is taken at random; `instruments` watch beside those of the config.
    """

    set: Mapping[str, Sequence[Any]]
    where: Mapping[str, Sequence[Any]]
    sample: float | None = None
    instruments: Sequence[str] = ()


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


def parse_selection(
    sets: Iterable[str],
    wheres: Iterable[str],
    sample: float | None = None,
    instruments: Iterable[str] = (),
) -> Selection:
    """`--set axis=a,b` and `--where axis=a,axis=b|c`. Values read as in YAML."""
    if sample == 0:
        raise ConfigError(
            "--sample 0%: is a sample of nothing", "Write 10%, or leave it out for all cells"
        )
    conditions = [part for where in wheres for part in where.split(",")]
    return Selection(
        _assignments(sets, ",", "--set"),
        _assignments(conditions, "|", "--where"),
        sample,
        tuple(instruments),
    )


def choose_sample(
    cells: Iterable[Cell], share: float, fewest: int = 1, seed: int = 0
) -> tuple[Cell, ...]:
    """This fraction of them at random, in their order: the same ones each time, and hardly others where some have been added."""
    known = tuple(cells)
    wanted = max(fewest, math.ceil(share * len(known)))
    drawn = sorted(known, key=lambda cell: text_digest(f"{seed} {cell.id}"))[:wanted]
    chosen = {cell.id for cell in drawn}
    return tuple(cell for cell in known if cell.id in chosen)


def expand(config: SweepConfig, source: Source, selection: Selection) -> Expansion:
    """Raises ConfigError for what is no axis or no value, and for a sweep without a cell."""
    _check_axes(config, source, selection)
    _check_clauses(config, source)
    _check_values(config, "--set", selection.set)
    _check_values(config, "--where", selection.where)
    _check_size(config, source, selection)
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
        _check_size(config, source, Selection({}, {}))
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


def matches(values: Mapping[str, Any], condition: Mapping[str, Any]) -> bool:
    """Whether a cell's parameters meet every clause; a list of values in a clause matches any of them."""
    return all(
        name in values
        and values[name] in (wanted if isinstance(wanted, list | tuple) else [wanted])
        for name, wanted in condition.items()
    )


def _expand_grid(
    grid: Grid, place: Place, config: SweepConfig, source: Source, selection: Selection
) -> Iterator[Cell]:
    for cell, _ in _made_cells(grid, place, config, source, selection.set):
        actual = _actual(cell)
        if any(matches(actual, excluded) for excluded in grid.exclude) or not matches(
            actual, selection.where
        ):
            continue
        yield cell


def _idle_clauses(grid: Grid, number: int, config: SweepConfig, source: Source) -> list[Place]:
    """Where those stand that match no cell of the grid as it is written."""
    base: Place = ("grids", number)
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
    grid: Grid, place: Place, config: SweepConfig, source: Source, sets: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[Cell, set[int]]]:
    """Those that are excluded as well; with the numbers of the overrides that match each."""
    known, defaults = axis_names(_params(grid)), default_values(_params(grid))
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
    grid: Grid, values: Values, written: Callable[[Place], Place], source: Source
) -> Cell:
    try:
        return make_cell(grid.task, values)
    except ValidationError as error:
        raise config_error(error, source, written, lambda _: axis_names(_params(grid))) from error


def _written(
    grid: Grid, at: Place, values: Values, narrowed: Collection[str], complaint: Place
) -> Place:
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


def _check_axes(config: SweepConfig, source: Source, selection: Selection) -> None:
    """Unknown names are found before anything is multiplied out."""
    for number, grid in enumerate(config.grids):
        known = axis_names(_params(grid))
        base: Place = ("grids", number)
        written: list[tuple[Place, Values]] = [
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
                        f"{where}: {grid.task} has no axis {name!r}", nearest(name, known)
                    )
    anywhere = sorted({name for grid in config.grids for name in axis_names(_params(grid))})
    for name in config.defaults:
        if name not in anywhere:
            raise ConfigError(
                f"{source.where(('defaults', name))}: no task has {name!r}", nearest(name, anywhere)
            )
    for option, names in (("--set", list(selection.set)), ("--where", list(selection.where))):
        for name in names:
            if name not in anywhere and (option, name) != ("--where", "task"):
                raise ConfigError(
                    f"{option} {name}: no task of this sweep has such an axis",
                    nearest(name, anywhere),
                )


def _check_clauses(config: SweepConfig, source: Source) -> None:
    """What a clause asks for must be a value of its axis: else it would match nothing, and say nothing."""
    for number, grid in enumerate(config.grids):
        base: Place = ("grids", number)
        clauses: list[tuple[Place, Values]] = [
            ((*base, "exclude", i), clause) for i, clause in enumerate(grid.exclude)
        ]
        clauses += [
            ((*base, "override", i, "when"), override.when)
            for i, override in enumerate(grid.override)
        ]
        for place, clause in clauses:
            for name, wanted in clause.items():
                _check_clause(grid, name, wanted, place, source)


def _check_clause(grid: Grid, name: str, wanted: Any, place: Place, source: Source) -> None:
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


def _within(at: Place, complaint: Place) -> Place:
    """at: of the parameter that is complained of."""
    return (*at, *complaint[1:])


def _check_values(config: SweepConfig, option: str, selected: Mapping[str, Sequence[Any]]) -> None:
    """Of several tasks that have the axis it is enough that one has the value."""
    for name, wanted in selected.items():
        grids = [grid for grid in config.grids if name in axis_names(_params(grid))]
        for value in wanted if grids else ():
            refusals = [_refusal(grid, name, value) for grid in grids]
            if all(refusals) and refusals[0]:
                raise config_error(
                    refusals[0], Source(option, None), (), lambda _: ()
                ) from refusals[0]


def _refusal(grid: Grid, name: str, value: Any) -> ValidationError | None:
    try:
        check_value(_params(grid), name, value)
    except ValidationError as error:
        return error
    return None


def _check_size(config: SweepConfig, source: Source, selection: Selection) -> None:
    """Also before anything is multiplied out."""
    asked = 0
    for number, grid in enumerate(config.grids):
        narrowed = {
            name: values
            for name, values in selection.set.items()
            if name in axis_names(_params(grid))
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


def _params(grid: Grid) -> Any:
    return all_tasks()[grid.task].params


def _assignments(texts: Iterable[str], separator: str, option: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, values = _assignment(text, separator, option)
        if name in found:
            raise ConfigError(
                f"{option} {name}: is given twice", f"Join the values with {separator!r}"
            )
        found[name] = values
    return found


def _assignment(text: str, separator: str, option: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise ConfigError(f"{option} {text}: is not an assignment", _SEVERAL)
    parser = YAML(typ="safe", pure=True)
    try:
        values = values.replace(separator, ",") if separator != "," else values
        return name.strip(), plain(parser.load(f"[{values}]"))
    except Exception as error:  # whatever the parser stumbles over: see config.py
        raise ConfigError(f"{option} {text}: is not YAML", _SEVERAL) from error
