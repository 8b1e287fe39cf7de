"""A cell as one run measured it, on rows made by hand. What is made of two of them: test_compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchestrator.analysis.cell_timing import load_counted, sides_of
from tasks.spec.outcome import Outcome
from tests.orchestrator.analysis.test_comparison import paced, write


def test_the_speed_of_the_host_is_that_of_all_repetitions(
    tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    run = write(
        tmp_path / "a",
        *(paced(make_outcome(number=number), 100.0 * number, 110.0) for number in (1, 2, 3)),
    )
    (side,) = sides_of(*load_counted(run)).values()
    assert side.paces == (100.0, 300.0)
