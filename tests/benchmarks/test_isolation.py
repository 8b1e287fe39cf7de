"""The benchmark of isolation: its sample of cells, its table, and its errors."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import orchestrator
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


def test_the_sample_is_the_same_each_time_and_in_the_order_of_the_cells(isolation: Any) -> None:
    assert isolation.sampled(CELLS, None) == isolation.sampled(CELLS, 50) == CELLS
    sample = isolation.sampled(CELLS, 10)
    assert len(sample) == 10
    assert sample == isolation.sampled(CELLS, 10) == sorted(sample, key=CELLS.index)


def test_each_way_is_compared_with_the_loop_over_the_same_cells(
    isolation: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop_times = {number: isolation.LoopTime(1.0 + number, 0.5) for number in range(50)}
    clock = iter([0.0, 100.0, 100.0, 150.0, 150.0, 210.0])
    monkeypatch.setattr(isolation, "loop_cells", lambda options: CELLS)
    monkeypatch.setattr(isolation.time, "monotonic", lambda: next(clock))
    ways = {
        "loop": lambda cells, command: [loop_times[cell["context_length"]] for cell in cells],
        "sweep": lambda cells, command: [],
        "processes": lambda cells, command: [loop_times[cell["context_length"]] for cell in cells],
    }
    monkeypatch.setattr(isolation, "WAYS", ways)
    monkeypatch.setattr(isolation, "mean_profile", lambda folder, seconds: "")
    monkeypatch.setattr(
        sys, "argv", ["isolation.py", "any.yaml", "--ways", "loop,sweep,processes", "--fresh", "2"]
    )
    isolation.main()
    rows = [
        [word.strip() for word in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
        if "|" in line
    ]
    own = sum(1.0 + cell["context_length"] for cell in isolation.sampled(CELLS, 2))
    assert {row[0]: row[1:] for row in rows[2:]} == {
        "loop": ["50", "100.00", "2.00", "1.00"],
        "loop, without pipelined steps": ["50", "75.00", "1.50", "0.75"],
        "loop, over the cells in fresh processes": ["2", f"{own:.2f}", f"{own / 2:.2f}", "1.00"],
        "sweep": ["50", "50.00", "1.00", "0.50"],
        "processes": ["2", "60.00", "30.00", f"{60 / own:.2f}"],
        "processes, without pipelined steps": ["2", "59.00", "29.50", f"{59 / own:.2f}"],
    }


def test_the_parts_of_a_cell_add_up_to_the_time_of_the_command(isolation: Any) -> None:
    folder = ROOT / "results" / "published" / "cpu" / "demo"
    cells = orchestrator.load(folder).cells
    line = isolation.mean_profile(folder, 60.0)
    means_s = [float(word) for word in re.findall(r"\d+\.\d\d", line)]
    assert [name in line for name in ("process", "warm_up", "outside of cells")] == [True] * 3
    assert sum(means_s) * len(cells) == pytest.approx(60.0, abs=0.01 * len(means_s) * len(cells))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.yaml"], "none.yaml: cannot be read"),
        (["c.yaml", "--set", "size=tinny"], "Did you mean 'tiny'?"),
        (
            ["c.yaml", "--set", "compile=blocks"],
            "a plain loop measures only eager cells of train_step",
        ),
        (
            ["c.yaml", "--set", "device=cuda"],
            "c.yaml: device cuda is not available on this machine",
        ),
        (
            [str(ROOT / "configs" / "numerics.yaml"), "--set", "device=cpu"],
            "a plain loop measures only eager cells of train_step",
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
def test_a_wrong_command_line_is_an_error(
    words: list[str],
    message: str,
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
    assert (out, message in err) == ("", True)


@pytest.mark.process
def test_a_failed_cell_ends_the_benchmark_with_an_error(
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


def test_the_loop_returns_the_time_of_each_cell(
    isolation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "plain_loop.plain_loop", lambda cell: {"step": [1000.0, 2000.0]}, raising=False
    )
    found = isolation.loop([dict(FAST), dict(FAST)])
    assert [cell.pipelined_s for cell in found] == [3.0, 3.0]
    assert json.loads(json.dumps(found)) == [list(cell) for cell in found]
