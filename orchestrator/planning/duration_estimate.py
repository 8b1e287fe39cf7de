"""Estimate how long cells take: from the durations of finished cells, or else from their FLOPs.

No measured number depends on an estimate. It decides the order of cells on several GPUs, and which
cells a time limit leaves out, and it is shown to the user.

The constants of the guess were read off one H200 (torch 2.11). Of 590 cells of configs/full,
memory, compile, precision, attention and attention-long, 88 % took between 2/3 and 1.5 times the
guess, and 97 % between half and twice the guess. On another GPU the guess is scaled by its peak.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.common.text import counted
from orchestrator.hardware.gpu_catalog import peak_tflops
from tasks.spec.attempt import Settings
from tasks.spec.axes import Affects, FrozenValues, Values, axes_with, axes_without, leave_out
from tasks.spec.cell import Cell
from tasks.spec.order_statistics import FEWEST
from tasks.spec.registry import all_tasks
from tasks.spec.status import Status
from tasks.spec.stopping import LEAST_MEASURED_MS

if TYPE_CHECKING:
    from orchestrator.store.cell_state import CellState

_Kind = tuple[tuple[object, ...], bool]  # values that decide the speed; compiled code is cached

_MARGIN = 1.25  # cells of one kind differ in how well they use the device
# Ratio of the most to the least work from which the fixed part of a duration can be separated.
_DISTINCT_WORK = 4.0

# Seconds of a cell without its steps, on an H200: forked, and in a new process that imports torch.
_FORKED_START_S = 0.7
_SPAWNED_START_S = 5.3
_RANK_START_S = 0.4  # of each of several: two took 1.5 s to start and to meet, on H100s
_UNTIMED_STEPS = 3  # without timing: until the memory is steady
_CPU_TFLOPS = 0.05
# An A100's, fp32 and tf32, for a GPU without a peak in gpus.toml.
_UNKNOWN_FP32_TFLOPS, _UNKNOWN_TFLOPS = 19.5, 156.0
# Launching the kernels of one phase of one layer takes this long, however small the layer is.
_LAUNCH_S = {"eager": 1.7e-3, "compiled": 0.3e-3}
_PHASES = {"forward_backward": 2, "train_step": 3}
# These write the (sequence, sequence) scores to memory, whose bandwidth then limits them.
_SCORES_IN_MEMORY = frozenset({"naive", "torch_softmax", "weights_only", "recompute", "math"})

# Seconds to compile (cold) and to load from the cache (warm). Compiled as a whole, xl took 157 s
# cold; large 95 s cold and 40 s warm; small 32 s and 12 s. Compiled by block, 10 s and 3.5 s.
_COMPILE_LAYER_S = {"cold": 3.1, "warm": 1.05}
_COMPILE_BLOCK_S = {"cold": 10.0, "warm": 3.5}
_COMPILE_ATTENTION_S = {"cold": 3.0, "warm": 1.5}
_AUTOTUNE_FACTOR = 12  # in the mode max-autotune, if nothing is cached

# Seen with torch 2.13 on the CPU with compiled blocks: a cell with another seed, number of steps,
# optimizer, vocabulary or number of layers, or with the pass `forward_backward` or `forward_grad`,
# found everything that `train_step` had compiled. `forward` did not. Inductor locks one graph at a
# time, so cells that compile different graphs do not wait for each other.
_NAMES_OF_DIMENSIONS = frozenset({"size", "year", "d_model", "d_ff", "num_layers", "num_heads"})
# Not part of a block's graph: all blocks share one, and embedding and head are outside.
_AROUND_THE_BLOCKS = frozenset({"num_layers", "vocab_size"})
# The optimizer is not compiled, and a forward pass with gradients is compiled together with its
# backward pass.
_GRADIENTS = {"train_step": "forward_backward", "forward_grad": "forward_backward"}


@dataclass(frozen=True)
class DurationConditions:
    """Conditions in which cells run.

    gpu: name as its driver reports it. timed: their steps are timed. forked: their processes are.
    """

    gpu: str | None = None
    timed: bool = True
    forked: bool = True

    @classmethod
    def of(cls, settings: Settings, gpu: str | None) -> DurationConditions:
        """Return the conditions of attempts with these settings."""
        return cls(gpu, "timing" in settings.instruments, settings.start_method != "spawn")


@dataclass
class _MeasuredKind:
    """Sums over the finished cells of a kind: the guessed work of each, and its duration.

    Sums, so that an estimate after each of thousands of cells costs the same.
    """

    shortest_s: float = math.inf
    least_work_s: float = math.inf
    most_work_s: float = 0.0
    work_s: float = 0.0
    squared_work: float = 0.0
    work_times_wall: float = 0.0

    def add(self, work_s: float, wall_s: float) -> None:
        """Add a finished cell."""
        self.shortest_s = min(self.shortest_s, wall_s)
        self.least_work_s = min(self.least_work_s, work_s)
        self.most_work_s = max(self.most_work_s, work_s)
        self.work_s += work_s
        self.squared_work += work_s**2
        self.work_times_wall += work_s * wall_s

    def seconds(self, work_s: float, guessed_fixed_s: float) -> float:
        """Return the likely duration of a cell of this kind: a fixed time and work at a pace."""
        fixed_s = self.shortest_s
        # Repetitions of one amount of work do not show which part of their duration is fixed.
        if self.most_work_s <= _DISTINCT_WORK * self.least_work_s:
            fixed_s = min(guessed_fixed_s, self.shortest_s / 2)
        # Least squares give weight to long cells. The start of short cells varies by seconds: taken
        # for the pace of a tiny cell, that would predict hours for a large one.
        pace = (self.work_times_wall - fixed_s * self.work_s) / self.squared_work
        return fixed_s + pace * work_s


class DurationEstimator:
    """Estimates durations in seconds, and learns from each finished cell.

    A measured cell takes as long again. A cell of a measured kind (same task, device, precision,
    attention, compilation, and compile cache filled or not) takes a fixed time plus its work at the
    pace of that kind. Any other cell takes the guess, times the median ratio of measured to guessed
    durations. What was learned is sorted by kind before the next estimate: a sweep without a time
    limit, on one device and without a terminal, makes none.
    """

    def __init__(
        self,
        cells: Iterable[Cell],
        states: Mapping[str, CellState],
        conditions: DurationConditions | None = None,
    ) -> None:
        self.conditions = conditions or DurationConditions()  # to set before the first estimate
        self._walls_s: dict[str, float] = {}
        self._longest_s = 0.0
        # Learned and not yet sorted: a cell, True if its compiled code was cached, its duration.
        self._unsorted: list[tuple[Cell, bool, float]] = []
        self._sorting = threading.Lock()  # the display estimates in its own thread
        self._measured: dict[_Kind, _MeasuredKind] = {}
        self._guess_ratios: list[float] = []  # of measured to guessed durations, ascending
        self._cached_graphs: set[str] = set()
        for cell in cells:
            if state := states.get(cell.id):
                for attempt in state.attempts:
                    self.learn(cell, attempt.status, attempt.wall_s)

    @property
    def learned(self) -> int:
        """The number of cells whose duration was measured."""
        return len(self._walls_s)

    def learn(self, cell: Cell, status: str, wall_s: float) -> None:
        """Use the duration of a finished attempt for later estimates, if it succeeded."""
        if status != Status.OK:
            return
        graph = shared_graph(cell)
        with self._sorting:
            self._unsorted.append((cell, graph in self._cached_graphs, wall_s))
        self._walls_s[cell.id] = wall_s
        self._longest_s = max(wall_s, self._longest_s)
        if graph:
            self._cached_graphs.add(graph)

    def can_estimate(self, cells: Iterable[Cell]) -> bool:
        """True if a cell was measured, or if all run on a GPU whose peak in their precision is known.

        False if neither the FLOPs of a cell are known nor the duration of another of its kind.
        """
        cells = list(cells)
        if any(map(self.lacks_formula, cells)):
            return False
        if self._walls_s:
            return True
        are_on_gpu = all(cell.params.device == "cuda" for cell in cells)
        return are_on_gpu and not self.precisions_without_peak(cells)

    def precisions_without_peak(self, cells: Iterable[Cell]) -> list[str]:
        """Return the precisions of these cells for which no source gives the GPU's peak."""
        precisions = sorted(set(map(_precision, cells)))
        return [name for name in precisions if peak_tflops(self.conditions.gpu, name) is None]

    def lacks_formula(self, cell: Cell) -> bool:
        """True if nothing says how long a cell takes: no formula, and no measured cell like it."""
        if all_tasks()[cell.task].work(cell.params) is not None:
            return False
        self._sort_measured()
        return _speed_values(cell) not in {values for values, _ in self._measured}

    def is_cached(self, graph: str | None) -> bool:
        """True if a cell that compiles this graph has finished, so that others find it cached."""
        return graph in self._cached_graphs

    def seconds(self, cell: Cell) -> float:
        """Return the likely duration of a cell that starts now."""
        return self._likely_s(cell, self._cached_graphs)

    def seconds_in_order(self, cells: Iterable[Cell]) -> list[float]:
        """Return the durations of cells that start in this order and fill the compile cache."""
        cached = set(self._cached_graphs)
        durations_s = []
        for cell in cells:
            durations_s.append(self._likely_s(cell, cached))
            if graph := shared_graph(cell):
                cached.add(graph)
        return durations_s

    def upper_bound_s(self, cell: Cell) -> float | None:
        """Return a duration that a cell will hardly exceed, or None if nothing was measured yet."""
        if cell.id in self._walls_s or not self._walls_s:
            return self._walls_s.get(cell.id)
        likely_s = self.seconds(cell) * _MARGIN
        kind = _speed_values(cell), self.is_cached(shared_graph(cell))
        if kind in self._measured:
            return likely_s
        # No cell of this kind has finished. Starting one cell too few is better than cutting one
        # off.
        return max(likely_s, self._longest_s)

    def _sort_measured(self) -> None:
        with self._sorting:
            for cell, is_warm, wall_s in self._unsorted:
                kind = _speed_values(cell), is_warm
                insort(self._guess_ratios, wall_s / self._guess_s(cell, is_warm))
                measured = self._measured.setdefault(kind, _MeasuredKind())
                measured.add(_work_s(cell, self.conditions), wall_s)
            self._unsorted.clear()

    def _likely_s(self, cell: Cell, cached_graphs: set[str]) -> float:
        if cell.id in self._walls_s:
            return self._walls_s[cell.id]
        self._sort_measured()
        is_warm = shared_graph(cell) in cached_graphs
        kind = _speed_values(cell), is_warm
        if kind not in self._measured:
            return self._guess_s(cell, is_warm) * self._median_ratio()
        guessed_fixed_s = _fixed_s(cell, self.conditions.forked, is_warm)
        return self._measured[kind].seconds(_work_s(cell, self.conditions), guessed_fixed_s)

    def _guess_s(self, cell: Cell, is_warm: bool) -> float:
        fixed_s = _fixed_s(cell, self.conditions.forked, is_warm)
        return fixed_s + _work_s(cell, self.conditions)

    def _median_ratio(self) -> float:
        count = len(self._guess_ratios)
        if not count:
            return 1.0
        return (self._guess_ratios[(count - 1) // 2] + self._guess_ratios[count // 2]) / 2


@dataclass(frozen=True)
class DurationEstimate:
    """Expected duration of a plan.

    gpu_s: sum over all GPUs. learned: number of finished cells that it is based on; 0 for a guess.
    """

    wall_s: float
    gpu_s: float
    learned: int

    def __str__(self) -> str:
        basis = "from FLOPs; after the first cells, from what they took"
        if self.learned:
            basis = f"from what {counted(self.learned, 'finished cell')} took"
        hours = self.gpu_s / 3600
        if not hours:
            return f"({basis})"
        return f"{_rounded(hours)} GPU-hours ({basis})"


def _rounded(hours: float) -> str:
    if hours < 0.005:
        return "less than 0.01"
    return f"{hours:.1f}" if hours >= 1 else f"{hours:.2f}"


def expect(
    estimator: DurationEstimator, cells: Sequence[Cell], slots: Mapping[str, int]
) -> DurationEstimate | None:
    """Return the expected duration of cells that start in this order, or None if it is unknown.

    slots: number of cells at the same time, by device. With several, the longest cells start first.
    """
    if not cells or not estimator.can_estimate(cells):
        return None
    by_device: dict[str, list[tuple[int, float]]] = {}
    for cell, seconds in zip(cells, estimator.seconds_in_order(cells), strict=True):
        width = max(1, cell.params.gpu_count)
        by_device.setdefault(cell.params.device, []).append((width, seconds))
    wall_s = 0.0
    for device, queue in by_device.items():
        count = slots.get(device, 1)
        if count > 1:
            queue.sort(reverse=True)
        widths, durations = zip(*queue, strict=True)
        wall_s += makespan_s(durations, count, widths=widths)
    gpu_s = sum(width * seconds for width, seconds in by_device.get("cuda", ()))
    return DurationEstimate(wall_s, gpu_s, estimator.learned)


def makespan_s(
    durations_s: Iterable[float],
    slots: int,
    busy_s: Sequence[float] = (),
    widths: Sequence[int] = (),
) -> float:
    """Return the seconds until all jobs have ended. They start in this order as slots become free.

    busy_s: remaining time of each slot that is taken. widths: number of slots that each job needs;
    one if not given.
    """
    free_at_s = [*sorted(busy_s, reverse=True)[:slots], *[0.0] * (slots - len(busy_s))]
    heapq.heapify(free_at_s)
    for duration_s, width in zip(durations_s, widths or itertools.repeat(1), strict=False):
        taken_s = [heapq.heappop(free_at_s) for _ in range(min(width, slots))]
        # Slots are popped in the order in which they become free: the last one decides the start.
        for _ in taken_s:
            heapq.heappush(free_at_s, taken_s[-1] + duration_s)
    return max(free_at_s)


@cache
def _speed_values(cell: Cell) -> tuple[object, ...]:
    values = cell.params.values()
    names = axes_with(type(cell.params), Affects.SPEED)
    return cell.task, *(values[name] for name in names)


@cache
def _work_s(cell: Cell, conditions: DurationConditions) -> float:
    """Return the guessed duration of all steps."""
    step_s = max(guess_step(cell, conditions.gpu))
    if not conditions.timed:
        return step_s * _UNTIMED_STEPS
    # On a GPU the steps are timed twice: each one synchronized, and pipelined.
    modes = 1 if cell.params.device == "cpu" else 2
    values = cell.params.values()
    measured = values.get("measured_steps", 1)
    if measured is None:  # adaptive: a steady cell stops as early as the rule allows
        return step_s * (2 + modes * max(FEWEST, LEAST_MEASURED_MS / 1e3 / step_s))
    return step_s * float(values.get("warmup_steps", 0) + modes * measured)


def _precision(cell: Cell) -> str:
    return str(cell.params.values().get("precision", "fp32"))


class StepGuess(NamedTuple):
    """Times that a step needs at least, in seconds: the longer one is the guess of its duration.

    compute_s: its FLOPs at the usual share of the peak. launch_s: launching its kernels.
    """

    compute_s: float
    launch_s: float


def guess_step(cell: Cell, gpu: str | None) -> StepGuess:
    """Return a guess of the duration of one step on a GPU of this name."""
    values = cell.params.values()
    launch_s = 0.0
    if dimensions := getattr(cell.params, "dimensions", None):
        phases = _PHASES.get(values.get("pass", ""), 1)
        mode = "compiled" if cell.params.compiled else "eager"
        launch_s = dimensions.num_layers * phases * _LAUNCH_S[mode]
    precision = _precision(cell)
    unknown = _UNKNOWN_FP32_TFLOPS if precision == "fp32" else _UNKNOWN_TFLOPS
    peak = peak_tflops(gpu, precision) or unknown
    if cell.params.device == "cpu":
        peak = _CPU_TFLOPS
    work = all_tasks()[cell.task].work(cell.params)
    if work is None:  # then cells are only compared with others of the same model
        work = getattr(cell.params, "tokens", 1) / cell.params.ranks
    return StepGuess(work / (peak * 1e12 * _peak_share(cell, precision)), launch_s)


def _peak_share(cell: Cell, precision: str) -> float:
    """Return the share of the peak that a cell reaches, by its task's own measure of work."""
    is_full, compiled = precision == "fp32", cell.params.compiled
    has_scores = cell.params.values().get("attention") in _SCORES_IN_MEMORY
    if cell.params.device == "cpu" or cell.task == "matmul":
        return 0.8
    if cell.task != "attention":
        if is_full:
            return 0.5
        if has_scores:
            return 0.3 if compiled else 0.1
        return 0.35 if compiled else 0.22
    if not has_scores:
        return 0.3 if is_full else 0.2
    # Limited by the memory bandwidth: the higher the peak, the smaller the share.
    share = 0.08 if is_full else 0.01
    return share * 2.5 if compiled else share


def _fixed_s(cell: Cell, is_forked: bool, is_warm: bool) -> float:
    """Return the guessed duration of everything except the steps: start and compilation."""
    start_s = _FORKED_START_S if is_forked else _SPAWNED_START_S
    if cell.params.ranks > 1:
        start_s += _RANK_START_S * cell.params.ranks
    if not cell.params.compiled:
        return start_s
    values, cache_state = cell.params.values(), "warm" if is_warm else "cold"
    compile_s = _COMPILE_BLOCK_S[cache_state]
    dimensions = getattr(cell.params, "dimensions", None)
    if cell.task == "attention":
        compile_s = _COMPILE_ATTENTION_S[cache_state]
    elif values.get("compile") == "model" and dimensions:
        compile_s = int(dimensions.num_layers) * _COMPILE_LAYER_S[cache_state]
    if values.get("compile_mode") == "max-autotune" and not is_warm:
        compile_s *= _AUTOTUNE_FACTOR
    return start_s + compile_s


@cache
def shared_graph(cell: Cell) -> str | None:
    """Return an identity of the graphs that a cell compiles: equal for cells that share them.

    None if the cell compiles nothing, or into a separate cache.
    """
    values = cell.params.values()
    if not cell.params.compiled or values.get("compile_cache") == "cold":
        return None
    traced = _traced_values(cell, values)
    if values.get("compile") == "blocks":
        traced = leave_out(traced, _AROUND_THE_BLOCKS)
    return repr((cell.task, cell.version, sorted(traced.items())))


def _traced_values(cell: Cell, values: FrozenValues) -> Values:
    """Return the parameters that enter the graphs, with a size replaced by its dimensions."""
    traced = leave_out(values, axes_without(type(cell.params), Affects.GRAPH))
    traced["pass"] = _GRADIENTS.get(values.get("pass", ""), values.get("pass"))
    dimensions = getattr(cell.params, "dimensions", None)
    if dimensions is None:
        return traced
    return {**leave_out(traced, _NAMES_OF_DIMENSIONS), **vars(dimensions)}
