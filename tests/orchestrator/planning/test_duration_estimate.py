"""How long cells take: the guess, what is learnt, and what `plan` says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from orchestrator.cli.text import plan as plan_text
from orchestrator.planning.duration_estimate import (
    DurationConditions,
    DurationEstimator,
    expect,
    guess_step,
    makespan_s,
)
from tasks.spec.cell import Cell
from tasks.spec.registry import all_tasks, make_cell
from tasks.spec.status import Status
from tests.support.fake_sweep import state_of

S = Status
H200 = DurationConditions("NVIDIA H200")


def cell(task: str = "train_step", **params: Any) -> Cell:
    return make_cell(task, {"size": "small", **params} if task == "train_step" else params)


def work(one: Cell) -> float:
    flops = all_tasks()[one.task].work(one.params)
    assert flops is not None
    return flops


def guess(one: Cell, conditions: DurationConditions = H200) -> float:
    return DurationEstimator([], {}, conditions).seconds(one)


# What cells took on an H200, in seconds: forked, with timing, memory and telemetry.
@pytest.mark.parametrize(
    ("params", "wall_s"),
    [
        ({"precision": "bf16_pure"}, 2.0),
        ({"precision": "fp16"}, 2.2),
        ({"size": "xl", "optimizer": "fused"}, 20.0),  # 25 steps of 782 ms
        ({"size": "xl", "context_length": 1024}, 40.7),
        ({"size": "2.7B", "precision": "bf16"}, 8.5),
        (
            {
                "task": "attention",
                "context_length": 16384,
                "precision": "bf16_pure",
                "causal": True,
            },
            17.7,
        ),
    ],
)
def test_the_guess_is_within_a_factor_of_two_of_what_a_gpu_took(
    params: dict[str, Any], wall_s: float
) -> None:
    assert wall_s / 2 < guess(cell(**params)) < wall_s * 2


# Steps of results/published/h200-best (medium, batch 16, context 1,024, fused), in ms.
@pytest.mark.parametrize(
    ("precision", "compile_", "attention", "ms"),
    [
        ("bf16", "blocks", "sdpa", 99.5),
        ("bf16", "blocks", "naive", 140.5),
        ("bf16", "eager", "sdpa", 183.8),
        ("tf32", "blocks", "sdpa", 273.0),
        ("tf32", "blocks", "naive", 283.8),
        ("tf32", "eager", "sdpa", 353.2),
        ("bf16", "eager", "naive", 528.4),
        ("tf32", "eager", "naive", 609.0),
    ],
)
def test_the_guess_of_a_step_knows_attention_without_scores_in_memory(
    precision: str, compile_: str, attention: str, ms: float
) -> None:
    axes = {"precision": precision, "compile": compile_, "attention": attention}
    one = cell(size="medium", context_length=1024, batch_size=16, optimizer="fused", **axes)
    assert 0.65 < ms / 1e3 / max(guess_step(one, "NVIDIA H200")) < 1.35


def test_estimates_are_lower_without_timing_and_higher_without_forking() -> None:
    assert (
        guess(cell(size="xl"), DurationConditions("NVIDIA H200", timed=False))
        < guess(cell(size="xl")) / 4
    )
    assert guess(cell(), DurationConditions("NVIDIA H200", forked=False)) == pytest.approx(
        guess(cell()) + 4.6
    )


def test_each_of_several_gpus_has_its_share_of_a_global_batch() -> None:
    def steps_s(**values: Any) -> float:
        shared = {"size": "xl", "batch_size": 8, "context_length": 1024, "parallel": "ddp"}
        start_s = 0.7 if values["gpus"] == 1 else 0.7 + 0.4 * values["gpus"]
        return guess(cell(**shared, **values)) - start_s

    assert steps_s(gpus=4) == pytest.approx(steps_s(gpus=1) / 4)
    assert steps_s(gpus=4, batch="per_gpu") == pytest.approx(steps_s(gpus=1))


def test_two_ranks_take_time_to_meet() -> None:
    """The start of a collective of a megabyte on two H100s is nearly all that took 1.7 s."""
    one = cell("collectives", gpus=2, size_mb=1)
    assert 1.2 < guess(one, DurationConditions("NVIDIA H100 80GB HBM3")) < 1.9


def test_a_slower_gpu_takes_longer_and_an_unknown_one_is_no_ground_to_go_by() -> None:
    large = cell(size="2.7B", context_length=1024)
    assert guess(large, DurationConditions("NVIDIA A100-SXM4-80GB")) > 2 * guess(large)
    assert DurationEstimator([], {}, H200).can_estimate([large])
    assert not DurationEstimator([], {}, DurationConditions("GPU of tomorrow")).can_estimate(
        [large]
    )
    assert not DurationEstimator([], {}, H200).can_estimate([cell(device="cpu")])


def test_the_time_of_a_model_without_a_formula_is_unknown_until_one_cell_has_ended() -> None:
    few, many = (
        cell(size=None, model="my:GPT", device="cuda", measured_steps=steps, warmup_steps=0)
        for steps in (10, 100_000)
    )
    estimator = DurationEstimator([], {}, H200)
    assert not estimator.can_estimate([few])
    estimator.learn(cell(device="cuda"), S.OK, 3.0)
    assert not estimator.can_estimate([few, cell(device="cuda")])
    estimator.learn(few, S.OK, 3.0)
    assert estimator.can_estimate([many])
    assert estimator.seconds(many) > 5_000 * estimator.seconds(few)


def test_only_the_first_of_those_that_share_a_graph_compiles() -> None:
    cells = [cell(size="xl", compile="model", seed=seed) for seed in (0, 1)]
    first, second = DurationEstimator([], {}, H200).seconds_in_order(cells)
    assert first - second == pytest.approx(48 * (3.1 - 1.05))
    cold = [cell(size="xl", compile="model", seed=seed, compile_cache="cold") for seed in (0, 1)]
    assert len(set(DurationEstimator([], {}, H200).seconds_in_order(cold))) == 1
    learned = DurationEstimator([], {}, H200)
    learned.learn(cells[0], S.OK, 200.0)
    assert learned.seconds(cells[1]) < 200


def test_a_measured_cell_is_estimated_to_take_as_long_again() -> None:
    one = cell()
    assert DurationEstimator([one], {one.id: state_of((S.OK,), (5.0,))}).seconds(one) == 5.0
    assert DurationEstimator([one], {one.id: state_of((S.FAILED,), (99.0,))}, H200).seconds(
        one
    ) == guess(one)


def test_measured_cells_correct_the_estimates_of_similar_cells() -> None:
    short, long, longer = (
        cell(size="tiny", device="cpu", context_length=length) for length in (128, 512, 1024)
    )
    estimator = DurationEstimator([short], {short.id: state_of((S.OK,), (5.0,))})
    steps = {one: guess(one) - 0.7 for one in (short, long)}
    assert estimator.seconds(long) == pytest.approx(0.7 + (5 - 0.7) * steps[long] / steps[short])
    estimator.learn(long, S.OK, 25.0)
    assert 25.0 * 1.9 < estimator.seconds(longer) < 25.0 * 3
    assert estimator.upper_bound_s(longer) == pytest.approx(1.25 * estimator.seconds(longer))


def test_repetitions_of_one_length_do_not_hide_the_pace() -> None:
    """All of one length say nothing of what is fixed: their shortest must not be taken for it."""
    alike, longer = [cell(seed=seed) for seed in range(3)], cell(size="xl")
    estimator = DurationEstimator(
        alike,
        {
            one.id: state_of((S.OK,), (wall,))
            for one, wall in zip(alike, (2.0, 2.1, 2.2), strict=True)
        },
        H200,
    )
    assert estimator.seconds(longer) > 2.1 * 5


def test_the_scatter_of_short_cells_does_not_count_for_long_ones() -> None:
    """Start-up varies by seconds: taken for the pace of a tiny cell it would foresee hours."""
    lengths = (16, 32, 64, 512)
    cells = [cell(size="tiny", device="cpu", context_length=length) for length in lengths]
    walls = dict(zip(lengths, (6.0, 9.0, 7.5, 12.0), strict=True))
    history = {c.id: state_of((S.OK,), (walls[n],)) for c, n in zip(cells, lengths, strict=True)}
    longest = cell(size="tiny", device="cpu", context_length=1024)
    truth = 6.0 + (12.0 - 6.0) * work(longest) / work(cells[-1])
    assert truth < DurationEstimator(cells, history).seconds(longest) < truth * 1.5


def test_the_guess_for_an_unmeasured_cell_is_scaled_by_measured_cells() -> None:
    estimator = DurationEstimator([], {}, H200)
    assert estimator.upper_bound_s(cell()) is None  # a guess holds nothing back
    estimator.learn(cell(), S.OK, 3 * guess(cell()))
    other = cell(precision="bf16", context_length=128)
    assert estimator.seconds(other) == pytest.approx(3 * guess(other))
    estimator.learn(cell(size="xl"), S.OK, 500.0)
    assert estimator.upper_bound_s(other) == 500.0


def test_an_adaptive_cell_is_expected_to_be_steady() -> None:
    """1 + 6 + 6 steps where the fixed one takes 5 + 10 + 10, and what surrounds them."""
    fixed, adaptive = (
        guess(cell(size="xl", context_length=1024, timing=timing))
        for timing in ("fixed", "adaptive")
    )
    assert 0.5 * fixed < adaptive < 0.7 * fixed


def test_the_makespan_follows_from_durations_slots_and_busy_time() -> None:
    assert makespan_s([3, 3, 2, 2, 2], 2) == 7
    assert makespan_s([5, 1, 1], 1) == 7
    assert makespan_s([4], 2, busy_s=[10, 1]) == 10
    assert makespan_s([4], 2, busy_s=[3]) == 4
    assert makespan_s([], 3) == 0


def test_a_plan_is_expected_to_begin_with_the_longest_where_there_are_several_places() -> None:
    cells = [cell(seed=seed) for seed in range(8)] + [cell(size="xl", context_length=1024)]
    estimator = DurationEstimator([], {}, H200)
    alone, four = (expect(estimator, cells, {"cuda": places}) for places in (1, 4))
    assert alone is not None
    assert four is not None
    assert alone.wall_s == pytest.approx(alone.gpu_s) == pytest.approx(four.gpu_s)
    assert four.wall_s == pytest.approx(guess(cells[-1]))
    assert expect(estimator, [], {"cuda": 1}) is None


CONFIG = "name: c\ngrids: [{task: train_step, fixed: {device: %s}, axes: {size: [small, xl]}}]"
Here = Callable[..., Result]


@pytest.fixture
def expected_line(sweep_here: Here, tmp_path: Path) -> Callable[..., str]:
    def say(device: str, *words: str) -> str:
        (tmp_path / "c.yaml").write_text(CONFIG % device)
        lines = sweep_here("plan", "c.yaml", *words).output.splitlines()
        return "".join(line for line in lines if line.startswith("expected"))

    return say


def test_a_plan_says_how_long_it_will_take(
    expected_line: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    how = "GPU-hours (from FLOPs; after the first cells, from what they took)"
    assert expected_line("cuda", "--gpu", "H200") == f"expected: 22 s on one H200, 0.01 {how}"
    monkeypatch.setattr(plan_text, "gpu_names", lambda: ("NVIDIA H200",) * 2)
    assert expected_line("cuda") == f"expected: 20 s on this machine's 2 GPUs, 0.01 {how}"
    monkeypatch.setattr(plan_text, "gpu_names", lambda: ())
    assert (
        expected_line("cuda")
        == "expected time: unknown, no GPU is here; add --gpu H200 for an estimate"
    )
    unknown = expected_line("cuda", "--gpu", "A10G")
    assert "unknown, no source was found for the peak speed of A10G in fp32; an estimate" in unknown
    assert expected_line("cuda", "--gpu", "24GiB").endswith(
        "name the GPU, for example --gpu 'RTX 4090'"
    )
    assert expected_line("cpu") == ""


def test_a_model_without_a_formula_has_no_estimate_before_its_first_cell(
    sweep_here: Here, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text("Net = None\n")
    config = "name: c\ngrids: [{task: train_step, fixed: {device: cuda, model: 'net:Net'}}]"
    (tmp_path / "c.yaml").write_text(config)
    assert (
        "expected time: unknown, no formula is known for net:Net; an estimate is available when the "
        "first of these cells has ended"
    ) in sweep_here("plan", "c.yaml", "--gpu", "H200").output


def test_a_plan_goes_by_what_cells_of_the_same_gpu_took(
    expected_line: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plan_text, "gpu_names", lambda: ())
    monkeypatch.setattr(plan_text, "gpus_of", lambda fingerprints: {"NVIDIA H200"})
    small = make_cell("train_step", {"size": "small"})
    real = plan_text.describe_cost

    def with_history(request: Any, plan: Any, card: Any) -> str:
        return real(
            request,
            dataclasses.replace(plan, states={small.id: state_of((S.OK,), (100.0,))}),
            card,
        )

    monkeypatch.setattr(plan_text, "describe_cost", with_history)
    assert "GPU-hours (from what 1 finished cell took)" in expected_line("cuda")
    assert "from what 1" in expected_line("cuda", "--gpu", "H200")
    assert "from FLOPs" in expected_line("cuda", "--gpu", "H100")


@pytest.mark.parametrize(
    ("gpu", "remedy"),
    [
        ("Voodoo", "is not known. Give the size: --gpu 24GiB"),
        (
            "A100",
            "comes in several sizes. Choose one of: A100 40GB, A100 80GB; or give the size: --gpu 24GiB",
        ),
    ],
)
def test_an_unknown_gpu_is_one_line(
    gpu: str, remedy: str, sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG % "cuda")
    done = sweep_here("plan", "c.yaml", "--memory", "--gpu", gpu)
    assert (done.exit_code, done.stderr) == (
        2,
        f"sweep: --gpu {gpu}: {remedy}\n",
    )
