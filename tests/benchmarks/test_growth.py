"""benchmarks/growth.py: what grows faster than linearly fails it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.store.run import Run
from tests.conftest import ROOT


@pytest.mark.parametrize(("power", "code"), [(1.0, 0), (1.5, 1)])
def test_an_exponent_above_the_limit_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], power: float, code: int
) -> None:
    def make_run(folder: Path, cells: int) -> Any:
        expansion = SimpleNamespace(cells=range(cells))
        return SimpleNamespace(expansion=expansion, run=Run(folder), config_path=folder)

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["growth.py", "plan", "--cells", "100,400,1600"])
    growth: Any = import_module("growth")
    monkeypatch.setattr(growth, "make_run", make_run)
    monkeypatch.setattr(growth, "add_fingerprints", lambda request: None)
    monkeypatch.setattr(growth, "command_cpu_s", lambda *words: 1.0)
    cost = {"plan": lambda request: len(request.expansion.cells) ** power}
    monkeypatch.setattr(growth, "MEASURES", cost)
    with pytest.raises(SystemExit) as ended:
        growth.main()
    assert ended.value.code == code
    assert f"{power:.2f} |" in capsys.readouterr().out.splitlines()[-1]
