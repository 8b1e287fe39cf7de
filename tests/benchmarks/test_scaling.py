"""The benchmark of scaling: its arithmetic, and one run over two small cells on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import orchestrator
from tests.conftest import ROOT

CONFIG = """
name: tiny
grids:
  - task: train_step
    fixed: {device: cpu, size: tiny, vocab_size: 200, batch_size: 1, warmup_steps: 1, measured_steps: 2}
    axes: {context_length: [16, 32]}
"""


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("scaling")


@pytest.mark.slow
def test_two_cells_are_measured_one_at_a_time_and_together(
    scaling: Any,
    sweep_here: Callable[..., Result],
    write_config: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The fake sweep uses no Ray, so that its two cells still run one after the other."""
    called: list[list[str]] = []

    def sweep(words: list[str], environment: dict[str, str]) -> None:
        called.append(words)
        if words[0] == "run":  # --cpu-cells needs Ray
            words = [*words[: words.index("--cpu-cells")], "--scheduler", "serial"]
        done = sweep_here(*words)
        assert done.exit_code == 0, done.output

    monkeypatch.setattr(scaling, "sweep", sweep)
    words = [str(write_config(CONFIG)), "--set", "seed=0,1", "--where", "seed=1"]
    words += ["--cpu-cells", "2", "--keep", str(tmp_path / "copies")]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *words])
    scaling.main()
    assert [words[0] for words in called] == ["plan", "run", "run"]
    assert [words[-2:] for words in called[1:]] == [["--cpu-cells", "1"], ["--cpu-cells", "2"]]
    printed = capsys.readouterr().out
    first = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("|")]
    assert [word for word in first if not word.startswith("-")] == 2 * ["cells", "1", "2"]
    assert "step with other cells / alone: " in printed
    assert "in 2 cells" in printed
    assert "0 cells ended differently in some sweep" in printed
    copies = tmp_path / "copies"
    cells = orchestrator.load(copies / "1-cells", copies / "2-cells").cells
    assert cells.groupby("run")["cell"].nunique().to_dict() == {"1-cells": 2, "2-cells": 2}


def test_each_round_has_its_own_copy_even_if_it_fails(scaling: Any, tmp_path: Path) -> None:
    def end_early(word: str) -> None:
        with scaling.new_folder("sweep", tmp_path) as folder:
            (folder / "run.json").write_text(word)
            (folder / "artifacts").mkdir()
            (folder / ".lock").touch()
            sys.exit(2)

    for word in ("first", "second"):
        with pytest.raises(SystemExit):
            end_early(word)
    assert {
        path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.json")
    } == {
        "sweep/run.json": "first",
        "sweep-2/run.json": "second",
    }
    assert not [*tmp_path.rglob("artifacts"), *tmp_path.rglob(".lock")]


def test_speed_up_and_contention(scaling: Any) -> None:
    def timed(slots: int, seconds: float, step_ms: float, status: str = "ok") -> Any:
        mean_s = dict.fromkeys(scaling.TIME_SPENT, seconds / 1000)
        statuses = {"a": status, "b": "ok", "c": "oom"}
        steps_ms = {"a": step_ms, "b": 5.0}
        return scaling.TimedSweep(slots, seconds, seconds - 10, steps_ms, statuses, mean_s)

    rounds = [timed(1, 110, 10.0), timed(4, 35, 12.0), timed(1, 130, 10.0), timed(4, 40, 13.0)]
    table = [
        [word.strip() for word in line.split("|")[1:-1]]
        for line in scaling.speed_up_table(rounds).splitlines()[2:]
    ]
    assert table == [
        ["1", "120.0", "1.00", "1.00", "110.0", "1.00", "1.00"],
        ["4", "37.5", "3.20", "0.80", "27.5", "4.00", "1.00"],
    ]
    assert [line.split()[1::2] for line in scaling.time_table(rounds).splitlines()[2:]] == [
        ["1", *5 * ["0.12"]],
        ["4", *5 * ["0.04"]],
    ]
    assert scaling.contention(rounds).splitlines() == [
        "step with other cells / alone: 1.125 (1.000 to 1.250) in 2 cells",
        "largest differences: a 1.250, b 1.000",
        "0 cells ended differently in some sweep",
    ]
    with_a_crash = scaling.contention([*rounds, timed(4, 40, 13.0, "crashed")])
    assert "1 cells ended differently in some sweep: a" in with_a_crash


def test_one_gpu_is_too_few(
    scaling: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "gpu_names", lambda: ("NVIDIA H200",))
    for words, message in (
        ([], "this machine has 1 GPU, and two are needed"),
        (["--cpu-cells", "1"], "argument --cpu-cells: 1: must be 2 or more"),
        (
            ["--json", "no/such.json"],
            "argument --json: no/such.json: cannot be written: No such file or directory",
        ),
    ):
        monkeypatch.setattr(sys, "argv", ["scaling.py", "configs/full.yaml", *words])
        with pytest.raises(SystemExit) as ended:
            scaling.main()
        assert (ended.value.code, message in capsys.readouterr().err) == (2, True)
