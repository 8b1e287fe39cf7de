"""Expansion of a config into its cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial

from pydantic import ValidationError

from orchestrator.common.errors import ConfigError
from orchestrator.common.text import shell_word, value_text
from orchestrator.config.cell_labels import CellLabels
from orchestrator.config.grid_checks import (
    check_axes,
    check_selection,
    check_size,
    grid_factors,
    include_factors,
    own_axes,
    product,
    task_params,
)
from orchestrator.config.schema import Grid, SweepConfig
from orchestrator.config.selection import CELL, TOKENS, Selection, choose_sample, matches
from orchestrator.config.yaml_source import KeyPath, Source, config_error, explain_unknown_key
from tasks.spec.axes import Values, leave_out, select
from tasks.spec.cell import Cell, dotted_values
from tasks.spec.parameters import default_values
from tasks.spec.registry import make_cell

# The remedy for an axis that asks for several ranks without effect.
REMEDIES_OF_RANKS = {
    "gpus": "On the CPU, processes takes its place",
    "processes": "On a GPU, gpus takes its place",
    "parallel": "It needs several ranks: set gpus, or on the CPU processes",
}
# Variables of NCCL that the axis `nccl_algo` sets.
_SET_BY_NCCL_ALGO = {"NCCL_ALGO", "NCCL_NVLS_ENABLE"}


@dataclass(frozen=True)
class Expansion:
    """The cells of a config in its order, each once.

    duplicates: number of combinations that gave a cell again.
    idle: axes that `--set` names although no cell has one of its values, such as an axis of another
    `timing`.
    refused: why each combination that the selection skips is impossible.
    """

    cells: tuple[Cell, ...]
    duplicates: int = 0
    idle: frozenset[str] = frozenset()
    refused: tuple[str, ...] = ()

    @cached_property
    def label(self) -> CellLabels:
        """The label of each cell: the task and the axes in which the cells of this task differ."""
        return CellLabels(self.cells)


def expand(config: SweepConfig, source: Source, selection: Selection) -> Expansion:
    """Return the selected cells.

    Raises ConfigError for an unknown axis, an impossible value, and a sweep without a cell.
    """
    check_axes(config, source, selection.set)
    if selection.set or selection.where:
        check_selection(config, selection)
    check_size(config, source, selection.set)
    cells: dict[str, Cell] = {}
    named, idle = 0, set(selection.set)
    refused: list[tuple[Values, ConfigError]] | None = [] if selection.skip_refused else None
    for number, grid in enumerate(config.grids):
        for cell, _ in _grid_cells(config, number, source, selection.set, refused):
            if grid.exclude or selection.where or idle:
                values = _condition_values(cell)
                is_excluded = any(matches(values, condition) for condition in grid.exclude)
                if is_excluded or not matches(values, selection.where):
                    continue
                idle -= {name for name in idle if matches(values, {name: selection.set[name]})}
            named += 1
            cells.setdefault(cell.id, cell)
            if cell.params.ranks > 1:
                _require_possible_ranks(cell, config, source)
    wanted = [error for values, error in refused or () if matches(values, selection.where)]
    if not named:
        raise wanted[0] if wanted else _empty_grid(config, source, selection)
    chosen = tuple(cells.values())
    if selection.sample:
        chosen = choose_sample(chosen, selection.sample)
    reasons = tuple(error.message for error in wanted)
    return Expansion(chosen, named - len(cells), frozenset(idle), reasons)


def _require_possible_ranks(cell: Cell, config: SweepConfig, source: Source) -> None:
    """Raise ConfigError if instruments or variables of the config rule out a cell of several ranks."""
    if "nsys" in config.instruments:
        where = source.where(("instruments", list(config.instruments).index("nsys")))
        raise ConfigError(
            f"{where}: the instrument nsys can observe only one process",
            "Remove it, or use --set gpus=1",
        )
    chosen = getattr(cell.params, "nccl_algo", "auto")
    for name in _SET_BY_NCCL_ALGO & config.env.keys():
        if chosen != "auto":
            raise ConfigError(
                f"{source.where(('env', name))}: nccl_algo and env both set NCCL's algorithm",
                "Remove one of them",
            )


def _empty_grid(config: SweepConfig, source: Source, selection: Selection) -> ConfigError:
    """Return the error of a selection without a cell: the condition that no cell meets."""
    present: dict[str, dict[str, None]] = {name: {} for name in selection.where}
    for number, grid in enumerate(config.grids):
        for cell, _ in _grid_cells(config, number, source, selection.set):
            values = _condition_values(cell)
            if any(matches(values, condition) for condition in grid.exclude):
                continue
            flat = dotted_values(values)
            for name in present.keys() & flat:
                present[name][value_text(flat[name])] = None
    if not any(present.values()):
        return ConfigError(f"{source.name}: the grid is empty", "Every combination is excluded")
    for name, wanted in selection.where.items():
        texts = list(map(value_text, wanted))
        if present[name].keys().isdisjoint(texts):
            problem = f"{source.name}: no cell has {name}={'|'.join(texts)}"
            remedy = f"The config has {', '.join(present[name])}"
            if name not in ("task", CELL, TOKENS, *selection.set):
                option = shell_word(f"{name}={','.join(texts)}")
                remedy += f". To use another value: --set {option}"
            return ConfigError(problem, remedy)
    return ConfigError(
        f"{source.name}: no cell meets all conditions of --where", "Leave one of them out"
    )


def require_ranks(config: SweepConfig, source: Source, selection: Selection) -> None:
    """Raise ConfigError if a grid asks for several ranks, but none of its cells has them."""
    if selection.set.keys() & {"gpus", "processes"}:
        return
    for number, grid in enumerate(config.grids):
        defaults = default_values(task_params(grid))
        written = own_axes(grid, config.defaults) | grid.fixed
        for name in REMEDIES_OF_RANKS.keys() & written.keys() - selection.set.keys():
            cells = _grid_cells(config, number, source, selection.set, refused=[])
            values = {cell.params.values()[name] for cell, _ in cells}
            if written[name] != defaults[name] and values == {defaults[name]}:
                place = ("grids", number, "fixed") if name in grid.fixed else ("defaults",)
                where = source.where((*place, name))
                problem = f"{where}: has no effect on the cells of this grid"
                raise ConfigError(problem, REMEDIES_OF_RANKS[name])


def require_matches(config: SweepConfig, source: Source) -> None:
    """Raise ConfigError for an `exclude` or `override` that matches no cell of its grid.

    It is probably a mistake. The grid is checked as it is written, without `--set`. A config that
    is valid only with `--set` is not checked.
    """
    numbers = [i for i, grid in enumerate(config.grids) if grid.exclude or grid.override]
    if not numbers:
        return
    try:
        check_size(config, source, {})
        idle = [place for number in numbers for place in _idle_conditions(config, number, source)]
    except ConfigError:
        return
    for place in idle:
        raise ConfigError(
            f"{source.where(place)}: matches no cell of the grid", "Correct it, or leave it out"
        )


def _idle_conditions(config: SweepConfig, number: int, source: Source) -> Iterator[KeyPath]:
    """Yield the places of the conditions that match no cell of a grid."""
    grid = config.grids[number]
    excludes = dict(enumerate(grid.exclude))
    overrides = set(range(len(grid.override)))
    for cell, overridden in _grid_cells(config, number, source, {}):
        values = _condition_values(cell)
        excludes = {i: one for i, one in excludes.items() if not matches(values, one)}
        overrides -= overridden
        if not excludes and not overrides:
            return
    for i in excludes:
        yield "grids", number, "exclude", i
    for i in sorted(overrides):
        yield "grids", number, "override", i, "when"


def _grid_cells(
    config: SweepConfig,
    number: int,
    source: Source,
    sets: Mapping[str, Sequence[object]],
    refused: list[tuple[Values, ConfigError]] | None = None,
) -> Iterator[tuple[Cell, set[int]]]:
    """Yield the cells of a grid before `exclude`, with the numbers of the overrides of each.

    refused: takes the impossible combinations, which otherwise raise ConfigError.
    """
    grid, place = config.grids[number], ("grids", number)
    defaults = default_values(task_params(grid))
    shared = own_axes(grid, config.defaults) | grid.fixed
    narrowed = own_axes(grid, sets)
    points: list[tuple[KeyPath, Values]] = []
    for point in product(grid_factors(grid.axes, grid.zip, narrowed)):
        points.append((place, shared | point))
    for i, included in enumerate(grid.include):
        for point in product(include_factors(grid.zip, narrowed)):
            points.append(((*place, "include", i), shared | included | point))
    for at, values in points:
        overridden: set[int] = set()
        for i, override in enumerate(grid.override):
            if matches(_nested({**defaults, **values}), override.when):
                # The command line wins over an override.
                values.update(override.set | select(values, narrowed))
                overridden.add(i)
        try:
            cell = make_cell(grid.task, _nested(values))
        except ValidationError as error:
            locate = partial(_place_in_file, grid, at, leave_out(values, narrowed))
            explain = partial(explain_unknown_key, defaults)
            problem = config_error(error, source, locate, explain)
            if refused is None:
                raise problem from error
            refused.append((_refused_values(grid, {**defaults, **values}), problem))
            continue
        yield cell, overridden


def _nested(values: Values) -> Values:
    """Return the values with each `model_args.layers` as a key of the mapping `model_args`."""
    dotted = [name for name in values if "." in name]
    if not dotted:
        return values
    nested = leave_out(values, dotted)
    for name in dotted:
        axis, _, key = name.partition(".")
        nested[axis] = {**(nested.get(axis) or {}), key: values[name]}
    return nested


def _condition_values(cell: Cell) -> Values:
    values = {**cell.params.values(), "task": cell.task, CELL: cell.id}
    return values | {TOKENS: getattr(cell.params, "tokens", None)}


def _refused_values(grid: Grid, values: Values) -> Values:
    """Return the values of an impossible combination that a condition may name."""
    nested, tokens = _nested(values), None
    with suppress(TypeError):  # the impossible value may be no number
        tokens = getattr(task_params(grid).model_construct(**nested), "tokens", None)
    return {**nested, "task": grid.task, TOKENS: tokens}


def _place_in_file(grid: Grid, at: KeyPath, written: Values, loc: KeyPath) -> KeyPath:
    """Return the place in the file of a value of a cell.

    at: the grid, or its `include` that the cell comes from. written: the values of the cell that
    are not from the command line. loc: the axis, and the steps within its value.
    """
    dotted = ".".join(map(str, loc[:2]))
    if dotted in written:
        loc = (dotted, *loc[2:])
    if not loc or loc[0] not in written:
        return (*at, *loc)
    name, value, grid_at = str(loc[0]), written[loc[0]], at[:2]
    # The last override wins. Values are compared by identity, as two places may hold equal ones.
    for i, override in reversed(list(enumerate(grid.override))):
        if name in override.set and override.set[name] is value:
            return (*grid_at, "override", i, "set", *loc)
    is_included = len(at) > 2
    if is_included and name in grid.include[int(at[-1])]:
        return (*at, *loc)
    lists: dict[KeyPath, Mapping[str, Sequence[object]]] = {("axes",): grid.axes}
    lists |= {("zip", number): group for number, group in enumerate(grid.zip)}
    for list_at, group in lists.items():
        if not is_included and name in group:
            indices = [index for index, one in enumerate(group[name]) if one is value]
            return (*grid_at, *list_at, name, *indices[:1], *loc[1:])
    if name in grid.fixed:
        return (*grid_at, "fixed", *loc)
    return ("defaults", *loc)
