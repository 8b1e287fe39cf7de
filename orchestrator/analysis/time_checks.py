"""Checks of times: which time of a cell says something about the program, and its verdict.

A step time depends on the CPU if the step is CPU-bound, and on the machine. GPU-bound steps are
compared on one machine only, kernel times on any. CPU-bound step times are shown, and judged only if
the policy asks for it, in operations of the CPU.

torch.compile chooses some kernels by timing them, so one program that is compiled twice may have
other kernels: of 20 cells that were compiled five times on H200s, the ratios of two compilations had
a standard deviation of 1.0 %, the largest was 4.1 %, and all rounds agreed. A cell that each side
compiled is therefore judged in one round, with that noise. `sweep ab` gives both sides one cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.analysis.axes import Row, has_value
from orchestrator.analysis.cell_timing import CellTiming
from orchestrator.analysis.checks import Check
from orchestrator.analysis.cpu_bound import MAX_CORE_WAIT, BoundBy
from orchestrator.analysis.gate_policy import Policy
from orchestrator.analysis.verdicts import (
    MIN_ROUNDS,
    UNKNOWN,
    Noise,
    Rounds,
    RoundsDecision,
    Verdict,
    decide,
    detectable,
    rounds_needed,
)
from tasks.spec.status import Status

STEP, KERNELS, OPERATIONS = "step", "kernels", "operations"
UNITS = {STEP: "ms", KERNELS: "ms", OPERATIONS: "operations"}
# Noise of the kernel time of one process, on H200s. The largest difference was 0.9 % in 726 pairs of
# processes with one compilation on one GPU, 1.7 % in 298 pairs on two machines, and 4.1 % in 188
# pairs of two compilations. With these values, one pair in 800, one in 215, and one in 175 is
# expected to exceed it (benchmarks/gate_noise.csv, gate_noise_ab.csv).
KERNEL_NOISE_SAME_MACHINE = Noise(0.0018, 30)
KERNEL_NOISE_OTHER_MACHINE = Noise(0.004, 30)
KERNEL_NOISE_COMPILED_TWICE = Noise(0.0098, 30)
# Noise of the step time of one process of a GPU-bound cell, for plans: the median of 114 cells that
# several processes measured on one H200 (benchmarks/gate_noise.csv). Verdicts use measured noise.
STEP_NOISE = Noise(0.0014, 30)
CPU_ROUNDS = 20  # of 10, a comparison in 75 had a false alarm at 10 %
_USUAL_ROUNDS, _MOST_ROUNDS = 5, 100
_CLOCK_TOLERANCE = 0.01


@dataclass(frozen=True)
class CellPair:
    """One cell in both runs.

    machine_facts: names of facts that are equal on one machine only.
    shares_cache: both sides have one cache of compiled code.
    """

    settings: Mapping[str, str]
    rows: tuple[Row, Row]
    timings: tuple[CellTiming, CellTiming]
    policy: Policy
    accepted: str
    machine_facts: tuple[str, ...]
    shares_cache: bool

    @property
    def cell(self) -> str:
        return str(self.rows[0]["cell"])

    @property
    def is_same_machine(self) -> bool:
        """True if both have the same host or the same GPU. A container may have a new host name."""
        for name in self.machine_facts:
            is_known = all(has_value(row, name) and row[name] for row in self.rows)
            if is_known and self.rows[0][name] == self.rows[1][name]:
                return True
        return False

    @property
    def is_compiled_twice(self) -> bool:
        """True if each side compiled the cell for its GPU by itself.

        A cell with compile_cache: cold compiles in each round, so that its rounds differ.
        """
        first = self.rows[0]
        # Whether code was in the cache is not on record without the instrument `timing`.
        is_compiled = has_value(first, "compile") and first["compile"] != "eager"
        is_compiled |= all(has_value(row, "compile_cache_seen") for row in self.rows)
        if not is_compiled or first.get("device") == "cpu" or first.get("compile_cache") == "cold":
            return False
        return not self.shares_cache or self.timings[1].compiles  # A is the first to compile

    @property
    def has_rounds(self) -> bool:
        """True if a round differs from another one by noise only."""
        return self.is_same_machine and not self.is_compiled_twice

    @property
    def kernel_noise(self) -> Noise:
        """The known noise of the kernel time of one process of either side."""
        if self.has_rounds:
            return KERNEL_NOISE_SAME_MACHINE
        return KERNEL_NOISE_COMPILED_TWICE if self.is_compiled_twice else KERNEL_NOISE_OTHER_MACHINE

    @property
    def bound_by(self) -> BoundBy | None:
        """CPU-bound if either time is, GPU-bound if both are, and None if that is unknown."""
        limits = {timing.bound_by for timing in self.timings}
        if BoundBy.CPU in limits:
            return BoundBy.CPU
        return None if None in limits else BoundBy.GPU

    def both(self, quantity: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Return a quantity of each attempt of both sides; None if one side has none."""
        names = {STEP: "steps_ms", KERNELS: "kernels_ms", OPERATIONS: "operations"}
        first, second = (getattr(timing, names[quantity]) for timing in self.timings)
        return (first, second) if first and second else None


def time_checks(pairs: Sequence[CellPair], policy: Policy) -> Iterator[Check]:
    """Yield a check of the time of each pair that both sides timed."""
    undecided: dict[int, Check] = {}
    rounds: dict[int, Rounds] = {}
    for number, pair in enumerate(pairs):
        found = _question(pair)
        if isinstance(found, Rounds):
            rounds[number] = found
        elif found is not None:
            undecided[number] = found
    decisions = dict(zip(rounds, decide([*rounds.values()], policy.false_alarm), strict=True))
    for number, pair in enumerate(pairs):
        check = undecided.get(number)
        if number in rounds:
            one = rounds[number]
            check = _decided(pair, one, decisions[number], len(rounds), policy.false_alarm)
        if check is not None:
            yield replace(check, accepted=pair.accepted)


def _question(pair: CellPair) -> Rounds | Check | None:
    """Return the rounds to decide on, a check that cannot be decided, or None without times."""
    steps, kernels = pair.both(STEP), pair.both(KERNELS)
    if not steps and not kernels:
        return _without_times(pair)
    limits, is_same = pair.policy, pair.is_same_machine
    count = min(map(len, steps)) if steps else 0
    is_gpu_bound = pair.bound_by is BoundBy.GPU
    quantity, prior = KERNELS, pair.kernel_noise
    # A few rounds of kernel times are decided by the noise that is known of them.
    if steps and pair.has_rounds and is_gpu_bound and (count >= MIN_ROUNDS or not kernels):
        quantity, threshold, prior = STEP, limits.step.gpu_bound, UNKNOWN
    elif (
        isinstance(limits.step.cpu_bound, float)
        and is_same
        and not is_gpu_bound
        and (operations := pair.both(OPERATIONS))
    ):
        count = min(map(len, operations))
        if count < CPU_ROUNDS:
            reason = f"CPU-bound, which needs {CPU_ROUNDS} rounds and has {count}"
            return _undecided(pair, OPERATIONS, reason, f"--repeat {CPU_ROUNDS}")
        waited = [row["waited_for_core"] for row in pair.rows if has_value(row, "waited_for_core")]
        if max(waited, default=0) > MAX_CORE_WAIT:
            reason = f"other processes used its cores more than {MAX_CORE_WAIT:.0%} of the time"
            return _undecided(pair, OPERATIONS, reason, "--retry cpu-contended")
        quantity, threshold, prior = OPERATIONS, limits.step.cpu_bound, UNKNOWN
    elif kernels:
        own = limits.kernels
        threshold = own.same_machine if pair.has_rounds else own.other_machine
    elif steps and is_same and is_gpu_bound:  # its kernels fill the step
        quantity, threshold = STEP, max(limits.step.gpu_bound, limits.kernels.other_machine)
    else:
        return _undecided(pair, STEP, *_without_kernels(pair))
    times = pair.both(quantity)
    assert times is not None
    return Rounds(_log_ratios(pair, times), threshold, quantity, prior.of_ratio())


def _without_times(pair: CellPair) -> Check | None:
    """Return an undecided check of a cell that both measured, unless memory is all they measured."""
    if any(row["status"] != Status.OK for row in pair.rows):
        return None
    has_memory = all(has_value(row, "peak_allocated_bytes") for row in pair.rows)
    is_timed = any(timing.steps_ms or timing.kernels_ms for timing in pair.timings)
    if has_memory and not is_timed:
        return None
    return _undecided(pair, STEP, "no time was measured in both", "")


def _log_ratios(pair: CellPair, times: tuple[Sequence[float], ...]) -> tuple[float, ...]:
    """Return the log ratio of each round from the times of A and of B.

    Another machine, and other compiled code, differ in the same way in all rounds, so that they are
    one round.
    """
    logs = [np.log(values) for values in times]
    if not pair.has_rounds:
        return (float(np.median(logs[1]) - np.median(logs[0])),)
    rounds = min(map(len, logs))
    return tuple(map(float, logs[1][:rounds] - logs[0][:rounds]))


def _without_kernels(pair: CellPair) -> tuple[str, str]:
    """Return why a step time says nothing, and the option of `sweep run` that helps."""
    if pair.rows[0].get("device") == "cpu":
        if isinstance(pair.policy.step.cpu_bound, float):
            if not pair.is_same_machine:
                return "a step on the CPU, not known to be measured on one machine", ""
            reason = "CPU-bound, and the speed of the CPU is not known"
            return reason, "--instrument telemetry"
        reason = (
            "a step on the CPU takes longer when anything else runs there; a policy with"
            f" step.cpu_bound: 10% judges it from {CPU_ROUNDS} rounds on"
        )
        rounds = min(len(timing.steps_ms) for timing in pair.timings)
        return reason, f"--repeat {CPU_ROUNDS}" if rounds < CPU_ROUNDS else ""
    option = "--instrument kernel_time"
    if pair.bound_by is BoundBy.GPU:
        return "measured on two machines, without kernel times", option
    if pair.bound_by is BoundBy.CPU:
        return "CPU-bound, without kernel times", option
    return "not known to be GPU-bound, without kernel times", option


def _clock_explanation(pair: CellPair, rounds: Rounds, decision: RoundsDecision) -> str:
    """Return how the GPU clocks differ, if the difference is not as large in clock cycles too."""
    clocks = [timing.clocks_mhz for timing in pair.timings]
    if rounds.kind == OPERATIONS or not all(clocks):
        return ""
    first, second = map(_middle, clocks)  # under a power limit, the clock of one attempt varies
    if abs(second / first - 1) <= _CLOCK_TOLERANCE:
        return ""
    sign = 1 if decision.verdict is Verdict.SLOWER else -1
    cycles = decision.log_ratio + math.log(second / first)
    if sign * cycles >= math.log1p(rounds.threshold):
        return ""
    return f"the GPU clocks differ: A {first:,.0f} MHz, B {second:,.0f} MHz"


def _undecided(pair: CellPair, quantity: str, reason: str, remedy: str) -> Check:
    return _check(pair, quantity, Verdict.UNDECIDED, reason=reason, remedy=remedy)


def _check(
    pair: CellPair, quantity: str, verdict: Verdict, reason: str = "", remedy: str = ""
) -> Check:
    times, steps = pair.both(quantity) or pair.both(STEP), pair.both(STEP)
    a, b = map(_middle, times) if times else (None, None)
    return Check(
        pair.cell,
        pair.settings,
        quantity,
        verdict,
        a,
        b,
        UNITS[quantity],
        reason,
        remedy,
        _log_ratios(pair, times) if times else (),
        bound_by=pair.bound_by,
        is_same_machine=pair.is_same_machine,
        step_ratio=_middle(steps[1]) / _middle(steps[0]) if steps and quantity != STEP else None,
    )


def _middle(values: Sequence[float]) -> float:
    return float(np.median(values))


def _decided(
    pair: CellPair, rounds: Rounds, decision: RoundsDecision, cells: int, false_alarm: float
) -> Check:
    count = len(rounds.log_ratios)
    check = replace(
        _check(pair, rounds.kind, decision.verdict),
        interval=decision.interval,
        threshold=rounds.threshold,
        detectable=detectable(decision, count, rounds.threshold),
    )
    if decision.verdict in (Verdict.SLOWER, Verdict.FASTER):
        reason = _clock_explanation(pair, rounds, decision)
        if reason:
            return replace(check, verdict=Verdict.UNDECIDED, reason=reason, remedy="--retry ok")
    if decision.verdict is not Verdict.UNDECIDED:
        return check
    if not pair.has_rounds:
        deviation = decision.noise.deviation
        what = "compilations" if pair.is_same_machine else "machines"
        reason = f"differs by more than the limit, but two {what} may differ by ±{deviation:.1%}"
        return replace(check, reason=reason, remedy="")
    if not decision.noise.degrees_of_freedom:
        reason = "measured once, so the noise between processes is not known"
        return replace(check, reason=reason, remedy=f"--repeat {_USUAL_ROUNDS}")
    reason = f"noise of ±{math.expm1(decision.noise.deviation):.1%} between rounds"
    needed = rounds_needed(decision.noise, rounds.threshold, cells, false_alarm)
    if needed > _MOST_ROUNDS:
        return replace(check, reason=f"{reason}: more than {_MOST_ROUNDS} rounds would be needed")
    return replace(check, reason=reason, remedy=f"--repeat {max(needed, count + 1, _USUAL_ROUNDS)}")
