"""Comparison of two runs: simulated timings, rows made by hand, and the command line."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from orchestrator.analysis import comparison
from orchestrator.analysis.cell_timing import CellTiming, load_timings
from orchestrator.analysis.comparison import (
    Change,
    Comparison,
    ComparisonReport,
    compare_cell,
    compare_runs,
)
from orchestrator.analysis.cpu_bound import BoundBy
from orchestrator.analysis.noise import Noise, noise_per_cell, pooled_noise
from orchestrator.analysis.results import load_results
from orchestrator.cli.text.comparison import comparison_table, describe_comparison
from orchestrator.common.errors import RunError
from orchestrator.report.formats.files import typed_columns
from orchestrator.report.formats.terminal import Screen
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.order_statistics import median_rank
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.conftest import ROOT, with_samples

pytestmark = pytest.mark.usefixtures("derive_once")
STEPS = 10
# Three runs of 40 cells, each repeated three times, one run after the other on one H200.
H200 = json.loads((ROOT / "tests" / "data" / "h200_same.json").read_text())
MakeOutcome = Callable[..., Outcome]
Pair = tuple[CellTiming, CellTiming]


def simulated(rng: np.random.Generator, ms: float, attempts: int, deviation: float) -> CellTiming:
    """Return a timing of processes that differ by `deviation`; their steps differ by 1 %."""
    between = rng.normal(0, deviation, (attempts, 1))
    steps = ms * np.exp(between + rng.normal(0, 0.01, (attempts, STEPS)))
    steps *= np.where(rng.random(steps.shape) < 0.03, 1.4, 1.0)  # the long tail of step times
    ordered, rank = np.sort(steps), median_rank(STEPS)
    low, high = np.median(ordered[:, rank - 1]), np.median(ordered[:, -rank])
    return CellTiming(tuple(np.median(steps, axis=1)), float(low), float(high))


def verdicts_of(pairs: Sequence[Pair], medians: Sequence[Sequence[float]] = ()) -> list[Change]:
    """Return the verdict of each pair. `medians`: those of all cells, by default of the pairs."""
    own = [(before.medians_ms, after.medians_ms) for before, after in pairs]
    noises = noise_per_cell(own, medians or list(itertools.chain(*own)))
    found = []
    for pair, noise in zip(pairs, noises, strict=True):
        found.append(compare_cell({}, *pair, noise).change)
    return found


def verdicts(effect: float, deviation: float, attempts: int, cells: int = 20) -> list[Change]:
    """Return the verdicts of 600 comparisons, in runs of `cells`, whose true ratio is `effect`."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(600 // cells):
        pairs = []
        for _ in range(cells):
            before = simulated(rng, 10, attempts, deviation)
            pairs.append((before, simulated(rng, 10 * effect, attempts, deviation)))
        found += verdicts_of(pairs)
    return found


def _at_most(draws: int) -> float:
    """Return how many of equal cells may differ: one in a hundred, and three standard errors."""
    return draws * 0.01 + 3 * (draws * 0.01 * 0.99) ** 0.5


def differing(found: Sequence[Change]) -> int:
    return found.count(Change.FASTER) + found.count(Change.SLOWER)


@pytest.mark.fuzz
@pytest.mark.parametrize("deviation", [0.001, 0.01, 0.05])
@pytest.mark.parametrize("attempts", [1, 2, 3, 5])
@pytest.mark.parametrize("cells", [1, 2, 20])
def test_at_most_one_of_a_hundred_equal_cells_is_called_faster_or_slower(
    deviation: float, attempts: int, cells: int
) -> None:
    """Runs of a few cells count too: they say little about how much cells differ in their noise."""
    found = verdicts(1.0, deviation, attempts, cells)
    assert differing(found) <= _at_most(len(found))


@pytest.mark.fuzz
def test_cells_with_different_noise_are_each_compared_with_their_own() -> None:
    rng = np.random.default_rng(0)
    deviations = [0.0003] * 20 + [0.01] * 10 + [0.1] * 10
    found: list[Change] = []
    noticed: list[Change] = []
    for _ in range(40):
        pairs = [(simulated(rng, 10, 3, one), simulated(rng, 10, 3, one)) for one in deviations]
        pairs.append((simulated(rng, 10, 3, 0.0003), simulated(rng, 10.4, 3, 0.0003)))
        *equal, real = verdicts_of(pairs)
        found += equal
        noticed.append(real)
    assert differing(found) <= len(found) / 100
    # 4 % of a cell with little noise, in a run whose other cells have more.
    assert noticed.count(Change.SLOWER) >= 0.9 * len(noticed)


def test_real_runs_of_the_same_cells_do_not_differ() -> None:
    runs = []
    for run in H200["runs"]:
        timings = [(tuple(cell["medians_ms"]), cell["low_ms"], cell["high_ms"]) for cell in run]
        runs.append([CellTiming(*timing) for timing in timings])
    found: list[Change] = []
    for before, after in itertools.combinations(runs, 2):
        medians = [timing.medians_ms for timing in (*before, *after)]
        found += verdicts_of(list(zip(before, after, strict=True)), medians)
    assert len(found) == 120
    assert differing(found) <= len(found) / 100


def test_a_real_difference_is_found_with_its_sign() -> None:
    slower, faster = verdicts(1.10, 0.005, 3), verdicts(1 / 1.10, 0.005, 3)
    assert slower.count(Change.SLOWER) > 0.95 * len(slower)
    assert faster.count(Change.FASTER) > 0.95 * len(faster)
    assert Change.FASTER not in slower


@pytest.mark.fuzz
@pytest.mark.parametrize(("attempts", "cells"), [(2, 2), (2, 8), (3, 2), (3, 8)])
def test_cells_with_very_different_noise_are_seldom_called_faster_or_slower(
    attempts: int, cells: int
) -> None:
    rng = np.random.default_rng(0)
    found: list[Change] = []
    for _ in range(2000 // cells):
        deviations = 0.02 * np.exp(rng.normal(size=cells))
        found += verdicts_of(
            [tuple(simulated(rng, 10, attempts, one) for _ in "ab") for one in deviations]
        )
    assert differing(found) <= _at_most(len(found))


def test_other_cells_say_nothing_about_one_with_two_attempts() -> None:
    calm, own = ((10.0, 10.0), (10.0, 10.0)), ((10.0, 11.0), (12.0, 13.0))
    pairs = [calm] * 20 + [own]
    noises = noise_per_cell(pairs, list(itertools.chain(*pairs)))
    assert noises[-1] == pooled_noise(own)


def test_the_noise_is_that_between_attempts_of_one_cell() -> None:
    noise = pooled_noise([(10.0, 10.0 * np.exp(0.02)), (500.0, 500.0 * np.exp(-0.02)), (3.0,)])
    assert noise.degrees_of_freedom == 2
    assert noise.deviation == pytest.approx(0.02 / np.sqrt(2))
    assert noise.threshold(1, 1) > noise.threshold(4, 4) > 0
    assert pooled_noise([(3.0,)]).threshold(1, 1) == np.inf  # unknown, not a number that is assumed


CALM = Noise(0.001, 20)
SLOWED = "CPU speed: {} → {} operations per ms"
OTHERS = "other processes used the cores {} of the time"
AT_10_MS = CellTiming((10.0, 10.0), 9.9, 10.1)
AT_11_MS = CellTiming((11.0, 11.0), 10.9, 11.1)


def paced_timing(ms: float, slowest: float, fastest: float, depends: bool = True) -> CellTiming:
    timing = CellTiming((ms, ms), ms - 0.1, ms + 0.1, depends_on_cpu=depends)
    return replace(timing, dispatch_rates=(slowest, fastest))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (AT_10_MS, AT_10_MS),
        # A gap between the intervals, but within the noise.
        (CellTiming((10.0, 10.0), 9.99, 10.01), CellTiming((10.03, 10.03), 10.02, 10.04)),
    ],
)
def test_a_difference_within_the_noise_is_none(before: CellTiming, after: CellTiming) -> None:
    comparison = compare_cell({}, before, after, CALM)
    assert (comparison.change, comparison.reason) == (Change.SAME, "")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (AT_10_MS, AT_11_MS),
        # One disturbed attempt changes nothing.
        (AT_10_MS, CellTiming((11.0, 11.2, 900.0), 10.9, 11.3)),
        # The clock differs, but the difference exceeds it.
        (CellTiming((10.0, 10.0), 9.9, 10.1, 1980), CellTiming((12.0, 12.0), 11.9, 12.1, 1800)),
        (AT_10_MS, replace(AT_11_MS, bound_by=BoundBy.CPU)),
        # The CPU was slower, but the difference exceeds that.
        (paced_timing(10.0, 490, 500), paced_timing(15.0, 390, 400)),
        (paced_timing(10.0, 500, 500, depends=False), paced_timing(15.0, 333, 334, depends=False)),
        # The slower cell had the CPU that was never as slow.
        (paced_timing(10.0, 250, 500), paced_timing(15.0, 300, 500)),
        (paced_timing(10.0, 490, 500), CellTiming((15.0, 15.0), 14.9, 15.1)),
    ],
)
def test_a_difference_that_nothing_explains_is_slower(
    before: CellTiming, after: CellTiming
) -> None:
    comparison = compare_cell({}, before, after, CALM)
    assert (comparison.change, comparison.reason) == (Change.SLOWER, "")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (AT_10_MS, CellTiming((9.0, 9.0), 8.9, 9.1)),
        # Faster although other processes used its cores.
        (AT_11_MS, replace(AT_10_MS, waited_for_core=0.12)),
    ],
)
def test_a_shorter_time_is_faster(before: CellTiming, after: CellTiming) -> None:
    comparison = compare_cell({}, before, after, CALM)
    assert (comparison.change, comparison.reason) == (Change.FASTER, "")


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (
            CellTiming((10.0, 10.0), 9.0, 11.0),
            CellTiming((10.5, 10.5), 9.5, 11.5),
            "the intervals overlap",
        ),
        (
            replace(AT_10_MS, clock_mhz=1980),
            replace(AT_11_MS, clock_mhz=1800),
            "GPU clock: 1980 → 1800 MHz",
        ),
        (AT_10_MS, replace(AT_11_MS, waited_for_core=0.12), OTHERS.format("12%")),
        (replace(AT_11_MS, waited_for_core=0.12), AT_10_MS, OTHERS.format("12%")),
        (
            paced_timing(10.0, 500, 500),
            paced_timing(15.0, 333, 334),
            SLOWED.format("500", "333 to 334"),
        ),
        (
            paced_timing(10.0, 300, 500),
            paced_timing(15.0, 250, 500),
            SLOWED.format("300 to 500", "250 to 500"),
        ),
        (
            paced_timing(10.0, 500, 500, depends=False),
            paced_timing(15.0, 333, 334),
            SLOWED.format("500", "333 to 334"),
        ),
    ],
)
def test_a_difference_with_another_explanation_is_ambiguous(
    before: CellTiming, after: CellTiming, reason: str
) -> None:
    comparison = compare_cell({}, before, after, CALM)
    assert (comparison.change, comparison.reason) == (Change.AMBIGUOUS, reason)


@pytest.mark.parametrize("medians_ms", [(9.0, 9.0, 12.35), (9.0, 9.0, 30.0)])
def test_a_difference_is_ambiguous_if_one_repetition_disagrees(
    medians_ms: tuple[float, ...],
) -> None:
    before, after = CellTiming((10.0, 10.0, 10.0), 9.9, 10.1), CellTiming(medians_ms, 8.9, 9.1)
    comparison = compare_cell({}, before, after, CALM)
    assert comparison.change is Change.AMBIGUOUS
    assert comparison.reason == "median and mean disagree"


def test_an_older_version_of_a_task_is_compared_in_either_order(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    now = make_outcome(step_ms=(10.0, 10.01, 10.02))
    cell = now.attempt.cell
    then = replace(now, attempt=replace(now.attempt, cell=replace(cell, version=cell.version - 1)))
    old, both = write(tmp_path / "old", then), write(tmp_path / "both", then, now)
    for first, second in ((old, both), (both, old)):
        report = compare_runs(first, second)
        assert len(report.comparisons) == 1
        assert report.unmatched == 1


def test_a_large_difference_is_ambiguous_if_the_noise_is_larger() -> None:
    wild = Noise(1.0, 10)
    before, after = CellTiming((10.0, 30.0), 19.0, 21.0), CellTiming((100.0, 500.0), 299.0, 301.0)
    comparison = compare_cell({}, before, after, wild)
    assert (comparison.change, comparison.reason) == (
        Change.AMBIGUOUS,
        "repetitions differ by as much",
    )
    assert (
        compare_cell({}, before, CellTiming((15.0, 26.0), 18.0, 22.0), wild).change is Change.SAME
    )
    overlapping = compare_cell({}, before, CellTiming((30.0, 50.0), 18.0, 60.0), wild)
    assert (overlapping.change, overlapping.reason) == (
        Change.AMBIGUOUS,
        "repetitions differ by as much",
    )


# Five attempts that differ by a factor of 20, as on a busy CPU.
BUSY = CellTiming((1.0, 2.0, 5.0, 12.0, 20.0), 0.7, 14.0)
BUSY_NOISE = Noise(1.79, 8)


@pytest.mark.parametrize("scale", [1.0, 1.1, 10.4])
def test_a_very_wide_interval_is_ambiguous(scale: float) -> None:
    after = CellTiming(tuple(scale * ms for ms in BUSY.medians_ms), scale * 0.7, scale * 14)
    comparison = compare_cell({}, BUSY, after, BUSY_NOISE)
    assert comparison.change is Change.AMBIGUOUS
    assert comparison.ratio.agrees is (scale < 1.25)
    calm = compare_cell({}, AT_10_MS, CellTiming((10.0, 10.0), 4.0, 21.0), CALM)
    assert (calm.change, calm.reason) == (Change.AMBIGUOUS, "the interval is too wide")


def lines_for(*comparisons: Comparison) -> list[str]:
    noise = comparisons[0].noise
    return list(
        describe_comparison(ComparisonReport(comparisons, noise, {}, 0, of_kernels=False), Screen())
    )


def test_large_noise_is_a_factor_in_the_heading_and_in_the_rows() -> None:
    heading, table, *_ = lines_for(compare_cell({}, BUSY, BUSY, BUSY_NOISE))
    assert heading == "noise between processes: factor 6.0, with 8 degrees of freedom"
    assert " factor > 10\n" in table
    heading, table, *_ = lines_for(compare_cell({}, BUSY, BUSY, Noise(0.25, 8)))
    assert heading == "noise between processes: ±25.00%, with 8 degrees of freedom"
    assert " ±70.0%\n" in table


@pytest.mark.parametrize(
    ("a", "b", "where"),
    [(1, 1, "on each side"), (1, 2, "in A"), (2, 1, "in B")],
)
def test_the_heading_says_which_side_was_measured_once(a: int, b: int, where: str) -> None:
    before, after = CellTiming((10.0,) * a, 9.9, 10.1), CellTiming((10.0,) * b, 9.9, 10.1)
    heading, table, *_ = lines_for(compare_cell({}, before, after, CALM))
    assert heading.startswith(f"measured once {where}, so the noise")
    assert table.endswith(f"\n1. measured once {where}\n")


def test_the_ratio_lies_within_its_interval() -> None:
    # Also with one attempt far off, because all three are medians.
    slow = CellTiming((19.5, 20.5, 53.2), 19.8, 20.9)
    comparison = compare_cell({}, slow, CellTiming((70.0, 77.7, 1240.0), 75.0, 79.0), CALM)
    assert comparison.ratio.low < comparison.ratio.middle < comparison.ratio.high


def write(folder: Path, *outcomes: Outcome, commit: str | None = None) -> Run:
    with open_for_writing(Run(folder)) as writer:
        writer.write_manifest({"name": folder.name})
        for outcome in outcomes:
            writer.append(outcome, commit)
    return Run(folder)


@pytest.fixture
def runs(tmp_path: Path, make_outcome: MakeOutcome) -> tuple[Run, Run]:
    """Two runs of three cells and a failed one. Of the two in both, the shorter is 10 % slower in b."""

    def outcomes(scale: float, other: int) -> list[Outcome]:
        made = [
            make_outcome(
                step_ms=tuple(scale * ms + 0.01 * number for ms in (10.0, 10.01, 10.02)),
                number=number,
            )
            for number in (1, 2, 3)
        ]
        same = [
            make_outcome(step_ms=(20.0, 20.01, 20.02), number=number, batch_size=2)
            for number in (1, 2)
        ]
        return [
            *made,
            *same,
            make_outcome(batch_size=other),
            make_outcome(Status.OOM, batch_size=64),
        ]

    return write(tmp_path / "a", *outcomes(1.0, 8)), write(tmp_path / "b", *outcomes(1.1, 16))


def test_runs_are_compared_cell_by_cell(runs: tuple[Run, Run]) -> None:
    report = compare_runs(*runs)
    assert [(one.change, round(one.ratio.middle, 2)) for one in report.comparisons] == [
        (Change.SLOWER, 1.1),
        (Change.SAME, 1.0),
    ]
    assert report.geometric_mean == pytest.approx(np.sqrt(1.1), rel=1e-3)
    assert report.unmatched == 2
    assert report.noise.degrees_of_freedom == 6
    assert report.differences == {}


@pytest.mark.parametrize(
    ("sources", "apart"),
    [
        (("one", "one"), set()),
        (("one", "two"), {"commit", "program_source"}),
        ((None, None), {"commit"}),  # an older program, which wrote no digest
        ((None, "two"), {"commit", "program_source"}),
    ],
)
def test_programs_with_equal_digests_are_the_same_at_different_commits(
    sources: tuple[str | None, str | None],
    apart: set[str],
    tmp_path: Path,
    make_outcome: MakeOutcome,
) -> None:
    made = make_outcome()
    by = [replace(made, facts={**made.facts, "program_source": source}) for source in sources]
    runs = (
        write(tmp_path / commit, own, commit=commit) for commit, own in zip("ab", by, strict=True)
    )
    assert set(compare_runs(*runs).differences) == apart


def test_commits_are_compared_if_one_row_has_no_digest(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    old, new = make_outcome(), make_outcome(batch_size=2)
    new, both = (replace(one, facts={**one.facts, "program_source": "one"}) for one in (new, old))
    before = write(tmp_path / "a", old, commit="a")
    with open_for_writing(before) as writer:
        writer.append(new, "b")
    assert set(compare_runs(before, write(tmp_path / "b", both, new, commit="b")).differences) == {
        "commit"
    }


def test_two_cells_of_one_run_can_be_compared(
    runs: tuple[Run, Run], make_outcome: MakeOutcome
) -> None:
    one, other = make_outcome().attempt.cell.id, make_outcome(batch_size=2).attempt.cell.id
    (comparison,) = compare_runs(runs[0], runs[0], (one[:6], other)).comparisons
    assert (comparison.change, round(comparison.ratio.middle, 2)) == (Change.SLOWER, 2.0)


def test_the_label_of_two_cells_shows_the_parameters_of_both(
    tmp_path: Path, make_outcome: MakeOutcome, sweep_here: Callable[..., Result]
) -> None:
    one, other = make_outcome(context_length=8), make_outcome(context_length=16, precision="bf16")
    a, b = write(tmp_path / "a", one), write(tmp_path / "b", other, make_outcome(context_length=32))
    done = sweep_here(
        "compare", f"{a.folder}:{one.attempt.cell.id}", f"{b.folder}:{other.attempt.cell.id}"
    )
    assert "precision: fp32 → bf16\ncontext_length: 8 → 16\n" in done.stdout
    assert "size=tiny, context_length=8 → 16, precision=fp32 → bf16" in done.stdout
    assert "only one of them measured" not in done.stdout


@pytest.mark.parametrize("columns", [50, 80, 200, None])
def test_a_comparison_fits_the_screen_and_is_whole_as_csv(
    columns: int | None,
    tmp_path: Path,
    make_outcome: MakeOutcome,
    sweep_here: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells = [
        make_outcome(precision=precision, batch_size=size, context_length=length, seed=31)
        for precision, size, length in (("fp32", 2, 8), ("bf16", 1024, 16), ("bf16", 4, 16))
    ]
    folder = write(tmp_path / "a", *cells).folder
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    lines = sweep_here("compare", folder, folder).stdout.splitlines()
    assert max(map(len, lines)) <= (columns or 100)
    assert sum("AMBIGUOUS  1.0000" in line for line in lines) == 3
    assert ("more columns: --format csv" in "\n".join(lines)) is (columns == 50)
    head, *rows = sweep_here("compare", folder, folder, "--format", "csv").stdout.splitlines()
    assert head.endswith("verdict,b_a,note,a_ms,b_ms,status")
    assert len(rows) == 3


def test_pipelined_steps_are_compared_rather_than_synced_ones(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    outcome = make_outcome(step_ms=(10.0, 10.0, 10.0))
    pipelined = tuple(
        Sample("timing", "duration", "ms", 7.0, "pipelined", "step", step) for step in range(3)
    )
    both = Outcome(**{**vars(outcome), "samples": (*outcome.samples, *pipelined)})
    (comparison,) = compare_runs(*[write(tmp_path / "a", both)] * 2).comparisons
    assert comparison.a.ms == pytest.approx(7.0)


def queued(outcome: Outcome, step_ms: float, lead_ms: float) -> Outcome:
    """Return the outcome with pipelined steps, of which the CPU is `lead_ms` ahead."""
    values = [("duration", step_ms)] * 6 + [("lead", lead_ms)] * 6
    samples = [
        Sample("timing", metric, "ms", ms, "pipelined", "step", step % 6)
        for step, (metric, ms) in enumerate(values)
    ]
    return with_samples(outcome, *samples)


def test_a_cpu_bound_cell_that_differs_is_marked(
    tmp_path: Path, make_outcome: MakeOutcome, sweep_here: Callable[..., Result]
) -> None:
    waiting, ahead = make_outcome(), make_outcome(batch_size=2)
    cells = twice(queued(waiting, 10.0, 0.9), queued(ahead, 10.0, 1.3))
    slower = twice(queued(waiting, 12.0, 0.9), queued(ahead, 12.0, 1.3))
    before, after = write(tmp_path / "a", *cells), write(tmp_path / "b", *slower)
    waits = load_results(before).cells.set_index("batch_size")["cpu_bound"]
    assert waits.to_dict() == {waiting.attempt.cell.params.values()["batch_size"]: True, 2: False}
    done = sweep_here("compare", before.folder, after.folder)
    assert done.stdout.count("SLOWER (CPU-bound)") == 1
    assert (
        "1 of the 2 cells that differ are CPU-bound: another CPU may explain the difference\n"
        in done.stdout
    )
    assert "2 of 2 cells differ. By chance, 0.02 would differ\n" in done.stdout


def test_nothing_is_faster_or_slower_if_it_was_measured_once(
    tmp_path: Path, make_outcome: MakeOutcome, sweep_here: Callable[..., Result]
) -> None:
    steps = tuple(10.0 + 0.01 * step for step in range(10))
    fast, slow = make_outcome(step_ms=steps), make_outcome(step_ms=tuple(2 * ms for ms in steps))
    a, b = write(tmp_path / "a", fast), write(tmp_path / "b", slow)
    done = sweep_here("compare", a.folder, b.folder, "--fail-on", "slower")
    assert done.exit_code == 0
    assert "\n1. measured once on each side\n" in done.stdout
    assert "measured once on each side, so the noise between processes is not known" in done.stdout
    assert "Measure both sides with --repeat 5 " in done.stdout.replace("\n", " ")
    assert "would differ" not in done.stdout
    both = write(tmp_path / "both", *twice(slow))
    one_side = sweep_here("compare", a.folder, both.folder).stdout
    assert "\n1. measured once in A\n" in one_side
    assert (
        "1 SLOWER"
        in sweep_here(
            "compare", both.folder, write(tmp_path / "c", *twice(slow, ms=4)).folder
        ).stdout
    )


@pytest.mark.parametrize(("slower", "exit_code"), [(1, 0), (2, 1)])
def test_a_check_fails_only_if_more_cells_differ_than_by_chance(
    slower: int,
    exit_code: int,
    runs: tuple[Run, Run],
    monkeypatch: pytest.MonkeyPatch,
    sweep_here: Callable[..., Result],
) -> None:
    base = CellTiming((10.0, 10.0), 9.9, 10.1)
    after = [CellTiming((11.0, 11.0), 10.9, 11.1)] * slower + [base] * (100 - slower)
    compared = tuple(compare_cell({}, base, one, CALM) for one in after)
    report = ComparisonReport(compared, CALM, {}, 0, of_kernels=False)
    monkeypatch.setattr(comparison, "compare_runs", lambda *runs: report)
    done = sweep_here("compare", *[run.folder for run in runs], "--fail-on", "slower")
    assert f"{slower} of 100 cells differ. By chance, 1 would differ\n" in done.stdout
    assert done.exit_code == exit_code


@pytest.mark.parametrize(
    ("after_ms", "is_free"),
    [
        ((12.0, 12.1, 12.2, 12.3, 12.4), True),
        ((12.0, 12.1, 12.2, 12.3), False),
        ((10.1, 12.1, 12.2, 12.3, 12.4), False),
    ],
)
def test_five_attempts_that_do_not_overlap_need_no_assumption(
    after_ms: tuple[float, ...], is_free: bool
) -> None:
    before = CellTiming((10.0, 10.1, 10.2, 10.3, 10.4), 9.9, 10.5)
    compared = compare_cell({}, before, CellTiming(after_ms, 11.9, 12.5), CALM)
    assert compared.differs
    assert compared.is_distribution_free == is_free
    report = ComparisonReport((compared,), CALM, {}, 0, of_kernels=False)
    lines = "\n".join(describe_comparison(report, Screen()))
    assert ("1 of them without an assumption about the noise" in lines) == is_free


def test_an_interval_of_fewer_than_six_steps_is_unknown(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    """Its place is taken by the range of the attempts. Of a single attempt nothing is known."""
    steps = [(9.0, 10.0, 11.0), (9.1, 10.1, 11.1)]
    repeated = [make_outcome(step_ms=ms, number=number) for number, ms in enumerate(steps, 1)]
    once = make_outcome(step_ms=steps[0], batch_size=2)
    enough = make_outcome(step_ms=(*steps[0], *steps[1]), batch_size=3)
    run = write(tmp_path / "a", *repeated, once, enough)
    own = {
        timing.ms: (timing.low_ms, timing.high_ms) for timing in load_timings(run).steps.values()
    }
    assert np.isnan(own[10.0]).all()
    columns = typed_columns(comparison_table(compare_runs(run, run)))
    assert columns["interval"].count(None) == 1
    assert columns["noise"].count(None) == 2


def twice(*outcomes: Outcome, ms: float = 1) -> list[Outcome]:
    """Return two equal attempts of each outcome, with `ms` times its durations."""
    repeated = []
    for outcome in outcomes:
        timed = [replace(one, value=one.value and ms * one.value) for one in outcome.samples]
        own = replace(outcome, samples=tuple(timed))
        for number in (1, 2):
            repeated.append(replace(own, attempt=replace(own.attempt, number=number)))
    return repeated


def waited(outcome: Outcome, share: float | None) -> Outcome:
    return with_samples(outcome, Sample("telemetry", "waited_for_core", "", share, "timing"))


def paced(outcome: Outcome, before: float, after: float) -> Outcome:
    paces = (
        Sample("telemetry", "host_pace", "1/ms", value, when)
        for when, value in (("before", before), ("after", after))
    )
    return with_samples(outcome, *paces)


def test_a_slower_cpu_explains_differences_of_cells_that_depend_on_it(
    tmp_path: Path, make_outcome: MakeOutcome, sweep_here: Callable[..., Result]
) -> None:
    """This holds also for a cell that became CPU-bound because its CPU became slower."""
    slow, gpu = (22.0, 23.0, 24.0), {"device": "cuda"}
    quick, lagging = ({"step_ms": ms} for ms in ((11.0, 11.5, 12.0), slow))
    before = write(
        tmp_path / "a",
        *twice(
            paced(make_outcome(batch_size=1, **quick), 420.0, 380.0),
            paced(queued(make_outcome(batch_size=2, **gpu), 10.0, 20.0), 400.0, 400.0),
            paced(queued(make_outcome(batch_size=3, **gpu), 10.0, 1.2), 400.0, 400.0),
        ),
    )
    after = write(
        tmp_path / "b",
        *twice(
            paced(make_outcome(batch_size=1, **lagging), 220.0, 180.0),
            paced(queued(make_outcome(batch_size=2, **gpu), 20.0, 40.0), 200.0, 200.0),
            paced(queued(make_outcome(batch_size=3, **gpu), 15.0, 0.01), 200.0, 200.0),
        ),
    )
    done = sweep_here("compare", before.folder, after.folder)
    assert done.stdout.count(SLOWED.format("380 to 420", "180 to 220")) == 1
    assert done.stdout.count(SLOWED.format("400", "200")) == 1
    assert "1 SLOWER, 2 AMBIGUOUS" in done.stdout  # one cell is GPU-bound in both runs


@pytest.mark.slow
def test_a_cell_that_waited_for_its_cores_is_not_called_slower(
    tmp_path: Path, make_outcome: MakeOutcome, sweep_here: Callable[..., Result]
) -> None:
    """This holds for cells that depend on the CPU: on a CPU, or CPU-bound."""
    slow, gpu = (22.0, 23.0, 24.0), {"device": "cuda"}
    quick = [make_outcome(batch_size=size) for size in (1, 2, 3, 5)]
    lagging = [
        waited(make_outcome(step_ms=slow, batch_size=1), 0.3),
        waited(make_outcome(step_ms=slow, batch_size=2), 0.02),
        waited(make_outcome(step_ms=slow, batch_size=3), None),
        make_outcome(step_ms=slow, batch_size=5),
        waited(queued(make_outcome(batch_size=6, **gpu), 10.0, 0.9), 0.3),
        waited(queued(make_outcome(batch_size=7, **gpu), 10.0, 1.3), 0.3),
    ]
    before, after = write(tmp_path / "a", *twice(*quick)), write(tmp_path / "b", *twice(*lagging))
    contended = load_results(after).cells.set_index("batch_size")["cpu_contended"]
    assert contended.dropna().to_dict() == {1: True, 2: False, 6: True, 7: False}
    done = sweep_here("compare", before.folder, after.folder)
    assert done.stdout.count(OTHERS.format("30%")) == 1
    assert "3 SLOWER, 1 AMBIGUOUS" in done.stdout
    report = " ".join(sweep_here("report", after.folder).stdout.split())  # in lines of any width
    assert "2 of 6 cells while other processes used their cores" in report


def test_adaptive_timing_takes_the_lead_from_its_last_checked_step(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    def checked(outcome: Outcome, *lead_ms: float) -> Outcome:
        samples = [
            Sample("timing", "lead", "ms", ms, "check", "step", step)
            for step, ms in enumerate(lead_ms)
        ]
        return with_samples(outcome, *samples)

    run = write(
        tmp_path / "a",
        checked(make_outcome(), 9.0, 0.1),
        checked(make_outcome(batch_size=2), 0.1, 9.0),
    )
    assert load_results(run).cells.set_index("batch_size")["cpu_bound"].sort_index().to_dict() == {
        1: True,
        2: False,
    }


@pytest.mark.parametrize(
    ("ms", "half_width", "agrees"),
    [
        (10.1, 0.01, True),
        (10.3, 0.01, False),
        (10.3, 0.3, True),
        (9.81, 0.01, True),
        (9.7, 0.1, False),
    ],
)
def test_times_agree_within_their_intervals_or_two_percent(
    ms: float, half_width: float, agrees: bool
) -> None:
    before, after = (
        CellTiming((10.0, 10.0), 9.9, 10.1, bound_by=BoundBy.GPU),
        CellTiming((ms, ms), ms - half_width, ms + half_width),
    )
    assert compare_cell({}, before, after, CALM).ratio.agrees is agrees
    assert compare_cell({}, before, after, CALM).bound_by is None


def test_kernel_times_are_compared_although_step_times_differ(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    """One cell's kernels take 5 % longer. A profiled step has no interval, and differs by 1 %."""

    def run(name: str, step_ms: float, more: float) -> Run:
        def cell(number: int, *added: Sample) -> Outcome:
            own = queued(make_outcome(batch_size=number), step_ms, 0.1)
            return with_samples(own, *added)

        def watched(factor: float) -> list[Sample]:
            return [
                Sample("kernel_time", "kernel_time", "ms", ms * factor, "", "step", step)
                for step, ms in enumerate([3.98, 3.99, 4.0, 4.01, 4.02, 4.03])
            ]

        profiled = (
            Sample("kernels", "kernel_time", "ms", 1 + more / 5, phase="forward"),
            Sample("kernels", "busy", "ratio", 0.9),
            Sample("kernels", "profiled_step", "ms", 12.0),
        )
        return write(
            tmp_path / name,
            cell(1, *watched(1.0)),
            cell(2, *watched(1 + more)),
            cell(3, *profiled),
            cell(4),
        )

    a, b = run("a", 10.0, 0.0), run("b", 20.0, 0.05)
    report = compare_runs(a, b)
    *_, agreeing, last = describe_comparison(report, Screen())
    assert agreeing.startswith("0 of 4 cells agree within")
    ratios = typed_columns(comparison_table(report))["kernels_b_a"]
    assert ratios == [pytest.approx(1.0), pytest.approx(1.05), pytest.approx(1.01), None]
    assert last == "in kernel time, which does not depend on the CPU, 2 of 3 cells agree"


def test_kernel_times_are_those_of_all_attempts(tmp_path: Path, make_outcome: MakeOutcome) -> None:
    """One disturbed attempt moves neither median nor interval, although it is the last."""

    def run(name: str, *kernels_ms: float) -> Run:
        def attempt(number: int, ms: float) -> Outcome:
            own = queued(make_outcome(number=number), 10.0, 0.1)
            return with_samples(own, Sample("kernel_time", "kernel_time", "ms", ms, "", "step", 0))

        return write(
            tmp_path / name, *(attempt(number, ms) for number, ms in enumerate(kernels_ms, 1))
        )

    *_, last = describe_comparison(
        compare_runs(run("a", 4.0, 4.0, 5.0), run("b", 4.0, 4.0, 4.0)), Screen()
    )
    assert last == "in kernel time, which does not depend on the CPU, 1 of 1 cell agrees"


def only_kernels(outcome: Outcome, ms: float) -> Outcome:
    watched = (
        Sample("kernel_time", "kernel_time", "ms", ms + 0.01 * step, "", "step", step)
        for step in range(6)
    )
    return replace(outcome, samples=tuple(watched))


def test_kernel_times_are_compared_if_a_run_timed_no_steps(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    """This holds also if the other run timed steps, which are other numbers."""
    timed, other = make_outcome(batch_size=1), make_outcome(batch_size=2)
    kernels = write(tmp_path / "a", only_kernels(timed, 4.0), only_kernels(other, 4.0))
    both = write(
        tmp_path / "b",
        *(
            with_samples(one, *only_kernels(one, ms).samples)
            for one, ms in ((timed, 4.0), (other, 5.0))
        ),
    )
    for before, after in ((kernels, both), (both, kernels)):
        *lines, last = describe_comparison(compare_runs(before, after), Screen())
        assert "one run timed no steps: kernel times are compared" in lines
        assert last == "1 of 2 cells agree within their intervals or 2%"
    assert [one.ratio.middle for one in compare_runs(kernels, both).comparisons] == [
        1.0,
        pytest.approx(5.025 / 4.025),
    ]
    with pytest.raises(RunError, match="has no cell that was timed"):
        compare_runs(kernels, write(tmp_path / "c", timed))


def test_the_samples_of_each_run_are_read_once(
    tmp_path: Path, make_outcome: MakeOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples are the largest table."""
    a, b = (
        write(tmp_path / "a", only_kernels(make_outcome(), 4.0)),
        write(tmp_path / "b", only_kernels(make_outcome(), 4.0)),
    )
    read, tables = Run.read, []

    def counted(run: Run, table: str, *more: Any, **options: Any) -> Any:
        tables.append((run.folder.name, table))
        return read(run, table, *more, **options)

    monkeypatch.setattr(Run, "read", counted)
    assert len(compare_runs(a, b).comparisons) == 1
    assert [name for name, table in tables if table == "samples"] == ["a", "b"]


def test_agreement_is_counted_separately_for_cpu_bound_cells(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    def at(own: Outcome, ms: float, lead_ms: float) -> Outcome:
        timing = {"duration": ms, "lead": lead_ms}
        added = [
            Sample("timing", metric, "ms", value, "pipelined", "step", 0)
            for metric, value in timing.items()
        ]
        return with_samples(own, *added)

    def run(name: str, ms: float, long_ms: float) -> Run:
        return write(
            tmp_path / name,
            at(make_outcome(), ms, 0.1),
            at(make_outcome(context_length=128), long_ms, 20.0),
        )

    *_, last = describe_comparison(
        compare_runs(run("a", 10.0, 30.0), run("b", 10.0, 33.0)), Screen()
    )
    assert (
        last
        == "1 of 2 cells agree within their intervals or 2%: 0 of 1 GPU-bound on both sides, 1 of 1 CPU-bound (†)"
    )
    *_, last = describe_comparison(
        compare_runs(run("c", 10.0, 30.0), run("d", 11.0, 30.0)), Screen()
    )
    assert last == (
        "1 of 2 cells agree within their intervals or 2%: 1 of 1 GPU-bound on both sides, 0 of 1 CPU-bound (†)"
    )


def test_the_command_prints_the_verdicts_and_fails_on_request(
    runs: tuple[Run, Run], sweep_here: Callable[..., Result]
) -> None:
    folders = [run.folder for run in runs]
    done = sweep_here("compare", *folders)
    assert done.exit_code == 0
    assert "1 SAME, 1 SLOWER" in done.stdout
    assert "geometric mean of B / A: 1.0487" in done.stdout
    assert done.stdout.endswith(
        "\n1 of 2 cells agree within their intervals or 2%\n"
    )  # whether they are CPU-bound is unknown
    assert (
        sweep_here("compare", *folders, "--fail-on", "slower", "--threshold", "3%").exit_code == 1
    )
    assert (
        sweep_here("compare", *folders, "--fail-on", "slower", "--threshold", "20%").exit_code == 0
    )
    assert sweep_here("compare", *reversed(folders), "--fail-on", "slower").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a", "nowhere"), ": nowhere: holds no run"),
        (("a:zzzz", "b:zzzz"), "a: has no measured cell 'zzzz'"),
        (("a:zzzz", "b"), "one is a run and the other a cell"),
        (("a", "b", "--threshold", "much"), "is not a percentage"),
        (("a", "untimed"), "untimed: has no cell that was timed"),
    ],
)
def test_a_comparison_that_is_impossible_ends_with_one_line(
    runs: tuple[Run, Run], sweep_here: Callable[..., Result], words: tuple[str, ...], message: str
) -> None:
    shutil.copytree(runs[1].folder, "untimed", ignore=shutil.ignore_patterns("samples"))
    done = sweep_here("compare", *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
