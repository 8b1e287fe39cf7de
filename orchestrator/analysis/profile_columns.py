"""Columns of cells about profiled steps."""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.derived_fields import derived_ratio

_SUFFIX = "_kernel_time_ms"

derived_ratio(
    "busy_timed",
    "kernel time of a step over `step_ms_median`, which no profiler makes longer",
    ("step_kernel_time_ms_median", "step_ms_median", 1),
)
derived_ratio(
    "profile_cost",
    "duration of the profiled step over that of a timed step",
    ("profiled_step_ms", "step_ms_median", 1),
    unit="",  # it is at least 1: no share
)
derived_ratio(
    "processing_share",
    "`processing_ms` as a share of the whole attempt",
    ("processing_ms", "wall_s", 1e-3),
)


def with_profiled_kernel_time(cells: pd.DataFrame) -> pd.DataFrame:
    """Fill `{phase}_kernel_time_ms_median` of cells that only profiled a step.

    One step has no interval, so only the median is filled.
    """
    times = cells.filter(regex=f"{_SUFFIX}$").drop(columns=f"outside{_SUFFIX}", errors="ignore")
    if times.empty or not {"busy", "profiled_step_ms"} <= set(cells):
        return cells
    # An imported trace may contain any number of steps. Without a known number, its kernel time is
    # not that of one step.
    is_one_step = cells["busy"].notna() & cells["profiled_step_ms"].notna()
    profiled = times.where(is_one_step)
    profiled = profiled.assign(**{f"step{_SUFFIX}": profiled.sum(axis=1, min_count=1)})
    medians = {}
    for name in profiled:
        measured = cells.get(f"{name}_median")
        filled = profiled[name] if measured is None else measured.fillna(profiled[name])
        medians[f"{name}_median"] = filled
    return cells.assign(**medians)
