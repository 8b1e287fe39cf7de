"""Findings on failed cells, on how steadily steps were timed, and of runs that compare nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from orchestrator.analysis import pairs
from orchestrator.analysis.axes import MAIN, has_value
from orchestrator.analysis.cpu_bound import (
    BoundBy,
    bound_by,
    depends_on_cpu,
    is_true,
    ran_with_others,
)
from orchestrator.analysis.pairs import HIGH, LOW, TIME, measured, preferring, select
from orchestrator.analysis.results import Results
from orchestrator.common.text import counted
from orchestrator.report.findings import finding
from orchestrator.report.findings.finding import Finding
from orchestrator.report.text.cell_names import scope_of
from orchestrator.report.text.numbers import confidence, number, percent, ratio
from orchestrator.report.text.provenance import counts_by_status
from tasks.spec.status import OUT_OF_MEMORY

_STEADY = 0.05  # attempts that differ by less agree
# Results that no step was run for, or that a finding on memory is about.
_NOT_FAILED = ("ok", *OUT_OF_MEMORY, "skipped")


def about_failures(results: Results) -> Iterator[Finding]:
    """Yield how many cells failed for another reason than memory, with the most common one."""
    cells = results.cells
    failed = select(cells, ~cells["status"].isin(_NOT_FAILED))
    if failed.empty:
        return
    statuses = failed["status"].value_counts()
    listed = ", ".join(f"{count} {status}" for status, count in statuses.items())
    by_status = f"By status: {listed}."
    if list(statuses.index) == ["failed"]:  # the label says it
        listed = by_status = ""
    yield Finding(
        "failed",
        f"{len(failed):,}",
        f"of {counted(len(cells), 'cell')}",
        f"{counted(len(failed), 'cell')} failed.",
        f"{by_status}{_common_reason(failed)}".strip(),
        listed,
        len(failed) / len(cells),
        finding.basis_of_cells(failed),
    )


def about_endings(results: Results) -> Iterator[Finding]:
    """Yield how many cells have no result, of a run in which others have one."""
    cells = results.cells
    unmeasured = select(cells, cells["status"] != "ok")
    if not 0 < len(unmeasured) < len(cells):
        return
    listed = ", ".join(text for text, kind in counts_by_status(results, 0) if kind != "ok")
    why_skipped = _common_reason(unmeasured[unmeasured["status"] == "skipped"])
    yield Finding(
        "without a result",
        f"{len(unmeasured):,}",
        f"of {counted(len(cells), 'cell')}",
        f"{counted(len(unmeasured), 'cell')} ended without a result: {listed}.",
        why_skipped.strip().replace("Most often", "Most often impossible", 1),
        basis=finding.basis_of_cells(unmeasured),
    )


def _common_reason(failed: pd.DataFrame) -> str:
    for column in ("message", "reason"):
        texts = failed[column].dropna() if column in failed else pd.Series(dtype=object)
        lines = texts.astype(str).str.strip().str.split("\n").str[0]
        counts = lines[lines != ""].value_counts()
        if len(counts):
            return f" Most often ({counts.iloc[0]:,}): {counts.index[0]}"
    return ""


def about_times(results: Results) -> Iterator[Finding]:
    """Yield the times of the shortest and of the longest step."""
    for task in ("train_step", "attention"):
        cells = finding.warmest(results, preferring(measured(results, task, TIME, LOW, HIGH), MAIN))
        if len(cells):
            break
    else:
        return
    row = finding.extreme(cells, TIME, largest=True)
    coverage = float(row[pairs.COVERAGE]) if has_value(row, pairs.COVERAGE) else 1.0
    detail = ""
    if len(cells) > 1:
        shortest = finding.extreme(cells, TIME, largest=False)
        detail = f"It is the longest of {len(cells):,}; the shortest takes"
        detail += f" {number(shortest[TIME])} ms ({scope_of(shortest)})."
    if coverage < pairs.MIN_COVERAGE:
        detail += f" Its few steps give an interval with {percent(coverage)} confidence only."
    yield Finding(
        "longest step" if len(cells) > 1 else "step",
        number(row[TIME]),
        f"[{number(row[LOW])}, {number(row[HIGH])}] ms{confidence(coverage)}",
        f"{finding.subject_of(row)} takes {number(row[TIME])} ms.",
        detail.strip(),
        scope_of(row),
        basis=[(row["cell"],)],
        is_cpu_bound=bool(depends_on_cpu(cells)[row.name]) and row["device"] != "cpu",
    )


def about_repetitions(results: Results) -> Iterator[Finding]:
    """Yield by how much the times of cells differ that were measured several times."""
    cells = results.cells
    if "repeated_ms_median" not in cells:
        return
    cells = select(cells, cells["repeated_ms_median"].notna())
    spread = (cells["repeated_ms_max"] / cells["repeated_ms_min"]).astype(float)
    row = cells.iloc[int(spread.argmax())]
    ends = f"{number(row['repeated_ms_min'])} to {number(row['repeated_ms_max'])}"
    several = f" Most of {len(cells):,} cells." if len(cells) > 1 else ""
    yield Finding(
        "over repetitions",
        number(row["repeated_ms_median"]),
        f"{ends} ms",
        f"{finding.subject_of(row)} takes {number(row['repeated_ms_median'])} ms, the median of"
        f" {row['repetitions']} attempts that took {ends} ms.",
        f"The slowest took {ratio(spread.max())} as long as the fastest.{several}",
        scope_of(row),
        float((spread > 1 + _STEADY).mean()),
        [(row["cell"],)],
    )


def about_trust(results: Results) -> Iterator[Finding]:
    """Yield how many timed cells are CPU-bound, have wide intervals or were disturbed."""
    cells = results.cells
    steps = select(cells, cells[TIME].notna()) if TIME in cells else cells.iloc[:0]
    bound = bound_by(steps)
    contended, concurrent = is_true(steps, "cpu_contended"), ran_with_others(steps)
    others = [
        *(["--retry cpu-contended"] if contended.any() else []),
        *(["--scheduler serial --fresh"] if concurrent.any() else []),
    ]
    # Label, what is found, the rest of the sentence, and the options that measure these cells again.
    kinds = [
        ("GPU-bound", bound == BoundBy.GPU, "GPU-bound: another machine with this GPU agrees", []),
        ("CPU-bound", bound == BoundBy.CPU, "CPU-bound: such a time holds for this CPU only", []),
        (
            "wide intervals",
            is_true(steps, "interval_wide"),
            "so unsteady that the interval is wider than 5% of the median",
            ["--retry interval-wide"],
        ),
        (
            "power-limited",
            is_true(steps, "power_capped_ns"),
            "slowed down by the power limit, which lowered the clock",
            [],
        ),
        (
            "disturbed",
            contended | concurrent,
            "disturbed by other processes or cells on the same CPU",
            others,
        ),
    ]
    for name, found, what, options in kinds:
        if found.any():
            again = " and ".join(f"`sweep run CONFIG {option}`" for option in options)
            count, total = int(found.sum()), counted(len(steps), "timed cell")
            yield Finding(
                name,
                f"{count:,}",
                f"of {total}",
                f"{count:,} of {total} {'is' if count == 1 else 'are'} {what}.",
                f"To measure again: {again}." if again else "",
                gain=count / len(steps) if again else 0.0,
                basis=finding.basis_of_cells(steps[found]),
            )
