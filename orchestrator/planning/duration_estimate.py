"""How long cells take: from what they took, or else from what they compute and what a GPU can do.

Nothing here is exact, and nothing measured rests on it: by it the longest cells begin first where several run at once, a
time limit is kept, and people are told how long they will wait.

The figures of the guess were read off one H200 (torch 2.11): of 590 cells of configs/full, memory, compile, precision, attention
and attention-long 88 % took between two thirds and one and a half times as long as guessed, and 97 % between half and twice. On
another GPU they are scaled by its peak, and the first cells that end correct them.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from orchestrator.hardware.gpu_catalog import peak_tflops
from tasks.spec.attempt import Settings
from tasks.spec.axes import Affects, axes_with
from tasks.spec.cell import Cell
from tasks.spec.compile_groups import shared_graph
from tasks.spec.order_statistics import FEWEST
from tasks.spec.registry import all_tasks
from tasks.spec.status import Status
from tasks.spec.stopping import LEAST_MEASURED_MS

if TYPE_CHECKING:
    from orchestrator.planning.history import CellHistory

_Kind = tuple[
    tuple[object, ...], bool
]  # by what cells are alike, and whether their cache was filled
MARGIN = 1.25  # cells of one kind differ in how well they use the device

_START_S = 0.7  # beside its steps, forked; see README
_START_OF_FRESH_S = 5.3
_ENOUGH = 4.0  # times as much work, to tell what is fixed from what grows with it
_STEPS_UNTIMED = 3  # of a cell that is not timed: until memory is steady
_UNKNOWN_TFLOPS = {
    "fp32": 19.5,
    "narrow": 156.0,
}  # of a GPU without a peak in gpus.toml: an A100's, fp32 and tf32
_CPU_TFLOPS = 0.05
_LAUNCH_S = {"eager": 1.7e-3, "compiled": 0.3e-3}  # a layer and phase take no less, however small
_PHASES = {"forward_backward": 2, "train_step": 3}
_WRITTEN_OUT = frozenset({"naive", "torch_softmax", "weights_only", "recompute", "math"})

# Seconds to compile, and to load from the cache: xl whole took 157 cold, large 95 and 40, small 32 and 12; by block 10 and 3.5.
_COMPILE_LAYER_S = {"cold": 3.1, "warm": 1.05}
_COMPILE_BLOCK_S = {"cold": 10.0, "warm": 3.5}
_COMPILE_ATTENTION_S = {"cold": 3.0, "warm": 1.5}
_AUTOTUNING = 12  # times as long, in the mode max-autotune


@dataclass(frozen=True)
class DurationConditions:
    """What cells run on, and how. gpu: by its driver's name. timed: whether their steps are timed. forked: their processes."""

    gpu: str | None = None
    timed: bool = True
    forked: bool = True

    @classmethod
    def of(cls, settings: Settings, gpu: str | None) -> DurationConditions:
        return cls(gpu, "timing" in settings.instruments, settings.start_method != "spawn")


_USUAL = DurationConditions()


class DurationEstimator:
    """How long a cell will take, from how long others took, and before that from its FLOPs.

    A cell that was measured before takes as long again. Another takes what is fixed, plus its work at the pace of cells of the
    same kind (same task, device, precision, attention and compilation, from a cold cache or a warm one), by least squares, so
    that the long ones count and the scatter of short ones does not. What is fixed is the shortest time seen, where the work
    of those seen differs enough to tell it from their pace, and the guess elsewhere. With none alike finished it is the guess
    from its FLOPs, times what others took over what was guessed of them. A display may ask in a thread of its own.
    """

    def __init__(
        self,
        cells: Iterable[Cell],
        history: Mapping[str, CellHistory],
        conditions: DurationConditions = _USUAL,
    ) -> None:
        self._conditions = conditions
        self._walls: dict[str, float] = {}
        self._longest = 0.0
        self._alike: dict[_Kind, list[tuple[float, float]]] = {}
        self._rates: dict[
            _Kind, tuple[float, float]
        ] = {}  # what is fixed, and the pace, until more is learnt
        self._over_guess: list[float] = []
        self._correction: float | None = None  # until more is learnt
        self._filled: set[str] = set()
        for cell in cells:
            past = history.get(cell.id)
            for status, wall in zip(past.statuses, past.walls_s, strict=True) if past else ():
                self.learn(cell, status, wall)

    @property
    def learned(self) -> int:
        """Of how many cells it knows how long they took."""
        return len(self._walls)

    def learn(self, cell: Cell, status: Status, wall_s: float) -> None:
        if status is not Status.OK:
            return
        graph = shared_graph(cell)
        is_warm = graph in self._filled
        self._over_guess.append(wall_s / self._guess(cell, is_warm))
        self._correction = None
        self._alike.setdefault((_kind(cell), is_warm), []).append((self._work_s(cell), wall_s))
        self._rates.pop((_kind(cell), is_warm), None)
        self._walls[cell.id] = wall_s
        self._longest = max(wall_s, self._longest)
        if graph:
            self._filled.add(graph)

    def knows(self, cells: Iterable[Cell]) -> bool:
        """Whether there is more to go by than an assumption: what cells took, or a GPU whose peak is known."""
        known = peak_tflops(self._conditions.gpu, "bf16") is not None
        return bool(self._walls) or (known and all(cell.params.device == "cuda" for cell in cells))

    def is_filled(self, graph: str | None) -> bool:
        """Whether a cell that compiles this has ended, so that the next one finds it in the cache."""
        return graph in self._filled

    def seconds(self, cell: Cell) -> float:
        """The likely duration."""
        return self._likely(cell, self.is_filled(shared_graph(cell)))

    def each(self, cells: Iterable[Cell]) -> list[float]:
        """Of several that begin in this order: what compiles the same as one before finds its cache filled."""
        filled, found = set(self._filled), []
        for cell in cells:
            graph = shared_graph(cell)
            found.append(self._likely(cell, graph in filled))
            if graph:
                filled.add(graph)
        return found

    def upper_bound_s(self, cell: Cell) -> float | None:
        """What it will hardly exceed. None before anything is finished: a guess alone holds nothing back.

        One with none alike finished may take as long as the longest of all: better to start a cell too few than one that
        is cut off.
        """
        if not self._walls or cell.id in self._walls:
            return self._walls.get(cell.id)
        likely = self.seconds(cell) * MARGIN
        alike = (_kind(cell), self.is_filled(shared_graph(cell))) in self._alike
        return likely if alike else max(likely, self._longest)

    def _likely(self, cell: Cell, is_warm: bool) -> float:
        if cell.id in self._walls:
            return self._walls[cell.id]
        kind = (_kind(cell), is_warm)
        if kind not in self._alike:
            return self._guess(cell, is_warm) * self._corrected()
        fixed, pace = self._rates.get(kind) or _fit(self._alike[kind], self._fixed_s(cell, is_warm))
        self._rates[kind] = fixed, pace
        return fixed + pace * self._work_s(cell)

    def _guess(self, cell: Cell, is_warm: bool) -> float:
        return self._fixed_s(cell, is_warm) + self._work_s(cell)

    def _fixed_s(self, cell: Cell, is_warm: bool) -> float:
        return (_START_S if self._conditions.forked else _START_OF_FRESH_S) + _compiling_s(
            cell, is_warm
        )

    def _work_s(self, cell: Cell) -> float:
        return _steps_s(cell, self._conditions)

    def _corrected(self) -> float:
        known = self._correction
        if known is None:
            known = self._correction = (
                statistics.median(self._over_guess) if self._over_guess else 1.0
            )
        return known


def _fit(alike: Sequence[tuple[float, float]], guessed_fixed_s: float) -> tuple[float, float]:
    """What is fixed, and the pace, of pairs of work and time."""
    works, shortest = [work for work, _ in alike], min(wall for _, wall in alike)
    fixed = shortest if max(works) > _ENOUGH * min(works) else min(guessed_fixed_s, shortest / 2)
    return fixed, sum((wall - fixed) * work for work, wall in alike) / sum(
        work**2 for work in works
    )


@dataclass(frozen=True)
class DurationEstimate:
    """What a plan is expected to take. gpu_s: of all GPUs together. learned: from how many finished cells; 0 where by guess."""

    wall_s: float
    gpu_s: float
    learned: int

    def __str__(self) -> str:
        hours, cells = (
            self.gpu_s / 3600,
            f"{self.learned} finished cell{'s' if self.learned > 1 else ''}",
        )
        how = (
            f"from what {cells} took"
            if self.learned
            else "from FLOPs; after the first cells, from what they took"
        )
        shown = (
            f"{hours:.1f}" if hours >= 1 else f"{hours:.2f}" if hours >= 0.005 else "less than 0.01"
        )
        return f"{shown} GPU-hours ({how})" if hours else f"({how})"


def expect(
    estimator: DurationEstimator, cells: Sequence[Cell], places: Mapping[str, int]
) -> DurationEstimate | None:
    """Of cells that begin in this order, longest first where there are several places. places: at once, by device.

    None where nothing is known yet, or nothing is to be done.
    """
    if not cells or not estimator.knows(cells):
        return None
    by_device: dict[str, list[tuple[int, float]]] = {}
    for cell, seconds in zip(cells, estimator.each(cells), strict=True):
        by_device.setdefault(cell.params.device, []).append(
            (max(1, cell.params.gpu_count), seconds)
        )
    walls = []
    for device, each in by_device.items():
        at_once = places.get(device, 1)
        turns = sorted(each, reverse=True) if at_once > 1 else each
        walls.append(
            makespan_s(
                [seconds for _, seconds in turns], at_once, widths=[width for width, _ in turns]
            )
        )
    gpu_s = sum(width * seconds for width, seconds in by_device.get("cuda", []))
    return DurationEstimate(sum(walls), gpu_s, estimator.learned)


def makespan_s(
    durations: Iterable[float],
    at_once: int,
    under_way: Sequence[float] = (),
    widths: Iterable[int] | None = None,
) -> float:
    """Until all have ended, each begun in its turn as soon as one of `at_once` places is free, or as many as it takes.

    under_way: of each place that is taken, what is still to come. widths: how many places each takes; one unless it is said.
    """
    places = [*sorted(under_way, reverse=True)[:at_once], *[0.0] * (at_once - len(under_way))]
    heapq.heapify(places)
    for duration, width in zip(
        durations, itertools.repeat(1) if widths is None else widths, strict=False
    ):
        taken = [heapq.heappop(places) for _ in range(min(width, at_once))]
        for _ in taken:
            heapq.heappush(places, taken[-1] + duration)
    return max(places)


@cache
def _kind(cell: Cell) -> tuple[object, ...]:
    values = cell.params.values()
    names = sorted(axes_with(type(cell.params), Affects.SPEED))
    return cell.task, *(values[name] for name in names)


@cache
def _steps_s(cell: Cell, conditions: DurationConditions) -> float:
    """Of all steps, by the guess. Timed ones are waited for and, where the host runs ahead of the device, taken again without."""
    step_s = _step_s(cell, conditions.gpu)
    modes = 1 if cell.params.device == "cpu" else 2
    return step_s * (_timed_steps(cell, step_s, modes) if conditions.timed else _STEPS_UNTIMED)


def _timed_steps(cell: Cell, step_s: float, modes: int) -> float:
    values = cell.params.values()
    measured = values.get("measured_steps", 1)
    if measured is None:  # as many as it takes: of a steady cell no more than must be
        return 2 + modes * max(FEWEST, LEAST_MEASURED_MS / 1e3 / step_s)
    return float(values.get("warmup_steps", 0) + modes * measured)


def _step_s(cell: Cell, gpu: str | None) -> float:
    """Of one step: its FLOPs at the share of the peak that such cells reach, and no less than launching it takes."""
    values = cell.params.values()
    dimensions = getattr(cell.params, "dimensions", None)
    phases = _PHASES.get(values.get("pass", ""), 1)
    launches = (
        dimensions.num_layers * phases * _LAUNCH_S["compiled" if cell.params.compiled else "eager"]
        if dimensions
        else 0.0
    )
    precision = str(values.get("precision", "fp32"))
    rate = _peak_flops(cell.params.device, gpu, precision) * _efficiency(cell, precision)
    return max(launches, float(all_tasks()[cell.task].work(cell.params)) / rate)


def _peak_flops(device: str, gpu: str | None, precision: str) -> float:
    if device == "cpu":
        return _CPU_TFLOPS * 1e12
    known = peak_tflops(gpu, precision)
    return (known or _UNKNOWN_TFLOPS["fp32" if precision == "fp32" else "narrow"]) * 1e12


def _efficiency(cell: Cell, precision: str) -> float:
    """What share of the peak such a cell reaches, by its task's own measure of work."""
    if cell.params.device == "cpu" or cell.task == "matmul":
        return 0.8
    full = precision == "fp32"
    if cell.task == "attention":  # bound by memory where the squares are written out
        if cell.params.values().get("attention") not in _WRITTEN_OUT:
            return 0.3 if full else 0.2
        return (0.08 if full else 0.01) * (2.5 if cell.params.compiled else 1.0)
    return 0.5 if full else 0.3 if cell.params.compiled else 0.1


def _compiling_s(cell: Cell, is_warm: bool) -> float:
    if not cell.params.compiled:
        return 0.0
    values, cache_is = cell.params.values(), "warm" if is_warm else "cold"
    tuned = _AUTOTUNING if values.get("compile_mode") == "max-autotune" and not is_warm else 1
    dimensions = getattr(cell.params, "dimensions", None)
    if cell.task == "attention":
        return tuned * _COMPILE_ATTENTION_S[cache_is]
    if values.get("compile") == "model" and dimensions:
        return tuned * int(dimensions.num_layers) * _COMPILE_LAYER_S[cache_is]
    return tuned * _COMPILE_BLOCK_S[cache_is]
