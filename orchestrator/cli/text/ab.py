"""Output of `sweep ab`: what decides the rest, and what its plan costs and finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from orchestrator.analysis.checks import Comparison
from orchestrator.analysis.comparison import compare_runs
from orchestrator.analysis.gate_policy import STRICT, STRICT_LIMITS, Policy
from orchestrator.analysis.time_checks import (
    CPU_ROUNDS,
    KERNEL_NOISE_SAME_MACHINE,
    KERNELS,
    STEP,
    STEP_NOISE,
)
from orchestrator.analysis.verdicts import Rounds, median_noise, power_of_plan, rounds_needed
from orchestrator.cli.text.plan import describe_cost
from orchestrator.common.text import (
    cell_count,
    path_argument,
    shell_command,
    without_options,
)
from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.planning.cell_decisions import make_plan
from orchestrator.planning.invocation import RunOptions
from orchestrator.planning.request import SweepRequest
from orchestrator.store.run import Run

_NAMES = {STEP: "step time of GPU-bound cells", KERNELS: "kernel time"}


def describe_decision(
    comparison: Comparison, command: Sequence[str], out: Path, policy: Path | None
) -> Iterator[str]:
    """Yield the policy and the command that decide what is undecided.

    command: the arguments of this command, its folder `out` and its file `policy` among them.
    """
    remedies = [check.remedy.split() for check in comparison.undecided if check.remedy]
    if not remedies:
        return
    limits = _limits_that_decide(comparison)
    words = without_options(command, {"--out": True, "--policy": True})
    for instrument in dict.fromkeys(value for name, value in remedies if name == "--instrument"):
        words += ["--instrument", instrument]
    if limits:
        words, policy = without_options(words, {"--strict": False}), policy or Path("gate.yaml")
        yield f"to decide, write into {policy}:"
        yield f"  gate: {limits}".replace("'", "")  # as YAML
        yield "and measure into another folder, so that no round is judged twice:"
    else:
        yield "to decide, measure into another folder:"
    if policy:
        words += ["--policy", str(policy)]
    others = (Path(f"{out}-{number}") for number in count(2))
    free = next(other for other in others if not other.exists())
    yield f"  {shell_command(['sweep', *words, '--out', path_argument(free)])}"


def _limits_that_decide(comparison: Comparison) -> dict[str, dict[str, object]]:
    """Return what a policy needs besides that of the comparison."""
    rounds = comparison.policy.rounds
    repeated = [one for one in comparison.undecided if one.remedy.startswith("--repeat ")]
    limits: dict[str, dict[str, object]] = {}
    # A step on a CPU, which the policy of the comparison does not judge.
    if any(check.threshold is None and check.gate == STEP for check in repeated):
        limits["step"] = {"cpu_bound": "10%"}
    counts = [int(one.remedy.split()[1]) for one in repeated if one.threshold is not None]
    if counts:
        limits["rounds"] = {"first": rounds.first, "more": max(counts) - rounds.first}
    if limits and comparison.policy == STRICT:  # --strict takes no policy
        for name, own in STRICT_LIMITS.items():
            limits[name] = {**own, **limits.get(name, {})}
    return limits


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
    yield f"the first {rounds.first} rounds of both sides: {_cost(request, rounds.first, gpu)}"
    if rounds.more:
        most = rounds.first + rounds.more
        yield f"all {most} rounds, if every cell is in doubt: {_cost(request, most, gpu)}"
    on_cpu = sum(cell.params.device == "cpu" for cell in cells)
    if on_cpu < len(cells):
        yield from _power(request, policy, runs)
    yield from _not_judged(request, policy, on_cpu)


def _cost(request: SweepRequest, rounds: int, gpu: GpuModel | None) -> str:
    # Both sides take equally long; what a side has measured already is not counted here.
    plan = make_plan(request.expansion.cells, {}, RunOptions(repeat=2 * rounds), 1)
    return describe_cost(request, plan, gpu) or "expected time: unknown before the first round"


def _power(request: SweepRequest, policy: Policy, runs: tuple[Run, Run]) -> Iterator[str]:
    """Yield what the rounds find, by the noise that those in the folder show, or other machines."""
    cells, last = len(request.expansion.cells), policy.rounds.first + policy.rounds.more
    known = (
        (STEP, STEP_NOISE, policy.step.gpu_bound),
        (KERNELS, KERNEL_NOISE_SAME_MACHINE, policy.kernels.same_machine),
    )
    checks = compare_runs(*runs, policy).times if all(run.exists for run in runs) else []
    for gate, usual, threshold in known:
        noise, source = usual.of_ratio(), "measured on H200s"
        judged = [one for one in checks if one.gate == gate and one.threshold is not None]
        own = [check for check in judged if len(check.log_ratios) > 1]
        in_folder = median_noise([Rounds(one.log_ratios, threshold) for one in own])
        if in_folder.degrees_of_freedom:
            noise = in_folder
            source = f"median of {cell_count(len(own))} in {runs[0].folder.parent}"
        found = power_of_plan(noise, last, threshold, cells, policy.false_alarm)
        text = (
            f"{_NAMES[gate]}: noise ±{noise.deviation:.2%} between rounds in the median cell"
            f" ({source}); {last} rounds find a slow-down of {found:.1%} with 90%"
        )
        needed = rounds_needed(noise, threshold, cells, policy.false_alarm)
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
        text = f"not judged: any time of {cell_count(on_cpu)} on the CPU"
        if on_cpu > (1 - policy.at_least) * len(cells):
            text += ", so the exit code is 3 unless a cell fails"
        yield text
    if on_cpu < len(cells) and "kernel_time" not in request.config.instruments:
        yield "not judged: kernel times, which CPU-bound cells need. Add --instrument kernel_time"
