"""Each finding of the published runs and of small ones, recomputed from their stored samples.

Nothing of the report is used for it: the cells that a finding names are read from the files, must
agree in everything but the axis in question, and give the number that it prints.
"""

from __future__ import annotations

import json
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis.results import load_results
from orchestrator.report.findings.finding import Finding
from orchestrator.report.findings.registry import findings
from orchestrator.store.open import open_runs
from tests.conftest import ROOT

PUBLISHED = ROOT / "results" / "published" / "h200"
SEARCH = PUBLISHED.parent / "h200-best" / "best"
SMALL = ROOT / "tests" / "data" / "findings"
RUNS = [
    *sorted(path.parent for path in PUBLISHED.glob("*/run.json")),
    *sorted(path.parent for path in SMALL.glob("*/run.json")),
    SEARCH,
]
# These published runs have between them every kind of number that is recomputed here; a slow tier
# reads the others.
IN_BRIEF = {"full", "kernels", "numerics", "oom-map", "warmup"}
# What differs together with an axis: an eager cell has no way to compile, and so on.
TOGETHER = {
    "compile": {"compile_mode", "compile_cache"},
    "warmup_steps": {"timing", "measured_steps", "half_width", "most_steps", "most_seconds"},
}
GIB = 2**30


class Stored:
    """The files of a run, by cell."""

    def __init__(self, folder: Path) -> None:
        attempts = read(folder, "attempts")
        decided = attempts.sort_values("attempt").groupby("cell").last()
        ok = attempts[attempts["status"] == "ok"].sort_values("attempt").groupby("cell").last()
        last = pd.concat([ok, decided[~decided.index.isin(ok.index)]])
        self.status = last["status"].to_dict()
        defaults = json.loads((folder / "run.json").read_text()).get("defaults", {})
        self.params = {
            cell: {**defaults.get(row["task"], {}), **json.loads(row["params"])}
            for cell, row in last.iterrows()
        }
        samples = read(folder, "samples")
        self.all_samples = samples
        number = samples["cell"].map(ok["attempt"].astype(float).to_dict())
        self.samples = dict(iter(samples[samples["attempt"] == number].groupby("cell")))

    def times(self, cell: str, phase: str = "step", synced: bool = False) -> list[float]:
        return durations(self.samples[cell], phase, synced)

    def ms(self, cell: str, phase: str = "step") -> float:
        # Only the timing that waits after each phase has times of phases.
        return statistics.median(self.times(cell, phase, synced=phase != "step"))

    def value(self, cell: str, metric: str) -> float:
        own = self.samples[cell]
        return float(own.loc[own["metric"] == metric, "value"].iloc[-1])

    def peak(self, cell: str, metric: str) -> float:
        own = self.samples[cell]
        own = own[(own["metric"] == metric) & (own["mode"] == "steady")]
        return float(own["value"].max())


def durations(samples: pd.DataFrame, phase: str, synced: bool = False) -> list[float]:
    own = samples[(samples["metric"] == "duration") & (samples["phase"] == phase)]
    for mode in ("synced",) if synced else ("pipelined", "synced"):
        values = own.loc[own["mode"] == mode, "value"]
        if len(values):
            return list(values.astype(float))
    raise LookupError(phase)


def read(folder: Path, table: str) -> pd.DataFrame:
    files = sorted((folder / table).glob("*.parquet"))
    frame = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
    return frame.astype({"cell": str})


@cache
def stored(folder: Path) -> Stored:
    return Stored(folder)


@cache
def found(folder: Path) -> list[Finding]:
    return findings(load_results(open_runs([folder])))


def names() -> list[Any]:
    """Return the runs. All tests of a run are for one worker, which finds its findings once."""
    runs = []
    for folder in RUNS:
        is_slow = folder.parent == PUBLISHED and folder.name not in IN_BRIEF
        marks = [pytest.mark.xdist_group(folder.name), *(is_slow * [pytest.mark.slow])]
        runs.append(pytest.param(folder, id=folder.name, marks=marks))
    return runs


def close_to(text: str, expected: float) -> bool:
    """True if a printed number is the expected one, to its last digit."""
    digits = re.sub(r"[^\d.]", "", text)
    half = 0.5 * 10 ** -len(digits.partition(".")[2])
    # From 1,000 on, fewer digits than the number has.
    return abs(float(digits) - abs(expected)) <= max(half, abs(expected) * 5e-3) + 1e-9


@pytest.mark.parametrize("folder", names())
def test_every_run_has_findings_and_none_fails(folder: Path) -> None:
    shown = found(folder)
    assert shown
    assert [one.sentence for one in shown if "cannot be made" in one.sentence] == []
    assert {cell for one in shown for row in one.basis for cell in row} <= set(
        stored(folder).status
    )


@pytest.mark.parametrize("folder", names())
def test_pairs_differ_in_one_axis(folder: Path) -> None:
    params = stored(folder).params
    for finding in found(folder):
        axes = set()
        for pair in finding.basis:
            if len(pair) == 2:
                own, base = (flat(params[cell]) for cell in pair)
                differing = {axis for axis in {*own, *base} if own.get(axis) != base.get(axis)}
                together = set().union(*(TOGETHER.get(axis, set()) for axis in differing))
                axes |= differing - together
        assert len(axes) <= 1, (finding.label, axes)


def flat(values: dict[str, Any]) -> dict[str, Any]:
    flattened = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flattened |= {f"{name}.{key}": one for key, one in value.items()}
        else:
            flattened[name] = value
    return flattened


def expected(finding: Finding, run: Stored) -> float | None:
    """Return the number of a finding from the samples; None if it has another test below."""
    label, basis = finding.label, finding.basis
    if " over " in label and label not in ("over repetitions", "best over default"):
        return statistics.median([run.ms(base) / run.ms(own) for own, base in basis])
    if label in ("longest step", "step"):
        return run.ms(basis[0][0])
    if label == "backward / forward":
        ratios = [run.ms(cell, "backward") / run.ms(cell, "forward") for (cell,) in basis]
        return statistics.median(ratios)
    if label == "largest peak":
        metric = "peak_rss_bytes" if "resident" in finding.interval else "peak_allocated_bytes"
        return run.peak(basis[0][0], metric) / GIB
    if label.startswith("sum in"):
        return run.value(basis[0][0], "error")
    if label == "worst norm":
        finite = [
            run.value(cell, "narrow_error")
            for cell, values in run.params.items()
            if "eps" in values and run.samples[cell]["metric"].eq("narrow_error").any()
        ]
        return max(value for value in finite if value == value)
    if label in (
        "CPU-bound",
        "GPU-bound",
        "wide intervals",
        "disturbed",
        "power-limited",
        "failed",
    ):
        return float(len({cell for (cell,) in basis}))
    return None


@pytest.mark.parametrize("folder", names())
def test_the_number_of_a_finding_is_that_of_the_samples(folder: Path) -> None:
    run = stored(folder)
    for finding in found(folder):
        value = expected(finding, run)
        if value is not None:
            assert close_to(finding.number, value), (finding.label, finding.number, value)


@pytest.mark.parametrize("folder", names())
def test_what_ran_out_of_memory_is_counted_from_the_attempts(folder: Path) -> None:
    run = stored(folder)
    for finding in found(folder):
        if finding.label == "out of memory":
            out = [cell for (cell,) in finding.basis if run.status[cell].startswith("oom")]
            if "/" not in finding.number:
                assert int(finding.number) == len(out) == len(finding.basis)
                continue
            limit = float(finding.scope.split()[1])
            limited = [
                cell for (cell,) in finding.basis if run.params[cell]["memory_limit_gib"] == limit
            ]
            failed = [cell for cell in limited if run.status[cell].startswith("oom")]
            assert finding.number == f"{len(failed)}/{len(limited)}"
        elif finding.label == "largest peak":
            assert not any(status.startswith("oom") for status in run.status.values())


def test_warm_up_is_the_median_over_the_same_cells() -> None:
    run = stored(PUBLISHED / "warmup")
    (finding,) = [one for one in found(PUBLISHED / "warmup") if "warm-up" in one.label]
    spreads: dict[int, list[float]] = {}
    sizes: dict[int, set[str]] = {}
    for (cell,) in finding.basis:
        steps = run.times(cell, synced=True)
        count = run.params[cell]["warmup_steps"]
        spreads.setdefault(count, []).append(statistics.stdev(steps) / statistics.mean(steps))
        sizes.setdefault(count, set()).add(run.params[cell]["size"])
    assert len(set(map(frozenset, sizes.values()))) == 1
    for count, values in spreads.items():
        (shown,) = re.findall(rf"([\d.]+)% after {count}\b", finding.detail)
        assert close_to(shown, 100 * statistics.median(values))


def test_the_answer_of_a_search_is_a_ratio_of_tokens_per_second() -> None:
    run = stored(SEARCH)
    finding = next(one for one in found(SEARCH) if one.label == "best over default")
    (best,), (default,) = finding.basis
    assert close_to(finding.number, pace(run, default) / pace(run, best))
    everything = stored(SEARCH.parent / "candidates")  # all 96 were measured too
    fastest = min(everything.params, key=lambda cell: pace(everything, cell))
    searched = ("precision", "compile", "optimizer", "attention", "batch_size")
    for axis in searched:
        assert everything.params[fastest][axis] == run.params[best][axis]


def pace(run: Stored, cell: str) -> float:
    return run.ms(cell) / run.params[cell]["batch_size"]


def test_repetitions_are_those_of_every_attempt() -> None:
    run = stored(SMALL / "repeat")
    (finding,) = [one for one in found(SMALL / "repeat") if one.label == "over repetitions"]
    medians = [
        statistics.median(durations(own, "step")) for _, own in run.all_samples.groupby("attempt")
    ]
    assert len(medians) == 5
    assert close_to(finding.number, statistics.median(medians))
    low, high = finding.interval.removesuffix(" ms").split(" to ")
    assert close_to(low, min(medians))
    assert close_to(high, max(medians))


def test_matrix_products_are_shares_of_the_same_cells() -> None:
    """The published run `kernels` has cells that were profiled in both precisions."""
    folder = PUBLISHED / "kernels"
    run, kernels = stored(folder), read(folder, "kernels")
    (finding,) = [one for one in found(folder) if one.label == "matrix products"]
    shares: dict[str, dict[tuple[Any, ...], float]] = {}
    for (cell,) in finding.basis:
        own = kernels[kernels["cell"] == cell]
        total = own["total_ns"].sum()
        params = run.params[cell]
        key = (params["size"], params["context_length"], params["pass"], params["compile"])
        share = own.loc[own["kernel_class"] == "GEMM", "total_ns"].sum() / total
        shares.setdefault(params["precision"], {})[key] = share
    assert set(shares) == {"fp32", "bf16"}
    assert set(shares["fp32"]) == set(shares["bf16"])
    for precision, by_cell in shares.items():
        pattern = rf"(\d+)%(?: of the kernel time)? in {precision}"
        (shown,) = re.findall(pattern, finding.conclusion)
        assert abs(int(shown) - 100 * statistics.median(by_cell.values())) <= 0.51
