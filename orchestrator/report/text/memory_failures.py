"""The cells of a run that ran out of memory, by model: how many, in which phase, from which context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from orchestrator.analysis.axes import NOTHING, ordered_values
from orchestrator.analysis.results import Results
from orchestrator.report.text.cell_names import LENGTH, NAME_COLUMNS, names_of
from tasks.spec.status import OUT_OF_MEMORY

_READ = (*NAME_COLUMNS, "status", "phase", "precision", LENGTH)
HEADER = ("out of memory", "cells", "ran out in", "first context that fails")


@dataclass(frozen=True)
class MemoryFailures:
    """The failures of one model. phases: such as `4 forward, 2 optimizer`."""

    name: str
    failed: int
    total: int
    phases: str
    first_context: str

    @property
    def texts(self) -> Sequence[str]:
        cells = f"{self.failed} of {self.total}"
        return (self.name, cells, self.phases, self.first_context)


def memory_failures(results: Results) -> list[MemoryFailures]:
    """Return the failures of each model that ran out of memory, the most failures first."""
    cells = results.cells.filter(items=_READ)
    cells = cells.assign(is_out=cells["status"].isin(OUT_OF_MEMORY), named=names_of(cells))
    found = []
    for name, own in cells.groupby("named", sort=False):
        failed = own[own["is_out"]]
        if len(failed):
            phases = _phases(failed)
            found.append(MemoryFailures(str(name), len(failed), len(own), phases, _first(failed)))
    return sorted(found, key=lambda one: one.failed / one.total, reverse=True)


def _phases(failed: pd.DataFrame) -> str:
    known = failed["phase"] if "phase" in failed else pd.Series(dtype=object)
    counts = known.replace("", pd.NA).dropna().value_counts()
    return ", ".join(f"{count} {phase}" for phase, count in counts.items()) or NOTHING


def _first(failed: pd.DataFrame) -> str:
    """Return the shortest context that fails, by precision if it differs."""
    if LENGTH not in failed or failed[LENGTH].isna().all():
        return NOTHING
    if "precision" not in failed:
        return f"{failed[LENGTH].min():,}"
    firsts = failed.groupby(failed["precision"].astype(str))[LENGTH].min()
    if firsts.nunique() == 1:
        return f"{firsts.iloc[0]:,}"
    precisions = ordered_values("precision", failed["precision"])
    return ", ".join(f"{firsts[str(one)]:,} in {one}" for one in precisions)
