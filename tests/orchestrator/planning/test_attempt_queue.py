"""In which order cells come, and how long they then take: on GPUs that are numbers, in a time that is counted."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from orchestrator.hardware.host import GpuInfo, HostInfo
from orchestrator.planning import attempt_queue as queue_module
from orchestrator.planning.attempt_queue import AttemptQueue, QueueState
from orchestrator.planning.cell_decisions import make_plan
from orchestrator.planning.duration_estimate import (
    DurationConditions,
    DurationEstimator,
    shared_graph,
)
from orchestrator.planning.invocation import RunOptions
from orchestrator.planning.oom_inference import OomInference
from orchestrator.planning.preflight import Preflight, Slots
from orchestrator.store.cell_state import CellState
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt, Settings, read_attempt
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tests.support.fake_sweep import state_of

GPU = "NVIDIA H200"
Took = Callable[[Cell], float]


def cell(**params: Any) -> Cell:
    return make_cell("train_step", {"size": "small", **params})


DEFAULT_OPTIONS = RunOptions()


def queue_of(
    folder: Path,
    cells: Sequence[Cell],
    options: RunOptions = DEFAULT_OPTIONS,
    states: Mapping[str, CellState] = MappingProxyType({}),
    deadline: float | None = None,
) -> AttemptQueue:
    plan = make_plan(cells, states, options, 3)
    return AttemptQueue(plan, Run(folder), Settings(), deadline)


def test_the_limit_of_a_cell_reaches_its_attempt(tmp_path: Path) -> None:
    cells = [cell(seed=seed) for seed in (0, 1)]
    plan = make_plan(cells, {}, DEFAULT_OPTIONS, 3)
    queue = AttemptQueue(plan, Run(tmp_path), Settings(), None, {cells[1].id: 7.5})
    attempts = [read_attempt(attempt.to_json()) for attempt in queue]
    assert [attempt.settings.beaten_ms for attempt in attempts] == [None, 7.5]
    assert [one.cell.id for one in attempts] == [one.id for one in cells]


def on_gpus(slots: Mapping[str, int]) -> Preflight:
    host = HostInfo(gpus=(GpuInfo(GPU, 1),))
    return Preflight(hosts=(host,), slots=Slots(slots))


class Simulation:
    """Takes cells from a queue as a scheduler with `gpus` GPUs does. began, ended: when each cell did, in seconds."""

    def __init__(
        self, folder: Path, cells: Sequence[Cell], gpus: int, options: RunOptions = DEFAULT_OPTIONS
    ) -> None:
        self.now = 0.0
        self.gpus = gpus
        self.began: list[tuple[float, Cell]] = []
        self.order: list[Cell] = []
        self.queue = queue_of(folder, cells, options)
        self.queue.begin(on_gpus({"cuda": gpus}))

    def run(self, took: Took, ends: Callable[[Cell], Status] = lambda one: Status.OK) -> float:
        """The makespan."""
        attempts, running = iter(self.queue), []
        while True:
            while len(running) < self.gpus and (attempt := next(attempts, None)):
                self.order.append(attempt.cell)
                self.began.append((self.now, attempt.cell))
                heapq.heappush(running, (self.now + took(attempt.cell), len(self.order), attempt))
            if not running:
                return self.now
            self.now, _, ended = heapq.heappop(running)
            self.queue.finished(outcome(ended, ends(ended.cell), took(ended.cell)))


def outcome(attempt: Attempt, status: Status, wall_s: float) -> Outcome:
    return Outcome(attempt, status, "", "", {}, {}, (), 0.0, wall_s)


def a_grid() -> list[Cell]:
    """As people write them: the sizes ascend, so that the longest come last."""
    lengths = (128, 256, 512, 1024)
    return [
        cell(size=size, context_length=length, precision=precision)
        for size in ("small", "medium", "large", "xl", "2.7B")
        for length in lengths
        for precision in ("fp32", "bf16")
    ]


def truth(chance: random.Random) -> Took:
    """What a machine would take that the guess does not know: another pace, and each cell off it by up to a third."""
    guess, off = DurationEstimator([], {}, DurationConditions(GPU)), {}

    def took(one: Cell) -> float:
        return 1.7 * guess.seconds(one) * off.setdefault(one, chance.uniform(0.75, 1.33))

    return took


def test_longest_first_is_within_four_thirds_of_what_no_order_can_beat(tmp_path: Path) -> None:
    cells, took = a_grid(), truth(random.Random(7))
    for gpus in (2, 4, 8):
        longest_first = Simulation(tmp_path, cells, gpus).run(took)
        as_written = _in_the_order_of_the_grid(cells, gpus, took)
        bound = max(sum(map(took, cells)) / gpus, max(map(took, cells)))
        assert longest_first <= as_written
        assert longest_first <= bound * 4 / 3


def _in_the_order_of_the_grid(cells: Sequence[Cell], gpus: int, took: Took) -> float:
    free = [0.0] * gpus
    for one in cells:
        heapq.heapreplace(free, free[0] + took(one))
    return max(free)


def test_one_gpu_keeps_the_order_of_the_grid(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, a_grid(), 1)
    simulation.run(truth(random.Random(1)))
    assert simulation.order == a_grid()


def test_every_cell_once_before_any_again(tmp_path: Path) -> None:
    cells = a_grid()[:6]
    simulation = Simulation(tmp_path, cells, 2, RunOptions(repeat=3))
    simulation.run(truth(random.Random(1)))
    rounds = [simulation.order[start : start + 6] for start in (0, 6, 12)]
    assert all(set(one) == set(cells) for one in rounds)
    assert rounds[0] != cells


def test_the_order_follows_what_is_learnt(tmp_path: Path) -> None:
    """By FLOPs bf16 over 1024 tokens takes longer than fp32 over 256; here it does not, and once one has ended that is known."""
    kinds = (("fp32", 1024), ("bf16", 1024), ("fp32", 256))
    long, quick, medium = (
        [
            cell(size="xl", precision=precision, context_length=length, seed=seed)
            for seed in range(4)
        ]
        for precision, length in kinds
    )
    took = {**dict.fromkeys(long, 10.0), **dict.fromkeys(quick, 1.0), **dict.fromkeys(medium, 5.0)}
    simulation = Simulation(tmp_path, [*medium, *quick, *long], 2)
    simulation.run(took.__getitem__)
    assert simulation.order == [*long, *quick[:2], *medium, *quick[2:]]


def compiled(**params: Any) -> Cell:
    return cell(compile="blocks", **params)


def test_cells_share_a_graph_only_if_they_compile_the_same_code() -> None:
    one = compiled(size="xl")
    same = [
        compiled(
            size="xl",
            seed=3,
            measured_steps=50,
            warmup_steps=9,
            optimizer="fused",
            memory_limit_gib=32.0,
        ),
        compiled(size="xl", **{"pass": "forward_backward"}),
        compiled(size="xl", **{"pass": "forward_grad"}),
        compiled(size=None, d_model=1600, d_ff=6400, num_layers=12, num_heads=25, vocab_size=500),
    ]
    assert {shared_graph(other) for other in same} == {shared_graph(one)}
    others = [
        compiled(),
        compiled(size="xl", context_length=1024),
        compiled(size="xl", precision="bf16"),
        compiled(size="xl", compile_mode="max-autotune"),
        compiled(size="xl", **{"pass": "forward"}),
        cell(size="xl", compile="model"),
        cell(size=None, compile="model", d_model=1600, d_ff=6400, num_layers=12, num_heads=25),
    ]
    assert len({shared_graph(other) for other in [one, *others]}) == 1 + len(others)
    assert shared_graph(cell(size="xl")) is None
    assert shared_graph(compiled(size="xl", compile_cache="cold")) is None


def test_cells_that_share_a_graph_wait_for_the_one_that_fills_the_cache(tmp_path: Path) -> None:
    sharing = [compiled(size="xl", seed=seed) for seed in range(4)]
    simulation = Simulation(tmp_path, [*sharing, *[cell(seed=seed) for seed in range(100)]], 4)
    simulation.run(lambda one: 20.0 if one.params.compiled else 1.0)
    began = sorted(at for at, one in simulation.began if one.params.compiled)
    assert began == [0.0, 20.0, 20.0, 20.0]


def test_cells_that_share_a_graph_do_not_wait_if_no_others_are_left(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, [compiled(seed=seed) for seed in range(4)], 2)
    assert simulation.run(lambda one: 10.0) == 20.0


def test_if_the_first_cell_of_a_graph_fails_the_next_one_fills_the_cache(tmp_path: Path) -> None:
    sharing = [compiled(size="xl", seed=seed) for seed in range(3)]
    simulation = Simulation(tmp_path, [*sharing, *[cell(seed=seed) for seed in range(60)]], 3)
    crashed = lambda one: Status.CRASHED if one == simulation.order[0] else Status.OK  # noqa: E731
    simulation.run(lambda one: 5.0 if one.params.compiled else 1.0, crashed)
    assert simulation.order[0].params.compiled
    assert sorted(at for at, one in simulation.began if one.params.compiled) == [0.0, 5.0, 10.0]


def test_where_memory_is_inferred_small_cells_stay_first(tmp_path: Path) -> None:
    """A large one that ran out would spare nobody."""
    cells = [cell(context_length=length) for length in (128, 256, 512, 1024, 2048)]
    simulation = Simulation(tmp_path, cells, 2, RunOptions(infer_oom=True))
    simulation.run(lambda one: 1.0, lambda one: Status.OOM if one != cells[0] else Status.OK)
    assert simulation.order == cells[:3]
    inferred = simulation.queue.take_inferred()
    assert [outcome.attempt.cell for outcome in inferred] == cells[3:]
    assert simulation.queue.take_inferred() == []
    assert OomInference([cells[1]]).find_smaller(cells[4])


def test_the_time_to_go_is_that_of_all_places_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(queue_module.time, "monotonic", lambda: now)
    cells = [cell(size="xl", seed=seed) for seed in range(6)]
    simulation = Simulation(tmp_path, cells, 2)
    guess = DurationEstimator([], {}, DurationConditions(GPU)).seconds(cells[0])
    assert simulation.queue.remaining_s() == pytest.approx(3 * guess)
    attempts = iter(simulation.queue)
    first, _ = next(attempts), next(attempts)
    now = 10.0
    assert simulation.queue.remaining_s() == pytest.approx(3 * guess - 10)
    simulation.queue.finished(outcome(first, Status.OK, 2 * guess))
    later = simulation.queue.remaining_s()
    assert later is not None
    assert later > 3.5 * guess
    assert queue_of(tmp_path, cells).remaining_s() is None


def test_the_time_to_go_of_many_cells_is_estimated_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((0.0, 1.0, 9.5, 10.5))
    estimates = []
    monkeypatch.setattr(queue_module, "_MANY_CELLS", 5)
    queue = Simulation(tmp_path, [cell(size="xl", seed=seed) for seed in range(6)], 2).queue
    monkeypatch.setattr(
        queue, "_estimate_remaining_s", lambda at_s: estimates.append(at_s) or 100.0
    )
    monkeypatch.setattr(queue_module.time, "monotonic", lambda: next(times))
    assert [queue.remaining_s() for _ in range(4)] == [100.0, 99.0, 90.5, 100.0]
    assert estimates == [0.0, 10.5]


def test_cells_too_long_for_the_time_limit_are_skipped_for_shorter_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module.time, "monotonic", lambda: 0.0)
    long, short = cell(size="2.7B", context_length=1024), cell()
    history = {
        one.id: state_of((Status.OK,), (wall,)) for one, wall in ((long, 60.0), (short, 5.0))
    }
    queue = queue_of(tmp_path, [long, short], RunOptions(repeat=2), history, deadline=30.0)
    queue.begin(on_gpus({"cuda": 2}))
    assert [attempt.cell for attempt in queue] == [short]
    assert queue.state() == QueueState(2, skipped_for_time=1, shortest_skipped_s=60.0)


def test_a_cell_that_cannot_end_in_time_waits_for_nothing(tmp_path: Path) -> None:
    """A cell that waits may have GPUs reserved."""
    long, short = cell(size="xl"), cell(size="small")
    history = {
        one.id: state_of((Status.OK,), (wall,)) for one, wall in ((long, 600.0), (short, 5.0))
    }
    queue = queue_of(tmp_path, [long, short], RunOptions(repeat=2), history, deadline_in(30.0))
    queue.begin(on_gpus({"cuda": 2}))
    assert list(queue.waiting()) == [short]
    assert queue.state().skipped_for_time == 1


def deadline_in(seconds: float) -> float:
    return queue_module.time.monotonic() + seconds


def test_a_cell_that_failed_is_not_repeated(tmp_path: Path) -> None:
    cells = [cell(seed=seed) for seed in range(2)]
    queue = queue_of(tmp_path, cells, RunOptions(repeat=3))
    queue.begin(on_gpus({"cuda": 1}))
    failed = queue.take(cells[0])
    assert failed is not None
    queue.finished(outcome(failed, Status.FAILED, 1.0))
    assert list(queue.waiting()) == [cells[1]] * 3
    assert queue.state().remaining == 1


def test_a_duration_is_unknown_until_a_cell_or_a_peak_is_known(tmp_path: Path) -> None:
    on_cpu = [cell(device="cpu", seed=seed) for seed in range(2)]
    queue = queue_of(tmp_path, on_cpu)
    queue.begin(Preflight(slots=Slots({"cpu": 1})))
    assert queue.expected_s(on_cpu[1]) is None
    taken = queue.take(on_cpu[0])
    assert taken is not None
    queue.finished(outcome(taken, Status.OK, 5.0))
    assert queue.expected_s(on_cpu[1]) == pytest.approx(5.0)
