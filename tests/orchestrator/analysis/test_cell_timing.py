"""Timings of the cells of one run, from rows made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.analysis.cell_timing import load_timings
from tasks.spec.outcome import Outcome
from tasks.spec.tables import Sample
from tests.conftest import with_samples
from tests.orchestrator.analysis.test_comparison import write


def test_steps_are_counted_in_operations_at_the_speed_of_each_attempt(
    tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    attempts = []
    for number in (1, 2):
        paces = [
            Sample("telemetry", "host_pace", "1/ms", value, when)
            for when, value in (("before", 100.0 * number), ("after", 110.0 * number))
        ]
        attempts.append(with_samples(make_outcome(number=number), *paces))
    (timing,) = load_timings(write(tmp_path / "a", *attempts)).timings.values()
    assert timing.steps_ms == pytest.approx((11.0, 11.0))
    assert timing.operations == pytest.approx((11 * 105.0, 11 * 210.0))
    assert timing.kernels_ms == ()
