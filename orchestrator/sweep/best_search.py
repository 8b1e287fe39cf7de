"""Find the fastest configuration: measure few cells, each chosen by what it may gain.

Every decision follows from the rows of the run and from the arguments (see search_loop.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.analysis.fastest import SURELY_FASTER, speeds_of
from orchestrator.analysis.results import load_results
from orchestrator.common.errors import ConfigError
from orchestrator.common.output import ProgressLine
from orchestrator.common.text import cells_and_verb
from orchestrator.config.grid import Expansion
from orchestrator.hardware.gpu_catalog import GpuModel, peak_tflops
from orchestrator.planning.duration_estimate import guess_step
from orchestrator.planning.prediction_requests import cap_bytes, predict_memory, verdict_of
from orchestrator.planning.request import SweepRequest
from orchestrator.planning.speed_model import Candidate, SpeedModel, expected_gain
from orchestrator.store.cell_state import PENDING, CellState, read_states
from orchestrator.store.manifest import BEST
from orchestrator.store.open import open_for_writing
from orchestrator.sweep.best_groups import Entrant, Goal, SearchGroup, make_groups
from orchestrator.sweep.outcome_log import SweepResult
from orchestrator.sweep.pipeline import Runtime
from orchestrator.sweep.search_loop import run_search
from tasks.prediction.records import predictable
from tasks.spec.axes import Values
from tasks.spec.cell import Cell
from tasks.spec.registry import all_tasks
from tasks.spec.status import OUT_OF_MEMORY, Status

_SETTLED = {Status.OK, Status.SKIPPED, *OUT_OF_MEMORY}
_SURELY_FITS = (None, "fits")  # None: nothing can be predicted
_BEATEN = 1.10  # share of the best step
_UNSURE = {
    "borderline": "within 3 % of the limit",
    "perhaps": "may not fit",
    "unlikely": "hardly fits",
}


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
                guess_s = one.guess_s / one.tokens
                scale = "" if one.is_scale_known else _scale(one.cell)
                candidates.append(
                    Candidate(group.position, one.options, guess_s, one.is_launch_bound, scale)
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
            if first + position not in known and may_run(one, self._goal)
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
        open_ones = [one for one in open_ones if group.may_win(group.entrants[one])]
        if not open_ones:
            return Step(None, "no other candidate can be faster, even at the peak of the GPU")
        where = np.array([first + position for position in open_ones])
        gains = expected_gain(mean[where], deviation[where], min(paces) * SURELY_FASTER)
        best = int(np.argmax(gains))
        if gains[best] < self._goal.until:
            return Step(
                None,
                f"the best remaining candidate has an expected gain of {100 * gains[best]:.1f} %, "
                f"less than {100 * self._goal.until:g} %",
            )
        return Step(open_ones[best])

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


def may_run(one: Entrant, goal: Goal) -> bool:
    """Return True if a candidate may be measured."""
    if one.was_tried or one.status in _SETTLED or one.verdict == "oom":
        return False
    return goal.try_perhaps or one.verdict in _SURELY_FITS


def _scale(cell: Cell) -> str:
    return f"{cell.task} {getattr(cell.params, 'model', None)}"


def find_best(
    request: SweepRequest, goal: Goal, gpu: GpuModel | None, runtime: Runtime | None, slots: int
) -> BestFound:
    """Search the fastest configuration of each group. Raise ConfigError.

    gpu: the GPU to predict for. runtime: None to plan only. slots: cells that run at the same time.
    """
    groups = make_groups(request.expansion.cells, goal)
    groups = predict_groups(groups, gpu, request.import_paths)
    # A plan may be for another GPU than the one that the folder has results of.
    planned = gpu if runtime is None else None
    with ProgressLine("reading the results"):
        groups = _with_speeds(request, groups, gpu=planned)
    untimed = {
        one.cell.id
        for group in groups
        for one in group.entrants
        if one.status == Status.OK and not one.speed
    }
    if untimed and runtime is not None:
        raise ConfigError(
            f"{request.run}: {cells_and_verb(len(untimed), 'was', 'were')} measured without the time"
            " of a step",
            "Measure them with `sweep run` and --retry ok, or name another --out",
        )
    running = _RunningSearch(request, goal, slots, groups)
    result = None if runtime is None else run_search(request, runtime, running.next_step)
    search = BestSearch(running.groups, goal)
    ends = tuple(search.next(number).reason for number in range(len(groups)))
    found = BestFound(tuple(running.groups), ends, gpu, result)
    if runtime is not None and request.run.exists:
        with open_for_writing(request.run, request.execution.take_over) as writer:
            writer.write_manifest({**writer.read_manifest(), BEST: _record(found, goal)})
    return found


def _record(found: BestFound, goal: Goal) -> Values:
    """Return what run.json holds of a search: its candidates, and why some were not measured."""
    groups = []
    for group, end in zip(found.groups, found.ends, strict=True):
        candidates = {one.cell.id: why_not_measured(group, one, goal) for one in group.entrants}
        default = group.entrants[group.default].cell.id
        groups.append({"default": default, "candidates": candidates, "ended": end})
    return {"over": list(goal.over), "groups": groups}


def why_not_measured(group: SearchGroup, one: Entrant, goal: Goal) -> str:
    """Return why an entrant has no measured step; empty if its expected gain was too small."""
    if one.speed:
        return ""
    if one.status != PENDING:
        return f"ended as {one.status}"
    if one.verdict == "oom":
        return "does not fit"
    if one.verdict in _UNSURE:
        remedy = "" if goal.try_perhaps else ": --try-perhaps measures it"
        return _UNSURE[one.verdict] + remedy
    if not group.may_win(one):
        return f"cannot be faster: its products take at least {1e3 * one.least_s:.1f} ms"
    return "was not measured" if one.was_tried else ""


@dataclass
class _RunningSearch:
    """A search and its groups, which have what was measured so far.

    round: the last one in which answers were confirmed.
    """

    request: SweepRequest
    goal: Goal
    slots: int
    groups: list[SearchGroup]
    round: int = 0

    def next_step(self, tried: Collection[str]) -> SweepRequest | None:
        """Return a request for the cells that are measured next."""
        self.groups = _with_speeds(self.request, self.groups, tried)
        chosen = BestSearch(self.groups, self.goal).round(self.slots)
        # A cell may be a candidate of several groups.
        cells = dict.fromkeys(self.groups[number].entrants[one].cell for number, one in chosen)
        limits_ms, options = beaten_limits_ms(self.groups), self.request.options
        if not cells:
            self.round, pairs = next_round(self.groups, self.goal, self.round)
            cells, limits_ms = dict.fromkeys(pairs), {}
            options = replace(options, repeat=1 + self.round)
        if not cells:
            return None
        return replace(
            self.request,
            expansion=Expansion(tuple(cells)),
            options=options,
            # The GPUs of a cluster are known only when a cell starts there.
            execution=replace(self.request.execution, skip_predicted_oom=True),
            beaten_ms=limits_ms,
        )


def beaten_limits_ms(groups: Iterable[SearchGroup]) -> dict[str, float]:
    """Return by cell the step above which it is beaten: 110 % of the best, of each of its groups."""
    limits_ms: dict[str, float] = {}
    for group in groups:
        # The synced steps of a cell are compared with those of another one: they take longer.
        paces = [
            (one.speed.synced_s or one.speed.step_s) / one.tokens
            for one in group.entrants
            if one.speed
        ]
        best_s = min(paces, default=math.inf)
        for one in group.entrants:
            limit_ms = 1e3 * _BEATEN * best_s * one.tokens
            limits_ms[one.cell.id] = max(limit_ms, limits_ms.get(one.cell.id, 0.0))
    return {cell: limit_ms for cell, limit_ms in limits_ms.items() if limit_ms < math.inf}


def next_round(groups: Iterable[SearchGroup], goal: Goal, last: int) -> tuple[int, list[Cell]]:
    """Return the next round that confirms answers, and its cells: each answer and its default.

    last: number of the last round. Groups that do not have it are left out: it was not measured.
    """
    pairs: dict[int, list[Cell]] = {}  # by the number of rounds that are done
    for group in groups:
        rounds, best = group.rounds, group.challenger
        if best is not None and rounds is not None and last <= rounds < goal.confirm:
            # A B B A: of two GPUs, which may differ, each measures both.
            pair = [best.cell, group.entrants[group.default].cell]
            pairs.setdefault(rounds, []).extend(pair[::-1] if rounds % 2 else pair)
    if not pairs:
        return last, []
    done = min(pairs)
    return done + 1, pairs[done]


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
        prediction, cell = predictions.get(one.cell.id), one.cell
        guess = guess_step(cell, device)
        precision = str(cell.params.values().get("precision", "fp32"))
        work = all_tasks()[cell.task].work(cell.params)
        peak = peak_tflops(device, precision) if cell.params.device == "cuda" else None
        return replace(
            one,
            prediction=prediction,
            verdict=verdict_of(cell, prediction, gpu) if prediction else None,
            guess_s=max(guess),
            is_launch_bound=guess.launch_s >= guess.compute_s,
            is_scale_known=work is not None and peak is not None,
            least_s=_least_s(cell, work, peak),
        )

    return _replaced(groups, complete)


def _least_s(cell: Cell, work: float | None, peak: float | None) -> float:
    """Return the shortest possible step, 0 if it is not known. peak: in TFLOP/s."""
    # The work of a task without tokens may be something else than FLOPs.
    if not work or not peak or not hasattr(cell.params, "tokens"):
        return 0.0
    # Half of them: fused attention skips the masked pairs, and adapters the gradients of weights.
    return work / 2 / (peak * 1e12)


def _with_speeds(
    request: SweepRequest,
    groups: Sequence[SearchGroup],
    tried: Collection[str] = (),
    gpu: GpuModel | None = None,
) -> list[SearchGroup]:
    """Return the groups with what the run has measured. Raise ConfigError.

    tried: cells that were to be measured. gpu: results of other GPUs do not count.
    """
    if not request.run.exists:
        return list(groups)
    results, states = load_results(request.run), read_states(request.run)
    rows = results.cells.to_dict("records")
    gpus = {row["cell"]: row["gpu"] for row in rows if isinstance(row.get("gpu"), str)}
    speeds = speeds_of(results)

    def complete(one: Entrant) -> Entrant:
        if gpu is not None and gpus.get(one.cell.id, gpu.device) != gpu.device:
            return one
        return replace(
            one,
            was_tried=one.was_tried or one.cell.id in tried,
            status=states.get(one.cell.id, CellState()).status,
            speed=speeds.get(one.cell.id),
        )

    for group in groups:
        kinds = sorted({gpus[one.cell.id] for one in group.entrants if one.cell.id in gpus})
        if len(kinds) > 1:
            raise ConfigError(
                f"{request.run}: has results from several kinds of GPU, whose times cannot be "
                f"compared: {', '.join(kinds)}",
                "Name another folder with --out",
            )
    return _replaced(groups, complete)


def _replaced(
    groups: Sequence[SearchGroup], change: Callable[[Entrant], Entrant]
) -> list[SearchGroup]:
    return [replace(group, entrants=tuple(map(change, group.entrants))) for group in groups]
