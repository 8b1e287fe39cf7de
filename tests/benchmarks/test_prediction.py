"""benchmarks/prediction.py: its verdict."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest

from tasks.prediction.replay import Trace
from tests.conftest import ROOT


@pytest.fixture
def prediction(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["prediction.py"])
    module = import_module("prediction")
    monkeypatch.setattr(module, "track", lambda params, workspace_bytes: Trace())
    monkeypatch.setattr(module, "trace_by_layers", lambda params, trace_of: Trace())
    return module


@pytest.mark.parametrize(
    ("layers_s", "predicted_s", "code"), [(0.39, 0.9, None), (0.41, 0.9, 1), (0.39, 1.0, 1)]
)
def test_the_prediction_benchmark_fails_if_a_prediction_takes_too_long(
    prediction: Any,
    monkeypatch: pytest.MonkeyPatch,
    layers_s: float,
    predicted_s: float,
    code: int | None,
) -> None:
    monkeypatch.setattr(prediction, "prediction_and_steps", lambda: (predicted_s, 1.0))
    durations = iter([1.0, layers_s] * 3)
    monkeypatch.setattr(prediction, "timed", lambda trace: (next(durations), trace()))
    found = None
    try:
        prediction.main()
    except SystemExit as ended:
        found = ended.code
    assert found == code


def test_a_difference_is_an_error(prediction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "trace_by_layers", lambda params, trace_of: Trace([4]))
    with pytest.raises(SystemExit, match="differs"):
        prediction.main()
