"""What the kernels of a step take, on a device made for it: operators of the CPU stand for its kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from tasks.harness.stage import Session
from tasks.harness.workload import PhaseMarker, Workload
from tasks.instruments import kernel_time
from tasks.matmul import MatmulParams
from tasks.process.phase_file import Progress
from tasks.spec.tables import Sample

LARGE, SMALL = torch.ones(600, 600), torch.ones(30, 30)  # the small one waits for no other thread


@pytest.fixture(autouse=True)
def operators_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_time, "ProfilerActivity", SimpleNamespace(CUDA=ProfilerActivity.CPU))
    monkeypatch.setattr(kernel_time, "DeviceType", SimpleNamespace(CUDA=DeviceType.CPU))


def step_of_two(phase: PhaseMarker) -> None:
    with phase("forward"):
        SMALL.mm(SMALL)
    LARGE.mm(LARGE)  # of no phase
    with phase("backward"):
        LARGE.mm(LARGE)


def timed(
    step: Callable[[PhaseMarker], None] = step_of_two,
    kind: str = "cuda",
    before: Callable[[], object] | None = None,
) -> tuple[list[Sample], Session]:
    waits: list[None] = []
    device: Any = SimpleNamespace(kind=kind, synchronize=lambda: waits.append(None))
    workload = Workload(step, ("forward", "backward"), device, tokens=None, before_phase=before)
    session = Session(workload, MatmulParams.model_validate({}), Progress())
    samples = list(kernel_time.time_kernels(session))
    assert len(waits) == 4 * (session.steps - 1) if kind == "cuda" else not waits
    return samples, session


def least(of: list[Sample], phase: str) -> float:
    """What else the cores do only adds to an operator's time."""
    return min(sample.value or 0.0 for sample in of if sample.phase == phase)


def test_each_phase_is_told_and_the_step_is_their_sum() -> None:
    samples, session = timed()
    assert session.steps == 7  # one before, so that what is watched is no first step
    assert {(s.instrument, s.metric, s.unit, s.mode, s.note) for s in samples} == {
        ("kernel_time", "kernel_time", "ms", "", "")
    }
    for number in range(6):
        ms = {sample.phase: sample.value or 0.0 for sample in samples if sample.step == number}
        assert ms["step"] == pytest.approx(ms["forward"] + ms["backward"])
    assert 0 < least(samples, "forward") < least(samples, "backward")  # 8000 times the work


def test_kernels_launched_before_a_phase_are_not_counted_in_the_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted, since a busy machine makes any product take as long as many."""
    monkeypatch.setattr(kernel_time, "kernel_ms", products)
    before = [0]

    def much() -> None:
        before[0] += 1
        for _ in range(20):
            SMALL.mm(SMALL)

    samples, _ = timed(before=much)
    assert before[0] == 14
    assert {(sample.phase, sample.value) for sample in samples} == {
        ("forward", 1.0),
        ("backward", 1.0),
        ("step", 2.0),
    }


def products(profiled: profile) -> float:
    """As many as the profiler saw, as if each took a ms."""
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    return float(
        sum(event.name() == "aten::mm" for event in profiled.profiler.kineto_results.events())
    )


def test_long_steps_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_time, "kernel_ms", lambda profiled: 200.0)
    samples, session = timed()
    assert session.steps == 4  # with 1,200 ms of kernels in the last three
    assert {sample.step for sample in samples} == {0, 1, 2}


def test_kernel_times_are_null_if_the_profiler_sees_no_kernels() -> None:
    def nothing(phase: PhaseMarker) -> None:
        for name in ("forward", "backward"):
            with phase(name):
                pass

    samples, _ = timed(nothing)
    assert {sample.value for sample in samples} == {None}
    assert all("CUPTI is refused here" in sample.note for sample in samples)


def test_a_phase_in_which_the_gpu_does_nothing_fails_the_cell() -> None:
    def one(phase: PhaseMarker) -> None:
        with phase("forward"):
            SMALL.mm(SMALL)
        with phase("backward"):
            pass

    with pytest.raises(RuntimeError, match="the GPU ran nothing in phase backward"):
        timed(one)


def test_kernel_times_are_null_without_a_gpu() -> None:
    samples, session = timed(kind="cpu")
    assert [(sample.value, sample.note) for sample in samples] == [
        (None, "only a GPU has kernel times")
    ]
    assert session.steps == 0


def test_a_profiler_is_refused_only_if_no_kernels_are_seen() -> None:
    kernel_time.require_kernels(lambda: SMALL.mm(SMALL))
    with pytest.raises(RuntimeError, match="the profiler saw no kernels"):
        kernel_time.require_kernels(lambda: None)
