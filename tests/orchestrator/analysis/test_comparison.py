"""Comparison of two runs, from rows made by hand: pairs of cells, checks, and the printed lines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from orchestrator.analysis.checks import Check
from orchestrator.analysis.comparison import Extent, compare_runs
from orchestrator.analysis.cpu_bound import BoundBy
from orchestrator.analysis.gate_policy import Policy, PolicyFile
from orchestrator.analysis.results import load_results
from orchestrator.analysis.verdicts import Rounds, Verdict, decide
from orchestrator.common.errors import ConfigError, RunError
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.conftest import ROOT, watched, with_samples
from tests.support.widths import widest

pytestmark = pytest.mark.usefixtures("derive_once")
# Three runs of 40 cells, each repeated three times, one run after the other on one H200.
H200 = json.loads((ROOT / "tests" / "data" / "h200_same.json").read_text())
MakeOutcome = Callable[..., Outcome]
STEPS = (0.999, 1.0, 1.001)  # of the median of a process


def write(folder: Path, *outcomes: Outcome, commit: str | None = None) -> Run:
    with open_for_writing(Run(folder)) as writer:
        writer.write_manifest({"name": folder.name})
        for outcome in outcomes:
            writer.append(outcome, commit)
    return Run(folder)


def on(host: str, outcome: Outcome, **facts: object) -> Outcome:
    return replace(outcome, facts={**outcome.facts, "host": host, **facts})


def gpu_cell(
    outcome: Outcome,
    medians_ms: Sequence[float],
    kernels_ms: Sequence[float] = (),
    lead_ms: float = 20.0,
    host: str = "one",
    clock_mhz: float | None = None,
    seen: Sequence[str] = (),
) -> list[Outcome]:
    """Return an attempt for each median of a cell on a GPU, whose CPU is ahead by `lead_ms`.

    seen: what each attempt found in the compiler's cache; nothing for a cell that is not compiled.
    """
    attempts = []
    for number, median in enumerate(medians_ms, 1):
        samples = list(outcome.samples)
        for step, factor in enumerate(STEPS):
            for metric, value in (("duration", median * factor), ("lead", lead_ms)):
                samples.append(Sample("timing", metric, "ms", value, "pipelined", "step", step))
        if kernels_ms:
            samples += watched([kernels_ms[number - 1] * factor for factor in STEPS])
        if clock_mhz:
            samples.append(Sample("telemetry", "sm_clock", "MHz", clock_mhz, "after"))
        one = replace(outcome, samples=tuple(samples))
        own = replace(one, attempt=replace(one.attempt, number=number))
        compiled = {"compile_cache_seen": seen[number - 1]} if seen else {}
        attempts.append(on(host, own, **compiled))
    return attempts


def only_time(before: Run, after: Run, policy: Policy | None = None) -> Check:
    (check,) = compare_runs(before, after, policy).times
    return check


def verdict_of(check: Check) -> tuple[str, Verdict]:
    return check.gate, check.verdict


@pytest.fixture
def gpu(make_outcome: MakeOutcome) -> Outcome:
    return make_outcome(device="cuda")


def test_gpu_bound_steps_of_one_machine_are_judged_by_their_time(
    tmp_path: Path, gpu: Outcome
) -> None:
    before = write(tmp_path / "a", *gpu_cell(gpu, (40.0, 40.01, 39.99)))
    after = write(tmp_path / "b", *gpu_cell(gpu, (42.0, 42.01, 41.99)))
    check = only_time(before, after)
    assert verdict_of(check) == ("step", Verdict.SLOWER)
    assert check.ratio == pytest.approx(1.05)
    assert (check.a, check.b, check.unit) == (pytest.approx(40.0), pytest.approx(42.0), "ms")
    assert len(check.log_ratios) == 3
    assert check.interval is not None
    assert check.interval[0] < 1.05 < check.interval[1]
    assert verdict_of(only_time(after, before)) == ("step", Verdict.FASTER)
    assert verdict_of(only_time(before, before)) == ("step", Verdict.SAME)
    comparison = compare_runs(before, after)
    assert (comparison.outcome, comparison.exit_code) == ("FAIL", 1)
    assert (compare_runs(after, before).outcome, compare_runs(after, before).exit_code) == (
        "PASS",
        0,
    )


def test_scaling_both_sides_changes_nothing(tmp_path: Path, gpu: Outcome) -> None:
    a, b = np.array((40.0, 40.5, 39.6)), np.array((41.0, 42.0, 41.5))
    found = []
    for number, scale in enumerate((1.0, 7.3)):
        runs = [
            write(tmp_path / f"{name}{number}", *gpu_cell(gpu, tuple(scale * times)))
            for name, times in (("a", a), ("b", b))
        ]
        found.append(only_time(*runs))
    assert found[0].log_ratios == pytest.approx(found[1].log_ratios)
    assert found[0].verdict is found[1].verdict


@pytest.mark.parametrize("lead_ms", [0.1, 20.0])
def test_on_another_machine_only_kernel_times_are_judged(
    lead_ms: float, tmp_path: Path, gpu: Outcome
) -> None:
    """One round decides, because the noise of kernel times is known."""
    before = write(tmp_path / "a", *gpu_cell(gpu, (40.0,), (38.0,), lead_ms))
    for ratio, expected in ((1.05, Verdict.SLOWER), (1.02, Verdict.SAME), (0.95, Verdict.FASTER)):
        cell = gpu_cell(gpu, (80.0,), (38.0 * ratio,), lead_ms, "two")
        check = only_time(before, write(tmp_path / f"b{ratio}", *cell))
        assert verdict_of(check) == ("kernels", expected)
        assert check.step_ratio == pytest.approx(2.0)


def test_fewer_than_three_rounds_are_judged_by_kernel_times(tmp_path: Path, gpu: Outcome) -> None:
    """This holds also if the policy judges CPU-bound steps: these are GPU-bound."""
    paces = [Sample("telemetry", "host_pace", "1/ms", 400.0, when) for when in ("before", "after")]
    cells = [with_samples(one, *paces) for one in gpu_cell(gpu, (40.0, 40.1), (38.0, 38.0))]
    run = write(tmp_path / "a", *cells)
    policy = PolicyFile.model_validate({"gate": {"step": {"cpu_bound": "10%"}}}).gate
    for one in (Policy(), policy):
        assert verdict_of(only_time(run, run, one)) == ("kernels", Verdict.SAME)


def test_hosts_of_two_publications_may_have_one_name(
    tmp_path: Path, gpu: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = gpu_cell(gpu, (40.0,) * 3, (38.0,) * 3, host="host 1")
    runs = [write(tmp_path / name / "run", *cells) for name in "ab"]
    known = [on("host 1", one, gpu_uuid="GPU 5f3a") for one in cells]
    same_gpu = [write(tmp_path / name / "run", *known) for name in "cd"]
    monkeypatch.setattr(Run, "is_published", True)
    assert not only_time(*runs).is_same_machine
    assert only_time(runs[0], runs[0]).is_same_machine
    assert only_time(*same_gpu).is_same_machine


def test_repetitions_on_another_machine_are_one_round(tmp_path: Path, gpu: Outcome) -> None:
    """All of them differ in the same way, however often they are repeated."""
    before = write(tmp_path / "a", *gpu_cell(gpu, (40.0,) * 5, (38.0,) * 5))
    after = write(tmp_path / "b", *gpu_cell(gpu, (40.0,) * 5, (38.0 * 1.04,) * 5, host="two"))
    assert len(only_time(before, after).log_ratios) == 1


def compiled_cell(gpu: Outcome, scale: float, seen: Sequence[str]) -> list[Outcome]:
    steps = (40.0 * scale, 40.01 * scale, 40.0 * scale)
    return gpu_cell(gpu, steps, (38.0 * scale,) * 3, seen=seen)


COMPILED = ("cold", "warm", "warm")


@pytest.mark.parametrize(
    ("cache", "seen", "rounds"),
    [
        (False, (COMPILED, COMPILED), 1),
        (True, (COMPILED, ("warm",) * 3), 3),
        (True, (COMPILED, ("mixed", "warm", "warm")), 1),  # B has other code
        (True, (("warm",) * 3, COMPILED), 1),  # and A's was compiled for another cell
        (False, (("warm",) * 3, ("warm",) * 3), 1),  # compiled for other cells of each run
    ],
)
def test_a_cell_that_each_side_compiled_is_one_round(
    cache: bool, seen: tuple[Sequence[str], ...], rounds: int, tmp_path: Path, gpu: Outcome
) -> None:
    """On an H200 one program had kernels that took 2.6 % longer when it was compiled again."""
    if cache:
        (tmp_path / "cache").mkdir()
    before = write(tmp_path / "a", *compiled_cell(gpu, 1.0, seen[0]))
    found = {}
    for scale in (1.026, 1.05):
        after = write(tmp_path / f"b{scale}", *compiled_cell(gpu, scale, seen[1]))
        check = only_time(before, after)
        assert len(check.log_ratios) == rounds
        found[scale] = check.verdict
    assert found == {1.026: Verdict.SAME if rounds == 1 else Verdict.SLOWER, 1.05: Verdict.SLOWER}


def test_compiled_code_of_a_cpu_is_not_chosen_by_timing(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    policy = PolicyFile.model_validate({"gate": {"step": {"cpu_bound": "10%"}}}).gate
    rng, runs = np.random.default_rng(0), []
    for name in "ab":
        attempts = cpu_cell(make_outcome(), 40.0, 400.0, rng)
        seen = {"compile_cache_seen": "cold"}
        runs.append(write(tmp_path / name, *(on("one", one, **seen) for one in attempts)))
    assert len(only_time(*runs, policy).log_ratios) == 20


def test_compiled_cells_without_the_instrument_timing_are_judged_as_one_round(
    tmp_path: Path, gpu: Outcome
) -> None:
    """The record of the compiler's cache is made by that instrument."""
    cell = make_cell(
        gpu.attempt.cell.task, {**gpu.attempt.cell.params.non_default, "compile": "blocks"}
    )
    own = replace(gpu, attempt=replace(gpu.attempt, cell=cell), samples=())
    runs = [
        write(
            tmp_path / name,
            *(
                replace(
                    own,
                    attempt=replace(own.attempt, number=number),
                    samples=watched([ms * factor for factor in STEPS]),
                )
                for number in (1, 2, 3)
            ),
        )
        for name, ms in (("a", 10.0), ("b", 10.26))
    ]
    check = only_time(*runs)
    assert (check.gate, check.verdict, len(check.log_ratios)) == ("kernels", Verdict.SAME, 1)


def test_a_few_rounds_of_kernel_times_have_the_noise_of_one_machine_or_of_two(
    tmp_path: Path, gpu: Outcome
) -> None:
    kernels = {"same_machine": "1%", "other_machine": "1%"}
    policy = PolicyFile.model_validate({"gate": {"kernels": kernels}}).gate
    before = write(tmp_path / "a", *gpu_cell(gpu, (40.0,), (10.0,), 0.1))
    found = {}
    for host in ("one", "two"):
        after = write(tmp_path / host, *gpu_cell(gpu, (40.0,), (10.12,), 0.1, host=host))
        found[host] = only_time(before, after, policy).verdict
    assert found == {"one": Verdict.SLOWER, "two": Verdict.UNDECIDED}


def test_a_cell_that_compiles_in_each_round_has_rounds(tmp_path: Path, gpu: Outcome) -> None:
    params = {"compile": "blocks", "compile_cache": "cold"}
    cell = make_cell(gpu.attempt.cell.task, {**gpu.attempt.cell.params.non_default, **params})
    own = replace(gpu, attempt=replace(gpu.attempt, cell=cell))
    runs = [
        write(tmp_path / name, *compiled_cell(own, scale, ("cold",) * 3))
        for name, scale in (("a", 1.0), ("b", 1.026))
    ]
    check = only_time(*runs)
    assert (check.verdict, len(check.log_ratios)) == (Verdict.SLOWER, 3)


def test_compiled_steps_without_kernel_times_are_judged_as_one_round(
    tmp_path: Path, gpu: Outcome
) -> None:
    verdicts = {}
    for ratio in (1.026, 1.05):
        runs = []
        for name, step in (("a", 40.0), ("b", 40.0 * ratio)):
            attempts = gpu_cell(gpu, (step,) * 3, seen=COMPILED)
            runs.append(write(tmp_path / f"{name}{ratio}", *attempts))
        verdicts[ratio] = verdict_of(only_time(*runs))
    assert verdicts == {1.026: ("step", Verdict.SAME), 1.05: ("step", Verdict.SLOWER)}


def test_cpu_bound_cells_are_judged_by_their_kernel_time(tmp_path: Path, gpu: Outcome) -> None:
    before = write(tmp_path / "a", *gpu_cell(gpu, (40.0,) * 3, (10.0, 10.01, 9.99), 0.1))
    after = write(tmp_path / "b", *gpu_cell(gpu, (80.0,) * 3, (10.0, 10.01, 9.99), 0.1))
    check = only_time(before, after)
    assert verdict_of(check) == ("kernels", Verdict.SAME)
    assert check.step_ratio == pytest.approx(2.0)


def test_a_cell_that_becomes_cpu_bound_is_judged_by_its_kernel_time(
    tmp_path: Path, gpu: Outcome
) -> None:
    before = write(tmp_path / "a", *gpu_cell(gpu, (40.0,) * 3, (38.0, 38.01, 37.99)))
    after = write(tmp_path / "b", *gpu_cell(gpu, (60.0,) * 3, (38.0, 38.01, 37.99), 0.1))
    assert verdict_of(only_time(before, after)) == ("kernels", Verdict.SAME)


@pytest.mark.parametrize(
    ("a", "b", "reason", "remedy"),
    [
        ({"lead_ms": 0.1}, {"lead_ms": 0.1}, "CPU-bound, without", "--instrument kernel_time"),
        ({}, {"host": "two"}, "measured on two machines", "--instrument kernel_time"),
        ({"medians_ms": (40.0,)}, {}, "measured once", "--repeat 5"),
        (
            {"medians_ms": (40.0, 41.0, 39.5)},
            {"medians_ms": (41.0, 40.0, 41.5)},
            "noise of ±3.8% between rounds",
            "--repeat 23",
        ),
        (
            {"medians_ms": (40.0, 44.0, 36.0)},
            {"medians_ms": (44.0, 41.0, 39.0)},
            "more than 100 rounds would be needed",
            "",
        ),
        ({"medians_ms": (40.0, 40.0)}, {"medians_ms": (40.9, 40.3)}, "between rounds", "--repeat "),
        (
            {"clock_mhz": 1980},
            {"clock_mhz": 1800, "medians_ms": (44.0, 44.01, 43.99)},
            "the GPU clocks differ: A 1,980 MHz, B 1,800 MHz",
            "--retry ok",
        ),
        (
            {"kernels_ms": (38.0,), "medians_ms": (40.0,)},
            {"kernels_ms": (38.456,), "medians_ms": (40.0,), "host": "two"},
            "two machines may differ",
            "",
        ),
        (
            {"kernels_ms": (38.0,) * 3, "seen": ("cold",) * 3},
            {"kernels_ms": (38.456,) * 3, "seen": ("cold",) * 3},
            "two compilations may differ",
            "",
        ),
    ],
)
def test_an_undecided_cell_has_a_reason_and_a_remedy(
    a: dict[str, Any], b: dict[str, Any], reason: str, remedy: str, tmp_path: Path, gpu: Outcome
) -> None:
    policy = Policy()
    if "kernels_ms" in b and (
        "host" in b or "seen" in b
    ):  # below the usual limit the noise decides every cell
        policy = PolicyFile.model_validate({"gate": {"kernels": {"other_machine": "1%"}}}).gate
    sides = [{"medians_ms": (40.0, 40.01, 39.99), **side} for side in (a, b)]
    runs = [
        write(tmp_path / name, *gpu_cell(gpu, **side))
        for name, side in zip("ab", sides, strict=True)
    ]
    check = only_time(*runs, policy)
    assert check.verdict is Verdict.UNDECIDED
    assert reason in check.reason
    assert check.remedy.startswith(remedy)
    assert bool(check.remedy) is bool(remedy)
    assert (compare_runs(*runs, policy).outcome, compare_runs(*runs, policy).exit_code) == (
        "UNDECIDED",
        3,
    )


def test_the_clock_of_one_attempt_explains_nothing(tmp_path: Path, gpu: Outcome) -> None:
    """Under a power limit it varies."""
    clocks = {"a": (1950, 1815, 1800, 1965), "b": (1980, 1845, 1875, 1815)}
    runs = []
    for name, step in (("a", 40.0), ("b", 42.0)):
        attempts = [gpu_cell(gpu, (step,) * 4, clock_mhz=clock) for clock in clocks[name]]
        runs.append(write(tmp_path / name, *(each[n] for n, each in enumerate(attempts))))
    assert only_time(*runs).verdict is Verdict.SLOWER


def test_steps_that_wait_for_the_cpu_in_some_attempts_are_judged_by_their_kernels(
    tmp_path: Path, gpu: Outcome
) -> None:
    """The times are those of one cell on an H200, whose median lead was long enough."""
    kernels = [(12.04, 11.95, 11.93, 11.97, 11.97), (11.77, 11.83, 11.8, 11.88, 11.79)]
    steps = [(19.63, 12.76, 12.66, 12.75, 12.75), (12.58, 15.34, 19.01, 16.24, 12.62)]
    runs = [
        write(tmp_path / name, *gpu_cell(gpu, of_steps, of_kernels))
        for name, of_steps, of_kernels in zip("ab", steps, kernels, strict=True)
    ]
    check = only_time(*runs)
    assert verdict_of(check) == ("kernels", Verdict.SAME)
    assert check.bound_by is BoundBy.CPU


def test_steps_that_only_b_makes_wait_are_slower(tmp_path: Path, gpu: Outcome) -> None:
    before = write(tmp_path / "a", *gpu_cell(gpu, (40.0, 40.01, 39.99), (38.0,) * 3))
    after = write(tmp_path / "b", *gpu_cell(gpu, (44.0, 44.01, 43.99), (38.0,) * 3))
    assert verdict_of(only_time(before, after)) == ("step", Verdict.SLOWER)


def test_a_difference_that_exceeds_that_of_the_clocks_is_real(tmp_path: Path, gpu: Outcome) -> None:
    before = write(tmp_path / "a", *gpu_cell(gpu, (40.0, 40.01, 39.99), clock_mhz=1980))
    after = write(tmp_path / "b", *gpu_cell(gpu, (48.0, 48.01, 47.99), clock_mhz=1800))
    assert only_time(before, after).verdict is Verdict.SLOWER
    equal = write(tmp_path / "c", *gpu_cell(gpu, (40.0, 40.01, 39.99), clock_mhz=1800))
    assert only_time(before, equal).verdict is Verdict.SAME


def cpu_cell(
    outcome: Outcome, ms: float, rate: float, rng: np.random.Generator, rounds: int = 20
) -> list[Outcome]:
    """Return attempts on a CPU of this speed, with a noise of 5 % that the speed does not show."""
    attempts = []
    for number in range(1, rounds + 1):
        speed = rate * np.exp(rng.normal(0, 0.3))
        median = ms * rate / speed * np.exp(rng.normal(0, 0.05))
        samples = [
            Sample("timing", "duration", "ms", median * factor, "synced", "step", step)
            for step, factor in enumerate(STEPS)
        ]
        for when in ("before", "after"):
            samples.append(Sample("telemetry", "host_pace", "1/ms", speed, when))
        own = replace(outcome, samples=tuple(samples))
        attempts.append(on("one", replace(own, attempt=replace(own.attempt, number=number))))
    return attempts


def test_cpu_steps_are_judged_in_operations_if_the_policy_asks_for_it(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    rng = np.random.default_rng(0)
    runs = {
        name: write(tmp_path / name, *cpu_cell(make_outcome(), ms, 400.0, rng, rounds))
        for name, ms, rounds in (("a", 10, 20), ("same", 10, 20), ("b", 13, 20), ("few", 13, 19))
    }
    policy = PolicyFile.model_validate({"gate": {"step": {"cpu_bound": "10%"}}}).gate
    found = {name: only_time(runs["a"], run, policy) for name, run in runs.items()}
    assert verdict_of(found["b"]) == ("operations", Verdict.SLOWER)
    assert verdict_of(found["same"]) == ("operations", Verdict.SAME)
    assert found["few"].verdict is Verdict.UNDECIDED
    assert (found["few"].reason, found["few"].remedy) == (
        "CPU-bound, which needs 20 rounds and has 19",
        "--repeat 20",
    )
    busy = [waited(one, 0.3) for one in cpu_cell(make_outcome(), 13, 400.0, rng)]
    contended = only_time(runs["a"], write(tmp_path / "busy", *busy), policy)
    assert (contended.verdict, contended.reason, contended.remedy) == (
        Verdict.UNDECIDED,
        "other processes used its cores more than 10% of the time",
        "--retry cpu-contended",
    )
    by_default = only_time(runs["a"], runs["b"])
    assert by_default.verdict is Verdict.UNDECIDED
    assert by_default.remedy == ""  # more rounds decide nothing without such a policy
    assert only_time(runs["few"], runs["few"]).remedy == "--repeat 20"
    # Without the speed of the CPU, the rounds of a step say nothing.
    cells = cpu_cell(make_outcome(), 13, 400.0, rng)
    for known in (0, 19):
        own = [*cells[:known], *map(without_telemetry, cells[known:])]
        check = only_time(runs["a"], write(tmp_path / f"known{known}", *own), policy)
        assert check.verdict is Verdict.UNDECIDED
        reason, remedy = {
            0: ("CPU-bound, and the speed of the CPU is not known", "--instrument telemetry"),
            19: ("CPU-bound, which needs 20 rounds and has 19", "--repeat 20"),
        }[known]
        assert (check.reason, check.remedy) == (reason, remedy)
    other = [on("two", one) for one in cells]
    check = only_time(runs["a"], write(tmp_path / "other", *other), policy)
    assert (check.reason, check.remedy) == (
        "a step on the CPU, not known to be measured on one machine",
        "",
    )


def without_telemetry(outcome: Outcome) -> Outcome:
    samples = tuple(one for one in outcome.samples if one.instrument != "telemetry")
    return replace(outcome, samples=samples)


def with_peak(outcome: Outcome, nbytes: float) -> Outcome:
    peak = Sample("memory", "peak_allocated_bytes", "bytes", nbytes, "steady", "forward")
    return with_samples(outcome, peak)


@pytest.mark.parametrize(
    ("factor", "verdict", "outcome"),
    [
        (1.02, Verdict.WORSE, "FAIL"),
        (1.003, Verdict.SAME, "PASS"),
        (0.9, Verdict.BETTER, "PASS"),
    ],
)
def test_peak_memory_may_grow_by_one_percent(
    factor: float, verdict: Verdict, outcome: str, tmp_path: Path, gpu: Outcome
) -> None:
    (cell,) = gpu_cell(gpu, (40.0,), (38.0,))
    a = write(tmp_path / "a", with_peak(cell, 2.0**30))
    b = write(tmp_path / "b", with_peak(cell, 2.0**30 * factor))
    comparison = compare_runs(a, b)
    (check,) = [check for check in comparison.exact if check.gate == "memory"]
    assert check.verdict is verdict
    assert comparison.outcome == outcome


@pytest.mark.parametrize(
    ("status", "actions", "outcome"),
    [
        (Status.OOM, {}, "FAIL"),
        (Status.CRASHED, {}, "FAIL"),
        (Status.OOM, {"oom": "report"}, "PASS"),
        (Status.CRASHED, {"failed": "report"}, "PASS"),
    ],
)
def test_a_cell_that_fails_only_in_b_fails_the_gate(
    status: Status, actions: dict[str, str], outcome: str, tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    policy = PolicyFile.model_validate({"gate": {"status": actions}}).gate
    good, bad = (make_outcome(one, device="cuda") for one in (Status.OK, status))
    a, b = write(tmp_path / "a", good), write(tmp_path / "b", bad)
    comparison = compare_runs(a, b, policy)
    (check,) = comparison.checks
    assert check.reason == f"ok → {status}"
    assert comparison.outcome == outcome
    back = compare_runs(b, a, policy)
    assert [(one.gate, one.verdict) for one in back.checks] == [("status", Verdict.BETTER)]
    assert back.outcome == "PASS"


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        ((Status.FAILED, Status.FAILED), "UNDECIDED"),
        ((Status.OOM, Status.CRASHED), "UNDECIDED"),
        ((Status.OOM, Status.OOM_INFERRED), "PASS"),
        ((Status.SKIPPED, Status.SKIPPED), "PASS"),
    ],
)
def test_a_cell_that_fails_in_both_is_no_pass(
    statuses: tuple[Status, Status], outcome: str, tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    good = gpu_cell(make_outcome(device="cuda"), (40.0,), (38.0,))
    a, b = (
        write(tmp_path / name, *good, make_outcome(status, device="cuda", batch_size=2))
        for name, status in zip("ab", statuses, strict=True)
    )
    comparison = compare_runs(a, b)
    assert comparison.outcome == outcome
    reasons = [check.reason for check in comparison.undecided]
    assert reasons == [" → ".join(statuses)] * (outcome == "UNDECIDED")


def test_graph_breaks_and_recompilations_may_not_increase(tmp_path: Path, gpu: Outcome) -> None:
    """A model with `print` breaks the graph."""
    (cell,) = gpu_cell(gpu, (40.0,), (38.0,))
    runs = [
        write(
            tmp_path / str(breaks),
            on("one", cell, compile_graph_breaks=breaks, compile_recompiles=1),
        )
        for breaks in (0, 1)
    ]
    comparison = compare_runs(*runs)
    (failure,) = comparison.failures
    assert (failure.gate, failure.reason, failure.verdict) == (
        "graph breaks",
        "0 → 1",
        Verdict.WORSE,
    )
    assert compare_runs(*reversed(runs)).outcome == "PASS"
    allowed = PolicyFile.model_validate({"gate": {"compile": {"graph_breaks": 1}}}).gate
    assert compare_runs(*runs, allowed).outcome == "PASS"


def test_cells_that_are_missing_in_b_count_if_the_policy_says_so(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    cells = [gpu_cell(make_outcome(device="cuda", batch_size=n), (40.0,), (38.0,)) for n in (1, 2)]
    a, b = write(tmp_path / "a", *cells[0], *cells[1]), write(tmp_path / "b", *cells[0])
    assert compare_runs(a, b).outcome == "PASS"
    assert compare_runs(a, b).only == (
        ("train_step size=tiny context_length=16 batch_size=2",),
        (),
    )
    policy = PolicyFile.model_validate({"gate": {"status": {"missing": "fail"}}}).gate
    (failure,) = compare_runs(a, b, policy).failures
    assert (failure.gate, failure.reason) == ("status", "is not in B")
    accepted = {
        "status": {"missing": "fail"},
        "cells": [{"when": {"batch_size": 2}, "accept": "x"}],
    }
    assert compare_runs(a, b, PolicyFile.model_validate({"gate": accepted}).gate).outcome == "PASS"


def test_limits_of_some_cells_and_cells_that_may_fail(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    def runs(name: str, scale: float) -> Run:
        cells: list[Outcome] = []
        for size in (1, 2, 4):
            own = make_outcome(device="cuda", batch_size=size)
            cells += gpu_cell(own, (40.0,), (38.0 * scale,))
        return write(tmp_path / name, *cells)

    a, b = runs("a", 1.0), runs("b", 1.06)
    assert len(compare_runs(a, b).failures) == 3
    limits = [
        {"when": {"batch_size": 2}, "kernels": "10%"},
        {"when": {"batch_size": 4}, "accept": "it was wrong before"},
    ]
    policy = PolicyFile.model_validate({"gate": {"cells": limits}}).gate
    comparison = compare_runs(a, b, policy)
    verdicts = [(check.verdict, check.accepted) for check in comparison.times]
    assert verdicts == [
        (Verdict.SLOWER, ""),
        (Verdict.SAME, ""),
        (Verdict.SLOWER, "it was wrong before"),
    ]
    assert len(comparison.failures) == 1
    for when in ({"batch_size": 3}, {"bach_size": 2}):
        bad = PolicyFile.model_validate({"gate": {"cells": [{"when": when, "memory": "2%"}]}}).gate
        with pytest.raises(ConfigError, match="which no cell matches"):
            compare_runs(a, b, bad)


def test_a_share_of_the_cells_may_be_undecided(tmp_path: Path, make_outcome: MakeOutcome) -> None:
    cells: list[Outcome] = []
    for size in range(1, 11):
        own = make_outcome(device="cuda", batch_size=size)
        cells += gpu_cell(own, (40.0,), (38.0,) if size > 1 else ())
    run = write(tmp_path / "a", *cells)
    comparison = compare_runs(run, run)
    assert (comparison.outcome, comparison.decided_cells) == ("PASS", 9)
    strict = PolicyFile.model_validate({"gate": {"at_least": "91%"}}).gate
    assert compare_runs(run, run, strict).outcome == "UNDECIDED"


def test_real_runs_of_the_same_cells_do_not_differ() -> None:
    """120 cells, many of them CPU-bound, at the limit of 2 % of GPU-bound ones."""
    runs = [[tuple(cell["medians_ms"]) for cell in run] for run in H200["runs"]]
    found: list[Verdict] = []
    for first, second in ((0, 1), (0, 2), (1, 2)):
        cells = []
        for a, b in zip(runs[first], runs[second], strict=True):
            logs = np.log(b[: len(a)]) - np.log(a[: len(b)])
            cells.append(Rounds(tuple(logs), 0.02, "step"))
        found += [one.verdict for one in decide(cells, 0.01)]
    assert len(found) == 120
    assert Verdict.SLOWER not in found
    assert Verdict.FASTER not in found


def test_an_older_version_of_a_task_is_compared_in_either_order(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    now = make_outcome(step_ms=(10.0, 10.01, 10.02))
    cell = now.attempt.cell
    then = replace(now, attempt=replace(now.attempt, cell=replace(cell, version=cell.version - 1)))
    old, both = write(tmp_path / "old", then), write(tmp_path / "both", then, now)
    assert [len(labels) for labels in compare_runs(old, both).only] == [0, 1]
    assert [len(labels) for labels in compare_runs(both, old).only] == [1, 0]
    assert len(compare_runs(both, old).cells) == 1


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


@pytest.fixture
def runs(tmp_path: Path, make_outcome: MakeOutcome) -> tuple[Run, Run]:
    """Two runs of three cells and a failed one. Of the two in both, the shorter is 10 % slower in b."""

    def outcomes(scale: float, other: int) -> list[Outcome]:
        cells: list[Outcome] = []
        for size, ms in ((1, 40.0 * scale), (2, 80.0)):
            own = make_outcome(device="cuda", batch_size=size)
            cells += gpu_cell(own, (ms, ms + 0.01, ms - 0.01))
        only = make_outcome(device="cuda", batch_size=other)
        return [*cells, only, make_outcome(Status.OOM, device="cuda", batch_size=64)]

    return write(tmp_path / "a", *outcomes(1.0, 8)), write(tmp_path / "b", *outcomes(1.1, 16))


def test_runs_are_compared_cell_by_cell(runs: tuple[Run, Run]) -> None:
    comparison = compare_runs(*runs)
    assert [(one.verdict, round(one.ratio or 0, 2)) for one in comparison.times] == [
        (Verdict.SLOWER, 1.1),
        (Verdict.SAME, 1.0),
    ]
    assert [label.split()[-1] for (label,) in comparison.only] == ["batch_size=8", "batch_size=16"]
    assert comparison.differences == {}
    a_cell = comparison.cells[0]
    selected = compare_runs(*runs, extent=Extent(cells={a_cell}))
    assert (selected.cells, selected.only) == ([a_cell], ((), ()))


def test_two_cells_of_one_run_can_be_compared(
    runs: tuple[Run, Run], make_outcome: MakeOutcome
) -> None:
    one, other = (make_outcome(device="cuda", batch_size=size).attempt.cell.id for size in (1, 2))
    (check,) = compare_runs(runs[0], runs[0], cells=(one[:6], other)).times
    assert (check.verdict, round(check.ratio or 0, 2)) == (Verdict.SLOWER, 2.0)


def test_the_label_of_two_cells_shows_the_parameters_of_both(
    tmp_path: Path, make_outcome: MakeOutcome, sweep_here: Callable[..., Result]
) -> None:
    one, other = make_outcome(context_length=8), make_outcome(context_length=16, precision="bf16")
    a, b = write(tmp_path / "a", one), write(tmp_path / "b", other, make_outcome(context_length=32))
    done = sweep_here(
        "compare", f"{a.folder}:{one.attempt.cell.id}", f"{b.folder}:{other.attempt.cell.id}"
    )
    assert "precision: fp32 → bf16\ncontext_length: 8 → 16\n" in done.stdout
    assert "context_length=8 → 16" in done.stdout
    assert "not compared" not in done.stdout


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
    text = sweep_here("compare", folder, folder).stdout
    assert widest(text) <= (columns or 100)
    assert sum("UNDECIDED  1.0000" in line for line in text.splitlines()) == 3
    assert ("more columns: --format csv" in text) is (columns == 50)
    assert any(line.endswith(f"--out {folder}") for line in text.splitlines())
    head, *rows = sweep_here("compare", folder, folder, "--format", "csv").stdout.splitlines()
    assert head.endswith("verdict,b_a,note,a_ms,b_ms,rounds,status")
    assert len(rows) == 3


def test_pipelined_steps_are_compared_rather_than_synced_ones(
    tmp_path: Path, make_outcome: MakeOutcome
) -> None:
    outcome = make_outcome(step_ms=(10.0, 10.0, 10.0))
    pipelined = [
        Sample("timing", "duration", "ms", 7.0, "pipelined", "step", step) for step in range(3)
    ]
    both = write(tmp_path / "a", with_samples(outcome, *pipelined))
    assert only_time(both, both).a == pytest.approx(7.0)


def test_kernel_times_are_compared_if_a_run_timed_no_steps(tmp_path: Path, gpu: Outcome) -> None:
    """This holds also if the other run timed steps, which are other numbers."""
    kernels = write(
        tmp_path / "a", on("one", replace(gpu, samples=tuple(watched([4.0, 4.01, 4.02]))))
    )
    both = write(tmp_path / "b", *gpu_cell(gpu, (9.0,), (5.0,)))
    for before, after in ((kernels, both), (both, kernels)):
        assert only_time(before, after).gate == "kernels"
    assert only_time(kernels, both).ratio == pytest.approx(5.0 / 4.01)
    steps = write(tmp_path / "c", *gpu_cell(gpu, (9.0,)))
    check = only_time(kernels, steps)
    assert (check.verdict, check.reason) == (Verdict.UNDECIDED, "no time was measured in both")
    assert (check.a, check.b, check.ratio) == (None, None, None)
    assert compare_runs(kernels, steps).exit_code == 3


def test_the_samples_of_each_run_are_read_once(
    tmp_path: Path, make_outcome: MakeOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples are the largest table."""
    a, b = (
        write(tmp_path / "a", make_outcome()),
        write(tmp_path / "b", make_outcome()),
    )
    read, tables = Run.read, []

    def counted(run: Run, table: str, *more: Any, **options: Any) -> Any:
        tables.append((run.folder.name, table))
        return read(run, table, *more, **options)

    monkeypatch.setattr(Run, "read", counted)
    assert len(compare_runs(a, b).times) == 1
    assert [name for name, table in tables if table == "samples"] == ["a", "b"]


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


def queued(outcome: Outcome, step_ms: float, lead_ms: float) -> Outcome:
    """Return the outcome with pipelined steps; the CPU is `lead_ms` ahead of them."""
    values = [("duration", step_ms)] * 6 + [("lead", lead_ms)] * 6
    samples = [
        Sample("timing", metric, "ms", ms, "pipelined", "step", step % 6)
        for step, (metric, ms) in enumerate(values)
    ]
    return with_samples(outcome, *samples)


def waited(outcome: Outcome, share: float | None) -> Outcome:
    return with_samples(outcome, Sample("telemetry", "waited_for_core", "", share, "timing"))


def test_cells_that_waited_for_their_cores_are_contended_if_they_depend_on_the_cpu(
    tmp_path: Path, make_outcome: MakeOutcome, sweep_here: Callable[..., Result]
) -> None:
    """This holds for cells on a CPU, and for CPU-bound ones."""
    slow, gpu = (22.0, 23.0, 24.0), {"device": "cuda"}
    lagging = [
        waited(make_outcome(step_ms=slow, batch_size=1), 0.3),
        waited(make_outcome(step_ms=slow, batch_size=2), 0.02),
        waited(make_outcome(step_ms=slow, batch_size=3), None),
        make_outcome(step_ms=slow, batch_size=5),
        waited(queued(make_outcome(batch_size=6, **gpu), 10.0, 0.9), 0.3),
        waited(queued(make_outcome(batch_size=7, **gpu), 10.0, 1.3), 0.3),
    ]
    run = write(tmp_path / "b", *lagging)
    contended = load_results(run).cells.set_index("batch_size")["cpu_contended"]
    assert contended.dropna().to_dict() == {1: True, 2: False, 6: True, 7: False}
    report = " ".join(sweep_here("report", run.folder).stdout.split())  # in lines of any width
    assert "2 of 6 cells while other processes used their cores" in report


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a", "nowhere"), ": nowhere: holds no run"),
        (("a:zzzz", "b:zzzz"), "a: has no measured cell 'zzzz'"),
        (("a:zzzz", "b"), "one is a run and the other a cell"),
    ],
)
def test_a_comparison_that_is_impossible_ends_with_one_line(
    runs: tuple[Run, Run], sweep_here: Callable[..., Result], words: tuple[str, ...], message: str
) -> None:
    done = sweep_here("compare", *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_run_whose_samples_are_lost_is_no_pass(
    runs: tuple[Run, Run], sweep_here: Callable[..., Result]
) -> None:
    shutil.copytree(runs[1].folder, "untimed", ignore=shutil.ignore_patterns("samples"))
    done = sweep_here("compare", "a", "untimed", "--gate")
    assert done.exit_code == 3
    assert "undecided: 2 cells: some of its rows are missing in B" in done.stdout


def test_runs_without_a_common_cell_are_an_error(tmp_path: Path, make_outcome: MakeOutcome) -> None:
    a, b = write(tmp_path / "a", make_outcome()), write(tmp_path / "b", make_outcome(batch_size=2))
    with pytest.raises(RunError, match="have no measured cell in common"):
        compare_runs(a, b)
