"""Find the fastest configuration: measure few cells, each chosen by what it may gain.

There is no state: every decision follows from the rows of the run and from the arguments, so that
an interrupted search is continued, and no cell is measured twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from orchestrator.analysis.results import load_results
from orchestrator.common.errors import ConfigError
from orchestrator.config.grid import Expansion
from orchestrator.config.selection import matches
from orchestrator.hardware.gpu_catalog import GpuModel, peak_tflops
from orchestrator.planning.duration_estimate import guess_step
from orchestrator.planning.prediction_requests import cap_bytes, predict_memory, verdict_of
from orchestrator.planning.request import SweepRequest
from orchestrator.planning.speed_model import Candidate, SpeedModel, expected_gain
from orchestrator.store.cell_state import CellState, read_states
from orchestrator.sweep.capacity_search import SharedScheduler, with_time_left
from orchestrator.sweep.outcome_log import SweepResult
from orchestrator.sweep.pipeline import Runtime, run_sweep
from tasks.prediction.records import Prediction, Verdict, predictable
from tasks.spec.axes import Values, leave_out, select
from tasks.spec.cell import Cell
from tasks.spec.registry import all_tasks
from tasks.spec.status import OUT_OF_MEMORY, Status

# A candidate is recommended if its time is at most this share of the default's: what the CPU limits
# differs by 10 % from process to process, and what the GPU limits by 0.15 %.
_SURELY_FASTER, _SURELY_FASTER_ON_CPU = 0.98, 0.70
_ALIKE, _ALIKE_ON_CPU = 1.02, 1.30
_SETTLED = {Status.OK, Status.SKIPPED, *OUT_OF_MEMORY}
_MAY_NOT_FIT = ("borderline", "perhaps")


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

    options: its values of the searched axes. floor_s: what the FLOPs of its step take at the peak.
    speed: None if it has no measured step; status: how its last attempt ended, or pending.
    was_tried: this command has asked for it, so that it is not tried again, whatever came of it.
    """

    cell: Cell
    options: Values
    verdict: Verdict | None = None
    prediction: Prediction | None = None
    guess_s: float = 1.0
    is_launch_bound: bool = False
    floor_s: float = 0.0
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


@dataclass(frozen=True)
class SearchGroup:
    """Configurations of one model, context and so on. default: the position of the one to compare
    with. position: of the group along the other axes, for the speed model.
    """

    values: Values
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
        best = min(self.alike(measured[0]), key=self._cost)
        is_faster = default.speed is None or self.is_surely_faster(best, default)
        return best if is_faster else default

    def is_surely_faster(self, one: Entrant, other: Entrant) -> bool:
        """Return True if the difference is above what differs from process to process."""
        on_cpu = one.is_cpu_bound or other.is_cpu_bound
        return one.pace_s <= other.pace_s * (_SURELY_FASTER_ON_CPU if on_cpu else _SURELY_FASTER)

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
        return False, one.speed.peak_bytes or math.inf, self.changes(one)

    def changes(self, one: Entrant) -> int:
        """Return the number of options in which an entrant differs from the default."""
        default = self.entrants[self.default].options
        return sum(one.options[name] != value for name, value in default.items())


@dataclass(frozen=True)
class Step:
    """The next entrant of a group to measure, or why there is none."""

    entrant: int | None
    reason: str = ""


@dataclass(frozen=True)
class BestFound:
    """Groups with what was measured, why each search ended, and the last result of measuring."""

    groups: tuple[SearchGroup, ...]
    ends: tuple[str, ...]
    gpu: GpuModel | None
    result: SweepResult | None = None


class BestSearch:
    """Decides what is measured next in groups, whose speeds are related."""

    def __init__(self, groups: Sequence[SearchGroup], goal: Goal) -> None:
        self._groups, self._goal = tuple(groups), goal
        self._first: list[int] = []
        candidates: list[Candidate] = []
        for group in groups:
            self._first.append(len(candidates))
            for one in group.entrants:
                candidates.append(
                    Candidate(
                        group.position, one.options, one.guess_s / one.tokens, one.is_launch_bound
                    )
                )
        self._model = SpeedModel(candidates)

    def next(self, number: int, assumed: Mapping[int, float] | None = None) -> Step:
        """Return what is measured next in a group of this number.

        assumed: paces in s of candidates that are being measured, by their number in the model.
        """
        group, first = self._groups[number], self._first[number]
        known = self._known() | dict(assumed or {})
        open_ones = [
            position
            for position, one in enumerate(group.entrants)
            if first + position not in known and self._may_run(one)
        ]
        if not open_ones:
            return Step(None, "every candidate that may run was tried")
        mean, deviation = self._model.posterior(known)
        paces = [
            known[first + position]
            for position in range(len(group.entrants))
            if first + position in known
        ]
        if not paces:
            return Step(min(open_ones, key=lambda position: mean[first + position]))
        if group.default in open_ones:
            return Step(group.default)
        limit_s = min(paces) * _SURELY_FASTER
        possible = [
            position
            for position in open_ones
            if group.entrants[position].floor_s / group.entrants[position].tokens < limit_s
        ]
        if not possible:
            return Step(None, "the FLOPs of every other candidate take longer at the GPU's peak")
        where = np.array([first + position for position in possible])
        gains = expected_gain(mean[where], deviation[where], limit_s)
        best = int(np.argmax(gains))
        if gains[best] < self._goal.until:
            return Step(
                None,
                f"the best remaining candidate has an expected gain of {100 * gains[best]:.1f} %, "
                f"less than {100 * self._goal.until:g} %",
            )
        return Step(possible[best])

    def expected_s(self, number: int) -> list[float]:
        """Return the expected step time of each entrant of a group, in seconds."""
        mean, _ = self._model.posterior(self._known())
        group, first = self._groups[number], self._first[number]
        return [
            math.exp(mean[first + position]) * one.tokens
            for position, one in enumerate(group.entrants)
        ]

    def round(self, most: int) -> list[tuple[int, int]]:
        """Return up to `most` entrants to measure at the same time: numbers of group and entrant."""
        assumed: dict[int, float] = {}
        chosen: list[tuple[int, int]] = []
        for number in range(len(self._groups)):
            while len(chosen) < most:
                step = self.next(number, assumed)
                if step.entrant is None:
                    break
                chosen.append((number, step.entrant))
                one = self._groups[number].entrants[step.entrant]
                # As if it had been as fast as expected.
                expected_s = self.expected_s(number)[step.entrant]
                assumed[self._first[number] + step.entrant] = expected_s / one.tokens
        return chosen

    def _known(self) -> dict[int, float]:
        found = {}
        for first, group in zip(self._first, self._groups, strict=True):
            for position, one in enumerate(group.entrants):
                if one.speed:
                    found[first + position] = one.pace_s
        return found

    def _may_run(self, one: Entrant) -> bool:
        if one.was_tried or one.status in _SETTLED or one.verdict == "oom":
            return False
        return self._goal.try_perhaps or one.verdict not in _MAY_NOT_FIT


def find_best(
    request: SweepRequest, goal: Goal, gpu: GpuModel | None, runtime: Runtime | None, slots: int
) -> BestFound:
    """Search the fastest configuration of each group. Raise ConfigError.

    gpu: the GPU to predict for. runtime: None to plan only. slots: cells that run at the same time.
    """
    groups = make_groups(request.expansion.cells, goal)
    groups = predict_groups(groups, gpu, request.import_paths)
    groups = _with_speeds(request, groups)
    result, started_s = None, time.monotonic()
    if runtime is not None:
        with SharedScheduler(runtime.open_scheduler) as scheduler:
            shared = replace(runtime, open_scheduler=scheduler.opened)
            while chosen := BestSearch(groups, goal).round(slots):
                if result is not None and result.is_cut_short:
                    break
                cells = tuple(groups[number].entrants[one].cell for number, one in chosen)
                execution = with_time_left(request.execution, started_s)
                step = replace(
                    request, expansion=Expansion(cells), execution=execution, is_search=True
                )
                result = run_sweep(step, shared)
                groups = _with_speeds(request, groups, {cell.id for cell in cells})
    search = BestSearch(groups, goal)
    ends = tuple(search.next(number).reason for number in range(len(groups)))
    return BestFound(tuple(groups), ends, gpu, result)


def make_groups(cells: Iterable[Cell], goal: Goal) -> list[SearchGroup]:
    """Return a group for all cells that differ along the searched axes alone. Raise ConfigError."""
    members: dict[str, list[Cell]] = {}
    for cell in cells:
        values = cell.params.values()
        if missing := [name for name in goal.over if name not in values]:
            raise ConfigError(f"--over {missing[0]}: {cell.task} has no such axis", "Leave it out")
        key = repr((cell.task, leave_out(values, goal.over)))
        members.setdefault(key, []).append(cell)
    groups = []
    for same in members.values():
        entrants = [Entrant(cell, select(cell.params.values(), goal.over)) for cell in same]
        found = [
            number for number, one in enumerate(entrants) if matches(one.options, goal.default)
        ]
        if not found:
            words = ",".join(
                f"{name}={'|'.join(map(str, values))}" for name, values in goal.default.items()
            )
            raise ConfigError(f"--default {words}: is none of the candidates", "Add it to --over")
        groups.append(
            SearchGroup(leave_out(same[0].params.values(), goal.over), tuple(entrants), found[0])
        )
    places = _positions([group.values for group in groups])
    return [replace(group, position=place) for group, place in zip(groups, places, strict=True)]


def _positions(rows: Sequence[Values]) -> list[tuple[float, ...]]:
    """Return the position of each row along the axes that vary: a logarithm or a number in order."""
    columns: list[list[float]] = []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        words = list(dict.fromkeys(map(repr, values)))
        if len(words) > 1:
            columns.append([_position(value, words) for value in values])
    return list(zip(*columns, strict=True)) if columns else [()] * len(rows)


def _position(value: object, words: Sequence[str]) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and value > 0:  # type: ignore[operator]
        return math.log2(value)  # type: ignore[arg-type]
    return float(words.index(repr(value)))


def predict_groups(
    groups: Sequence[SearchGroup], gpu: GpuModel | None, import_paths: tuple[str, ...] | None
) -> list[SearchGroup]:
    """Return the groups with guessed times, and with predicted memory.

    import_paths: folders with the user's models; None to predict no memory.
    """
    cells = [one.cell for group in groups for one in group.entrants]
    needed = [cell for cell in predictable(cells) if cap_bytes(cell, gpu) is not None]
    predictions = {}
    if needed and import_paths is not None:
        predictions = predict_memory(needed, gpu, import_paths)
    device = gpu.device if gpu else None

    def complete(one: Entrant) -> Entrant:
        prediction = predictions.get(one.cell.id)
        guess = guess_step(one.cell, device)
        return replace(
            one,
            prediction=prediction,
            verdict=verdict_of(one.cell, prediction, gpu) if prediction else None,
            guess_s=max(guess),
            is_launch_bound=guess.launch_s >= guess.compute_s,
            floor_s=_floor_s(one.cell, device),
        )

    return _replaced(groups, complete)


def _floor_s(cell: Cell, device: str | None) -> float:
    """Return what the FLOPs of a step take at the dense peak of the GPU, or 0 if it is unknown."""
    precision = str(cell.params.values().get("precision", "fp32"))
    work, peak = all_tasks()[cell.task].work(cell.params), peak_tflops(device, precision)
    is_known = work and peak and cell.params.device == "cuda"
    return work / (peak * 1e12) if is_known else 0.0  # type: ignore[operator]


def _with_speeds(
    request: SweepRequest, groups: Sequence[SearchGroup], tried: Container[str] = ()
) -> list[SearchGroup]:
    """Return the groups with what the run has measured. tried: cells that were to be measured."""
    if not request.run.exists:
        return list(groups)
    rows = {row["cell"]: row for row in load_results(request.run).cells.to_dict("records")}
    states = read_states(request.run)

    def complete(one: Entrant) -> Entrant:
        status = states.get(one.cell.id, CellState()).status
        one = replace(one, was_tried=one.was_tried or one.cell.id in tried, status=status)
        row = rows.get(one.cell.id, {})
        step_ms = row.get("step_ms_median")
        if status != Status.OK or step_ms is None or not step_ms > 0:
            return one
        speed = Speed(
            step_ms / 1e3,
            _number(row.get("step_ms_ci_low"), step_ms) / 1e3,
            _number(row.get("step_ms_ci_high"), step_ms) / 1e3,
            row.get("cpu_bound") is True or one.cell.params.device == "cpu",
            _number(row.get("peak_allocated_bytes"), None),
        )
        return replace(one, speed=speed)

    return _replaced(groups, complete)


def _number(value: object, otherwise: float | None) -> float:
    is_known = isinstance(value, int | float) and not math.isnan(value)
    return value if is_known else otherwise  # type: ignore[return-value]


def _replaced(
    groups: Sequence[SearchGroup], change: Callable[[Entrant], Entrant]
) -> list[SearchGroup]:
    return [replace(group, entrants=tuple(map(change, group.entrants))) for group in groups]
