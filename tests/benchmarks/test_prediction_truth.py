"""benchmarks/prediction_truth.py: its verdicts, and that each of its models runs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from tasks.prediction.records import Prediction
from tasks.spec.tables import Sample
from tests.conftest import ROOT


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the benchmark sets it for good
    return import_module("prediction_truth")


def predicted(how: str = "tracked", **sizes: float) -> Prediction:
    samples = tuple(
        Sample("prediction", f"peak_{name}_bytes", "bytes", nbytes, "steady", "backward")
        for name, nbytes in sizes.items()
    )
    return Prediction(how, "", samples)


@pytest.mark.parametrize(
    ("how", "allocated", "reserved", "is_beyond"),
    [
        ("tracked", 1000, 1000, False),
        ("tracked", 1009, 1049, False),
        ("tracked", 1011, 1000, True),
        ("tracked", 1000, 1051, True),
        ("may take more", 1200, 1200, False),  # its row says so
    ],
)
def test_the_bars_hold_for_followed_predictions(
    truth: Any, how: str, allocated: float, reserved: float, is_beyond: bool
) -> None:
    steps = [truth.Step("gpt2", path, "fp32") for path in ("sdpa", "written")]
    measured = {"allocated": 1000, "reserved": 1000}
    found = {(step, way): measured for step in steps for way in ("product", "plain")}
    guess = predicted(how, allocated=allocated, reserved=reserved)
    assert truth.report(dict.fromkeys(steps, guess), found) == is_beyond


def test_saved_bytes_must_be_equal_in_both_runs(truth: Any) -> None:
    assert truth.compared("tracked", [5, 5], [5, 5], False) == truth.EQUAL
    assert truth.compared("tracked", [5, 5], [6, 6], False) == truth.DIFFERENT
    assert truth.compared("tracked", [5, 5], [5, 6], False) == truth.OTHER_RUN
    assert truth.compared("tracked", [5, 5], [5, 6], True) == truth.OTHER_RUN
    assert truth.compared("tracked", [5, 5], [6, 6], True).startswith("another kernel")
    assert truth.compared("may take more", [5, 5], [6, 6], False).startswith("not followed")


@pytest.mark.slow
def test_each_model_trains_all_of_its_parameters(truth: Any) -> None:
    models = import_module("architectures")
    assert len(models.ARCHITECTURES) >= 25
    for name, architecture in models.ARCHITECTURES.items():
        shape = architecture.small()
        tokens = torch.randint(shape.vocabulary, (2, shape.context))
        for path in architecture.paths:
            model = models.build(name, path, is_small=True)
            logits = model(tokens)
            assert logits.shape == (2, shape.context, shape.vocabulary)
            logits.sum().backward()
            assert not [key for key, one in model.named_parameters() if one.grad is None], name
