"""Output of `sweep compare`: differing settings, a verdict for each cell, and a summary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np

from orchestrator.analysis.cell_timing import AGREEMENT, RatioInterval
from orchestrator.analysis.comparison import Change, Comparison, ComparisonReport
from orchestrator.analysis.cpu_bound import BoundBy
from orchestrator.cli.text.tables import note_entry, text_table
from orchestrator.common.text import cell_count, cells_and_verb
from orchestrator.report.formats.terminal import Screen, dense_table_text
from orchestrator.report.tables.table import (
    MISSING,
    NOTES,
    Entry,
    RenderedTable,
    milliseconds,
    quantity,
)
from orchestrator.report.text.numbers import HOST_MARK

_VERDICT = "verdict"
# The first ones are the most important: the last ones are left out on a narrow screen.
_MEASURES = (
    _VERDICT, "B / A", NOTES, "interval", "A", "B", "noise", "kernels, B / A"
)  # fmt: skip
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
    yield _verdicts(report)
    yield from _chance(report)
    yield from _distribution_free(report.comparisons)
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
    least, middle, most = map(_deviation, np.quantile(deviations, [0, 0.5, 1]))
    spread = middle
    if len(deviations) > 1:
        spread += f" in the median cell, {least} to {most}"
    known = f"noise between processes: {spread}, with {degrees} degrees of freedom"
    if unknown:
        cells = cells_and_verb(unknown, "was", "were")
        known += f". {cells} measured once: measure again with --repeat 5"
    return known


def _deviation(logarithmic: float) -> str:
    """Return the deviation of the logarithm of a time, such as `±0.60%`, as a factor if large."""
    if logarithmic < _LARGE_NOISE:
        return f"±{logarithmic:.2%}"
    return _factor(math.exp(logarithmic))


def _threshold(relative: float) -> str:
    """Return the relative difference that noise may cause, such as `±0.6%`."""
    return f"±{relative:.1%}" if relative < _LARGE_NOISE else _factor(1 + relative)


def _factor(factor: float) -> str:
    return f"factor {factor:.1f}" if factor <= _MAX_FACTOR else f"factor > {_MAX_FACTOR}"


def comparison_table(report: ComparisonReport) -> RenderedTable:
    """Return a table with a row for each compared cell."""
    reasons = sorted({one.reason for one in report.comparisons if one.reason})
    rows = []
    for one in report.comparisons:
        note = note_entry(one.reason, reasons)
        rows.append((one.settings, [Entry(_verdict(one)), *_numbers(one, note)]))
    return text_table("Comparison", _MEASURES, rows, _VERDICT, reasons)


def _numbers(one: Comparison, note: Entry) -> list[Entry]:
    """Return the entries of _MEASURES behind the verdict."""
    ratio, interval, noise, kernels = one.ratio, MISSING, MISSING, MISSING
    if not math.isnan(ratio.low):
        interval = Entry(f"{ratio.low:.4f} to {ratio.high:.4f}")
    if one.noise_is_known:
        noise = Entry(_threshold(one.noise_threshold))
    if one.kernel_ratio:
        kernels = quantity(one.kernel_ratio.middle, ".4f")
    times = milliseconds(one.a.ms), milliseconds(one.b.ms)
    return [quantity(ratio.middle, ".4f"), note, interval, *times, noise, kernels]


def _verdict(one: Comparison) -> str:
    if one.differs and one.bound_by is BoundBy.CPU:
        return f"{one.change} ({BoundBy.CPU})"
    return str(one.change)


def _verdicts(report: ComparisonReport) -> str:
    counts = Counter(map(attrgetter("change"), report.comparisons))
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Change if counts[verdict])
    suffix = ""
    if report.unmatched:
        suffix = f"; {cell_count(report.unmatched)} that only one of them measured"
    return f"{verdicts}; geometric mean of B / A: {report.geometric_mean:.4f}{suffix}"


def _chance(report: ComparisonReport) -> Iterator[str]:
    """Yield how many cells differ, and how many of equal cells would differ by chance."""
    if report.differing_by_chance:
        differing = sum(map(attrgetter("differs"), report.comparisons))
        cells = cells_and_verb(len(report.comparisons), "differs", "differ")
        yield f"{differing} of {cells}. By chance, {report.differing_by_chance:.2g} would differ"


def _distribution_free(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield how many differences need no assumption about the noise, if there are any."""
    count = sum(map(attrgetter("is_distribution_free"), comparisons))
    if count:
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
            shares.append(f"{_agreeing(ratios)} {_BOUND_BY[kind]}")
    cells = _agreeing_cells(list(map(attrgetter("ratio"), comparisons)))
    sentence = f"{cells} within their intervals or {AGREEMENT:.0%}"
    if shares:
        sentence += f": {', '.join(shares)}"
    yield sentence
    kernels = list(filter(None, map(attrgetter("kernel_ratio"), comparisons)))
    if kernels:
        cells = _agreeing_cells(kernels)
        yield f"in kernel time, which does not depend on the CPU, {cells}"


def _agreeing_cells(ratios: Sequence[RatioInterval]) -> str:
    agreeing = sum(map(attrgetter("agrees"), ratios))
    return f"{agreeing} of {cells_and_verb(len(ratios), 'agrees', 'agree')}"


def _agreeing(ratios: Sequence[RatioInterval]) -> str:
    return f"{sum(map(attrgetter('agrees'), ratios))} of {len(ratios)}"
