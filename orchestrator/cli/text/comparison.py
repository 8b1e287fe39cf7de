"""Output of `sweep compare`: settings that differ, a verdict for each cell, and kernels of two cells."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np
import pandas as pd

from orchestrator.analysis.axes import has_value
from orchestrator.analysis.cell_timing import AGREEMENT, RatioInterval
from orchestrator.analysis.comparison import Change, Comparison, ComparisonReport, cell_labels
from orchestrator.analysis.cpu_bound import BoundBy
from orchestrator.analysis.results import Results, load_results
from orchestrator.common.errors import RunError
from orchestrator.common.text import cell_count, cells_and_verb
from orchestrator.report.formats.terminal import Screen, dense_table_text
from orchestrator.report.tables.kernel_tables import difference_between
from orchestrator.report.tables.layouts import text_table
from orchestrator.report.tables.registry import TABLES
from orchestrator.report.tables.table import (
    MISSING,
    NOTES,
    Entry,
    RenderedTable,
    milliseconds,
    quantity,
)
from orchestrator.report.text.numbers import HOST_MARK
from orchestrator.store.run import Run, find_cell

KERNEL_DIFF = "kernel-diff"
_LISTED = 8
_VERDICT = "verdict"
# Of a relative difference. From here on, it is printed as a factor: as a percentage, a time could
# not be so much shorter.
_LARGE_NOISE = 1.0
# Above this factor, the repetitions are too few to estimate the noise any better.
_MAX_FACTOR = 10
_BOUND_BY = {
    BoundBy.GPU: f"{BoundBy.GPU} on both sides",
    BoundBy.CPU: f"{BoundBy.CPU} ({HOST_MARK})",
}


def describe_comparison(report: ComparisonReport, screen: Screen) -> Iterator[str]:
    """Yield the lines of a comparison of two runs or cells. The table fits the screen."""
    for name, (a, b) in report.differences.items():
        yield f"{name}: {a} → {b}"
    yield _noise(report)
    if report.of_kernels:
        yield "one run timed no steps: kernel times are compared"
    table = dense_table_text(comparison_table(report), screen, "--format csv")
    yield f"\n{table}\n"
    yield from _summary(report)
    yield from _cpu_warning(report.comparisons)
    yield from _agreement(report.comparisons)


def _noise(report: ComparisonReport) -> str:
    degrees = report.noise.degrees_of_freedom
    known_count = sum(map(attrgetter("noise_is_known"), report.comparisons))
    unknown = len(report.comparisons) - known_count
    if unknown == len(report.comparisons):
        reasons = set(map(attrgetter("reason"), report.comparisons))
        problem = reasons.pop() if len(reasons) == 1 else "measured once on one side or on both"
        remedy = "Measure both sides with --repeat 5"
        return f"{problem}, so the noise between processes is not known. {remedy}"
    deviations = [one.noise.deviation for one in report.comparisons if one.noise_is_known]
    # Deviations of the logarithms of times.
    quantiles = np.quantile(deviations, [0, 0.5, 1])
    least, middle, most = (_difference(one, math.exp(one), ".2%") for one in quantiles)
    spread = middle
    if len(deviations) > 1:
        spread += f" in the median cell, {least} to {most}"
    known = f"noise between processes: {spread}, with {degrees} degrees of freedom"
    if unknown:
        cells = cells_and_verb(unknown, "was", "were")
        known += f". {cells} measured once: measure again with --repeat 5"
    return known


def _difference(relative: float, factor: float, form: str) -> str:
    """Return a relative difference, such as `±0.60%`, or the factor that it is if it is large."""
    if relative < _LARGE_NOISE:
        return f"±{relative:{form}}"
    return f"factor {factor:.1f}" if factor <= _MAX_FACTOR else f"factor > {_MAX_FACTOR}"


def comparison_table(report: ComparisonReport) -> RenderedTable:
    """Return a table with a row for each compared cell."""
    rows = [(one.settings, _measures(one)) for one in report.comparisons]
    return text_table("Comparison", rows, _VERDICT)


def _measures(one: Comparison) -> dict[str, Entry]:
    """Return the entries of a row; on a narrow screen, the last ones are left out."""
    ratio, interval, noise, kernels = one.ratio, MISSING, MISSING, MISSING
    verdict = str(one.change)
    if one.differs and one.bound_by is BoundBy.CPU:
        verdict += f" ({BoundBy.CPU})"
    if not math.isnan(ratio.low):
        interval = Entry(f"{ratio.low:.4f} to {ratio.high:.4f}")
    if one.noise_is_known:
        noise = Entry(_difference(one.noise_threshold, 1 + one.noise_threshold, ".1%"))
    if one.kernel_ratio:
        kernels = quantity(one.kernel_ratio.middle, ".4f")
    return {
        _VERDICT: Entry(verdict),
        "B / A": quantity(ratio.middle, ".4f"),
        NOTES: Entry(one.reason),
        "interval": interval,
        "A": milliseconds(one.a.ms),
        "B": milliseconds(one.b.ms),
        "noise": noise,
        "kernels, B / A": kernels,
    }


def _summary(report: ComparisonReport) -> Iterator[str]:
    """Yield how many cells have each verdict, how many would differ by chance, and how many surely."""
    comparisons = report.comparisons
    counts = Counter(map(attrgetter("change"), comparisons))
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Change if counts[verdict])
    suffix = ""
    if report.unmatched:
        suffix = f"; {cell_count(report.unmatched)} that only one of them measured"
    yield f"{verdicts}; geometric mean of B / A: {report.geometric_mean:.4f}{suffix}"
    if report.differing_by_chance:
        differing = sum(map(attrgetter("differs"), comparisons))
        cells = cells_and_verb(len(comparisons), "differs", "differ")
        yield f"{differing} of {cells}. By chance, {report.differing_by_chance:.2g} would differ"
    if count := sum(map(attrgetter("is_distribution_free"), comparisons)):
        yield f"{count} of them without an assumption about the noise: no attempts overlap"


def _cpu_warning(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield a warning if another CPU could explain some of the differences."""
    limits = [one.bound_by for one in comparisons if one.differs]
    bound = limits.count(BoundBy.CPU)
    if not bound:
        return
    if len(limits) == 1:
        subject = "the cell that differs is"
    elif bound < len(limits):
        subject = f"{bound} of the {len(limits)} cells that differ are"
    else:
        subject = f"all {bound} cells that differ are"
    yield f"{subject} CPU-bound: another CPU may explain the difference"


def _agreement(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield how many cells agree in their times and in their kernel times."""
    shares = []
    for kind in BoundBy:
        ratios = [one.ratio for one in comparisons if one.bound_by is kind]
        if ratios:
            shares.append(f"{_agreeing(ratios, len(ratios))} {_BOUND_BY[kind]}")
    cells = cells_and_verb(len(comparisons), "agrees", "agree")
    sentence = f"{_agreeing([one.ratio for one in comparisons], cells)} within their intervals"
    sentence += f" or {AGREEMENT:.0%}"
    if shares:
        sentence += f": {', '.join(shares)}"
    yield sentence
    kernels = list(filter(None, map(attrgetter("kernel_ratio"), comparisons)))
    if kernels:
        cells = cells_and_verb(len(kernels), "agrees", "agree")
        yield f"in kernel time, which does not depend on the CPU, {_agreeing(kernels, cells)}"


def _agreeing(ratios: Sequence[RatioInterval], total: object) -> str:
    return f"{sum(map(attrgetter('agrees'), ratios))} of {total}"


def compare_kernels(a: Run, b: Run, cells: tuple[str, str] = ("", "")) -> RenderedTable:
    """Return the kernels that differ most between two cells.

    cells: how the id of each cell begins; empty for the only one of its run that has kernels.
    Raise RunError if a run has several, or if milliseconds of a step are known of one cell only.
    """
    table = next(one for one in TABLES if one.name == KERNEL_DIFF)
    sides: list[pd.DataFrame] = []
    names: list[str] = []
    for side, run, prefix in zip("AB", (a, b), cells, strict=True):
        results = load_results(run.require())
        cell, kernels = _kernels(results, run, prefix)
        sides.append(kernels)
        names.append(f"{side}: {_described(results, cell)}, cell {cell} of {run}")
    known = [bool(kernels["steps"].notna().all()) for kernels in sides]
    if known[0] != known[1]:
        unknown = (a, b)[known.index(False)]
        problem = f"{unknown}: the number of steps in its trace is not known"
        raise RunError(problem, "Import it again with --steps N")
    grid = difference_between(sides, ["A", "B"])
    return RenderedTable(table, grid, ". ".join(names))


def _described(results: Results, cell: str) -> str:
    row = results.cells.set_index("cell").loc[cell].to_dict()
    files = [str(row[name]) for name in ("file", "rank") if has_value(row, name) and row[name]]
    return " ".join([cell_labels(results)[cell], *files])


def _kernels(results: Results, run: Run, prefix: str) -> tuple[str, pd.DataFrame]:
    kernels = results.kernels()
    present = sorted(set(kernels["cell"].astype(str)))
    if not present:
        raise RunError(f"{run}: has no cell with kernels", "Measure with --instrument kernels")
    if not prefix and len(present) > 1:
        listed = ", ".join(present[:_LISTED])
        raise RunError(f"{run}: has {len(present)} cells with kernels", f"Name RUN:CELL: {listed}")
    cell = find_cell(prefix, present, run, "cell with kernels")
    return cell, kernels[kernels["cell"] == cell]
