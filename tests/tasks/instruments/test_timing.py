"""How many steps are timed, on a device and a clock made for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import chain, cycle, repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from orchestrator.common.errors import ConfigError
from orchestrator.config.grid import Expansion, expand
from orchestrator.config.schema import parse_config
from orchestrator.config.selection import Selection, parse_selection
from tasks.harness.stage import Session
from tasks.harness.workload import PhaseMarker, Workload
from tasks.instruments import timing
from tasks.matmul import MatmulParams
from tasks.prediction.records import memory_identity
from tasks.process.phase_file import Progress
from tasks.spec.cell import Cell
from tasks.spec.order_statistics import half_width
from tasks.spec.registry import make_cell
from tasks.spec.tables import Sample
from tests.conftest import FAST

ADAPTIVE = {"timing": "adaptive"}


class Event:
    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock, self.at_ms = clock, 0.0

    def record(self) -> None:
        self.at_ms = self.clock.ms

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands still but in a step."""
    clock = SimpleNamespace(ms=0.0)
    reader = SimpleNamespace(perf_counter_ns=lambda: int(clock.ms * 1e6))
    monkeypatch.setattr(timing, "clock", reader)
    monkeypatch.setattr(timing, "_event", lambda: Event(clock))
    monkeypatch.setattr(timing, "uncollected", nullcontext)
    return clock


def timed(
    clock: SimpleNamespace,
    durations_ms: Iterable[float],
    device: str = "cuda",
    looking_in: Sequence[Any] = (),
    beaten_ms: float | None = None,
    **params: Any,
) -> tuple[Session, Any]:
    """A session whose steps take so long, and the durations of its whole steps by mode."""
    left = iter(durations_ms)

    def step(phase: PhaseMarker) -> None:
        with phase("forward"):
            clock.ms += next(left)

    fake: Any = SimpleNamespace(
        kind=device, synchronize=lambda: None, torch_device=torch.device("cpu")
    )
    session = Session(
        Workload(step, ("forward",), fake, tokens=None),
        MatmulParams.model_validate(params),
        Progress(),
        beaten_ms=beaten_ms,
    )
    session.on_last_warm_up += looking_in
    samples, facts = list[Sample](), dict[str, Any]()
    for stage in timing.STAGES:
        samples += stage.run(session)
        facts |= session.facts
        session.facts.clear()  # as it is when they have been handed over
    session.facts |= facts
    by_mode: dict[str, list[float]] = {}
    for sample in samples:
        if (sample.phase, sample.metric) == ("step", "duration"):
            assert sample.step == len(by_mode.setdefault(sample.mode, []))
            by_mode[sample.mode].append(sample.value or 0.0)
    phases = [s for s in samples if (s.phase, s.metric) == ("forward", "duration")]
    assert len(phases) == sum(map(len, by_mode.values()))
    return session, by_mode


def test_the_protocol_of_the_write_ups_is_the_default(clock: SimpleNamespace) -> None:
    session, taken = timed(clock, repeat(100.0))
    assert {mode: len(steps) for mode, steps in taken.items()} == {
        "warmup": 5,
        "synced": 10,
        "pipelined": 10,
    }
    assert session.facts == {}


@pytest.mark.parametrize(
    ("durations", "step"),
    [([0.0], "1 of warmup"), ([1.0] * 7 + [0.0], "3 of synced"), ([1.0] * 15 + [0.0], "1 of pipe")],
)
def test_a_step_in_which_the_clock_stands_still_fails_the_cell(
    clock: SimpleNamespace, durations: list[float], step: str
) -> None:
    with pytest.raises(RuntimeError, match=f"the clock did not advance in step {step}"):
        timed(clock, chain(durations, repeat(1.0)))


def test_long_and_steady_steps_are_few(clock: SimpleNamespace) -> None:
    session, taken = timed(clock, chain([900.0], cycle([500.0, 501.0, 499.0])), **ADAPTIVE)
    assert {mode: len(steps) for mode, steps in taken.items()} == {
        "warmup": 1,
        "check": 1,
        "synced": 6,
    }
    assert session.facts == {
        "timing_warmup_steps": 1,
        "timing_stopped_by": "half-width",
        "timing_pipelined": "as synced",
        "timing_half_width": pytest.approx(0.002),
    }


def test_a_beaten_cell_ends_after_five_steps(clock: SimpleNamespace) -> None:
    session, taken = timed(
        clock, chain([900.0], [500.0] * 2, cycle([500.0, 560.0])), beaten_ms=440.0, **ADAPTIVE
    )
    assert (session.facts["timing_stopped_by"], len(taken["synced"])) == ("beaten", 5)
    assert session.facts["timing_half_width"] == pytest.approx(0.06)  # 30 of 500: it is wide
    fixed, taken = timed(clock, repeat(500.0), beaten_ms=440.0)
    assert (fixed.facts, len(taken["synced"])) == ({}, 10)


def test_the_step_that_ran_on_is_held_against_the_synced_ones(clock: SimpleNamespace) -> None:
    session, taken = timed(clock, chain([700.0], [330.0, 300.0], repeat(300.0)), **ADAPTIVE)
    assert {mode: len(steps) for mode, steps in taken.items()} == {
        "warmup": 1,
        "check": 2,
        "synced": 6,
    }  # the last of two
    assert session.facts["timing_pipelined"] == "as synced"


def test_steps_that_run_on_are_measured_where_they_take_another_time(
    clock: SimpleNamespace,
) -> None:
    session, taken = timed(
        clock, chain([700.0], [300.0, 270.0], repeat(300.0, 6), repeat(270.0)), **ADAPTIVE
    )
    assert {mode: len(steps) for mode, steps in taken.items()} == {
        "warmup": 1,
        "check": 2,
        "synced": 6,
        "pipelined": 6,
    }
    assert taken["pipelined"] == pytest.approx([270.0] * 6)
    assert session.facts["timing_pipelined"] == "measured"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_one_step_of_the_warm_up_is_looked_into(clock: SimpleNamespace, device: str) -> None:
    seen: list[str] = []
    watcher = SimpleNamespace(enter=seen.append, leave=seen.append)
    timed(clock, chain([700.0], repeat(300.0)), device, [watcher], **ADAPTIVE)
    assert seen == ["forward", "forward"]


def test_pipelined_steps_are_measured_if_the_half_width_is_out_of_reach(
    clock: SimpleNamespace,
) -> None:
    """Two steps that happen to be near the middle of noise say nothing."""
    session, taken = timed(
        clock, chain([300.0, 300.0], [240.0, 360.0] * 3, repeat(300.0)), **ADAPTIVE
    )
    assert session.facts["timing_stopped_by"] == "out of reach"
    assert (len(taken["check"]), len(taken["pipelined"])) == (2, 6)


def test_steps_before_the_steady_state_are_kept_as_warm_up_samples(clock: SimpleNamespace) -> None:
    session, taken = timed(
        clock, chain([900.0], [700.0], [600.0, 550.0], repeat(500.0)), **ADAPTIVE
    )
    assert taken["warmup"] == pytest.approx([900.0, 600.0, 550.0])
    assert taken["synced"] == pytest.approx([500.0] * 6)
    assert session.facts["timing_warmup_steps"] == 3


def test_noise_takes_more_of_both_modes(clock: SimpleNamespace) -> None:
    session, taken = timed(clock, chain([500.0], cycle([98.5, 101.5])), **ADAPTIVE, most_steps=40)
    assert (len(taken["synced"]), len(taken["pipelined"])) == (40, 40)
    assert session.facts["timing_stopped_by"] == "steps"
    assert (
        session.facts["timing_half_width"] == half_width(taken["synced"]) == pytest.approx(0.015)
    )  # of all there are


@pytest.mark.parametrize(
    ("limits", "stopped_by", "steps"),
    [
        ({"half_width": 0.02}, "half-width", 6),
        ({"most_seconds": 3.2}, "seconds", 32),
        ({"most_seconds": 1.0}, "out of reach", 6),
    ],
)
def test_the_stopping_limits_of_adaptive_timing_can_be_set(
    clock: SimpleNamespace, limits: dict[str, float], stopped_by: str, steps: int
) -> None:
    session, taken = timed(clock, chain([500.0], cycle([98.5, 101.5])), **ADAPTIVE, **limits)
    assert (session.facts["timing_stopped_by"], len(taken["synced"])) == (stopped_by, steps)


def test_nothing_is_pipelined_where_nothing_queues(clock: SimpleNamespace) -> None:
    _, taken = timed(clock, repeat(100.0), device="cpu", **ADAPTIVE)
    assert set(taken) == {"warmup", "synced"}


def expanded(timing: str, axes: str = "", *sets: str) -> Expansion:
    text = f"name: t\ngrids: [{{task: train_step, fixed: {{size: tiny}}, axes: {{timing: [{timing}]{axes}}}}}]"
    return expand(
        *parse_config(text, "t.yaml"), parse_selection(sets, ()) if sets else Selection({}, {})
    )


def test_fixed_cells_are_the_cells_they_were() -> None:
    """Ids from before there was another timing."""
    assert make_cell("train_step", {"size": "tiny"}).id == "6c70ae76db08"
    assert make_cell("attention", {}).id == "7d17a5704a16"
    assert make_cell("matmul", {"measured_steps": 3}).id == "c975422a6353"


def test_adaptive_cells_are_others_and_each_is_one() -> None:
    cells = expanded("fixed, adaptive", ", warmup_steps: [0, 5], half_width: [0.01, 0.02]").cells
    shown = [
        [c.params.values()[n] for n in ("timing", "warmup_steps", "measured_steps", "half_width")]
        for c in cells
    ]
    assert shown == [
        ["fixed", 0, 10, None], ["fixed", 5, 10, None],
        ["adaptive", None, None, 0.01], ["adaptive", None, None, 0.02],
    ]  # fmt: skip
    assert len({cell.id for cell in cells}) == 4
    assert [make_cell("train_step", cell.params.values()).id for cell in cells] == [
        cell.id for cell in cells
    ]


def test_defaults_said_or_not_are_the_same_cell() -> None:
    plain, said = (
        expanded("adaptive").cells[0],
        expanded("adaptive", "", "half_width=0.01", "most_seconds=5").cells[0],
    )
    assert plain.id == said.id
    assert plain.params.values()["most_steps"] == 100


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["timing=adaptve"], "'adaptve' is not allowed"),
        (["timing=adaptive", "half_width=2"], "less than 1"),
        (["timing=adaptive", "most_steps=5"], "greater than or equal to 6"),
        (["timing=adaptive", "most_seconds=0"], "greater than 0"),
        (["timing=adaptive", "measured_steps=many"], "valid integer"),
        (["timing=fixed", "measured_steps=null"], "needs warmup_steps and measured_steps"),
    ],
)
def test_impossible_timing_options_are_refused_in_one_line(sets: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as refused:
        expanded("fixed", "", *sets)
    assert "\n" not in str(refused.value).strip()


def test_timing_options_do_not_change_the_memory_identity() -> None:
    cells: list[Cell] = [
        make_cell("train_step", {**FAST, **own})
        for own in ({}, ADAPTIVE, {**ADAPTIVE, "half_width": 0.1})
    ]
    assert memory_identity(cells[0]) == memory_identity(cells[1]) == memory_identity(cells[2])


def test_a_timing_other_than_fixed_or_adaptive_is_refused() -> None:
    with pytest.raises(ValidationError, match="'fixed' or 'adaptive'"):
        MatmulParams.model_validate({"timing": "guessed"})
