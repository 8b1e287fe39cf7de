"""The benchmark of isolation: which cells are shown in fresh processes, and what each way is held against."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from orchestrator.store.run import Run
from tests.conftest import FAST, ROOT

CONFIG = """
name: few
grids:
  - task: train_step
    fixed: {device: cpu, size: tiny, vocab_size: 50, context_length: 8, batch_size: 1, warmup_steps: 1, measured_steps: 2}
"""
CELLS = [{"context_length": length} for length in range(50)]


@pytest.fixture
def isolation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("isolation")


@pytest.fixture
def config(write_config: Callable[..., Path]) -> Path:
    return write_config(CONFIG, "c.yaml")


def test_some_cells_are_drawn_the_same_ones_each_time_in_their_order(isolation: Any) -> None:
    assert isolation.drawn(CELLS, None) == isolation.drawn(CELLS, 50) == CELLS
    drawn = isolation.drawn(CELLS, 10)
    assert len(drawn) == 10
    assert drawn == isolation.drawn(CELLS, 10) == sorted(drawn, key=CELLS.index)


def test_each_way_is_held_against_the_loop_over_the_same_cells(
    isolation: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looped = {number: isolation.Looped(1.0 + number, 0.5) for number in range(50)}
    clock = iter([0.0, 100.0, 100.0, 150.0, 150.0, 210.0])
    monkeypatch.setattr(isolation, "cells_of", lambda *asked: CELLS)
    monkeypatch.setattr(isolation.time, "monotonic", lambda: next(clock))
    ways = {
        "loop": lambda cells, command: [looped[cell["context_length"]] for cell in cells],
        "sweep": lambda cells, command: [],
        "processes": lambda cells, command: [looped[cell["context_length"]] for cell in cells],
    }
    monkeypatch.setattr(isolation, "WAYS", ways)
    monkeypatch.setattr(
        sys, "argv", ["isolation.py", "any.yaml", "--ways", "loop,sweep,processes", "--fresh", "2"]
    )
    isolation.main()
    rows = [
        [word.strip() for word in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
        if "|" in line
    ]
    own = sum(1.0 + cell["context_length"] for cell in isolation.drawn(CELLS, 2))
    assert {row[0]: row[1:] for row in rows[2:]} == {
        "loop": ["50", "100.00", "2.00", "1.00"],
        "loop, but for what runs on": ["50", "75.00", "1.50", "0.75"],
        "loop, of those in fresh processes": ["2", f"{own:.2f}", f"{own / 2:.2f}", "1.00"],
        "sweep": ["50", "50.00", "1.00", "0.50"],
        "processes": ["2", "60.00", "30.00", f"{60 / own:.2f}"],
        "processes, but for what runs on": ["2", "59.00", "29.50", f"{59 / own:.2f}"],
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.yaml"], "none.yaml: cannot be read"),
        (["c.yaml", "--set", "size=tinny"], "Did you mean 'tiny'?"),
        (
            ["c.yaml", "--set", "compile=blocks"],
            "a plain loop does eager cells of train_step alone",
        ),
        (
            ["c.yaml", "--set", "device=cuda"],
            "c.yaml: asks for device cuda, and there is no GPU here",
        ),
        (
            [str(ROOT / "configs" / "numerics.yaml"), "--set", "device=cpu"],
            "a plain loop does eager cells of train_step alone",
        ),
        (
            ["c.yaml", "--keep", "c.yaml/kept"],
            "argument --keep: c.yaml/kept: cannot be made: Not a directory",
        ),
        (["c.yaml", "--rounds", "two"], "argument --rounds: two: must be 1 or more"),
        (["c.yaml", "--ways", "loop,fast"], "argument --ways: fast: choose from loop, sweep,"),
        (["c.yaml", "--rounds", "0"], "argument --rounds: 0: must be 1 or more"),
        (["c.yaml", "--fresh", "-1"], "argument --fresh: -1: must be 1 or more"),
    ],
)
def test_what_cannot_be_measured_is_said(
    words: list[str],
    said: str,
    isolation: Any,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(config.parent)
    monkeypatch.setattr("orchestrator.hardware.nvml.gpu_names", list)
    monkeypatch.setattr(sys, "argv", ["isolation.py", *words])
    with pytest.raises(SystemExit) as ended:
        isolation.main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (out, said in err) == ("", True)


def test_a_cell_that_has_no_result_is_said(
    isolation: Any,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--set", "precision=tf32", "--ways", "sweep", "--keep", str(config.parent / "kept")]
    monkeypatch.setattr(sys, "argv", ["isolation.py", str(config), *words])
    with pytest.raises(SystemExit, match="1 of the cells were not measured"):
        isolation.main()
    assert "sweep" in capsys.readouterr().out
    assert Run(config.parent / "kept" / "sweep").exists


def test_the_loop_says_what_each_cell_took(isolation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "plain_loop.plain_loop", lambda cell: {"step": [1000.0, 2000.0]}, raising=False
    )
    found = isolation.loop([dict(FAST), dict(FAST)])
    assert [one.running_on_s for one in found] == [3.0, 3.0]
    assert json.loads(json.dumps(found)) == [list(one) for one in found]
