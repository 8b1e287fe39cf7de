"""The benchmark of scaling: its arithmetic, and the whole of it over a grid of two small cells on the CPU."""

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


def test_a_grid_alone_and_together(
    scaling: Any,
    sweep_here: Callable[..., Result],
    write_config: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Without Ray, which other tests start: two cells at a time are then one after the other."""
    called: list[list[str]] = []

    def sweep(words: list[str], environment: dict[str, str]) -> None:
        called.append(words)
        how = (
            words.index("--cpu-cells") if words[0] == "run" else None
        )  # the last two, which are of Ray
        done = sweep_here(*words[:how], *(["--scheduler", "serial"] if words[0] == "run" else []))
        assert done.exit_code == 0, done.output

    monkeypatch.setattr(scaling, "sweep", sweep)
    words = [
        str(write_config(CONFIG)),
        "--set",
        "seed=0,1",
        "--where",
        "seed=1",
        "--cpu-cells",
        "2",
    ]
    words += ["--keep", str(tmp_path / "kept")]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *words])
    scaling.main()
    assert [one[0] for one in called] == ["plan", "run", "run"]
    assert [one[-2:] for one in called[1:]] == [["--cpu-cells", "1"], ["--cpu-cells", "2"]]
    said = capsys.readouterr().out
    first = [line.split("|")[1].strip() for line in said.splitlines() if line.startswith("|")]
    assert [word for word in first if not word.startswith("-")] == 2 * ["at once", "1", "2"]
    assert "a step among others / alone: " in said
    assert "in 2 cells" in said
    assert "0 cells did not end alike in all sweeps" in said
    kept = orchestrator.load(tmp_path / "kept" / "1-at-once", tmp_path / "kept" / "2-at-once").cells
    assert kept.groupby("run")["cell"].nunique().to_dict() == {"1-at-once": 2, "2-at-once": 2}


def test_rounds_are_kept_apart_however_they_end(scaling: Any, tmp_path: Path) -> None:
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
    def swept(places: int, seconds: float, step_ms: float, status: str = "ok") -> Any:
        took_s = dict.fromkeys(scaling.TIME_SPENT, seconds / 1000)
        return scaling.Swept(
            places,
            seconds,
            seconds - 10,
            {"a": step_ms, "b": 5.0},
            {"a": status, "b": "ok", "c": "oom"},
            took_s,
        )

    rounds = [swept(1, 110, 10.0), swept(4, 35, 12.0), swept(1, 130, 10.0), swept(4, 40, 13.0)]
    table = [
        [word.strip() for word in line.split("|")[1:-1]]
        for line in scaling.scaling(rounds).splitlines()[2:]
    ]
    assert table == [
        ["1", "120.0", "1.00", "1.00", "110.0", "1.00", "1.00"],
        ["4", "37.5", "3.20", "0.80", "27.5", "4.00", "1.00"],
    ]
    assert [line.split()[1::2] for line in scaling.seconds(rounds).splitlines()[2:]] == [
        ["1", *5 * ["0.12"]],
        ["4", *5 * ["0.04"]],
    ]
    assert scaling.contention(rounds).splitlines() == [
        "a step among others / alone: 1.125 (1.000 to 1.250) in 2 cells",
        "furthest off: a 1.250, b 1.000",
        "0 cells did not end alike in all sweeps",
    ]
    assert "1 cells did not end alike in all sweeps: a" in scaling.contention(
        [*rounds, swept(4, 40, 13.0, "crashed")]
    )


def test_without_two_places_there_is_nothing_to_compare(
    scaling: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "gpu_names", lambda: ("NVIDIA H200",))
    for words, said in (
        ([], "there is 1 GPU here, and it takes two"),
        (["--cpu-cells", "1"], "argument --cpu-cells: 1: must be 2 or more"),
        (
            ["--json", "no/such.json"],
            "argument --json: no/such.json: cannot be written: No such file or directory",
        ),
    ):
        monkeypatch.setattr(sys, "argv", ["scaling.py", "configs/full.yaml", *words])
        with pytest.raises(SystemExit) as ended:
            scaling.main()
        assert (ended.value.code, said in capsys.readouterr().err) == (2, True)
