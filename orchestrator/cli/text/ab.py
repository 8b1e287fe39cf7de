"""Output of `sweep ab`: its comparison, and what its plan costs and finds."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.analysis.checks import Comparison
from orchestrator.analysis.comparison import compare_runs
from orchestrator.analysis.gate_policy import Policy
from orchestrator.analysis.time_checks import (
    CPU_ROUNDS,
    KERNEL_NOISE_SAME_MACHINE,
    KERNELS,
    STEP,
    STEP_NOISE,
)
from orchestrator.analysis.verdicts import Rounds, median_noise, power_of_plan, rounds_needed
from orchestrator.cli.text.comparison import describe_comparison
from orchestrator.cli.text.plan import describe_cost
from orchestrator.common.text import cell_count
from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.planning.cell_decisions import make_plan
from orchestrator.planning.invocation import RunOptions
from orchestrator.planning.request import SweepRequest
from orchestrator.report.formats.terminal import Screen
from orchestrator.store.run import Run

_NAMES = {STEP: "step time of GPU-bound cells", KERNELS: "kernel time"}


def describe_contest(comparison: Comparison, screen: Screen) -> Iterator[str]:
    """Yield the lines of the result."""
    yield from describe_comparison(comparison, screen)
    if any(check.log_ratios for check in comparison.undecided):
        rounds = comparison.policy.rounds
        yield (
            f"to decide, name a policy with more rounds than {rounds.first} + {rounds.more}"
            " and another --out: looking again and again at one run would add false alarms"
        )


def describe_ab_plan(
    request: SweepRequest, policy: Policy, runs: tuple[Run, Run], gpu: GpuModel | None
) -> Iterator[str]:
    """Yield how many cells are measured how often, how long it takes, and what it finds.

    gpu: the GPU that was named, or None for this machine's.
    """
    cells, rounds = request.expansion.cells, policy.rounds
    yield (
        f"{cell_count(len(cells))}; rounds: {rounds.first} of all cells,"
        f" {rounds.more} more of those in doubt; each measures A and B"
    )
    # Both sides take equally long; what a side has measured already is not counted here.
    once = make_plan(cells, {}, RunOptions(repeat=2 * rounds.first), 1)
    cost = describe_cost(request, once, gpu) or "expected time: unknown before the first round"
    yield f"the first {rounds.first} rounds of both sides: {cost}"
    on_cpu = sum(cell.params.device == "cpu" for cell in cells)
    if on_cpu < len(cells):
        yield from _power(request, policy, runs)
    yield from _not_judged(request, policy, on_cpu)


def _power(request: SweepRequest, policy: Policy, runs: tuple[Run, Run]) -> Iterator[str]:
    """Yield what the rounds find, by the noise that those in the folder show, or other machines."""
    count, last = len(request.expansion.cells), policy.rounds.first + policy.rounds.more
    known = (
        (STEP, STEP_NOISE, policy.step.gpu_bound),
        (KERNELS, KERNEL_NOISE_SAME_MACHINE, policy.kernels.same_machine),
    )
    checks = compare_runs(*runs, policy).times if all(run.exists for run in runs) else []
    for gate, usual, threshold in known:
        noise, source = usual.of_ratio(), "measured on H200s"
        own = [check for check in checks if check.gate == gate and len(check.log_ratios) > 1]
        in_folder = median_noise([Rounds(one.log_ratios, threshold) for one in own])
        if in_folder.degrees_of_freedom:
            noise = in_folder
            source = f"median of {cell_count(len(own))} in {runs[0].folder.parent}"
        found = power_of_plan(noise, last, threshold, count, policy.false_alarm)
        text = (
            f"{_NAMES[gate]}: noise ±{noise.deviation:.2%} between rounds in the median cell"
            f" ({source}); {last} rounds find a slow-down of {found:.1%} with 90%"
        )
        needed = rounds_needed(noise, threshold, count, policy.false_alarm)
        if needed > last:
            text += f"; {threshold:.0%} needs {needed} rounds"
        yield text
    yield f"false alarms in the whole comparison: at most {policy.false_alarm:.0%}"


def _not_judged(request: SweepRequest, policy: Policy, on_cpu: int) -> Iterator[str]:
    cells = request.expansion.cells
    is_judged_on_cpu = isinstance(policy.step.cpu_bound, float)
    if is_judged_on_cpu:
        yield (
            f"CPU-bound step times: judged in operations, at {policy.step.cpu_bound:.0%}, from"
            f" {CPU_ROUNDS} rounds on, which such cells get"
        )
    else:
        yield (
            "not judged: the ms of CPU-bound steps, which differ by 13% between processes;"
            f" they are shown. A policy with step.cpu_bound: 10% judges them from {CPU_ROUNDS}"
            " rounds on"
        )
    if on_cpu and not is_judged_on_cpu:
        yield f"not judged: any time of {cell_count(on_cpu)} on the CPU"
    if on_cpu < len(cells) and "kernel_time" not in request.config.instruments:
        yield "not judged: kernel times, which CPU-bound cells need. Add --instrument kernel_time"
