"""Names that users give to ranges: phases, steps, warm-up, or modules."""

from __future__ import annotations

import pytest

from tasks.traces.ranges import Range, phase_of, sort_ranges
from tasks.traces.timeline import PhaseSpan


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        *[(text, "forward") for text in ("forward", "Forward Pass", "forward_pass", "forward_3")],
        *[(text, "forward") for text in ("FWD", "ForwardPass", "model.forward", "phase::forward")],
        *[(text, "backward") for text in ("backward", "Backward Pass", "loss.backward()", "bwd 0")],
        *[(text, "optimizer") for text in ("optimizer", "Optimizer Step", "optimizer.step", "opt")],
        *[(text, "optimizer") for text in ("Optimizer.step#AdamW.step", "weight update")],
        *[(text, "") for text in ("step 3", "loss", "attention forward", "forward backward", "")],
        *[(text, "") for text in ("aten::mm, seq = 12", "MulBackward0", "optimizer zero_grad")],
    ],
)
def test_a_phase_is_recognised_by_its_words(text: str, phase: str) -> None:
    assert phase_of(text, {}) == phase


@pytest.mark.parametrize("text", ["vorwärts", "vorwärts_3", "Vorwärts 12"])
def test_the_user_may_name_a_phase(text: str) -> None:
    assert phase_of(text, {"vorwärts": "forward"}) == "forward"
    assert phase_of(text, {"rückwärts": "backward"}) == ""


def of(*ranges: tuple[str, int, int]) -> list[Range]:
    return [Range(text, start, end, 1) for text, start, end in ranges]


def test_ranges_around_phases_are_no_modules_and_ranges_in_phases_are() -> None:
    sorted_ = sort_ranges(
        of(
            ("Benchmarking Phase", 0, 100),
            ("Step_0", 5, 90),
            ("forward", 10, 30),
            ("attention", 12, 20),
        ),
        {},
    )
    assert sorted_.phases == [PhaseSpan("forward", 10, 30)]
    assert [one.text for one in sorted_.parts] == ["attention"]
    assert sorted_.steps == 1


def test_everything_in_a_warm_up_range_is_left_out() -> None:
    warm_up = of(("Warmup Phase", 0, 50), ("Step_0", 1, 49), ("forward", 2, 9), ("relu", 3, 4))
    measured = of(("Step_1", 60, 99), ("forward", 61, 70))
    sorted_ = sort_ranges([*warm_up, *measured], {})
    assert sorted_.phases == [PhaseSpan("forward", 61, 70)]
    assert (sorted_.steps, list(sorted_.parts)) == (1, [])
    assert [sorted_.is_warmup(at) for at in (0, 50, 51, 99)] == [True, True, False, False]


@pytest.mark.parametrize("name", ["warm-up", "warm_up step 3", "warmup_forward", "WarmUp"])
def test_warm_up_is_recognised_by_its_words(name: str) -> None:
    assert len(sort_ranges(of((name, 0, 9)), {}).warmups) == 1


def test_a_schedule_of_the_learning_rate_is_no_warm_up() -> None:
    assert not sort_ranges(of(("lr warmup scheduler", 0, 9)), {}).warmups


@pytest.mark.parametrize(
    ("texts", "steps"),
    [
        (["step 0", "step 1", "step 2"], 3),
        (["ProfilerStep#4", "ProfilerStep#5"], 2),
        (["forward", "backward", "optimizer"] * 4, 4),
        (["forward_0", "backward_0", "forward_1", "backward_1", "optimizer step"] * 2, 2),
        (["forward"] * 5, 5),
        (["forward", "forward", "backward"], None),
        (["attention"], None),
    ],
)
def test_steps_are_counted_by_ranges_of_steps_or_by_the_optimizer(
    texts: list[str], steps: int | None
) -> None:
    ranges = of(*[(text, 10 * index, 10 * index + 9) for index, text in enumerate(texts)])
    assert sort_ranges(ranges, {}).steps == steps


def test_the_outermost_of_nested_phases_counts() -> None:
    """Torch puts its own range into the optimizer step; checkpointing runs forward in backward."""
    ranges = of(
        ("backward", 0, 50),
        ("forward", 10, 20),
        ("optimizer", 60, 90),
        ("Optimizer.step#AdamW.step", 61, 80),
    )
    assert [phase.name for phase in sort_ranges(ranges, {}).phases] == ["backward", "optimizer"]
