"""Timings of the cells of one run, from rows made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchestrator.analysis.cell_timing import load_timings
from tasks.spec.outcome import Outcome
from tests.orchestrator.analysis.test_comparison import paced, write


def test_the_range_of_cpu_speeds_covers_all_repetitions(
    tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    run = write(
        tmp_path / "a",
        *(paced(make_outcome(number=number), 100.0 * number, 110.0) for number in (1, 2, 3)),
    )
    (timing,) = load_timings(run).steps.values()
    assert timing.dispatch_rates == (100.0, 300.0)
