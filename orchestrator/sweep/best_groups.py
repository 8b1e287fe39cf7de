"""The candidates of `sweep best`, in groups that each have an answer, and what is recommended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from orchestrator.common.errors import ConfigError
from orchestrator.common.text import value_text
from orchestrator.config.selection import matches
from orchestrator.store.cell_state import CellState
from tasks.prediction.records import Prediction, Verdict
from tasks.spec.axes import FrozenValues, Values, leave_out, select
from tasks.spec.cell import Cell
from tasks.spec.registry import make_cell

# A candidate is recommended if its time is at most this share of the default's: what the CPU limits
# differs by 10 % from process to process, and what the GPU limits by 0.15 %.
SURELY_FASTER, _SURELY_FASTER_ON_CPU = 0.98, 0.70
_ALIKE, _ALIKE_ON_CPU = 1.02, 1.30


@dataclass(frozen=True)
class Goal:
    """The aim of a search.

    over: the axes that may change. default: values of the configuration to compare with; it is the
    first one of the config that has them. until: the expected gain, as a share of the step
    time, at which the search ends. try_perhaps: measure also what may not fit.
    """

    over: tuple[str, ...]
    default: Mapping[str, Sequence[object]] = field(default_factory=dict)
    until: float = 0.01
    try_perhaps: bool = False


@dataclass(frozen=True)
class Speed:
    """The measured step of a cell. low_s, high_s: 95 % interval of the median."""

    step_s: float
    low_s: float
    high_s: float
    is_cpu_bound: bool
    peak_bytes: float | None


@dataclass(frozen=True)
class Entrant:
    """A configuration of a group.

    options: its values of the searched axes. is_scale_known: True if the guess of its duration is
    one in seconds; otherwise it only compares candidates with each other.
    speed: None if it has no measured step; status: how its last attempt ended, or pending.
    was_tried: this command has asked for it, so that it is not tried again, whatever came of it.
    """

    cell: Cell
    options: Values
    verdict: Verdict | None = None
    prediction: Prediction | None = None
    guess_s: float = 1.0
    is_launch_bound: bool = False
    is_scale_known: bool = False
    speed: Speed | None = None
    status: str = CellState().status
    was_tried: bool = False

    @property
    def is_cpu_bound(self) -> bool:
        """True if the speed of the CPU limits its steps."""
        return self.speed is not None and self.speed.is_cpu_bound

    @property
    def tokens(self) -> int:
        """Tokens of a step; 1 for a task without them, whose steps are compared."""
        return int(getattr(self.cell.params, "tokens", 1))

    @property
    def pace_s(self) -> float:
        """Seconds for each token, as measured."""
        assert self.speed is not None
        return self.speed.step_s / self.tokens

    @property
    def pace_interval_s(self) -> tuple[float, float]:
        """The interval of the pace."""
        assert self.speed is not None
        return self.speed.low_s / self.tokens, self.speed.high_s / self.tokens


@dataclass(frozen=True)
class SearchGroup:
    """Configurations of one model, context and so on. default: the position of the one to compare
    with. position: of the group along the other axes, for the speed model.
    """

    entrants: tuple[Entrant, ...]
    default: int
    position: tuple[float, ...] = ()

    @property
    def measured(self) -> list[Entrant]:
        """The entrants with a measured step, the fastest first."""
        known = [one for one in self.entrants if one.speed]
        return sorted(known, key=lambda one: one.pace_s)

    @property
    def winner(self) -> Entrant | None:
        """The recommended entrant: the default unless another one is surely faster."""
        measured, default = self.measured, self.entrants[self.default]
        if not measured:
            return None
        found = self.alike(measured[0])
        if default.speed:
            found = [one for one in found if is_surely_faster(one, default)]
        return min(found, key=self._cost, default=default)

    def alike(self, best: Entrant) -> list[Entrant]:
        """Return the entrants that are about as fast as this one, and this one."""
        found = []
        for one in self.measured:
            on_cpu = one.is_cpu_bound or best.is_cpu_bound
            if one.pace_s <= best.pace_s * (_ALIKE_ON_CPU if on_cpu else _ALIKE):
                found.append(one)
        return found

    def _cost(self, one: Entrant) -> tuple[bool, float, int]:
        # What the CPU limits is chosen last: on another host it may be slower.
        if one.speed is None or one.is_cpu_bound:
            return True, one.pace_s, 0
        default = self.entrants[self.default].options
        changes = sum(one.options[name] != value for name, value in default.items())
        return False, one.speed.peak_bytes or math.inf, changes


def is_surely_faster(one: Entrant, other: Entrant) -> bool:
    """Return True if the difference is above what differs between processes and between steps."""
    is_above_noise = one.pace_s <= sure_share(one, other) * other.pace_s
    return is_above_noise and one.pace_interval_s[1] <= other.pace_interval_s[0]


def sure_share(one: Entrant, other: Entrant) -> float:
    """Return the share of a time below which another one is faster in every process."""
    on_cpu = one.is_cpu_bound or other.is_cpu_bound
    return _SURELY_FASTER_ON_CPU if on_cpu else SURELY_FASTER


def make_groups(cells: Iterable[Cell], goal: Goal) -> list[SearchGroup]:
    """Return a group for all cells that differ along the searched axes alone. Raise ConfigError."""
    known = {cell.id: cell for cell in cells}
    groups = []
    for ids in _members(known, goal.over):
        # In the order of the config, in which the first one is the default.
        same = [cell for name, cell in known.items() if name in ids]
        entrants = [Entrant(cell, select(cell.params.values(), goal.over)) for cell in same]
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
