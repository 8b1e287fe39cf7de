"""Small tables of the cells of a run that ran out of memory: by model, and by memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import NOTHING, ordered_values
from orchestrator.analysis.pairs import preferring
from orchestrator.analysis.results import Results
from orchestrator.report.text import cell_names
from orchestrator.report.text.cell_names import LENGTH, NAME, NAME_COLUMNS
from tasks.spec.status import OUT_OF_MEMORY

LIMIT = "memory_limit_gib"
_READ = (*NAME_COLUMNS, "status", "stage", "phase", "precision", LENGTH)
_MOST_LIMITS = 4


@dataclass(frozen=True)
class TextTable:
    """A small table of texts. The first column of each row names a model."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


NO_TABLE = TextTable((), ())


def memory_failures(results: Results) -> list[TextTable]:
    """Return tables of the models that ran out of memory, the most failures first.

    With several memory limits, the first one has a column for each, which says which contexts fit.
    Models that were measured without a limit are in the last one.
    """
    cells = results.cells.reindex(columns=_READ)
    is_out = cells["status"].isin(OUT_OF_MEMORY)
    cells = cells.assign(is_out=is_out, named=cell_names.names_of(cells))
    limits = contexts_by_limit(limited_steps(results), results.axes)
    of_limits = {name: texts for name, *texts in limits.rows if len(texts) > 1}
    by_model = dict(iter(cells.groupby("named", sort=False)))
    shares = cells.groupby("named", sort=False)["is_out"].mean()
    limited, unlimited = [], []
    for model in shares[shares > 0].sort_values(ascending=False, kind="stable").index:
        failed = by_model[model][by_model[model]["is_out"]]
        first = (model, f"{len(failed)} of {len(by_model[model])}")
        if model in of_limits:
            limited.append([*first, *of_limits[model]])
        else:
            phases = phases_of(failed).value_counts()
            listed = ", ".join(f"{count} {phase}" for phase, count in phases.items())
            unlimited.append([*first, listed or NOTHING, _first(failed)])
    titles = ("out of memory", "cells")
    tables = [
        TextTable((*titles, *limits.header[1:]), limited, limits.caption),
        TextTable((*titles, "ran out in", "first context that fails"), unlimited),
    ]
    return [table for table in tables if table.rows]


def phases_of(failed: pd.DataFrame) -> pd.Series[Any]:
    """Return the phase in which each cell ended, or its stage, such as `build`, if it had none."""
    known = failed.reindex(columns=["phase", "stage"]).replace("", pd.NA)
    return known["phase"].fillna(known["stage"]).dropna()


def limited_steps(results: Results) -> pd.DataFrame:
    """Return the cells that were measured under a memory limit, whole steps if there are any."""
    cells = results.cells
    if LIMIT not in cells:
        return cells.iloc[:0]
    is_decided = cells["status"].isin(["ok", *OUT_OF_MEMORY])
    return preferring(cells[is_decided & cells[LIMIT].notna()], {"pass": "train_step"})


def contexts_by_limit(limited: pd.DataFrame, axes: Sequence[str]) -> TextTable:
    """Return the longest context that fits and the first that fails, by model and memory limit."""
    if limited.empty or LENGTH not in limited or limited[LENGTH].isna().any():
        return NO_TABLE
    cells = limited.assign(**{NAME: cell_names.names_of(limited)})
    if "precision" in cells:  # the first one, which needs most
        cells = preferring(cells, {"precision": cell_names.ordered("precision", cells)[0]})
    cells, note = cell_names.choose_slice(cells, axes, [NAME, LENGTH, LIMIT])
    is_out = cells["status"].isin(OUT_OF_MEMORY)
    longest = cells[~is_out].groupby([NAME, LIMIT])[LENGTH].max()
    first = cells[is_out].groupby([NAME, LIMIT])[LENGTH].min()
    limits = cell_names.evenly(sorted(cells[LIMIT].unique()), _MOST_LIMITS)
    rows = []
    for name in cell_names.ordered(NAME, cells):
        places = [(name, limit) for limit in limits]
        texts = [f"{_context(longest.get(at))} / {_context(first.get(at))}" for at in places]
        rows.append([name, *texts])
    caption = f"Longest context that fits / first that fails: {note}"
    return TextTable(("model", *(f"{limit:g} GiB" for limit in limits)), rows, caption)


def _context(length: float | None) -> str:
    return NOTHING if length is None else f"{length:,.0f}"


def _first(failed: pd.DataFrame) -> str:
    """Return the shortest context that fails, by precision if it differs."""
    if failed[LENGTH].isna().all():
        return NOTHING
    firsts = failed.groupby(failed["precision"].astype(str))[LENGTH].min()
    if firsts.nunique() == 1:
        return f"{firsts.iloc[0]:,}"
    precisions = ordered_values("precision", failed["precision"])
    return ", ".join(f"{firsts[str(one)]:,} in {one}" for one in precisions)
