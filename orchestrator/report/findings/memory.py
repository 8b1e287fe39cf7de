"""Findings on memory: what ran out of it, under which limit, and how well it was predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import MAIN, has_value
from orchestrator.analysis.pairs import combinations, preferring, select
from orchestrator.analysis.results import Results
from orchestrator.common.text import counted
from orchestrator.common.units import GIB
from orchestrator.report.findings import finding
from orchestrator.report.findings.finding import Finding
from orchestrator.report.text.cell_names import LENGTH, evenly, scope_of
from orchestrator.report.text.memory_failures import (
    LIMIT,
    contexts_by_limit,
    limited_steps,
    phases_of,
)
from orchestrator.report.text.numbers import gibibytes, number, percent
from tasks.spec.status import OUT_OF_MEMORY

_PEAK, _PREDICTED = "peak_allocated_bytes", "predicted_peak_allocated_bytes"
_RESIDENT = "peak_rss_bytes"
_MOST_PARTS = 4
_LEAST_SHARE = 0.005  # of a part that is named; less would be 0%
_LEAST_ERROR = 0.001  # of a prediction that is written out
_MOST_MODELS = 5  # of the table of what fits in each memory limit


def about_memory(results: Results) -> Iterator[Finding]:
    """Yield how many cells run out of memory, by limit, or the largest peak if none does."""
    cells = results.cells
    decided = select(cells, cells["status"].isin(["ok", *OUT_OF_MEMORY]))
    limited = limited_steps(results)
    out = select(decided, _ran_out(decided))
    if _ran_out(limited).any():
        yield _of_limits(limited, decided, results)
    elif len(out):
        yield Finding(
            "out of memory",
            f"{len(out):,}",
            f"of {counted(len(decided), 'cell')}",
            f"{counted(len(out), 'cell')} ran out of memory.",
            f"{_phases(out)} {_shortest(out)}{_largest_peak(decided)}".strip(),
            _shortest(out).rstrip("."),
            len(out) / len(decided),
            finding.basis_of_cells(out),
        )
    elif (row := _largest(usual := preferring(decided, MAIN))) is not None:
        peak, what = finding.peak_of(row) or (0.0, "")
        yield Finding(
            "largest peak",
            number(peak / GIB),
            f"GiB {what}",
            "No cell ran out of memory.",
            _largest_peak(usual).strip(),
            scope_of(row),
            basis=[(row["cell"],)],
        )


def _ran_out(cells: pd.DataFrame) -> pd.Series[bool]:
    return cells["status"].isin(OUT_OF_MEMORY)


def _of_limits(limited: pd.DataFrame, decided: pd.DataFrame, results: Results) -> Finding:
    """Return what the limit that separates the cells best decides, over cells with every limit."""
    same = finding.matched_on(limited, LIMIT, results.axes)
    limited = same if len(same) else limited
    by_limit = _ran_out(limited).groupby(limited[LIMIT].astype(float))
    chosen: Any = (by_limit.mean() - 0.5).abs().idxmin()
    table = contexts_by_limit(limited, results.axes)
    table = replace(table, rows=evenly(table.rows, _MOST_MODELS))
    count, total = by_limit.sum()[chosen], by_limit.size()[chosen]
    listed = [f"{out:,} in {limit:g} GiB" for limit, out in by_limit.sum().items()]
    detail = f" Of the same {total}: {', '.join(listed)}." if len(listed) > 1 else ""
    verb = "runs" if total == 1 else "run"
    return Finding(
        "out of memory",
        f"{count}/{total}",
        f"of the steps fail in {chosen:g} GiB",
        f"In {chosen:g} GiB, {count} of {counted(total, 'step')} {verb} out of memory.",
        f"{_phases(limited[_ran_out(limited)])}{detail}{_without_limit(limited, decided, results)}",
        f"limit {chosen:g} GiB",
        float(_ran_out(limited).mean()),
        finding.basis_of_cells(limited),
        table=table,
    )


def _phases(out: pd.DataFrame) -> str:
    """Return how many cells ran out in each phase."""
    if "phase" not in out or out["phase"].isna().all():
        return ""
    counts = phases_of(out).value_counts()
    return f"By phase: {', '.join(f'{count:,} in {phase}' for phase, count in counts.items())}."


def _without_limit(limited: pd.DataFrame, decided: pd.DataFrame, results: Results) -> str:
    """Return how the cells that ran out under a limit ended without one, where they were tried."""
    keys = [axis for axis in results.axes if axis != LIMIT and axis in decided]
    numbers = combinations(decided, keys)
    failed = set(numbers[limited.index[_ran_out(limited)]])
    free = decided[decided[LIMIT].isna() & numbers.isin(failed)]
    if free.empty:
        return ""
    ran = int((~_ran_out(free)).sum())
    verb = "was" if len(free) == 1 else "were"
    text = f" Of the {len(free)} of them that {verb} also measured without a limit, {ran} ran."
    return text + _largest_peak(free)


def _largest(cells: pd.DataFrame) -> Any:
    on_cpu = finding.extreme(cells, _RESIDENT, largest=True)
    return finding.extreme(cells, _PEAK, largest=True) if on_cpu is None else on_cpu


def _largest_peak(cells: pd.DataFrame) -> str:
    row = _largest(cells)
    if row is None or (found := finding.peak_of(row)) is None:
        return ""
    peak, what = found
    whole = " of the whole process" if what == "resident" else ""
    text = f" The largest peak is {gibibytes(peak)}{whole}: {scope_of(row)}"
    if what == "allocated" and has_value(row, _PREDICTED):
        text += f"; predicted {gibibytes(row[_PREDICTED])}"
    return f"{text}."


def _shortest(failed: pd.DataFrame) -> str:
    row = finding.extreme(failed, LENGTH, largest=False)
    if row is None:
        return ""
    return f"The shortest context that fails is {row[LENGTH]:,} ({scope_of(row)})."


def about_parts(results: Results) -> Iterator[Finding]:
    """Yield the largest parts of the largest predicted peak."""
    cells = finding.main_run(preferring(results.cells, MAIN))
    cells = select(cells, cells["status"] == "ok")
    parts = cells.filter(regex=r"^predicted_of_\w+_bytes$").astype(float)
    whole = parts.sum(axis=1)
    if whole.empty or not whole.max() > 0:
        return
    position = int(whole.argmax())
    row, largest = cells.iloc[position], parts.iloc[position].dropna()
    shares = (largest / whole.max()).sort_values(ascending=False).head(_MOST_PARTS)
    names = list(shares.index.str.slice(len("predicted_of_"), -len("_bytes")).str.replace("_", " "))
    # The word of the charts and of the glossary.
    names = [name.replace("attention squares", "attention scores") for name in names]
    listed = [
        f"{name} {percent(share)}"
        for name, share in zip(names, shares, strict=True)
        if share >= _LEAST_SHARE
    ]
    yield Finding(
        names[0],
        percent(shares.iloc[0]),
        f"of {gibibytes(whole.max())} predicted",
        f"{names[0].capitalize()} are the largest part of the peak of {scope_of(row)}.",
        f"By the prediction, {', '.join(listed)} of {gibibytes(whole.max())}.",
        scope_of(row),
        basis=[(row["cell"],)],
    )


def about_predictions(results: Results) -> Iterator[Finding]:
    """Yield how well the peaks were predicted, of cells that were measured and predicted."""
    cells = results.cells
    if not {_PEAK, _PREDICTED} <= set(cells):
        return
    # Compiling frees memory earlier, which a prediction that counts eager steps does not know.
    eager = preferring(cells, {"compile": "eager"})
    both = eager[["cell", _PEAK, _PREDICTED]].dropna()
    both = both[both[_PEAK] > 0]
    if both.empty:
        return
    off = (both[_PREDICTED] / both[_PEAK] - 1).abs().astype(float)
    usual = max(off.quantile(0.95), _LEAST_ERROR)
    yield Finding(
        "predicted peak",
        f"{usual:.1%}",
        f"at most {max(off.max(), _LEAST_ERROR):.1%}",
        f"The predicted peak is within {usual:.1%} of the measured one in 95% of"
        f" {counted(len(both), 'eager cell')}.",
        scope=counted(len(both), "eager cell"),
        basis=finding.basis_of_cells(both),
    )
