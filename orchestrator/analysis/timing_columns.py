"""Columns of cells about timed and profiled steps, and the step times of every attempt."""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.derived_fields import DERIVED_FIELDS, DerivedField, derived, quotients
from orchestrator.analysis.metric_columns import STATISTICS

# An interval wider than this share of its median hides most differences that a reader looks for.
# Seen on a virtual machine whose host slowed down: half of 265 cells had one wider than 10 %.
_WIDE = 0.05
ATTEMPT_KEY = ["cell", "attempt"]
_KERNEL_TIME = "_kernel_time_ms"

DERIVED_FIELDS += [
    DerivedField(
        "busy_timed",
        "kernel time of a step over `step_ms_median`, which no profiler makes longer",
        "ratio",
        ("step_kernel_time_ms_median", "step_ms_median"),
        ratio=1,
    ),
    DerivedField(
        "profile_cost",
        "duration of the profiled step over that of a timed step",
        "",  # it is at least 1: no share
        ("profiled_step_ms", "step_ms_median"),
        ratio=1,
    ),
    DerivedField(
        "processing_share",
        "`processing_ms` as a share of the whole attempt",
        "ratio",
        ("processing_ms", "wall_s"),
        ratio=1e-3,
    ),
]


def with_profiled_kernel_time(cells: pd.DataFrame) -> pd.DataFrame:
    """Fill `{phase}_kernel_time_ms_median` of cells that only profiled a step.

    One step has no interval, so only the median is filled.
    """
    times = cells.filter(regex=f"{_KERNEL_TIME}$").drop(
        columns=f"outside{_KERNEL_TIME}", errors="ignore"
    )
    if times.empty:
        return cells
    # An imported trace may contain any number of steps. Without a known number, its kernel time is
    # not that of one step.
    is_one_step = cells["busy"].notna() & cells["profiled_step_ms"].notna()
    profiled = times.where(is_one_step)
    profiled = profiled.assign(**{f"step{_KERNEL_TIME}": profiled.sum(axis=1, min_count=1)})
    medians = {}
    for name in profiled:
        measured = cells.get(f"{name}_median")
        filled = profiled[name] if measured is None else measured.fillna(profiled[name])
        medians[f"{name}_median"] = filled
    return cells.assign(**medians)


def host_lead(samples: pd.DataFrame) -> pd.DataFrame:
    """Return `{phase}_lead_ms`, the CPU's lead over the GPU, and their maximum `host_lead_ms`."""
    # If the maximum is near zero, the GPU waited for the CPU all the time. `drain_ms` alone does
    # not show this: in a step that ends in many small kernels the GPU catches up.
    leads = samples[(samples["instrument"] == "timing") & (samples["metric"] == "lead")]
    if leads.empty:
        return pd.DataFrame()
    pipelined, checked = (leads[leads["mode"] == mode] for mode in ("pipelined", "check"))
    # If adaptive timing stopped without pipelined steps, the last of its warm-up counts.
    checked_only = checked[~checked["cell"].isin(pipelined["cell"])]
    last_step = checked_only.groupby("cell", observed=True)["step"].transform("max")
    last = checked_only[checked_only["step"] == last_step]
    lead = pd.concat([pipelined, last]).astype({"cell": object, "phase": object})
    if lead.empty:
        return pd.DataFrame()
    by_phase = lead.groupby(["cell", "phase"])["value"].median().unstack("phase")
    return by_phase.add_suffix("_lead_ms").assign(host_lead_ms=by_phase.max(axis=1))


@derived(
    "step_ms_{statistic}",
    "whole step as in training: pipelined, or synced if there are no pipelined steps",
    "ms",
)
def step_time(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the statistics of the whole step."""
    # Synced steps wait after each phase, which makes them up to a tenth longer: the CPU cannot
    # prepare the optimizer step while the backward pass still runs.
    columns = {}
    for statistic in STATISTICS:
        synced = cells.get(f"step_synced_ms_{statistic}")
        pipelined = cells.get(f"step_pipelined_ms_{statistic}")
        if synced is not None:
            columns[f"step_ms_{statistic}"] = synced
            if pipelined is not None:
                columns[f"step_ms_{statistic}"] = pipelined.fillna(synced)
    return pd.DataFrame(columns, index=cells.index)


@derived(
    "interval_wide",
    "true if the interval of `step_ms_median` is wider than 5 % of it",
    needs=("step_ms_median", "step_ms_ci_low", "step_ms_ci_high", "step_ms_coverage"),
)
def interval_wide(cells: pd.DataFrame) -> pd.Series[bool]:
    """Return for each cell if its interval is too wide, null for a single step."""
    interval = cells["step_ms_ci_high"] - cells["step_ms_ci_low"]
    width = quotients(interval, cells["step_ms_median"])
    has_interval = cells["step_ms_coverage"] > 0  # a single step has none
    return (width > _WIDE).astype("boolean").where(has_interval & width.notna())


@derived(
    "timing_beaten",
    "true if `sweep best` ended the timing early, because the steps were slower than the best",
    needs=("timing_stopped_by",),
)
def timing_beaten(cells: pd.DataFrame) -> pd.Series[bool]:
    """Return for each cell if its timing ended early, null for other than adaptive timing."""
    stopped_by = cells["timing_stopped_by"]
    return (stopped_by == "beaten").astype("boolean").where(stopped_by.notna())


@derived(
    "compile_cost_ms",
    "`compile_total_ms` less the same number of steps that are not compiled",
    "ms",
    needs=("compile_total_ms", "compile_steps", "step_ms_median"),
)
def compile_cost(cells: pd.DataFrame) -> pd.Series[float]:
    """Return the time that compilation added."""
    return cells["compile_total_ms"] - cells["compile_steps"] * cells["step_ms_median"]


def step_attempts(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the durations of whole steps of every attempt: pipelined, or synced without those."""
    steps = _whole_steps(samples, "timing", "duration")
    pipelined = steps[steps["mode"] == "pipelined"]
    synced = steps[steps["mode"] == "synced"]
    has_pipelined = pd.MultiIndex.from_frame(synced[ATTEMPT_KEY]).isin(
        pd.MultiIndex.from_frame(pipelined[ATTEMPT_KEY])
    )
    return pd.concat([pipelined, synced[~has_pipelined]])


def repeated_steps(samples: pd.DataFrame) -> pd.DataFrame:
    """Return `repeated_ms_{statistic}` of each cell, over the medians of its attempts."""
    if samples.empty:  # most runs have no repetitions
        return pd.DataFrame()
    steps = step_attempts(samples)
    if steps.empty:
        return pd.DataFrame()
    medians = steps.groupby(ATTEMPT_KEY, observed=True)["value"].median()
    by_cell = medians.groupby("cell", observed=True).agg(["median", "min", "max"])
    return by_cell.add_prefix("repeated_ms_").rename(index=str)


def step_kernel_times(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the kernel time of whole steps of every attempt, by the instrument `kernel_time`."""
    steps = _whole_steps(samples, "kernel_time", "kernel_time")
    return steps[steps["value"].notna()]


def _whole_steps(samples: pd.DataFrame, instrument: str, metric: str) -> pd.DataFrame:
    return samples[
        (samples["instrument"] == instrument)
        & (samples["metric"] == metric)
        & (samples["phase"] == "step")
    ]
