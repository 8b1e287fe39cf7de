"""Columns of cells about profiled steps."""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.derived_fields import derived
from tasks.spec.fields import Format

_SUFFIX = "_kernel_time_ms"


def with_profiled_kernel_time(cells: pd.DataFrame) -> pd.DataFrame:
    """Fill `{phase}_kernel_time_ms_median` from the profiled step if `kernel_time` did not measure
    it.

    One step has no interval, so only the median is filled. An imported trace may contain any number
    of steps; without a known number its kernel time is not that of one step.
    """
    names = map(str, cells)
    of_phases = [name for name in names if name.endswith(_SUFFIX) and name != f"outside{_SUFFIX}"]
    if not of_phases or not {"busy", "profiled_step_ms"} <= set(cells):
        return cells
    is_one_step = cells["busy"].notna() & cells["profiled_step_ms"].notna()
    profiled = cells[of_phases].where(is_one_step)
    profiled = profiled.assign(**{f"step{_SUFFIX}": profiled.sum(axis=1, min_count=1)})
    medians = {}
    for name in profiled:
        measured = cells.get(f"{name}_median")
        filled = profiled[name] if measured is None else measured.fillna(profiled[name])
        medians[f"{name}_median"] = filled
    return cells.assign(**medians)


@derived(
    "busy_timed",
    "kernel time of a step over `step_ms_median`, which no profiler makes longer",
    style=Format.PERCENT,
    needs=("step_kernel_time_ms_median", "step_ms_median"),
)
def busy_timed(cells: pd.DataFrame) -> pd.Series[float]:
    return cells["step_kernel_time_ms_median"] / cells["step_ms_median"]


@derived(
    "profile_cost",
    "duration of the profiled step over that of a timed step",
    needs=("profiled_step_ms", "step_ms_median"),
)
def profile_cost(cells: pd.DataFrame) -> pd.Series[float]:
    return cells["profiled_step_ms"] / cells["step_ms_median"]


@derived(
    "processing_share",
    "`processing_ms` as a share of the whole attempt",
    style=Format.PERCENT,
    needs=("processing_ms", "wall_s"),
)
def processing_share(cells: pd.DataFrame) -> pd.Series[float]:
    return cells["processing_ms"] / (cells["wall_s"] * 1e3)
