"""benchmarks/commands.py: a command above its limit fails it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.store.run import Run
from tests.conftest import ROOT


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["commands.py"])
    module = import_module("commands")
    made = SimpleNamespace(config_path=Path("many.yaml"), run=Run(Path("many")))
    monkeypatch.setattr(module, "make_run", lambda folder, cells: made)
    return module


@pytest.mark.parametrize(("status_s", "code"), [(2.5, 0), (2.7, 1)])
def test_the_best_of_three_tries_has_to_be_below_the_limit(
    commands: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status_s: float,
    code: int,
) -> None:
    tries: list[str] = []

    def taken(command: list[str]) -> float:
        if command[1] == "-c":
            return 2.0  # of the fixed work
        tries.append(command[3])
        return 2.0 * (status_s if command[3] == "status" else 0.2)

    monkeypatch.setattr(commands, "cpu_s", taken)
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert ended.value.code == code
    assert tries == ["--help", "plan", "plan", "plan", *["status"] * (3 if code else 1)]
    assert f" {status_s:.2f} (at most 2.6)  sweep status " in capsys.readouterr().out
