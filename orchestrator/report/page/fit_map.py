"""The map of what fits: for each model and context the smallest memory limit that it runs in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from orchestrator.analysis.axes import has_value, is_null
from orchestrator.analysis.pairs import preferring
from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.text.cell_names import (
    LENGTH,
    NAME,
    SCOPE_COLUMNS,
    cell_keys,
    names_of,
    ordered,
)
from orchestrator.report.text.numbers import number
from orchestrator.report.text.slices import evenly
from tasks.spec.status import OUT_OF_MEMORY

_LIMIT, _PEAK = "memory_limit_gib", "peak_allocated_bytes"
# Of several hundred columns: each choice of rows copies all columns of its frame.
_READ = (*SCOPE_COLUMNS, "status", "attention", _LIMIT, _PEAK)
_SHADES = 4  # classes f0 to f4
_MOST_ROWS, _MOST_COLUMNS, _MOST_PANELS = 12, 8, 2


@dataclass(frozen=True)
class FitCell:
    """The smallest limit, and the peak below it. style: the shade, or `bad` if no limit is enough."""

    limit: str = ""
    peak: str = ""
    style: str = ""
    key: str = ""


@dataclass(frozen=True)
class FitPanel:
    """The map of one precision."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[FitCell]]]


def fit_panels(results: Results) -> list[FitPanel]:
    """Return a map for each precision; none if no cell had a memory limit."""
    cells = results.cells
    if not {"task", _LIMIT, LENGTH} <= set(cells) or cells[_LIMIT].nunique() < 2:
        return []
    cells = cells.filter(items=_READ).assign(**{NAME: names_of(cells), "key": cell_keys(results)})
    cells = cells[(cells["task"] == "train_step") & cells["status"].isin(("ok", *OUT_OF_MEMORY))]
    cells = preferring(cells, {"pass": "train_step", "compile": "eager", "attention": "naive"})
    grid = cells[cells[_LIMIT].notna()].drop_duplicates([NAME, LENGTH, "precision"])
    if len(grid) < 2:
        return []
    limits = sorted(cells[_LIMIT].dropna().unique())
    contexts = evenly(ordered(LENGTH, grid), _MOST_COLUMNS)
    by_place = dict(iter(cells.groupby(["precision", NAME, LENGTH], observed=True)))
    panels = []
    for precision in evenly(ordered("precision", grid), _MOST_PANELS):
        rows = []
        for name in evenly(ordered(NAME, grid), _MOST_ROWS):
            found = [by_place.get((precision, name, context)) for context in contexts]
            rows.append((name, [_cell(own, limits) for own in found]))
        panels.append(FitPanel(str(precision), [f"{context:,}" for context in contexts], rows))
    return panels


def _cell(cells: pd.DataFrame | None, limits: list[float]) -> FitCell:
    if cells is None:
        return FitCell()
    ran = cells[cells["status"] == "ok"].sort_values(_LIMIT)  # no limit comes last
    if ran.empty:
        return FitCell("out of memory", "", "bad", cells.iloc[-1]["key"])
    first, free = ran.iloc[0], ran.iloc[-1]
    text = number(float(free[_PEAK]) / GIB) if has_value(free, _PEAK) else ""
    if is_null(first[_LIMIT]):
        return FitCell("no limit", text, f"f{_SHADES}", first["key"])
    shade = round((_SHADES - 1) * limits.index(first[_LIMIT]) / max(len(limits) - 1, 1))
    return FitCell(f"{first[_LIMIT]:g}", text, f"f{shade}", first["key"])
