"""The simulation of a sweep on many GPUs."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest

from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tests.conftest import ROOT
from tests.support.fake_sweep import state_of


@pytest.fixture
def gpu_queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("gpu_queue")


def cells_of(gpu_queue: Any, durations_s: list[float]) -> Any:
    cells = [
        make_cell("train_step", {"size": "small", "context_length": 64 * 4**number})
        for number in range(len(durations_s))
    ]
    seconds = {cell.id: duration_s for cell, duration_s in zip(cells, durations_s, strict=True)}
    states = {cell: state_of((Status.OK,), (duration_s,)) for cell, duration_s in seconds.items()}
    return gpu_queue.MeasuredCells("NVIDIA H200", cells, states, seconds)


def test_known_durations_fill_the_gpus(gpu_queue: Any) -> None:
    measured = cells_of(gpu_queue, [1.0, 1.0, 1.0, 1.0, 4.0])
    assert measured.bound_s(2) == 4.0
    assert gpu_queue.simulate(measured, 2, start_s=10.0, are_known=True) == 14.0


def test_a_wrong_estimate_lets_the_longest_cell_start_last(gpu_queue: Any) -> None:
    """A short context takes longest here, which no estimate expects."""
    measured = cells_of(gpu_queue, [1.0, 4.0, 1.0, 1.0, 1.0])
    assert gpu_queue.simulate(measured, 2, start_s=0.0, are_known=False) == 6.0
    assert gpu_queue.simulate(measured, 2, start_s=0.0, are_known=True) == 4.0


def test_a_published_run_is_simulated(
    gpu_queue: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ROOT / "results" / "published" / "h200" / "tenth"
    monkeypatch.setattr(sys, "argv", ["gpu_queue.py", str(run), "--gpus", "1,4"])
    gpu_queue.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert [row[0] for row in rows] == ["| 1", "| 4"]
    assert rows[0][2] == rows[0][3] == rows[0][5]


def test_a_cell_takes_all_of_its_gpus_and_short_ones_fill_the_rest(gpu_queue: Any) -> None:
    widths = {1: [2.0, 2.0], 2: [3.0, 3.0], 4: [9.0]}
    cells, seconds = [], {}
    for gpus, durations_s in widths.items():
        parallel = "ddp" if gpus > 1 else "none"
        for seed, duration_s in enumerate(durations_s):
            values = {"size": "small", "gpus": gpus, "parallel": parallel, "seed": seed}
            cell = make_cell("train_step", values)
            cells.append(cell)
            seconds[cell.id] = duration_s
    states = {cell: state_of((Status.OK,), (took_s,)) for cell, took_s in seconds.items()}
    measured = gpu_queue.MeasuredCells("NVIDIA H200", cells, states, seconds).on(3)
    assert (measured.gpu_s, measured.bound_s(3)) == (16.0, 16.0 / 3)
    # The cells of two GPUs come first; the others run on the third GPU meanwhile.
    assert gpu_queue.simulate(measured, 3, start_s=0.0, are_known=True) == 6.0
