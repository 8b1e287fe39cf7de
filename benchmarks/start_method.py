"""Does it change a measurement that a cell's process was forked? And what does it save?

    python benchmarks/start_method.py configs/full.yaml --where size=small,precision=fp32,compile=eager --rounds 5

Measures each cell by turns in a process forked from the prepared parent and in a fresh one, so that whatever else the
machine does strikes both. Prints the ratio forked / fresh of the medians of steps, how far apart processes of one kind are
in it (largest over smallest), and what an attempt takes besides its steps.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence

from options import asked, cell_options, ending_in_order
from tabulate import tabulate

from orchestrator.execution.attempt import execute
from tasks.spec.attempt import Attempt, Settings, StartMethod
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome

METHODS: tuple[StartMethod, ...] = ("fork", "spawn")


def main() -> None:
    options = cell_options(__doc__, 5).parse_args()
    expansion = asked(options)
    rows: list[list[object]] = []
    for cell in expansion.cells:
        try:
            rows.append([expansion.label(cell), *compare(cell, options.rounds)])
        except RuntimeError as error:
            print(f"left out: {error}")
    header = [
        "cell",
        "forked / fresh",
        "forked apart",
        "fresh apart",
        "forked: other s",
        "fresh: other s",
    ]
    print(tabulate(rows, header, "github", floatfmt=".3f"))


def compare(cell: Cell, rounds: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        outcomes: dict[StartMethod, list[Outcome]] = {method: [] for method in METHODS}
        for number in range(1, rounds + 1):
            for method in METHODS:
                settings = Settings(instruments=("timing",), start_method=method)
                outcomes[method].append(
                    execute(Attempt(cell, number, f"{folder}/{method}{number}", settings))
                )
    steps = {method: [step_ms(outcome) for outcome in outcomes[method]] for method in METHODS}
    forked, fresh = (statistics.median(steps[method]) for method in METHODS)
    apart = [max(steps[method]) / min(steps[method]) for method in METHODS]
    other = [statistics.median(map(beside_steps_s, outcomes[method])) for method in METHODS]
    return [forked / fresh, *apart, *other]


def step_ms(outcome: Outcome) -> float:
    """The median of the steps that were waited for. Raises RuntimeError for a cell that was not measured as asked."""
    if (
        outcome.status != "ok"
        or outcome.facts["start_method"] != outcome.attempt.settings.start_method
    ):
        raise RuntimeError(f"{outcome.attempt.cell.describe()}: {outcome.status}")
    return statistics.median(step_durations(outcome, ("synced",)))


def beside_steps_s(outcome: Outcome) -> float:
    return (
        outcome.wall_s
        - sum(step_durations(outcome, ("warmup", "compile", "synced", "pipelined"))) / 1e3
    )


def step_durations(outcome: Outcome, modes: Sequence[str]) -> list[float]:
    """In ms."""
    taken = [
        sample for sample in outcome.samples if sample.mode in modes and sample.metric == "duration"
    ]
    return [sample.value for sample in taken if sample.phase == "step" and sample.value is not None]


if __name__ == "__main__":
    ending_in_order(main)
