"""Which steps are CPU-bound: on another host with the same GPU they take another time."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.analysis.concurrency import SOME

_HARDLY_AHEAD = 0.1  # of a phase
_AHEAD_MS = 15.0  # enough, however long the phase: full queues of small kernels let the host be no further ahead of a long one
_WAITING = 0.1  # of a step
_LEAD = "_lead_ms"
MOST_WAITED = 0.1  # of the timing that a thread waited for a core: on two cores up to 0.09 alone, 0.5 beside two processes


class Decides(StrEnum):
    """What decides how long a step takes: one that is GPU-bound takes the same on another machine that has the same GPU, and one
    that is CPU-bound, whose GPU waits for the CPU that launches its kernels, takes what that CPU takes, or in part what it takes.
    """

    GPU = "GPU-bound"
    HOST = "CPU-bound"


def with_host(wide: pd.DataFrame) -> pd.DataFrame:
    """`waiting_share`: how much of a step's phases are such as end with the host hardly ahead of the device, which waits for it;
    `waits_for_host`: whether that is more than a tenth.

    Where that makes a step longer, `disturbed`: whether what else ran on the host took its cores meanwhile.

    It goes by the phase, since an optimizer of few large kernels lets the host run ahead however long the device waited for it
    before. Of 432 steps on an H200 whose kernels were timed apart, the kernels fill at least 90 % of each of the 216 of which
    that share is no more than a tenth, and 72 to 96 % of 22 others whose host was well ahead at the end of one phase.
    """
    if {"host_lead_ms", "step_ms_median"} <= set(wide):
        wide["waiting_share"] = _waiting_share(wide)
        wide["waits_for_host"] = (
            (wide["waiting_share"] > _WAITING)
            .astype("boolean")
            .where(wide["waiting_share"].notna())
        )
    if "waited_for_core" in wide:
        waited = wide["waited_for_core"]
        wide["disturbed"] = (
            (needs_host(wide) & (waited > MOST_WAITED)).astype("boolean").where(waited.notna())
        )
    return wide.drop(columns="neighbours") if wide["neighbours"].isna().all() else wide


def _waiting_share(wide: pd.DataFrame) -> pd.Series[float]:
    """Of the phases of which it is known, or of the step where it is known of that alone."""
    leads = [name for name in map(str, wide) if name.endswith(_LEAD) and name != f"host{_LEAD}"]
    ahead = wide[leads].astype(float).set_axis([name.removesuffix(_LEAD) for name in leads], axis=1)
    took = pd.DataFrame({phase: _took(wide, phase) for phase in map(str, ahead)}).where(
        ahead.notna()
    )
    if "step" in took:
        took["step"] = took["step"].where(took.drop(columns="step").isna().all(axis=1))
    waits = (ahead < _HARDLY_AHEAD * took) & (ahead < _AHEAD_MS)
    return took.where(waits).sum(axis=1) / took.sum(axis=1)


def _took(wide: pd.DataFrame, phase: str) -> pd.Series[float]:
    took = pd.Series(np.nan, index=wide.index)
    for name in (f"{phase}_pipelined_ms_median", f"{phase}_ms_median"):
        took = took.fillna(wide[name].astype(float)) if name in wide else took
    return took


def flagged(cells: pd.DataFrame, column: str) -> set[str]:
    """The ids of the cells of which that is known to be true."""
    return set(cells.loc[cells[column].fillna(False), "cell"]) if column in cells else set()


def ran_with_others(cells: pd.DataFrame) -> pd.Series[bool]:
    """Return which CPU-bound cells other attempts on their host may have slowed down."""
    if not {"neighbours", "step_ms_median"} <= set(cells):
        return pd.Series(False, index=cells.index)
    shared = cells["neighbours"].ge(SOME).fillna(False).astype(bool)
    return needs_host(cells) & shared & cells["step_ms_median"].notna()


def decides(cells: pd.DataFrame) -> pd.Series[Any]:
    """A `Decides` of each cell; None where it is not known."""
    found = pd.Series([None] * len(cells), cells.index, dtype=object)
    if "waits_for_host" in cells:
        found[cells["waits_for_host"].notna()] = Decides.GPU
    found[_is_true(cells, "waits_for_host")] = Decides.HOST
    return found


def _is_true(cells: pd.DataFrame, column: str) -> pd.Series[bool]:
    return (
        cells[column].fillna(False).astype(bool)
        if column in cells
        else pd.Series(False, index=cells.index)
    )


def needs_host(cells: pd.DataFrame) -> pd.Series[bool]:
    """Of which cells a step takes longer where the host is slower: those of a CPU, and those that wait for it."""
    waits = _is_true(cells, "waits_for_host")
    return (cells["device"] == "cpu") | waits if "device" in cells else waits
