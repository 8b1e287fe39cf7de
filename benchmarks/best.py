"""Searches of `sweep best` in the cells of a run: how many are measured, and how good is the answer?

    python benchmarks/best.py results/published/h200/full
    python benchmarks/best.py results/published/h200/full --passes train_step --searches 40

The truth is the measured step of each cell, searched over precision and compile. A simulated
process multiplies it by a factor, whose standard deviation is 0.15 % for cells that the GPU limits
and 10 % for those that the CPU limits, as pairs of runs of one machine showed. An answer is right if
its true time is at most 2 % above the best one of its group.

The share of time compares what the search takes with what the run took for all cells, without their
instruments. A search measures with adaptive timing and ends cells that are beaten: its steps are
drawn from the cell's synchronized steps until the rule of adaptive timing stops. `synced` leaves out
the pipelined steps of a search, and `same timing` is the share of the measured cells in what the run
took.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import pandas as pd
from tabulate import tabulate

from orchestrator import api
from orchestrator.analysis.fastest import Speed
from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.planning.request import resolve_again
from orchestrator.store.open import open_run
from orchestrator.sweep.best_groups import Entrant, Goal, SearchGroup, make_groups
from orchestrator.sweep.best_search import BestSearch, beaten_limits_ms, predict_groups
from tasks.spec.parameters import StopRule
from tasks.spec.stopping import StepDurations
from tasks.training.parameters import TrainStepParams

OVER = ("precision", "compile")
NOISE = {False: 0.0015, True: 0.10}
RIGHT = 1.02
FIXED_WARM_UP, ADAPTIVE_WARM_UP = 5, 3  # steps


@dataclass(frozen=True)
class Truth:
    """The true duration of a step and of a cell, without instruments.

    before_s: until the first step that is measured. synced_ms: steps with a synchronization each.
    rule: of adaptive timing.
    """

    step_s: float
    is_cpu_bound: bool
    before_s: float
    timing_s: float
    synced_ms: tuple[float, ...]
    rule: StopRule

    @property
    def wall_s(self) -> float:
        return self.before_s + self.timing_s

    def adaptive_s(
        self, chance: random.Random, factor: float, beaten_ms: float | None
    ) -> tuple[float, float]:
        """Return what the cell takes with adaptive timing, and what pipelined steps add to it.

        factor: that of the process.
        """
        steps = StepDurations(self.rule, beaten_ms)
        while steps.stopped_by is None:
            steps.add(factor * chance.choice(self.synced_ms))
        measured_s = sum(steps.durations) / 1e3
        is_as_synced = abs(median(self.synced_ms) / 1e3 / self.step_s - 1) <= self.rule.half_width
        warm_up_s = (ADAPTIVE_WARM_UP - FIXED_WARM_UP) * self.step_s
        return self.before_s + warm_up_s + measured_s, 0.0 if is_as_synced else measured_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run")
    parser.add_argument("--passes", default="train_step")
    parser.add_argument("--searches", type=int, default=20)
    options = parser.parse_args()
    groups, truths = read_groups(options.run, options.passes.split(","))
    rows = []
    for until in (0.003, 0.01, 0.02):
        found = [search(groups, truths, until, seed) for seed in range(options.searches)]
        rows.append(
            (
                f"{100 * until:g} %",
                *(sum(column) / len(found) for column in zip(*found, strict=True)),
            )
        )
    head = (
        "until",
        "cells per group",
        "share of time",
        "synced",
        "same timing",
        "right",
        "GPU-bound right",
        "slower than default",
    )
    print(tabulate(rows, head, floatfmt=".3f"))


def read_groups(folder: str, passes: Sequence[str]) -> tuple[list[SearchGroup], dict[str, Truth]]:
    """Return the groups of a run without their speeds, and the truth by cell."""
    results = api.load(folder)
    cells: pd.DataFrame = results.cells
    cells = cells[cells["pass"].isin(passes) & (cells["status"] == "ok")]
    samples = results.samples
    is_synced = (samples["metric"] == "duration") & (samples["mode"] == "synced")
    synced = samples[is_synced & (samples["phase"] == "step")].groupby("cell")["value"].agg(tuple)
    rule = TrainStepParams.model_validate({"size": "small", "timing": "adaptive"}).stop_rule
    assert rule is not None
    truths = {}
    for row in cells.to_dict("records"):
        truths[row["cell"]] = Truth(
            row["step_ms_median"] / 1e3,
            bool(row["cpu_bound"]),
            row["time_process_s"] + row["time_build_s"] + row["time_warm_up_s"],
            row["time_timing_s"],
            synced[row["cell"]],
            rule,
        )
    request = resolve_again(open_run(folder))
    known = [cell for cell in request.expansion.cells if cell.id in truths]
    # Without a memory limit nothing is predicted: every cell of the run did fit.
    gpu = GpuModel("", 0, None, str(cells["gpu"].iloc[0]))
    return predict_groups(make_groups(known, Goal(OVER)), gpu, None), truths


def search(
    groups: Sequence[SearchGroup], truths: dict[str, Truth], until: float, seed: int
) -> tuple[float, float, float, float, float, float, float]:
    """Play one search and return the columns of its row."""
    chance, goal = random.Random(seed), Goal(OVER, until=until)
    noise = {
        cell: math.exp(chance.gauss(0, NOISE[one.is_cpu_bound])) for cell, one in truths.items()
    }
    now, spent_s, pipelined_s = list(groups), 0.0, 0.0
    while chosen := BestSearch(now, goal).round(1):
        limits_ms = beaten_limits_ms(now)
        for number, position in chosen:
            one = now[number].entrants[position]
            truth = truths[one.cell.id]
            factor = noise[one.cell.id]
            taken_s, added_s = truth.adaptive_s(chance, factor, limits_ms.get(one.cell.id))
            spent_s += taken_s
            pipelined_s += added_s
            step_s = truth.step_s * factor
            synced_s = factor * median(truth.synced_ms) / 1e3
            speed = Speed(step_s, step_s, step_s, truth.is_cpu_bound, None, synced_s)
            entrants = list(now[number].entrants)
            entrants[position] = replace(one, speed=speed, status="ok")
            now[number] = replace(now[number], entrants=tuple(entrants))
    measured = [one for group in now for one in group.measured]
    right = [is_right(group, truths) for group in now]
    on_gpu = [one for one, group in zip(right, now, strict=True) if not on_cpu(group, truths)]
    slower = [
        true_s(group.winner, truths) > 1.0001 * true_s(group.entrants[group.default], truths)
        for group in now
    ]
    run_s = sum(one.wall_s for one in truths.values())
    return (
        len(measured) / len(now),
        (spent_s + pipelined_s) / run_s,
        spent_s / run_s,
        sum(truths[one.cell.id].wall_s for one in measured) / run_s,
        sum(right) / len(right),
        sum(on_gpu) / max(1, len(on_gpu)),
        sum(slower) / len(slower),
    )


def true_s(one: Entrant | None, truths: dict[str, Truth]) -> float:
    assert one is not None
    return truths[one.cell.id].step_s


def is_right(group: SearchGroup, truths: dict[str, Truth]) -> bool:
    best_s = min(true_s(one, truths) for one in group.entrants)
    return true_s(group.winner, truths) <= RIGHT * best_s


def on_cpu(group: SearchGroup, truths: dict[str, Truth]) -> bool:
    return any(truths[one.cell.id].is_cpu_bound for one in group.entrants)


if __name__ == "__main__":
    main()
