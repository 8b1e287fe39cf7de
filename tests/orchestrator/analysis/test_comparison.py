"""Is it faster, or noise? By simulation, on rows made by hand, and from the command line."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from orchestrator.analysis.cell_timing import Side
from orchestrator.analysis.comparison import (
    ASSUMED_NOISE,
    Noise,
    Verdict,
    compare,
    judge,
    noise_of,
    noises_of,
)
from orchestrator.analysis.cpu_bound import BoundBy
from orchestrator.analysis.results import load_results
from orchestrator.common.errors import RunError
from orchestrator.report.text.comparison_text import describe_comparison
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.order_statistics import median_rank
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.conftest import ROOT, with_samples

STEPS = 10
H200 = json.loads((ROOT / "tests" / "data" / "h200_same.json").read_text())
MakeOutcome = Callable[..., Outcome]


def side(rng: np.random.Generator, ms: float, attempts: int, between: float) -> Side:
    """As measured: processes that differ by `between`, steps within them by 1 %, and three in a hundred much slower."""
    steps = ms * np.exp(
        rng.normal(0, between, (attempts, 1)) + rng.normal(0, 0.01, (attempts, STEPS))
    )
    steps *= np.where(rng.random(steps.shape) < 0.03, 1.4, 1.0)
    ordered, rank = np.sort(steps), median_rank(STEPS)
    return Side(
        tuple(np.median(steps, axis=1)),
        float(np.median(ordered[:, rank - 1])),
        float(np.median(ordered[:, -rank])),
    )


def verdicts(
    effect: float, between: float, attempts: int, trials: int = 30, cells: int = 20
) -> list[Verdict]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(trials):
        pairs = [
            (side(rng, 10, attempts, between), side(rng, 10 * effect, attempts, between))
            for _ in range(cells)
        ]
        noises = noises_of(pairs, [one.medians_ms for pair in pairs for one in pair])
        found += [
            judge("", *pair, noise).verdict for pair, noise in zip(pairs, noises, strict=True)
        ]
    return found


@pytest.mark.fuzz
@pytest.mark.parametrize("between", [0.001, 0.01, 0.05])
@pytest.mark.parametrize("attempts", [2, 3])
def test_no_more_than_one_null_comparison_in_a_hundred_cries_wolf(
    between: float, attempts: int
) -> None:
    found = verdicts(1.0, between, attempts)
    assert sum(verdict in (Verdict.FASTER, Verdict.SLOWER) for verdict in found) <= len(found) / 100


def test_nor_where_cells_are_not_alike() -> None:
    rng = np.random.default_rng(0)
    betweens = [0.0003] * 20 + [0.01] * 10 + [0.1] * 10
    found: list[Verdict] = []
    noticed: list[Verdict] = []
    for _ in range(40):
        pairs = [(side(rng, 10, 3, between), side(rng, 10, 3, between)) for between in betweens]
        pairs.append((side(rng, 10, 3, 0.0003), side(rng, 10.4, 3, 0.0003)))
        noises = noises_of(pairs, [one.medians_ms for pair in pairs for one in pair])
        *null, real = [
            judge("", *pair, noise).verdict for pair, noise in zip(pairs, noises, strict=True)
        ]
        found += null
        noticed.append(real)
    assert sum(verdict in (Verdict.FASTER, Verdict.SLOWER) for verdict in found) <= len(found) / 100
    assert noticed.count(Verdict.SLOWER) >= 0.9 * len(
        noticed
    )  # 4 %, of a cell that is quiet beside others that are not


def test_nor_do_real_runs_of_the_same() -> None:
    """tests/data says of what: three runs of 40 cells, each three times by turns, on one H200, held against each other."""
    runs = [
        [Side(tuple(cell["medians_ms"]), cell["low_ms"], cell["high_ms"]) for cell in run]
        for run in H200["runs"]
    ]
    found: list[Verdict] = []
    for two in itertools.combinations(runs, 2):
        pairs = list(zip(*two, strict=True))
        noises = noises_of(pairs, [one.medians_ms for run in two for one in run])
        found += [
            judge("", *pair, noise).verdict for pair, noise in zip(pairs, noises, strict=True)
        ]
    assert len(found) == 120
    assert sum(verdict in (Verdict.FASTER, Verdict.SLOWER) for verdict in found) <= len(found) / 100


def test_a_real_difference_is_found_with_its_sign() -> None:
    slower, faster = verdicts(1.10, 0.005, 3), verdicts(1 / 1.10, 0.005, 3)
    assert slower.count(Verdict.SLOWER) > 0.95 * len(slower)
    assert faster.count(Verdict.FASTER) > 0.95 * len(faster)
    assert Verdict.FASTER not in slower


def test_the_noise_is_that_between_attempts_of_one_cell() -> None:
    noise = noise_of([(10.0, 10.0 * np.exp(0.02)), (500.0, 500.0 * np.exp(-0.02)), (3.0,)])
    assert noise.freedom == 2
    assert noise.sd == pytest.approx(0.02 / np.sqrt(2))
    assert noise.floor(1, 1) > noise.floor(4, 4) > 0
    assert noise_of([(3.0,)]).floor(1, 1) == ASSUMED_NOISE


CALM = Noise(0.001, 20)
SLOWED = "the CPU: {} → {} operations a ms"
OTHERS = "something else had the cores {} of the time"


def paced_side(ms: float, slowest: float, fastest: float, needs: bool = True) -> Side:
    return Side((ms,), ms - 0.1, ms + 0.1, needs_host=needs, paces=(slowest, fastest))


@pytest.mark.parametrize(
    ("before", "after", "verdict", "reason"),
    [
        (Side((10.0,), 9.9, 10.1), Side((10.0,), 9.9, 10.1), Verdict.SAME, ""),
        (
            Side((10.0,), 9.99, 10.01),
            Side((10.03,), 10.02, 10.04),
            Verdict.SAME,
            "",
        ),  # a gap, and yet within the noise
        (Side((10.0,), 9.9, 10.1), Side((11.0,), 10.9, 11.1), Verdict.SLOWER, ""),
        (
            Side((10.0,), 9.9, 10.1),
            Side((11.0, 11.2, 900.0), 10.9, 11.3),
            Verdict.SLOWER,
            "",
        ),  # one in trouble moves nothing
        (Side((10.0,), 9.9, 10.1), Side((9.0,), 8.9, 9.1), Verdict.FASTER, ""),
        (
            Side((10.0,), 9.0, 11.0),
            Side((10.5,), 9.5, 11.5),
            Verdict.AMBIGUOUS,
            "the intervals overlap",
        ),
        (
            Side((10.0,), 9.9, 10.1, 1980),
            Side((11.0,), 10.9, 11.1, 1800),
            Verdict.AMBIGUOUS,
            "the clock: 1980 → 1800 MHz",
        ),
        (
            Side((10.0,), 9.9, 10.1, 1980),
            Side((12.0,), 11.9, 12.1, 1800),
            Verdict.SLOWER,
            "",
        ),  # in cycles as well
        (
            Side((10.0,), 9.9, 10.1),
            Side((11.0,), 10.9, 11.1, decides=BoundBy.CPU),
            Verdict.SLOWER,
            "",
        ),
        (
            Side((10.0,), 9.9, 10.1),
            Side((11.0,), 10.9, 11.1, waited_for_core=0.12),
            Verdict.AMBIGUOUS,
            OTHERS.format("12%"),
        ),
        (
            Side((11.0,), 10.9, 11.1, waited_for_core=0.12),
            Side((10.0,), 9.9, 10.1),
            Verdict.AMBIGUOUS,
            OTHERS.format("12%"),
        ),
        (
            Side((11.0,), 10.9, 11.1),
            Side((10.0,), 9.9, 10.1, waited_for_core=0.12),
            Verdict.FASTER,
            "",
        ),  # and yet
        (
            paced_side(10.0, 500, 500),
            paced_side(15.0, 333, 334),
            Verdict.AMBIGUOUS,
            SLOWED.format("500", "333 to 334"),
        ),
        (
            paced_side(10.0, 300, 500),
            paced_side(15.0, 250, 500),
            Verdict.AMBIGUOUS,
            SLOWED.format("300 to 500", "250 to 500"),
        ),
        (
            paced_side(10.0, 490, 500),
            paced_side(15.0, 390, 400),
            Verdict.SLOWER,
            "",
        ),  # by more than the host was
        (
            paced_side(10.0, 500, 500, needs=False),
            paced_side(15.0, 333, 334),
            Verdict.AMBIGUOUS,
            SLOWED.format("500", "333 to 334"),
        ),
        (
            paced_side(10.0, 500, 500, needs=False),
            paced_side(15.0, 333, 334, needs=False),
            Verdict.SLOWER,
            "",
        ),
        (
            paced_side(10.0, 250, 500),
            paced_side(15.0, 300, 500),
            Verdict.SLOWER,
            "",
        ),  # on a host that was never as slow
        (paced_side(10.0, 490, 500), Side((15.0,), 14.9, 15.1), Verdict.SLOWER, ""),
    ],
)
def test_verdicts(before: Side, after: Side, verdict: Verdict, reason: str) -> None:
    comparison = judge("", before, after, CALM)
    assert (comparison.verdict, comparison.reason) == (verdict, reason)


@pytest.mark.parametrize("medians_ms", [(9.0, 9.0, 12.35), (9.0, 9.0, 30.0)])
def test_where_one_repetition_says_otherwise_nobody_can_tell(medians_ms: tuple[float, ...]) -> None:
    comparison = judge("", Side((10.0, 10.0, 10.0), 9.9, 10.1), Side(medians_ms, 8.9, 9.1), CALM)
    assert (comparison.verdict, comparison.reason) == (
        Verdict.AMBIGUOUS,
        "one repetition says otherwise",
    )


def test_an_older_version_of_a_task_is_compared_whichever_side_it_is_on(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    now = make_outcome(step_ms=(10.0, 10.01, 10.02))
    cell = now.attempt.cell
    then = replace(now, attempt=replace(now.attempt, cell=replace(cell, version=cell.version - 1)))
    old, both = write(tmp_path / "old", then), write(tmp_path / "both", then, now)
    for first, second in ((old, both), (both, old)):
        report = compare(first, second)
        assert len(report.comparisons) == 1
        assert {report.only_before, report.only_after} == {0, 1}


def test_where_repetitions_differ_by_as_much_nobody_can_tell() -> None:
    wild = Noise(1.0, 10)
    before, after = Side((10.0, 30.0), 19.0, 21.0), Side((100.0, 500.0), 299.0, 301.0)
    comparison = judge("", before, after, wild)
    assert (comparison.verdict, comparison.reason) == (
        Verdict.AMBIGUOUS,
        "repetitions differ by as much",
    )
    assert judge("", before, Side((15.0, 26.0), 18.0, 22.0), wild).verdict is Verdict.SAME
    overlapping = judge("", before, Side((30.0, 50.0), 18.0, 60.0), wild)
    assert (overlapping.verdict, overlapping.reason) == (
        Verdict.AMBIGUOUS,
        "repetitions differ by as much",
    )


def test_the_ratio_lies_within_its_interval() -> None:
    """However far off one attempt is: all three are medians."""
    slow = Side((19.5, 20.5, 53.2), 19.8, 20.9)
    comparison = judge("", slow, Side((70.0, 77.7, 1240.0), 75.0, 79.0), CALM)
    low, high = comparison.interval
    assert low < comparison.ratio < high


def write(folder: Path, *outcomes: Outcome, commit: str | None = None) -> Run:
    with open_for_writing(Run(folder)) as writer:
        writer.write_manifest({"name": folder.name})
        for outcome in outcomes:
            writer.append(outcome, commit)
    return Run(folder)


@pytest.fixture
def runs(tmp_path: Path, make_outcome: MakeOutcome) -> tuple[Run, Run]:
    """Three cells each, two of them in both; the shorter is a tenth slower in the second. And one that failed."""

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
    report = compare(*runs)
    assert [(one.verdict, round(one.ratio, 2)) for one in report.comparisons] == [
        (Verdict.SLOWER, 1.1),
        (Verdict.SAME, 1.0),
    ]
    assert report.geometric_mean == pytest.approx(np.sqrt(1.1), rel=1e-3)
    assert (report.only_before, report.only_after) == (1, 1)
    assert report.noise.freedom == 6
    assert report.differences == {}


@pytest.mark.parametrize(
    ("sources", "apart"),
    [
        (("one", "one"), set()),
        (("one", "two"), {"commit", "program_source"}),
        ((None, None), {"commit"}),  # of a program that did not write it down
        ((None, "two"), {"commit", "program_source"}),
    ],
)
def test_programs_differ_where_what_they_say_does_and_not_their_commits(
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
    assert set(compare(*runs).differences) == apart


def test_nor_where_one_of_the_rows_does_not_say_which(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    old, new = make_outcome(), make_outcome(batch_size=2)
    new, both = (replace(one, facts={**one.facts, "program_source": "one"}) for one in (new, old))
    before = write(tmp_path / "a", old, commit="a")
    with open_for_writing(before) as writer:
        writer.append(new, "b")
    assert set(compare(before, write(tmp_path / "b", both, new, commit="b")).differences) == {
        "commit"
    }


def test_two_cells_of_one_run(runs: tuple[Run, Run], make_outcome: MakeOutcome) -> None:
    one, other = make_outcome().attempt.cell.id, make_outcome(batch_size=2).attempt.cell.id
    (comparison,) = compare(runs[0], runs[0], (one[:6], other)).comparisons
    assert (comparison.verdict, round(comparison.ratio, 2)) == (Verdict.SLOWER, 2.0)


def test_of_two_cells_both_are_named(
    tmp_path: Path, make_outcome: MakeOutcome, sweep_here: Callable[..., Result]
) -> None:
    """Also where the run of one of them varies nothing."""
    one, other = make_outcome(context_length=8), make_outcome(context_length=16, precision="bf16")
    a, b = write(tmp_path / "a", one), write(tmp_path / "b", other, make_outcome(context_length=32))
    done = sweep_here(
        "compare", f"{a.folder}:{one.attempt.cell.id}", f"{b.folder}:{other.attempt.cell.id}"
    )
    assert "precision: fp32 → bf16\ncontext_length: 8 → 16\n" in done.stdout
    assert re.search(
        r"^\| train_step size=tiny context_length=8 → 16 precision=fp32 → bf16 +\|",
        done.stdout,
        re.MULTILINE,
    )
    assert "only one of them measured" not in done.stdout


def test_a_pipelined_step_counts_before_a_synced_one(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    outcome = make_outcome(step_ms=(10.0, 10.0, 10.0))
    pipelined = tuple(
        Sample("timing", "duration", "ms", 7.0, "pipelined", "step", step) for step in range(3)
    )
    both = Outcome(**{**vars(outcome), "samples": (*outcome.samples, *pipelined)})
    (comparison,) = compare(*[write(tmp_path / "a", both)] * 2).comparisons
    assert comparison.before.ms == pytest.approx(7.0)


def queued(outcome: Outcome, step_ms: float, lead_ms: float) -> Outcome:
    """With steps that ran on, the host so far ahead of them."""
    values = [("duration", step_ms)] * 6 + [("lead", lead_ms)] * 6
    samples = [
        Sample("timing", metric, "ms", ms, "pipelined", "step", step % 6)
        for step, (metric, ms) in enumerate(values)
    ]
    return with_samples(outcome, *samples)


def test_what_waits_for_its_host_is_said_where_it_differs(
    tmp_path: Path, make_outcome: MakeOutcome, sweep_here: Callable[..., Result]
) -> None:
    waiting, ahead = make_outcome(), make_outcome(batch_size=2)
    before = write(tmp_path / "a", queued(waiting, 10.0, 0.9), queued(ahead, 10.0, 1.3))
    after = write(tmp_path / "b", queued(waiting, 12.0, 0.9), queued(ahead, 12.0, 1.3))
    waits = load_results(before).cells.set_index("batch_size")["cpu_bound"]
    assert waits.to_dict() == {waiting.attempt.cell.params.values()["batch_size"]: True, 2: False}
    done = sweep_here("compare", before.folder, after.folder)
    assert done.stdout.count("SLOWER (CPU-bound)") == 1
    assert (
        "1 of the 2 that differ are CPU-bound: the difference may be the CPU's, not the change's\n"
        in done.stdout
    )
    assert "nothing was repeated: the noise is assumed to be 5%" in done.stdout
    assert "| assumed noise |" in " ".join(done.stdout.split())


def waited(outcome: Outcome, share: float | None) -> Outcome:
    return with_samples(outcome, Sample("telemetry", "waited_for_core", "", share, "timing"))


def paced(outcome: Outcome, before: float, after: float) -> Outcome:
    paces = (
        Sample("telemetry", "host_pace", "1/ms", value, when)
        for when, value in (("before", before), ("after", after))
    )
    return with_samples(outcome, *paces)


def test_what_a_slower_host_explains_is_said_of_what_needs_its_host(
    tmp_path: Path, make_outcome: MakeOutcome, sweep_here: Callable[..., Result]
) -> None:
    """Also of a cell that came to wait for its host because that became slower."""
    slow, gpu = (22.0, 23.0, 24.0), {"device": "cuda"}
    quick, lagging = ({"step_ms": ms} for ms in ((11.0, 11.5, 12.0), slow))
    before = write(
        tmp_path / "a",
        paced(make_outcome(batch_size=1, **quick), 420.0, 380.0),
        paced(queued(make_outcome(batch_size=2, **gpu), 10.0, 20.0), 400.0, 400.0),
        paced(queued(make_outcome(batch_size=3, **gpu), 10.0, 1.2), 400.0, 400.0),
    )
    after = write(
        tmp_path / "b",
        paced(make_outcome(batch_size=1, **lagging), 220.0, 180.0),
        paced(queued(make_outcome(batch_size=2, **gpu), 20.0, 40.0), 200.0, 200.0),
        paced(queued(make_outcome(batch_size=3, **gpu), 15.0, 0.01), 200.0, 200.0),
    )
    done = sweep_here("compare", before.folder, after.folder)
    assert done.stdout.count(SLOWED.format("380 to 420", "180 to 220")) == 1
    assert done.stdout.count(SLOWED.format("400", "200")) == 1
    assert "1 SLOWER, 2 AMBIGUOUS" in done.stdout  # one GPU's host was ahead on both


def test_what_was_measured_beside_a_neighbour_is_not_called_slower(
    tmp_path: Path, make_outcome: MakeOutcome, sweep_here: Callable[..., Result]
) -> None:
    """Of a cell that needs its host: on the CPU, or where the GPU waits for it."""
    slow, gpu = (22.0, 23.0, 24.0), {"device": "cuda"}
    before = write(tmp_path / "a", *(make_outcome(batch_size=size) for size in (1, 2, 3, 5)))
    after = write(
        tmp_path / "b",
        waited(make_outcome(step_ms=slow, batch_size=1), 0.3),
        waited(make_outcome(step_ms=slow, batch_size=2), 0.02),
        waited(make_outcome(step_ms=slow, batch_size=3), None),
        make_outcome(step_ms=slow, batch_size=5),
        waited(queued(make_outcome(batch_size=6, **gpu), 10.0, 0.9), 0.3),
        waited(queued(make_outcome(batch_size=7, **gpu), 10.0, 1.3), 0.3),
    )
    contended = load_results(after).cells.set_index("batch_size")["cpu_contended"]
    assert contended.dropna().to_dict() == {1: True, 2: False, 6: True, 7: False}
    done = sweep_here("compare", before.folder, after.folder)
    assert done.stdout.count(OTHERS.format("30%")) == 1
    assert "3 SLOWER, 1 AMBIGUOUS" in done.stdout
    assert (
        "2 of 6 cells while something else had the cores"
        in sweep_here("report", after.folder).stdout
    )


def test_adaptive_timing_knows_it_of_the_step_that_ran_on_before(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    """Of the last of them: before the first the host was at its start."""

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
def test_what_agrees_does_so_within_the_intervals_or_two_percent(
    ms: float, half_width: float, agrees: bool
) -> None:
    before, after = (
        Side((10.0,), 9.9, 10.1, decides=BoundBy.GPU),
        Side((ms,), ms - half_width, ms + half_width),
    )
    assert judge("", before, after, CALM).agrees is agrees
    assert judge("", before, after, CALM).bound_by is None


def test_kernels_agree_whatever_the_hosts_do(tmp_path: Path, make_outcome: MakeOutcome) -> None:
    """Of one the kernels take 5 % longer, by intervals that leave a gap; a profiled step has none, and is 1 % apart."""

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
    *_, agreeing, last = lines = list(describe_comparison(compare(a, b)))
    assert agreeing.startswith("0 of 4 cells agree within")
    title, _, *rows = [
        line.split("|")[7].strip() for line in "\n".join(lines).splitlines() if line.startswith("|")
    ]
    assert (title, rows) == ("kernels, B / A", ["1.0000", "1.0500", "1.0100", "–"])
    assert last == "in kernel time, which does not depend on the CPU, 2 of 3 cells agree"


def test_kernels_are_those_of_all_attempts(tmp_path: Path, make_outcome: MakeOutcome) -> None:
    """One attempt in trouble moves neither median nor interval, though it is the last."""

    def run(name: str, *kernels_ms: float) -> Run:
        def attempt(number: int, ms: float) -> Outcome:
            own = queued(make_outcome(number=number), 10.0, 0.1)
            return with_samples(own, Sample("kernel_time", "kernel_time", "ms", ms, "", "step", 0))

        return write(
            tmp_path / name, *(attempt(number, ms) for number, ms in enumerate(kernels_ms, 1))
        )

    *_, last = describe_comparison(compare(run("a", 4.0, 4.0, 5.0), run("b", 4.0, 4.0, 4.0)))
    assert last == "in kernel time, which does not depend on the CPU, 1 of 1 cells agree"


def only_kernels(outcome: Outcome, ms: float) -> Outcome:
    watched = (
        Sample("kernel_time", "kernel_time", "ms", ms + 0.01 * step, "", "step", step)
        for step in range(6)
    )
    return replace(outcome, samples=tuple(watched))


def test_where_no_step_was_timed_the_kernels_are_held_against_each_other(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    """Also where one side has times of steps, which are other numbers."""
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
        *lines, last = describe_comparison(compare(before, after))
        assert "not both were timed: the comparison is of their kernel times" in lines
        assert last == "1 of 2 cells agree within their intervals or 2%"
    assert [one.ratio for one in compare(kernels, both).comparisons] == [
        1.0,
        pytest.approx(5.025 / 4.025),
    ]
    with pytest.raises(RunError, match="has no cell that was timed"):
        compare(kernels, write(tmp_path / "c", timed))


def test_the_samples_of_either_run_are_read_once(
    tmp_path: Path, make_outcome: MakeOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the most of it; also where what was timed is not what is compared."""
    a, b = (
        write(tmp_path / "a", only_kernels(make_outcome(), 4.0)),
        write(tmp_path / "b", only_kernels(make_outcome(), 4.0)),
    )
    read, tables = Run.read, []

    def counted(run: Run, table: str, *more: Any, **options: Any) -> Any:
        tables.append((run.folder.name, table))
        return read(run, table, *more, **options)

    monkeypatch.setattr(Run, "read", counted)
    assert len(compare(a, b).comparisons) == 1
    assert [name for name, table in tables if table == "samples"] == ["a", "b"]


def test_agreement_is_counted_by_what_binds_the_step(
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

    *_, last = describe_comparison(compare(run("a", 10.0, 30.0), run("b", 10.0, 33.0)))
    assert (
        last
        == "1 of 2 cells agree within their intervals or 2%: 0 of 1 GPU-bound on both sides, 1 of 1 CPU-bound (†)"
    )
    *_, last = describe_comparison(compare(run("c", 10.0, 30.0), run("d", 11.0, 30.0)))
    assert last == (
        "1 of 2 cells agree within their intervals or 2%: 1 of 1 GPU-bound on both sides, 0 of 1 CPU-bound (†)"
    )


def test_the_command_says_what_differs_and_ends_as_asked(
    runs: tuple[Run, Run], sweep_here: Callable[..., Result]
) -> None:
    folders = [run.folder for run in runs]
    done = sweep_here("compare", *folders)
    assert done.exit_code == 0
    assert "1 SAME, 1 SLOWER" in done.stdout
    assert "geometric mean of B / A: 1.0487" in done.stdout
    assert done.stdout.endswith(
        "\n1 of 2 cells agree within their intervals or 2%\n"
    )  # of the host nothing is known
    assert (
        sweep_here("compare", *folders, "--fail-on", "slower", "--threshold", "3%").exit_code == 1
    )
    assert (
        sweep_here("compare", *folders, "--fail-on", "slower", "--threshold", "20%").exit_code == 0
    )
    assert sweep_here("compare", *reversed(folders), "--fail-on", "slower").exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a", "nowhere"), ": nowhere: holds no run"),
        (("a:zzzz", "b:zzzz"), "a: has no measured cell 'zzzz'"),
        (("a:zzzz", "b"), "one is a run and the other a cell"),
        (("a", "b", "--threshold", "much"), "is not a percentage"),
        (("a", "untimed"), "untimed: has no cell that was timed and ended well"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    runs: tuple[Run, Run], sweep_here: Callable[..., Result], words: tuple[str, ...], said: str
) -> None:
    shutil.copytree(runs[1].folder, "untimed", ignore=shutil.ignore_patterns("samples"))
    done = sweep_here("compare", *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
