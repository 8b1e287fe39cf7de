"""The candidates of `sweep best`, in groups that each have an answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from orchestrator.analysis.fastest import SURELY_FASTER, Contender, Ranking
from orchestrator.common.errors import ConfigError
from orchestrator.common.text import value_text
from orchestrator.config.selection import matches
from orchestrator.store.cell_state import CellState
from tasks.prediction.records import Prediction, Verdict
from tasks.spec.axes import FrozenValues, leave_out, select
from tasks.spec.cell import Cell
from tasks.spec.registry import make_cell

# Axes whose values may change together while the tokens of an update stay.
HELD_AXES = ("batch_size", "gradient_accumulation")


@dataclass(frozen=True)
class Goal:
    """The aim of a search.

    over: the axes that may change. default: values of the configuration to compare with; it is the
    first one of the config that has them. until: the expected gain, as a share of the step
    time, at which the search ends. try_perhaps: measure also what may not fit. confirm: how often
    the answer and the default are measured alternately. is_held: the tokens of an update stay.
    """

    over: tuple[str, ...]
    default: Mapping[str, Sequence[object]] = field(default_factory=dict)
    until: float = 0.01
    try_perhaps: bool = False
    confirm: int = 0
    is_held: bool = False


@dataclass(frozen=True, kw_only=True)
class Entrant(Contender):
    """A configuration of a group.

    is_scale_known: True if the guess of its duration is one in seconds; otherwise it only compares
    candidates with each other. least_s: the shortest possible step at the peak of the GPU, 0
    if that is unknown. status: how its last attempt ended, or pending.
    was_tried: this command has asked for it, so that it is not tried again, whatever came of it.
    """

    cell: Cell
    verdict: Verdict | None = None
    prediction: Prediction | None = None
    guess_s: float = 1.0
    least_s: float = 0.0
    is_launch_bound: bool = False
    is_scale_known: bool = False
    status: str = CellState().status
    was_tried: bool = False


@dataclass(frozen=True)
class SearchGroup(Ranking[Entrant]):
    """Configurations of one model, context and so on.

    position: of the group along the other axes, for the speed model.
    """

    position: tuple[float, ...] = ()

    def may_win(self, one: Entrant) -> bool:
        """Return True unless a measured entrant is faster than this one can ever be."""
        fastest = self.measured[:1]
        return not fastest or one.least_s / one.tokens < SURELY_FASTER * fastest[0].pace_s


def make_groups(cells: Iterable[Cell], goal: Goal) -> list[SearchGroup]:
    """Return a group for all cells that differ along the searched axes alone. Raise ConfigError."""
    known = {cell.id: cell for cell in cells}
    groups = []
    for ids in _members(known, goal.over):
        # In the order of the config, in which the first one is the default.
        same = [cell for name, cell in known.items() if name in ids]
        entrants = [_entrant(cell, goal) for cell in same]
        found = [
            number for number, one in enumerate(entrants) if matches(one.options, goal.default)
        ]
        if not found:
            words = ",".join(
                f"{name}={'|'.join(map(value_text, values))}"
                for name, values in goal.default.items()
            )
            raise ConfigError(f"--default {words}: is none of the candidates", "Add it to --over")
        groups.append(SearchGroup(tuple(entrants), found[0]))
    defaults = [group.entrants[group.default].cell for group in groups]
    places = _positions([leave_out(cell.params.values(), goal.over) for cell in defaults])
    return [replace(group, position=place) for group, place in zip(groups, places, strict=True)]


def _entrant(cell: Cell, goal: Goal) -> Entrant:
    tokens = int(getattr(cell.params, "tokens", 1))
    return Entrant(select(cell.params.values(), goal.over), tokens, cell=cell)


def _members(known: Mapping[str, Cell], over: Sequence[str]) -> list[set[str]]:
    """Return the ids of the cells of each group."""
    groups: dict[str, dict[str, str]] = {}  # ids by options
    options: dict[str, dict[str, FrozenValues]] = {}  # of each task
    for cell in known.values():
        own: FrozenValues = select(cell.params.values(), over)
        options.setdefault(cell.task, {})[repr(own)] = own
        key = repr((cell.task, leave_out(cell.params.values(), over)))
        groups.setdefault(key, {})[repr(own)] = cell.id
    for same in groups.values():
        example = known[next(iter(same.values()))]
        for key, chosen in options[example.task].items():
            if key in same:
                continue
            # With some options other axes mean nothing and are dropped, such as `parallel` with
            # one GPU: such a cell is a candidate in all groups that it could be made from.
            with suppress(ValidationError):
                reduced = make_cell(example.task, {**example.params.values(), **chosen}).id
                if reduced in known:
                    same[key] = reduced
    found = [set(same.values()) for same in groups.values()]
    return [ids for ids in found if not any(ids < other for other in found)]


def _positions(rows: Sequence[FrozenValues]) -> list[tuple[float, ...]]:
    """Return the position of each row along the axes that vary: a logarithm or a number in order."""
    columns: list[list[float]] = []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        words = list(dict.fromkeys(map(repr, values)))
        if len(words) > 1:
            columns.append([_position(value, words) for value in values])
    return list(zip(*columns, strict=True)) if columns else [()] * len(rows)


def _position(value: object, words: Sequence[str]) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return math.log2(value)
    return float(words.index(repr(value)))
