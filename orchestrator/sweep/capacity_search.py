"""The largest context or batch that fits: by prediction and bisection, and, where asked, confirmed by measuring.

    cells ─without the axis→ groups ─predict, bisect→ Limit ─measure, bisect→ Limit

What is measured goes through `run_sweep`: its rows are kept in the run's folder, and are not measured again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.common.errors import ConfigError
from orchestrator.config.grid import Expansion
from orchestrator.execution.host_probe import probe_here
from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.planning.history import CellHistory, read_histories
from orchestrator.planning.memory_prediction import cap_bytes, predicting, verdict_of
from orchestrator.planning.options import ExecutionOptions
from orchestrator.planning.preflight import smallest_gpu
from orchestrator.planning.request import SweepRequest
from orchestrator.scheduling.scheduler import ReusableScheduler
from orchestrator.sweep.pipeline import run_sweep
from orchestrator.sweep.result import SweepResult
from orchestrator.sweep.runtime import Runtime
from tasks.prediction.records import AS_EAGER, Prediction, unsupported_reason
from tasks.spec.cell import Cell
from tasks.spec.registry import make_cell
from tasks.spec.status import Status

_DECIDED = frozenset({Status.OK, Status.OOM})


@dataclass(frozen=True)
class Bounds:
    """Multiples of `granularity` along `axis` are tried, none above `up_to`."""

    axis: str
    granularity: int
    up_to: int


class Search:
    """The largest multiple that fits. fits, fails: the largest known to, 0 for none, and the smallest known not to.

    It tries the hints first, then ever larger steps until something fails, then halves what is between.
    """

    def __init__(self, bounds: Bounds, hints: Iterable[int] = ()) -> None:
        self._step = self._granularity = bounds.granularity
        self._most = bounds.up_to // bounds.granularity * bounds.granularity
        self._hints = tuple(hints)
        self.fits = 0
        self.fails: int | None = None

    @property
    def next(self) -> int | None:
        """What to try; None where all is known."""
        end = self._most + self._granularity if self.fails is None else self.fails
        if end - self.fits <= self._granularity:
            return None
        hint = next((hint for hint in self._hints if self.fits < hint < end), None)
        if hint is not None:
            return hint
        if self.fails is None:
            return min(self.fits + self._step, self._most)
        return self.fits + max(1, (end - self.fits) // self._granularity // 2) * self._granularity

    def learn(self, value: int, fits: bool) -> None:
        if fits:
            self.fits = max(self.fits, value)
            self._step *= 2
        else:
            self.fails = value if self.fails is None else min(self.fails, value)


@dataclass
class Limit:
    """What was found of one cell whose axis is left open.

    surely: the largest that fits with a margin; perhaps: the largest that may, None where nobody can tell; unpredicted: why
    predicting came to no end. measured: where it was; failure: why that came to no end.
    """

    at: Callable[[int], Cell]
    surely: Search
    perhaps: Search | None
    predictions: dict[int, Prediction] = field(default_factory=dict)
    unpredicted: str = ""
    measured: Search | None = None
    failure: str = ""


def open_groups(expansion: Expansion, bounds: Bounds) -> list[Limit]:
    """One for all cells that differ in the axis alone. Raises ConfigError where no task has it."""
    groups: dict[str, Limit] = {}
    for cell in expansion.cells:
        values = cell.params.values()
        if bounds.axis in values:
            at = _at(
                cell.task,
                {name: value for name, value in values.items() if name != bounds.axis},
                bounds.axis,
            )
            groups.setdefault(at(bounds.granularity).id, Limit(at, Search(bounds), Search(bounds)))
    if not groups:
        tasks = ", ".join(sorted({cell.task for cell in expansion.cells}))
        raise ConfigError(
            f"{tasks}: has no axis {bounds.axis!r}", "Name a sweep of train_step or attention"
        )
    return list(groups.values())


def _at(task: str, others: Mapping[str, Any], axis: str) -> Callable[[int], Cell]:
    return lambda value: make_cell(task, {**others, axis: value})


def _check_ceilings(request: SweepRequest, groups: Iterable[Limit], bounds: Bounds) -> None:
    """Without one the search would go on until the machine ends other programs. Raises ConfigError."""
    cells = [group.at(bounds.granularity) for group in groups]
    endless = [
        cell
        for cell in cells
        if cell.params.device == "cpu" and cell.params.memory_limit_gib is None
    ]
    if endless and request.config.limits.host_memory_gib is None:
        raise ConfigError(
            "--confirm: on the CPU nothing says when memory ends", "Add --set memory_limit_gib=8"
        )


def _own_gpu(groups: Iterable[Limit], bounds: Bounds, measures: bool) -> GpuModel | None:
    """This machine's GPU, where something depends on it. Raises ConfigError where that is so and there is none."""
    cells = [group.at(bounds.granularity) for group in groups]
    predicted = [cell for cell in cells if not unsupported_reason(cell)]
    unlimited = [cell for cell in predicted if cap_bytes(cell, None) is None]
    if not (unlimited or (measures and predicted)):
        return None
    card = smallest_gpu([probe_here()])
    if card is None and unlimited:
        raise ConfigError(
            "for which GPU? This machine has none",
            "Add --gpu 'RTX 5090' or --set memory_limit_gib=32",
        )
    return card


def predict_limits(
    groups: Sequence[Limit], bounds: Bounds, card: GpuModel | None, paths: tuple[str, ...]
) -> None:
    """Fills in what prediction finds, of all cells at once, step by step."""
    with predicting(card, paths) as predict:
        while asked := [
            (group, value) for group in groups if (value := _next_to_predict(group)) is not None
        ]:
            found = predict([group.at(value) for group, value in asked])
            for group, value in asked:
                cell = group.at(value)
                _learn_prediction(group, value, cell, found[cell.id], card)


def _next_to_predict(group: Limit) -> int | None:
    if group.unpredicted:
        return None
    value = group.surely.next
    return group.perhaps.next if value is None and group.perhaps is not None else value


def _learn_prediction(
    group: Limit, value: int, cell: Cell, prediction: Prediction, card: GpuModel | None
) -> None:
    group.predictions[value] = prediction
    verdict = verdict_of(cell, prediction, card)
    if verdict is None:
        group.unpredicted = f"{value} cannot be predicted: {prediction.reason}"
        return
    if prediction.how == AS_EAGER:  # compiled it may take less: nothing is known not to fit
        group.perhaps = None
    group.surely.learn(value, verdict == "fits")
    if group.perhaps is not None:
        group.perhaps.learn(value, verdict != "oom")


def confirm_limits(
    request: SweepRequest, groups: Sequence[Limit], bounds: Bounds, runtime: Runtime
) -> SweepResult | None:
    """Measure what was found and what is next to it, and continue from there if it is not so.

    What the folder has already is not measured again. Returns the result of the last round, or None
    if nothing was left to measure.
    """
    started_s, result = time.monotonic(), None
    for group in groups:
        group.measured = Search(bounds, _hints(group))
    reusable = ReusableScheduler(lambda example: runtime.open_scheduler(request.execution, example))
    shared = replace(runtime, open_scheduler=lambda _, example: reusable.opened(example))
    try:
        while asked := _to_measure(request, groups):
            cells = Expansion(tuple({cell.id: cell for _, _, cell in asked}.values()))
            execution = _with_time_left(request.execution, started_s)
            step = replace(request, expansion=cells, execution=execution, is_search=True)
            result = run_sweep(step, shared)
            _learn_measured(request, asked)
            if result.is_cut_short:
                break
    finally:
        reusable.close()
    return result


def _with_time_left(execution: ExecutionOptions, started_s: float) -> ExecutionOptions:
    if execution.time_limit_s is None:
        return execution
    elapsed_s = time.monotonic() - started_s
    return replace(execution, time_limit_s=execution.time_limit_s - elapsed_s)


def _hints(group: Limit) -> list[int]:
    """What is predicted to fit, and what is predicted not to."""
    fails = (group.perhaps or group.surely).fails
    return [value for value in (group.surely.fits, fails) if value]


def _to_measure(request: SweepRequest, groups: Iterable[Limit]) -> list[tuple[Limit, int, Cell]]:
    """The next of each group that is not known from the run's folder."""
    history = read_histories(request.run)
    asked = []
    for group in groups:
        while (value := _next_to_measure(group)) is not None:
            cell = group.at(value)
            status = history.get(cell.id, CellHistory()).status
            if status not in _DECIDED:
                asked.append((group, value, cell))
                break
            _learn_status(group, value, status)
    return asked


def _next_to_measure(group: Limit) -> int | None:
    return group.measured.next if group.measured is not None and not group.failure else None


def _learn_measured(request: SweepRequest, asked: Iterable[tuple[Limit, int, Cell]]) -> None:
    """Of those that were begun: a round may end before all of them were."""
    history = read_histories(request.run)
    for group, value, cell in asked:
        if cell.id in history:
            _learn_status(group, value, history[cell.id].status)


def _learn_status(group: Limit, value: int, status: str) -> None:
    if status in _DECIDED and group.measured is not None:
        group.measured.learn(value, status == Status.OK)
    else:
        group.failure = f"{value} ended as {status}"


@dataclass(frozen=True)
class Found:
    """The limits of all groups. gpu: where they hold. result: of the last round of measuring."""

    groups: Sequence[Limit]
    gpu: GpuModel | None
    result: SweepResult | None = None


def find_limits(
    request: SweepRequest, bounds: Bounds, gpu: GpuModel | None, runtime: Runtime | None
) -> Found:
    """Predict the limits, and measure them too if there is a runtime. Raises ConfigError.

    gpu: the GPU that was named; None: this machine's.
    """
    if bounds.up_to < bounds.granularity:
        raise ConfigError(
            f"--up-to {bounds.up_to}: is less than the granularity, {bounds.granularity}",
            "Name a larger one",
        )
    groups = open_groups(request.expansion, bounds)
    if runtime is not None:
        _check_ceilings(request, groups, bounds)
    gpu = gpu or _own_gpu(groups, bounds, runtime is not None)
    predict_limits(groups, bounds, gpu, request.import_paths)
    if runtime is None:
        return Found(groups, gpu)
    return Found(groups, gpu, confirm_limits(request, groups, bounds, runtime))
