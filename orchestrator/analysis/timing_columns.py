"""Columns of cells that come from timed steps."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from orchestrator.analysis.pivot import (
    ATTEMPT_KEY,
    metric_rows,
    pivot_samples,
    summary_columns,
    with_text_columns,
    with_text_index,
)
from orchestrator.analysis.statistics import STATISTICS

_WIDE = 0.05  # of the median: what is compared with it shows no smaller difference


def synced_durations(samples: pd.DataFrame) -> pd.DataFrame:
    """Of each phase, waited for at its end: `forward_ms_mean`, …; `step_synced_ms_mean`, … of the step so measured."""
    return _duration_columns(samples, "synced", {"step": "step_synced"})


def pipelined_durations(samples: pd.DataFrame) -> pd.DataFrame:
    """Of steps that run on without waiting: `forward_pipelined_ms_mean`, …, `step_pipelined_ms_mean`, …"""
    phases = samples.loc[samples["mode"] == "pipelined", "phase"].unique()
    return _duration_columns(
        samples, "pipelined", {phase: f"{phase}_pipelined" for phase in phases}
    )


def kernel_time(samples: pd.DataFrame) -> pd.DataFrame:
    """`step_kernel_time_ms_median`, … with its interval: of all kernels of a step; `forward_kernel_time_ms_…` by phase."""
    timed = metric_rows(samples, "kernel_time", "", "kernel_time")
    return summary_columns(
        timed[timed["value"].notna()],
        lambda phase: f"{phase}_kernel_time_ms_",
        ("median", "ci_low", "ci_high", "coverage"),
    )


def step_kernel_times(samples: pd.DataFrame) -> pd.DataFrame:
    """What the kernels of the steps took that the instrument `kernel_time` watched, of every attempt."""
    watched = _whole_steps(samples, "kernel_time", "kernel_time")
    return watched[watched["value"].notna()]


def step_attempts(samples: pd.DataFrame) -> pd.DataFrame:
    """The durations of whole steps in ms, of every attempt: pipelined where the device queues work, else synced."""
    steps = _whole_steps(samples, "duration")
    pipelined, synced = (steps[steps["mode"] == mode] for mode in ("pipelined", "synced"))
    keys = pd.MultiIndex.from_frame(synced[ATTEMPT_KEY])
    return pd.concat(
        [pipelined, synced[~keys.isin(pd.MultiIndex.from_frame(pipelined[ATTEMPT_KEY]))]]
    )


def _whole_steps(samples: pd.DataFrame, metric: str, instrument: str = "timing") -> pd.DataFrame:
    return samples[
        (samples["instrument"] == instrument)
        & (samples["metric"] == metric)
        & (samples["phase"] == "step")
    ]


def first_steps(samples: pd.DataFrame) -> pd.DataFrame:
    """What the step that compiled took, by phase: `compile_forward_ms`, …, `compile_step_ms`.

    `compile_total_ms` adds the steps that record CUDA graphs, where there are such; `compile_steps` says how many in all.
    """
    compiling = metric_rows(samples, "timing", "compile", "duration")
    first = with_text_columns(compiling[compiling["step"] == 0])
    by_phase = first.assign(column="compile_" + first["phase"] + "_ms").pipe(pivot_samples)
    whole = compiling[compiling["phase"] == "step"]
    if by_phase.empty:
        return by_phase
    totals = whole.groupby("cell", observed=True)["value"].agg(
        compile_total_ms="sum", compile_steps="size"
    )
    return by_phase.join(with_text_index(totals))


def drain(samples: pd.DataFrame) -> pd.DataFrame:
    """`drain_ms`: how far the device was behind the host at the end. Near zero: the host is the bottleneck."""
    return (
        metric_rows(samples, "timing", "pipelined", "drain")
        .assign(column="drain_ms")
        .pipe(pivot_samples)
    )


def host_lead(samples: pd.DataFrame) -> pd.DataFrame:
    """`forward_lead_ms`, …, `step_lead_ms`: how far the host was ahead of the device at the end of a phase, in the median;
    `host_lead_ms`: the largest of them.

    Where the largest is near zero, the device waited for the host all along. The drain alone does not tell: a step that ends in
    many small kernels lets the device catch up. Where adaptive timing went without pipelined steps, it is of the one that ran on
    before.
    """
    pipelined, checked = (
        metric_rows(samples, "timing", mode, "lead") for mode in ("pipelined", "check")
    )
    alone = checked[~checked["cell"].isin(pipelined["cell"])]
    last = alone[alone["step"] == alone.groupby("cell", observed=True)["step"].transform("max")]
    lead = with_text_columns(pd.concat([pipelined, last]))
    by_phase = pivot_samples(lead.assign(column=lead["phase"] + "_lead_ms"), "median")
    return by_phase.assign(host_lead_ms=by_phase.max(axis=1)) if len(by_phase) else by_phase


def _duration_columns(samples: pd.DataFrame, mode: str, names: Mapping[str, str]) -> pd.DataFrame:
    return summary_columns(
        metric_rows(samples, "timing", mode, "duration"),
        lambda phase: f"{names.get(phase, phase)}_ms_",
    )


def with_whole_step(wide: pd.DataFrame) -> pd.DataFrame:
    """`step_ms_mean`, …: the step as training runs it, pipelined where the device queues work, else synced. `wide`: whether the
    interval of its median is.

    Waiting at each phase costs a step up to a tenth: the host cannot prepare the optimizer behind the backward pass.
    """
    for statistic in STATISTICS:
        synced, pipelined = (
            wide.get(f"step_{mode}_ms_{statistic}") for mode in ("synced", "pipelined")
        )
        if synced is not None:
            wide[f"step_ms_{statistic}"] = synced if pipelined is None else pipelined.fillna(synced)
    if "step_ms_median" in wide:
        width = (wide["step_ms_ci_high"] - wide["step_ms_ci_low"]) / wide["step_ms_median"]
        wide["wide"] = (
            (width > _WIDE).astype("boolean").where(wide["step_ms_coverage"] > 0)
        )  # a single step has no interval
    if {"compile_total_ms", "step_ms_median"} <= set(wide):
        wide["compile_cost_ms"] = (
            wide["compile_total_ms"] - wide["compile_steps"] * wide["step_ms_median"]
        )
    return wide
