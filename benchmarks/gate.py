"""How often the gate raises a false alarm, and which changes it finds, on measured noise.

Each round of a simulated cell has the ratio of two processes of one real cell, measured on H200s
where nothing had changed. gate_noise.csv has the medians of these processes, from all runs that were
published at commit 67bcc56, on 15 machines; those with another GPU clock are left out. Half of the
40 cells of a comparison are judged by the step time of GPU-bound cells, half by the kernel time of
CPU-bound ones. With a change, one cell of either kind is slower. Seeds are fixed.

    python benchmarks/gate.py [--families N]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from orchestrator.analysis.time_checks import KERNEL_NOISE
from orchestrator.analysis.verdicts import UNKNOWN, Floats, Rounds, Verdict, decide

NOISE = Path(__file__).with_name("gate_noise.csv")
CELLS = 40
FALSE_ALARM = 0.01
CHANGES = (0.02, 0.03, 0.05)
_CLOCK_TOLERANCE = 0.01
_SMOOTHING = 0.1  # many cells were measured twice, and their one difference would be two values
KINDS = ["step"] * (CELLS // 2) + ["kernels"] * (CELLS // 2)
PRIORS = {"step": UNKNOWN, "kernels": KERNEL_NOISE.of_ratio()}
Pool = list[Floats]  # for each real cell, log ratios of two of its processes


def log_ratios(rows: pd.DataFrame, column: str, keys: Sequence[str]) -> Pool:
    """Return the log ratios of all pairs of processes in each group, in both directions."""
    pool = []
    for _, group in rows[rows[column].notna()].groupby(list(keys)):
        off = (group["clock_mhz"] / group["clock_mhz"].median() - 1).abs()
        logs = np.log(group.loc[~(off > _CLOCK_TOLERANCE), column].to_numpy(dtype=float))
        if len(logs) > 1:
            differences = logs[:, None] - logs[None, :]
            pool.append(differences[~np.eye(len(logs), dtype=bool)])
    return pool


def pools(machines: str) -> tuple[Pool, Pool]:
    """Return the pools of step times of GPU-bound cells and kernel times of CPU-bound ones.

    machines: `same` or `other`. Kernel times were seldom measured twice on one machine, so theirs
    are always of several machines.
    """
    rows = pd.read_csv(NOISE)
    keys = ["cell", "machine"] if machines == "same" else ["cell"]
    is_gpu_bound = rows["cpu_bound"] == 0
    steps = log_ratios(rows[is_gpu_bound], "step_ms", keys)
    return steps, log_ratios(rows[~is_gpu_bound], "kernel_ms", ["cell"])


def drawn(rng: np.random.Generator, pool: Pool, cells: int, rounds: int) -> Floats:
    """Return log ratios of cells that did not change, of shape (cells, rounds)."""
    rows = [rng.choice(pool[number], rounds) for number in rng.integers(len(pool), size=cells)]
    return np.array(rows) * rng.normal(1.0, _SMOOTHING, (cells, rounds))


@dataclass(frozen=True)
class Rule:
    """A rule, and the noise that it is tried on.

    machines: `same` or `other`, see `pools`. Cells in doubt get `more` rounds after the first ones.
    """

    machines: str
    threshold: float
    first: int
    more: int = 0

    def __str__(self) -> str:
        rounds = f"{self.first} + {self.more}" if self.more else str(self.first)
        return f"{self.threshold:.0%}, rounds: {rounds}, {self.machines} machine"

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
            cells.append(Rounds(measured, self.threshold, kind, PRIORS[kind]))
        return [one.verdict for one in decide(cells, FALSE_ALARM)]


class StoredBaseline(Rule):
    """A baseline of another machine, of which kernel times are judged, in one round."""

    def __str__(self) -> str:
        return f"{super().__str__()}, kernels"

    def ratios(self, rng: np.random.Generator, pools: tuple[Pool, Pool]) -> Floats:
        return drawn(rng, pools[1], CELLS, 1)

    def verdicts(self, ratios: Floats) -> list[Verdict]:
        prior = PRIORS["kernels"]
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


def simulate(rule: Rule, families: int, change: float = 0.0) -> Result:
    """Return the result of a rule in comparisons of 40 cells, two of which are slower by `change`."""
    rng = np.random.default_rng(1)
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


DEFAULT = Rule("same", 0.02, 2, 3)
RULES = [
    Rule("same", 0.02, 5),
    DEFAULT,
    Rule("same", 0.01, 3, 4),
    Rule("other", 0.02, 5),
    Rule("other", 0.02, 2, 3),
    Rule("other", 0.01, 3, 4),
    Rule("same", 0.02, 1),
    StoredBaseline("other", 0.03, 1),
]


def table(families: int) -> Iterator[str]:
    """Yield the lines of the table, one for each rule."""
    found = "".join(f"{f'found {change:.0%}':>11}" for change in CHANGES)
    yield f"{'rule, and its noise':<44}{'false alarms':>15}{'undecided':>11}{found}"
    for rule in RULES:
        result = simulate(rule, families)
        undecided = result.equal[Verdict.UNDECIDED] / result.equal.total()
        line = f"{rule!s:<44}{f'{result.false_alarms} of {families}':>15}{undecided:>11.1%}"
        for change in CHANGES:
            changed = simulate(rule, max(1, families // 10), change).changed
            line += f"{changed[Verdict.SLOWER] / changed.total():>11.0%}"
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--families", type=int, default=2000)
    for line in table(parser.parse_args().families):
        print(line, flush=True)


if __name__ == "__main__":
    main()
