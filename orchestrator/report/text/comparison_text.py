"""The output of `sweep compare`: what differs between two runs, a verdict for each cell, and a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from tabulate import tabulate

from orchestrator.analysis.axes import NOTHING
from orchestrator.analysis.cell_timing import AGREEMENT
from orchestrator.analysis.comparison import ASSUMED_NOISE, Comparison, ComparisonReport, Verdict
from orchestrator.analysis.cpu_bound import BoundBy
from orchestrator.report.tables.formatters import HOST_MARK, format_ms

# A factor of ten either way: too few repetitions to estimate the noise.
_UNKNOWN_NOISE = 10.0
_BOUND_BY = {
    BoundBy.GPU: f"{BoundBy.GPU} on both sides",
    BoundBy.CPU: f"{BoundBy.CPU} ({HOST_MARK})",
}


def describe_comparison(report: ComparisonReport) -> Iterator[str]:
    """Yield the lines of a comparison of two runs or cells."""
    for name, (before, after) in report.differences.items():
        yield f"{name}: {before} → {after}"
    yield _noise(report)
    if any(one.before.is_of_kernels for one in report.comparisons):
        yield "not both were timed: the comparison is of their kernel times"
    yield ""
    yield _table(report)
    yield ""
    yield _verdicts(report)
    yield from _cpu_warning([one for one in report.comparisons if one.differs])
    yield from _agreement(report.comparisons)


def _noise(report: ComparisonReport) -> str:
    freedom = report.noise.freedom
    if not freedom:
        assumed = f"nothing was repeated: the noise is assumed to be {ASSUMED_NOISE:.0%}"
        return f"{assumed}. `sweep run --repeat 3` measures it"
    deviations = [one.noise.sd for one in report.comparisons]
    least, middle, most = np.quantile(deviations, [0, 0.5, 1])
    spread = f"±{middle:.2%} in the median cell, ±{least:.2%} to ±{most:.2%}"
    return f"from process to process: {spread}, with {freedom} degrees of freedom"


def _table(report: ComparisonReport) -> str:
    has_kernels = any(one.of_kernels for one in report.comparisons)
    header = ["cell", "A ms", "B ms", "B / A", "interval"]
    header.append("noise" if report.noise.freedom else "assumed noise")
    if has_kernels:
        header.append("kernels, B / A")
    header.append("verdict")
    rows = [_row(one, has_kernels) for one in report.comparisons]
    alignment = ["left", *["right"] * (len(header) - 2), "left"]
    return tabulate(rows, header, tablefmt="pipe", disable_numparse=True, colalign=alignment)


def _row(one: Comparison, has_kernels: bool) -> list[str]:
    low, high = one.interval
    row = [
        one.label,
        format_ms(one.before.ms),
        format_ms(one.after.ms),
        f"{one.ratio:.4f}",
        f"{low:.4f} to {high:.4f}",
        f"±{one.floor:.1%}" if one.floor < _UNKNOWN_NOISE else "unknown",
    ]
    if has_kernels:
        row.append(f"{one.of_kernels.middle:.4f}" if one.of_kernels else NOTHING)
    return [*row, _verdict(one)]


def _verdict(one: Comparison) -> str:
    if one.reason:
        return f"{one.verdict}: {one.reason}"
    is_cpu_bound = one.differs and one.bound_by is BoundBy.CPU
    return f"{one.verdict} ({BoundBy.CPU})" if is_cpu_bound else f"{one.verdict}"


def _verdicts(report: ComparisonReport) -> str:
    counts = Counter(one.verdict for one in report.comparisons)
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    unmatched = report.only_before + report.only_after
    suffix = f"; {unmatched} cells that only one of them measured" if unmatched else ""
    return f"{verdicts}; geometric mean of B / A: {report.geometric_mean:.4f}{suffix}"


def _cpu_warning(differing: Sequence[Comparison]) -> Iterator[str]:
    """Yield a warning if another CPU could explain some of the differences."""
    bound = sum(one.bound_by is BoundBy.CPU for one in differing)
    if not bound:
        return
    if len(differing) == 1:
        subject = "the one that differs is"
    elif bound < len(differing):
        subject = f"{bound} of the {len(differing)} that differ are"
    else:
        subject = f"all {bound} that differ are"
    yield f"{subject} CPU-bound: the difference may be the CPU's, not the change's"


def _agreement(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield how many cells agree in their times and in their kernel times."""
    shares = []
    for kind in BoundBy:
        found = [one for one in comparisons if one.bound_by is kind]
        if found:
            shares.append(f"{_agreeing(found)} {_BOUND_BY[kind]}")
    whole = f"{_agreeing(comparisons)} cells agree within their intervals or {AGREEMENT:.0%}"
    yield f"{whole}: {', '.join(shares)}" if shares else whole
    of_kernels = [one.of_kernels for one in comparisons if one.of_kernels]
    if of_kernels:
        count = f"{sum(ratio.holds_one for ratio in of_kernels)} of {len(of_kernels)}"
        yield f"in kernel time, which does not depend on the CPU, {count} cells agree"


def _agreeing(comparisons: Sequence[Comparison]) -> str:
    return f"{sum(one.agrees for one in comparisons)} of {len(comparisons)}"
