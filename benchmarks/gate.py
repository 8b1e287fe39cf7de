"""False alarms of the gate, and the changes that it finds, on measured noise.

Each round of a simulated cell has the ratio of two processes of one real cell, measured on H200s
where nothing had changed. A comparison of one round draws the measured ratio of two processes.
Several rounds need independent processes: each is drawn from those of the cell by a smoothed
bootstrap, with their variance (B. W. Silverman and G. A. Young, The bootstrap: to smooth or not to
smooth?, 1987). Drawn from measured ratios alone, all rounds of a cell that was measured twice would
be one number with either sign, and in one of 2^rounds comparisons all signs would be positive,
which no test can tell from a change.

gate_noise.csv has the medians of these processes, from all runs that were published at commit
67bcc56, on 15 machines. gate_noise_ab.csv has the kernel times of sides of
`sweep ab configs/gate.yaml` on two more machines, also with the model of slow_model.py without a
slow-down. All processes of such a run had one compilation, and each of its cells had one GPU.
Processes with another GPU clock are left out. Half of the 40 cells of a comparison are judged by the
step time of GPU-bound cells, half by the kernel time of CPU-bound ones. With a change, one cell of either kind is slower. Seeds are fixed.

    python benchmarks/gate.py [--families N] [--seed N]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from orchestrator.analysis.time_checks import (
    KERNEL_NOISE_COMPILED_TWICE,
    KERNEL_NOISE_OTHER_MACHINE,
    KERNEL_NOISE_SAME_MACHINE,
)
from orchestrator.analysis.verdicts import UNKNOWN, Floats, Rounds, Verdict, decide

NOISE, NOISE_AB = (Path(__file__).with_name(f"gate_noise{suffix}.csv") for suffix in ("", "_ab"))
CELLS = 40
FALSE_ALARM = 0.01
CHANGES = (0.02, 0.03, 0.05)
_CLOCK_TOLERANCE = 0.01
_BANDWIDTH = 1.06  # in standard deviations, for one value; Silverman's rule for normal values
SEED = 1
KINDS = ["step"] * (CELLS // 2) + ["kernels"] * (CELLS // 2)
PRIORS = {
    "same machine": KERNEL_NOISE_SAME_MACHINE.of_ratio(),
    "other machine": KERNEL_NOISE_OTHER_MACHINE.of_ratio(),
    "compiled twice": KERNEL_NOISE_COMPILED_TWICE.of_ratio(),
}
Pool = list[Floats]  # for each real cell, the logarithms of the times of its processes


def processes(rows: pd.DataFrame, column: str, keys: Sequence[str]) -> Pool:
    """Return the logarithms of the times in each group."""
    pool = []
    for _, group in rows[rows[column].notna()].groupby(list(keys)):
        off = (group["clock_mhz"] / group["clock_mhz"].median() - 1).abs()
        logs = np.log(group.loc[~(off > _CLOCK_TOLERANCE), column].to_numpy(dtype=float))
        if len(logs) > 1:
            pool.append(logs)
    return pool


@cache
def pools(machines: str) -> tuple[Pool, Pool]:
    """Return the pools of step times of GPU-bound cells and kernel times of CPU-bound ones.

    machines: `same machine`, `other machine` or `compiled twice`; the last one has
    no step times, and the kernel times of all compiled cells.
    """
    rows, in_turn = pd.read_csv(NOISE), pd.read_csv(NOISE_AB)
    if machines == "compiled twice":
        compiled = in_turn[in_turn["compiled"] == 1].groupby(["cell", "run"], as_index=False)
        return [], processes(compiled.median(numeric_only=True), "kernel_ms", ["cell"])
    is_gpu_bound = rows["cpu_bound"] == 0
    if machines == "same machine":
        steps = processes(rows[is_gpu_bound], "step_ms", ["cell", "machine"])
        return steps, processes(in_turn[in_turn["cpu_bound"] == 1], "kernel_ms", ["cell", "run"])
    steps = processes(rows[is_gpu_bound], "step_ms", ["cell"])
    return steps, processes(rows[~is_gpu_bound], "kernel_ms", ["cell"])


def drawn(rng: np.random.Generator, pool: Pool, cells: int, rounds: int) -> Floats:
    """Return log ratios of cells that did not change, of shape (cells, rounds)."""
    rows = []
    for number in rng.integers(len(pool), size=cells):
        if rounds == 1:
            a, b = rng.choice(pool[number], 2, replace=False)
            rows.append([b - a])
        else:
            a, b = smoothed(rng, pool[number], rounds)
            rows.append(b - a)
    return np.array(rows)


def smoothed(rng: np.random.Generator, values: Floats, rounds: int) -> Floats:
    """Return values of independent processes with the variance of these, of shape (2, rounds)."""
    count = len(values)
    width = _BANDWIDTH * count**-0.2
    # The variance of draws from n values is too small by (n - 1) / n.
    centred = (values - values.mean()) * np.sqrt(count / (count - 1))
    noise = rng.normal(0.0, width * values.std(ddof=1), (2, rounds))
    chosen: Floats = (rng.choice(centred, (2, rounds)) + noise) / np.sqrt(1 + width**2)
    return chosen


@dataclass(frozen=True)
class Rule:
    """A rule, and the noise that it is tried on.

    machines: see `pools`. Cells in doubt get `more` rounds after the first ones.
    """

    machines: str
    threshold: float
    first: int
    more: int = 0

    def __str__(self) -> str:
        rounds = f"{self.first} + {self.more}" if self.more else str(self.first)
        return f"{self.threshold:.0%}, rounds: {rounds}, {self.machines}"

    def ratios(self, rng: np.random.Generator, pools: tuple[Pool, Pool]) -> Floats:
        """Return the log ratios of a comparison in which nothing changed."""
        rounds = self.first + self.more
        return np.concatenate([drawn(rng, pool, CELLS // 2, rounds) for pool in pools])

    def verdicts(self, ratios: Floats) -> list[Verdict]:
        """Return the verdict on each cell."""
        cells = []
        for row, kind in zip(ratios, KINDS, strict=True):
            is_in_doubt = np.abs(row[: self.first]).max() > np.log1p(self.threshold) / 2
            measured = tuple(row if is_in_doubt else row[: self.first])
            prior = UNKNOWN if kind == "step" else PRIORS[self.machines]
            cells.append(Rounds(measured, self.threshold, kind, prior))
        return [one.verdict for one in decide(cells, FALSE_ALARM)]


class StoredBaseline(Rule):
    """A baseline of another machine, whose kernel times are judged in one round."""

    def __str__(self) -> str:
        return f"{super().__str__()}, kernels"

    def ratios(self, rng: np.random.Generator, pools: tuple[Pool, Pool]) -> Floats:
        return drawn(rng, pools[1], CELLS, 1)

    def verdicts(self, ratios: Floats) -> list[Verdict]:
        prior = PRIORS[self.machines]
        cells = [Rounds(tuple(row), self.threshold, "kernels", prior) for row in ratios]
        return [one.verdict for one in decide(cells, FALSE_ALARM)]


@dataclass
class Result:
    """Verdicts of cells that did not change and of those that did, and false alarms.

    A false alarm is a comparison in which a cell is SLOWER that did not change.
    """

    equal: Counter[Verdict] = field(default_factory=Counter)
    changed: Counter[Verdict] = field(default_factory=Counter)
    false_alarms: int = 0


def simulate(rule: Rule, families: int, change: float = 0.0, seed: int = SEED) -> Result:
    """Return the result of a rule in comparisons of 40 cells. Two are slower by `change`."""
    rng = np.random.default_rng(seed)
    measured = pools(rule.machines)
    result = Result()
    slow = (0, CELLS // 2) if change else ()
    for _ in range(families):
        ratios = rule.ratios(rng, measured)
        ratios[list(slow)] += np.log1p(change)
        found = rule.verdicts(ratios)
        result.changed.update(found[number] for number in slow)
        others = [one for number, one in enumerate(found) if number not in slow]
        result.equal.update(others)
        result.false_alarms += Verdict.SLOWER in others
    return result


DEFAULT = Rule("same machine", 0.02, 2, 3)
RULES = [
    Rule("same machine", 0.02, 5),
    DEFAULT,
    Rule("same machine", 0.01, 3, 4),
    Rule("other machine", 0.02, 5),
    Rule("other machine", 0.02, 2, 3),
    Rule("other machine", 0.01, 3, 4),
    Rule("same machine", 0.02, 1),
    StoredBaseline("other machine", 0.03, 1),
    StoredBaseline("compiled twice", 0.03, 1),
]


def table(families: int, seed: int = SEED) -> Iterator[str]:
    """Yield the lines of the table, one for each rule."""
    found = "".join(f"{f'found {change:.0%}':>11}" for change in CHANGES)
    yield f"{'rule, and its noise':<44}{'false alarms':>15}{'undecided':>11}{found}"
    for rule in RULES:
        result = simulate(rule, families, seed=seed)
        undecided = result.equal[Verdict.UNDECIDED] / result.equal.total()
        line = f"{rule!s:<44}{f'{result.false_alarms} of {families}':>15}{undecided:>11.1%}"
        for change in CHANGES:
            changed = simulate(rule, max(1, families // 10), change, seed).changed
            line += f"{changed[Verdict.SLOWER] / changed.total():>11.0%}"
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--families", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=SEED)
    chosen = parser.parse_args()
    for line in table(chosen.families, chosen.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
