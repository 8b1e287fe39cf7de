"""The comparison of predicted and measured memory of compiled cells."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest

from tasks.prediction.records import Prediction
from tasks.spec.tables import Sample
from tests.conftest import ROOT


@pytest.fixture
def compiled_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("compiled_memory")


def test_a_published_run_is_compared(
    compiled_memory: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fake predictions are 4 % above every measured peak."""
    run = ROOT / "results" / "published" / "h200" / "full"
    measured = compiled_memory.measured_peaks(compiled_memory.Run(run))

    def predict(cells: Any, gpu: Any, import_paths: Any) -> dict[str, Prediction]:
        return {cell.id: prediction_of(*(1.04 * measured.loc[cell.id])) for cell in cells}

    monkeypatch.setattr(compiled_memory, "predict_memory", predict)
    words = ["compiled_memory.py", str(run), "--where", "size=small", "--where", "pass=forward"]
    monkeypatch.setattr(sys, "argv", words)
    compiled_memory.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["forward", "bf16", "small", "4", *(6 * ["+4.0%"])]
    assert lines[-3].startswith("allocated: 100.0% of 12 cells within 5%; 0 more than 2% too low")
    assert lines[-1] == "predicted: 12 compiled"


def prediction_of(allocated: float, reserved: float) -> Prediction:
    peaks = {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved}
    samples = [
        Sample("prediction", name, "bytes", value, "steady", "forward")
        for name, value in peaks.items()
    ]
    return Prediction("compiled", "", tuple(samples))
