"""benchmarks/gate.py: false alarms and power of the gate, on measured noise, with fixed seeds."""

from __future__ import annotations

from importlib import import_module
from typing import Any

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
def test_at_most_one_of_a_hundred_comparisons_of_equal_cells_has_a_false_alarm(gate: Any) -> None:
    result = gate.simulate(gate.DEFAULT, 2000)
    assert result.false_alarms <= 20
    assert result.equal[Verdict.UNDECIDED] / result.equal.total() <= 0.05
    stored = gate.simulate(gate.RULES[-1], 500)
    assert stored.false_alarms <= 5


@pytest.mark.fuzz
@pytest.mark.parametrize(("change", "found"), [(0.02, 0.42), (0.03, 0.93), (0.05, 0.98)])
def test_a_slow_down_is_found_as_often_as_the_guide_says(
    gate: Any, change: float, found: float
) -> None:
    changed = gate.simulate(gate.DEFAULT, 200, change).changed
    assert changed[Verdict.SLOWER] / changed.total() == pytest.approx(found, abs=0.03)
