"""The search of the fastest configuration, with speeds that a test decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis.fastest import Speed
from orchestrator.analysis.results import load_results
from orchestrator.common.errors import ConfigError
from orchestrator.config.grid import Expansion
from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.planning.invocation import ExecutionOptions, RunOptions, last_sweep
from orchestrator.store.run import Run
from orchestrator.sweep import best_search
from orchestrator.sweep.best_groups import Entrant, Goal, SearchGroup, make_groups
from orchestrator.sweep.best_search import BestFound, BestSearch, beaten_limits_ms, find_best
from tasks.spec.attempt import Attempt
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tasks.spec.stopping import StepDurations
from tasks.spec.tables import Sample
from tests.support.fake_sweep import FakeScheduler, fake_runtime, go, request_for

OVER = ("precision", "compile")
ADAPTIVE = """
name: adaptive
grids:
  - task: train_step
    axes: {attention: [naive, sdpa], optimizer: [course, foreach, fused]}
    fixed: {device: cpu, size: tiny, timing: adaptive}
"""
Duration = Callable[[Entrant], float]


def cells(sizes: Sequence[str] = ("small",), **values: object) -> list[Cell]:
    return [
        make_cell(
            "train_step",
            {"device": "cuda", "size": size, "precision": precision, "compile": how, **values},
        )
        for size in sizes
        for precision in ("fp32", "tf32", "bf16")
        for how in ("eager", "blocks")
    ]


def speed(step_s: float, peak_bytes: float | None = None, is_cpu_bound: bool = False) -> Speed:
    return Speed(step_s, step_s, step_s, is_cpu_bound, peak_bytes)


def play(
    groups: Sequence[SearchGroup], goal: Goal, duration: Duration, most: int = 1
) -> list[SearchGroup]:
    """Return the groups when a search has ended. Each cell takes as long as a test says."""
    now = list(groups)
    while chosen := BestSearch(now, goal).round(most):
        assert len(chosen) <= most
        assert len(set(chosen)) == len(chosen)
        for number, position in chosen:
            one = now[number].entrants[position]
            assert one.speed is None
            entrants = list(now[number].entrants)
            entrants[position] = replace(one, speed=speed(duration(one)), status="ok")
            now[number] = replace(now[number], entrants=tuple(entrants))
    return now


def words(one: Entrant | None) -> str:
    assert one is not None
    return " ".join(map(str, one.options.values()))


def by_options(one: Entrant) -> float:
    """Return the duration of a step: bf16 is fast, and compiling helps a little."""
    precision = {"fp32": 1.0, "tf32": 0.5, "bf16": 0.3}[str(one.options["precision"])]
    return precision * (0.8 if one.options["compile"] == "blocks" else 1.0)


@pytest.mark.parametrize("most", [1, 4])
def test_the_fastest_one_is_found_without_measuring_all(most: int) -> None:
    groups = make_groups(cells(("small", "medium", "large", "xl")), Goal(OVER))
    ended = play(groups, Goal(OVER), by_options, most)
    assert [words(group.winner) for group in ended] == ["bf16 blocks"] * 4
    assert sum(len(group.measured) for group in ended) < 4 * 6
    for group in ended:
        assert group.entrants[group.default].speed
        assert words(group.entrants[group.default]) == "fp32 eager"


def test_what_is_measured_already_is_not_measured_again() -> None:
    groups = make_groups(cells(), Goal(OVER))
    ended = play(groups, Goal(OVER), by_options)
    assert BestSearch(ended, Goal(OVER)).round(8) == []
    # From any state in between, the search ends with the same answer.
    for count in range(1, 7):
        entrants = [
            replace(one, speed=speed(by_options(one)), status="ok") if number < count else one
            for number, one in enumerate(groups[0].entrants)
        ]
        begun = [replace(groups[0], entrants=tuple(entrants))]
        assert words(play(begun, Goal(OVER), by_options)[0].winner) == "bf16 blocks"


def test_what_does_not_fit_never_runs() -> None:
    verdicts = ["oom", "perhaps", "unlikely", "borderline", "fits", "oom"]
    group = make_groups(cells(), Goal(OVER))[0]
    entrants = [
        replace(one, verdict=verdict)  # type: ignore[arg-type]
        for one, verdict in zip(group.entrants, verdicts, strict=True)
    ]
    group = replace(group, entrants=tuple(entrants))
    ended = play([group], Goal(OVER), by_options)[0]
    assert [words(one) for one in ended.measured] == ["bf16 eager"]
    ended = play([group], Goal(OVER, try_perhaps=True), by_options)[0]
    assert {one.verdict for one in ended.measured} <= {"fits", "perhaps", "borderline", "unlikely"}
    assert len(ended.measured) > 1


def test_a_cell_that_failed_is_not_tried_for_ever() -> None:
    group = make_groups(cells(), Goal(OVER))[0]
    entrants = tuple(replace(one, was_tried=True, status="failed") for one in group.entrants)
    search = BestSearch([replace(group, entrants=entrants)], Goal(OVER))
    assert search.next(0).reason == "every candidate that may run was tried"
    assert replace(group, entrants=entrants).winner is None


@pytest.mark.parametrize(
    ("is_cpu_bound", "share", "winner"),
    [
        (False, 0.97, "bf16 eager"),
        (False, 0.99, "fp32 eager"),
        (True, 0.75, "fp32 eager"),
        (True, 0.65, "bf16 eager"),
    ],
)
def test_only_what_is_surely_faster_is_recommended(
    is_cpu_bound: bool, share: float, winner: str
) -> None:
    group = make_groups(cells(), Goal(OVER))[0]
    steps = {"fp32 eager": 1.0, "bf16 eager": share}
    entrants = tuple(
        replace(one, speed=speed(steps[words(one)], is_cpu_bound=is_cpu_bound), status="ok")
        if words(one) in steps
        else one
        for one in group.entrants
    )
    assert words(replace(group, entrants=entrants).winner) == winner


def test_of_two_that_are_as_fast_the_smaller_one_wins() -> None:
    group = make_groups(cells(), Goal(OVER))[0]
    known = {"fp32 eager": (1.0, 9e9), "bf16 eager": (0.5, 8e9), "bf16 blocks": (0.505, 5e9)}
    entrants = tuple(
        replace(one, speed=speed(*known[words(one)]), status="ok") if words(one) in known else one
        for one in group.entrants
    )
    assert words(replace(group, entrants=entrants).winner) == "bf16 blocks"


def test_no_search_recommends_what_is_slower_than_the_default() -> None:
    chance = random.Random(0)
    for _ in range(300):
        truth: dict[str, float] = {}

        def noisy(one: Entrant, truth: dict[str, float] = truth) -> float:
            truth[one.cell.id] = chance.lognormvariate(0, 0.02)
            return truth[one.cell.id] * chance.lognormvariate(0, 0.0015)

        goal = Goal(OVER, default={"precision": ["bf16"], "compile": ["blocks"]})
        ended = play(make_groups(cells(), goal), goal, noisy)[0]
        winner, default = ended.winner, ended.entrants[ended.default]
        assert words(default) == "bf16 blocks"
        assert winner is not None
        assert truth[winner.cell.id] <= truth[default.cell.id]


def test_batches_are_compared_by_their_tokens() -> None:
    goal = Goal(("batch_size",))
    sizes = [
        make_cell("train_step", {"device": "cuda", "size": "small", "batch_size": size})
        for size in (1, 2, 4)
    ]
    seconds = {1: 0.1, 2: 0.15, 4: 0.4}
    ended = play(make_groups(sizes, goal), goal, lambda one: seconds[one.cell.params.batch_size])[0]
    assert words(ended.winner) == "2"


def test_a_default_that_is_no_candidate_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--default precision=fp16: is none of the candidates"):
        make_groups(cells(), Goal(OVER, default={"precision": ["fp16"]}))


def test_cells_without_an_axis_that_they_do_not_need_are_candidates() -> None:
    """One GPU has no `parallel`, and eager code no `compile_mode`."""
    ranked = [
        make_cell("train_step", {"device": "cuda", "size": "small", "gpus": 1}),
        *(
            make_cell("train_step", {"size": "small", "gpus": gpus, "parallel": how})
            for how in ("ddp", "fsdp2")
            for gpus in (2, 4)
        ),
    ]
    found = make_groups(ranked, Goal(("gpus",)))
    assert [[words(one) for one in group.entrants] for group in found] == [["1", "2", "4"]] * 2
    assert [group.default for group in found] == [0, 0]
    compiled = [
        make_cell("train_step", {"size": size, "compile": how, "compile_mode": "reduce-overhead"})
        for size in ("small", "medium")
        for how in ("eager", "blocks")
    ]
    found = make_groups(compiled, Goal(("compile",)))
    assert [[words(one) for one in group.entrants] for group in found] == [["eager", "blocks"]] * 2


def test_guesses_without_a_scale_compare_candidates_all_the_same() -> None:
    """The FLOPs of an own model are unknown, so that its guesses are wrong by a large factor."""
    counts = []
    for scale in (1.0, 1e8):
        groups = make_groups(cells(("small", "medium")), Goal(OVER))

        def scaled(one: Entrant, scale: float = scale) -> float:
            return scale * by_options(one)

        ended = play(groups, Goal(OVER), scaled)
        assert [words(group.winner) for group in ended] == ["bf16 blocks"] * 2
        counts.append(sum(len(group.measured) for group in ended))
    assert counts[0] == counts[1] < 12


def test_the_recommended_one_of_alike_ones_is_surely_faster() -> None:
    group = make_groups(cells(), Goal(OVER))[0]
    # The smaller one is within 2 % of the fastest, and within 2 % of the default, too.
    known = {"fp32 eager": (1.0, 9e9), "bf16 eager": (0.975, 8e9), "bf16 blocks": (0.985, 5e9)}
    entrants = tuple(
        replace(one, speed=speed(*known[words(one)])) if words(one) in known else one
        for one in group.entrants
    )
    assert words(replace(group, entrants=entrants).winner) == "bf16 eager"


def test_what_may_be_noise_is_not_recommended() -> None:
    group = make_groups(cells(), Goal(OVER))[0]
    default, other, *_ = group.entrants
    for high_s, winner in ((0.9, "fp32 blocks"), (1.1, "fp32 eager")):
        measured = (
            replace(default, speed=Speed(1.0, 0.95, 1.05, False, None)),
            replace(other, speed=Speed(0.5, 0.4, high_s, False, None)),
        )
        assert words(replace(group, entrants=measured).winner) == winner


def test_times_of_two_kinds_of_gpu_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [
        {"cell": cell.id, "gpu": gpu, "step_ms_median": 5.0}
        for cell, gpu in zip(cells()[:2], ("NVIDIA H100", "NVIDIA H200"), strict=True)
    ]
    states = {row["cell"]: SimpleNamespace(status="ok") for row in rows}
    results = SimpleNamespace(cells=pd.DataFrame(rows))
    monkeypatch.setattr(best_search, "load_results", lambda run: results)
    monkeypatch.setattr(best_search, "read_states", lambda run: states)
    monkeypatch.setattr(
        best_search, "speeds_of", lambda found: dict.fromkeys(found.cells["cell"], speed(5e-3))
    )
    run = SimpleNamespace(exists=True)
    request: Any = SimpleNamespace(run=run, expansion=Expansion(tuple(cells())), import_paths=None)
    with pytest.raises(ConfigError, match=r"several kinds of GPU.*NVIDIA H100, NVIDIA H200"):
        find_best(request, Goal(OVER), None, None, 1)
    # A plan for another GPU than the one of the results has no measured step.
    rows.pop()
    results.cells = pd.DataFrame(rows)
    for device, count in (("NVIDIA H100", 1), ("NVIDIA H200", 0)):
        found = find_best(request, Goal(OVER), GpuModel("", 0, None, device), None, 1)
        assert len(found.groups[0].measured) == count


class Steps:
    """Measures cells: each step takes as long as their options say, but for noise of the process."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.chance = random.Random(1)
        self.limits_ms: dict[str, float | None] = {}

    def __call__(self, attempt: Attempt) -> Outcome:
        values = attempt.cell.params.values()
        name = f"{values['attention']} {values['optimizer']}"
        self.begun.append((name, attempt.number))
        limit_ms = attempt.settings.beaten_ms
        self.limits_ms.setdefault(name, limit_ms)
        step_ms = {"naive": 400.0, "sdpa": 100.0}[values["attention"]]
        step_ms += {"course": 60.0, "foreach": 20.0, "fused": 0.0}[values["optimizer"]]
        step_ms *= self.chance.lognormvariate(0, 0.01)
        durations, facts = StepDurations(attempt.cell.params.stop_rule, limit_ms), {"host": "one"}
        while durations.stopped_by is None:
            durations.add(step_ms)
        facts["timing_stopped_by"] = durations.stopped_by
        samples = tuple(
            Sample("timing", "duration", "ms", ms, "synced", "step", number)
            for number, ms in enumerate(durations.durations)
        )
        return Outcome(attempt, Status.OK, "", "", {}, facts, samples, 1.7e9, 2.0)


def searched(
    write_config: Callable[..., Path], out: Path, goal: Goal, steps: Steps, **execution: Any
) -> BestFound:
    request = request_for(write_config(ADAPTIVE), [], [], out)
    request = replace(request, execution=ExecutionOptions(**execution))
    return find_best(request, goal, None, fake_runtime(FakeScheduler(steps)), 1)


def test_a_cell_ends_early_if_it_is_beaten_and_can_be_measured_in_full_later(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    goal, steps = Goal(("attention", "optimizer"), until=0.0), Steps()
    found = searched(write_config, tmp_path / "out", goal, steps)
    results = load_results(Run(tmp_path / "out"))
    stops = results.cells.set_index(["attention", "optimizer"])["timing_stopped_by"].to_dict()
    assert stops["sdpa", "fused"] == "half-width"
    assert stops["naive", "fused"] == "beaten"
    # The first one has nothing to be compared with.
    assert [limit is None for limit in steps.limits_ms.values()] == [True] + [False] * 5
    by_name = {words(one): one.speed for one in found.groups[0].entrants}
    assert by_name["naive fused"] is not None
    assert by_name["naive fused"].is_beaten
    assert by_name["naive fused"].step_s == pytest.approx(0.4, rel=0.05)
    # For a sweep it is a result. To measure such cells as the others are is asked for.
    request = request_for(write_config(ADAPTIVE), [], [], tmp_path / "out")
    assert go(request, FakeScheduler(steps)).counts == {}
    beaten = sum(stop == "beaten" for stop in stops.values())
    result = go(
        request, FakeScheduler(steps), RunOptions(retry=frozenset({"beaten"})), summary=True
    )
    assert result.counts == {Status.OK: beaten}
    assert result.quality["beaten"] == 0


def test_the_limit_of_a_cell_is_that_of_the_slowest_group_that_it_is_in() -> None:
    first, second, *_ = make_groups(cells(), Goal(OVER))[0].entrants
    fast = replace(first, speed=replace(speed(1.0), synced_s=1.2))
    slow = replace(first, speed=speed(3.0))
    groups = [SearchGroup((one, second), 0) for one in (fast, slow)]
    # Synced steps are compared with synced ones.
    assert beaten_limits_ms(groups[:1]) == {
        first.cell.id: pytest.approx(1320.0),
        second.cell.id: pytest.approx(1320.0),
    }
    assert beaten_limits_ms(groups)[second.cell.id] == pytest.approx(3300.0)
    assert beaten_limits_ms([SearchGroup((first, second), 0)]) == {}
    batches = [
        make_cell("train_step", {"device": "cuda", "size": "small", "batch_size": size})
        for size in (1, 4)
    ]
    group = make_groups(batches, Goal(("batch_size",)))[0]
    one = replace(group.entrants[0], speed=speed(1.0))
    limits = beaten_limits_ms([replace(group, entrants=(one, group.entrants[1]))])
    assert limits[batches[1].id] == pytest.approx(4400.0)


def test_an_answer_is_confirmed_in_alternating_rounds(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    goal, steps = Goal(("attention", "optimizer"), confirm=3), Steps()
    found = searched(write_config, tmp_path / "out", goal, steps)
    rounds = steps.begun[-6:]
    assert [number for _, number in rounds] == [2, 2, 3, 3, 4, 4]
    # A B B A A B: on two GPUs, which may differ, each is measured on both.
    pair = ["sdpa fused", "naive course"]
    assert [name for name, _ in rounds] == [*pair, *pair[::-1], *pair]
    confirmation = found.groups[0].confirmation
    assert confirmation is not None
    assert (confirmation.rounds, confirmation.is_faster) == (3, True)
    assert confirmation.ratio == pytest.approx(100 / 460, rel=0.03)
    # The same command finds nothing to measure, and a sweep of the folder misses no repetition.
    count = len(steps.begun)
    again = searched(write_config, tmp_path / "out", goal, steps)
    assert len(steps.begun) == count
    assert again.groups[0].confirmation == confirmation
    assert last_sweep(Run(tmp_path / "out")).choice["repeat"] == 1


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_search_that_was_cut_at_any_cell_ends_with_the_same_answer(
    write_config: Callable[..., Path], tmp_path: Path, every: int
) -> None:
    goal, whole = Goal(("attention", "optimizer"), confirm=2), Steps()
    expected = searched(write_config, tmp_path / "whole", goal, whole)

    class Killed(Steps):
        def __call__(self, attempt: Attempt) -> Outcome:
            if len(self.begun) == self.most:
                raise KeyboardInterrupt
            return super().__call__(attempt)

        most = 0

    for most in range(0, len(whole.begun), every):
        steps, out = Killed(), tmp_path / str(most)
        steps.most = most
        with suppress(KeyboardInterrupt):
            searched(write_config, out, goal, steps)
        steps.most = -1
        found = searched(write_config, out, goal, steps)
        assert steps.begun == whole.begun
        assert words(found.groups[0].winner) == words(expected.groups[0].winner) == "sdpa fused"


def test_a_candidate_that_was_measured_without_its_time_is_an_error(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """A default that cannot be compared would leave a recommendation without evidence."""

    def untimed(attempt: Attempt) -> Outcome:
        return Outcome(attempt, Status.OK, "", "", {}, {"host": "one"}, (), 1.7e9, 2.0)

    request = request_for(write_config(ADAPTIVE), [], ["attention=naive"], tmp_path / "out")
    go(request, FakeScheduler(untimed))
    steps = Steps()
    with pytest.raises(ConfigError, match="3 cells were measured without the time of a step"):
        searched(write_config, tmp_path / "out", Goal(("attention", "optimizer")), steps)
    assert not steps.begun


def test_the_folder_has_the_candidates_and_why_some_were_not_measured(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    goal = Goal(("attention", "optimizer"))
    found = searched(write_config, tmp_path / "out", goal, Steps())
    stored = Run(tmp_path / "out").read_manifest()["best"]
    assert stored["over"] == ["attention", "optimizer"]
    (group,) = stored["groups"]
    assert list(group["candidates"]) == [one.cell.id for one in found.groups[0].entrants]
    assert group["default"] == found.groups[0].entrants[0].cell.id
    assert set(group["candidates"].values()) == {""}
    assert group["ended"] == found.ends[0]
    # A later command leaves it as it is.
    go(request_for(write_config(ADAPTIVE), [], [], tmp_path / "out"), FakeScheduler(Steps()))
    assert Run(tmp_path / "out").read_manifest()["best"] == stored


def test_no_cell_that_is_predicted_not_to_fit_reaches_the_scheduler(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predicted(groups: list[SearchGroup], *_: object) -> list[SearchGroup]:
        (group,) = groups
        verdicts = {"sdpa": "oom", "naive": "fits"}
        entrants = [
            replace(one, verdict=verdicts[str(one.options["attention"])])  # type: ignore[arg-type]
            for one in group.entrants
        ]
        return [replace(group, entrants=tuple(entrants))]

    monkeypatch.setattr(best_search, "predict_groups", predicted)
    steps, goal = Steps(), Goal(("attention", "optimizer"), until=0.0, confirm=2, try_perhaps=True)
    found = searched(write_config, tmp_path / "out", goal, steps)
    assert {name.split()[0] for name, _ in steps.begun} == {"naive"}
    assert words(found.groups[0].winner) == "naive fused"
    reasons = Run(tmp_path / "out").read_manifest()["best"]["groups"][0]["candidates"].values()
    assert sorted(reasons) == ["", "", "", *["does not fit"] * 3]


def test_what_cannot_be_faster_is_not_measured() -> None:
    """At the peaks of an H100, the products of fp32 alone take longer than a step in bf16."""
    values = {"context_length": 512, "batch_size": 4}
    groups = make_groups(cells(("xl",), **values), Goal(OVER))
    gpu = GpuModel("H100", 80 * 2**30, None, "NVIDIA H100 80GB HBM3")
    groups = best_search.predict_groups(groups, gpu, None)
    group = groups[0]
    least = {words(one): one.least_s for one in group.entrants}
    assert least["fp32 eager"] == least["fp32 blocks"] > 10 * least["bf16 eager"] > 0
    ended = play(groups, Goal(OVER), lambda one: 0.9 * least["fp32 eager"] * by_options(one))[0]
    # The default is, to compare with.
    assert {"fp32 eager", "bf16 blocks"} <= set(map(words, ended.measured))
    blocks = next(one for one in ended.entrants if words(one) == "fp32 blocks")
    assert blocks.speed is None
    reason = best_search.why_not_measured(ended, blocks, Goal(OVER))
    assert reason == f"cannot be faster: its products take at least {1e3 * blocks.least_s:.1f} ms"
