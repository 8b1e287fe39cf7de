"""benchmarks/gate.py: false alarms and power of the gate, on measured noise, with fixed seeds."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from orchestrator.analysis.verdicts import Verdict
from tests.conftest import ROOT


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("gate")


def test_few_simulated_comparisons_have_the_shape_of_the_table(gate: Any) -> None:
    head, *lines = gate.table(2)
    assert len(lines) == len(gate.RULES)
    assert {len(line) for line in lines} == {len(head)}


@pytest.mark.fuzz
@pytest.mark.parametrize("number", range(9))
def test_at_most_one_of_a_hundred_comparisons_of_equal_cells_has_a_false_alarm(
    gate: Any, number: int
) -> None:
    rule = gate.RULES[number]
    result = gate.simulate(rule, 2000)
    assert result.false_alarms <= 20
    if rule.more:
        assert result.equal[Verdict.UNDECIDED] / result.equal.total() <= 0.05


def test_smoothed_processes_have_the_variance_of_the_measured_ones(gate: Any) -> None:
    rng, measured = np.random.default_rng(1), np.array([0.0, 0.01, 0.002])
    a, b = gate.smoothed(rng, measured, 100_000)
    assert a.var() == pytest.approx(measured.var(ddof=1), rel=0.02)
    assert (b - a).var() == pytest.approx(2 * measured.var(ddof=1), rel=0.02)
    assert np.corrcoef(a, b)[0, 1] == pytest.approx(0, abs=0.02)


@pytest.mark.fuzz
@pytest.mark.parametrize(("change", "found"), [(0.02, 0.46), (0.03, 0.93), (0.05, 0.98)])
def test_a_slow_down_is_found_as_often_as_the_guide_says(
    gate: Any, change: float, found: float
) -> None:
    changed = gate.simulate(gate.DEFAULT, 200, change).changed
    assert changed[Verdict.SLOWER] / changed.total() == pytest.approx(found, abs=0.03)
