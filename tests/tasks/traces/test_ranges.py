"""Names that users give to ranges: phases, steps, warm-up, or modules."""

from __future__ import annotations

import pytest

from tasks.traces.ranges import Range, phase_of, sort_ranges
from tasks.traces.timeline import BACKWARD_NODE, PhaseSpan

TWO_OPTIMIZERS = ("Optimizer.step#Muon.step", "Optimizer.step#AdamW.step")  # of one step
OPTIMIZERS = ("Muon", "Adafactor", "Lion", "RMSprop", "AdamW8bit", "SOAP", "My_Optimizer2", "Größe")


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        *[(text, "forward") for text in ("forward", "Forward Pass", "forward_pass", "forward_3")],
        *[(text, "forward") for text in ("FWD", "ForwardPass", "model.forward", "phase::forward")],
        *[(text, "backward") for text in ("backward", "Backward Pass", "loss.backward()", "bwd 0")],
        *[(text, "optimizer") for text in ("optimizer", "Optimizer Step", "optimizer.step", "opt")],
        *[(text, "optimizer") for text in ("Optimizer.step#AdamW.step", "weight update")],
        *[(f"Optimizer.step#{name}.step", "optimizer") for name in OPTIMIZERS],
        *[(f"Optimizer.zero_grad#{name}.zero_grad", "") for name in (*OPTIMIZERS, "AdamW")],
        *[(f"{name}DataParallel.forward", "forward") for name in ("", "Distributed")],
        ("FullyShardedDataParallel.forward", "forward"),
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
        (["forward", "backward", "Optimizer.step#Muon.step"] * 3, 3),
        ([*["forward", "backward"] * 4, "Optimizer.step#SOAP.step"] * 2, 2),
        (["forward", "backward", *TWO_OPTIMIZERS] * 3, 3),
        ([*TWO_OPTIMIZERS] * 3, 3),
        (["Optimizer.step#Muon.step"] * 3, 3),
        (["optimizer_0", "optimizer_1"], 2),
        (["DistributedDataParallel.forward", "Optimizer.step#Lion.step"] * 2, 2),
    ],
)
def test_steps_are_counted_by_ranges_of_steps_or_by_the_optimizer(
    texts: list[str], steps: int | None
) -> None:
    ranges = of(*[(text, 10 * index, 10 * index + 9) for index, text in enumerate(texts)])
    assert sort_ranges(ranges, {}).steps == steps


@pytest.mark.parametrize(
    ("texts", "steps"),
    [
        (["B", "SGD", "SGD", "B", "SGD", "SGD"], 2),  # two optimizers of one class
        (["B", "B", "B", "SGD", "B", "B", "SGD"], 2),
        (["B", "SGD", "B", "Adam", "B", "SGD", "B", "Adam"], 2),  # one after the other
        (["B", "SGD", "Muon", "Muon", "B", "SGD", "Muon", "Muon"], 2),
        (["SGD", "SGD"], 2),  # the trace has no operators
        (["B(SGD)", "B(SGD)", "B(SGD)"], None),  # each parameter is updated in the backward pass
        (["B", "B(SGD)", "B", "B(SGD)"], None),
    ],
)
def test_steps_are_counted_by_the_optimizers_after_a_backward_pass(
    texts: list[str], steps: int | None
) -> None:
    updates, nodes = [], []
    for index, text in enumerate(texts):
        start, end = 10 * index, 10 * index + 9
        if text.startswith("B"):
            nodes.append((BACKWARD_NODE, start, end))
        if text != "B":
            updates.append((f"Optimizer.step#{text.strip('B()')}.step", start + 2, end - 2))
    assert sort_ranges(of(*updates), {}, of(*nodes)).steps == steps


def test_the_outermost_of_nested_phases_counts() -> None:
    """Torch puts its own range into the optimizer step; checkpointing runs forward in backward."""
    ranges = of(
        ("backward", 0, 50),
        ("forward", 10, 20),
        ("optimizer", 60, 90),
        ("Optimizer.step#AdamW.step", 61, 80),
    )
    assert [phase.name for phase in sort_ranges(ranges, {}).phases] == ["backward", "optimizer"]


MICRO_BATCH = ("forward", "backward")


@pytest.mark.parametrize(
    ("begun", "ended"),
    [
        ((), MICRO_BATCH),
        ((), MICRO_BATCH * 3),
        (("optimizer",), ()),
        (("backward", "optimizer"), ("forward",)),
        ((*MICRO_BATCH, "optimizer"), MICRO_BATCH),
    ],
)
def test_phases_of_a_step_that_the_trace_cuts_are_outside(
    begun: tuple[str, ...], ended: tuple[str, ...]
) -> None:
    step = (*MICRO_BATCH * 4, "optimizer")
    texts = [*begun, *step * 2, *ended]
    ranges = of(*[(text, 10 * index, 10 * index + 9) for index, text in enumerate(texts)])
    sorted_ = sort_ranges(ranges, {})
    assert sorted_.steps == 2
    assert [phase.name for phase in sorted_.phases] == [*step * 2]
    assert sorted_.phases[0].start_ns == 10 * len(begun)


def test_phases_outside_of_the_ranges_of_steps_are_outside() -> None:
    sorted_ = sort_ranges(
        of(
            ("forward", 0, 5),
            ("ProfilerStep#1", 10, 50),
            ("forward", 11, 20),
            ("backward", 21, 30),
            ("Optimizer.step#Muon.step", 31, 40),
            ("forward", 51, 60),
            ("backward", 61, 70),
        ),
        {},
    )
    assert sorted_.steps == 1
    assert [(phase.name, phase.start_ns) for phase in sorted_.phases] == [
        ("forward", 11),
        ("backward", 21),
        ("optimizer", 31),
    ]


def test_a_range_named_step_around_the_optimizer_leaves_the_other_phases() -> None:
    ranges = of(
        ("forward", 0, 9), ("backward", 10, 19), ("step", 20, 29), ("Optimizer.step#A.step", 21, 28)
    )
    sorted_ = sort_ranges(ranges, {})
    assert sorted_.steps == 1
    assert [phase.name for phase in sorted_.phases] == ["forward", "backward", "optimizer"]
