"""Columns of cells from profiled steps and from the GPU's sensors."""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.pivot import (
    pivot_samples,
    with_text_columns,
    with_text_index,
)


def telemetry(samples: pd.DataFrame) -> pd.DataFrame:
    """The GPU's state after the timing, and the energy spent until then, warm-up included: `sm_clock_after`, `power_after`,
    `energy_j`.

    `waited_for_core`: of the timing, what the thread that waited longest for a core of the host did.
    """
    read = with_text_columns(
        samples.loc[
            samples["instrument"] == "telemetry", ["cell", "mode", "metric", "unit", "value"]
        ]
    )
    if read.empty:
        return pd.DataFrame()
    states = read[~read["metric"].isin(["energy", "power_capped", "thermal_capped"])]
    during = states["mode"] == "timing"
    state = pivot_samples(
        states.assign(
            column=states["metric"].where(during, states["metric"] + "_" + states["mode"])
        )
    )
    counters = read[read["metric"].isin(["energy", "power_capped", "thermal_capped"])]
    if counters.empty:
        return state
    signed = counters.assign(
        column=counters["metric"] + "_" + counters["unit"].str.lower(),
        value=counters["value"] * counters["mode"].map({"before": -1, "after": 1}),
    )
    known = with_text_index(
        signed["value"]
        .notna()
        .groupby([signed["cell"], signed["column"]], observed=True)
        .all()
        .unstack()
    )
    return state.join(
        pivot_samples(signed, "sum").where(known.fillna(False).astype(bool)), how="outer"
    )


def kernels(samples: pd.DataFrame) -> pd.DataFrame:
    """What the kernels come to over all: `forward_kernel_time_ms`, … of a step; `busy`, `forward_busy`, … shares of time;
    `idle_ms`, `idle_for_host_ms`; `attributed_to_phase`, … shares of kernel time; `profiled_step_ms`.
    """
    watched = with_text_columns(samples[samples["instrument"] == "kernels"])
    prefix = watched["phase"].where(watched["phase"] == "", watched["phase"] + "_")
    suffix = watched["unit"].map({"ms": "_ms"}).fillna("")
    return pivot_samples(watched.assign(column=prefix + watched["metric"] + suffix))


def with_kernel_time(wide: pd.DataFrame) -> pd.DataFrame:
    """`step_kernel_time_ms_median`, `forward_…`: without an interval of the one step that the instrument `kernels` profiled,
    where `kernel_time` timed none. `busy_timed`: how busy the device is with that in a timed step."""
    own = [
        str(column)
        for column in wide
        if str(column).endswith("_kernel_time_ms") and column != "outside_kernel_time_ms"
    ]
    if own and {"busy", "profiled_step_ms"} <= set(wide):
        of_a_step = (
            wide["busy"].notna() & wide["profiled_step_ms"].notna()
        )  # of how many a trace from elsewhere is nobody knows
        profiled = (
            wide[own]
            .assign(step_kernel_time_ms=wide[own].sum(axis=1, min_count=1))
            .where(of_a_step)
        )
        for column in profiled:
            timed = wide.get(f"{column}_median")
            wide[f"{column}_median"] = (
                profiled[column] if timed is None else timed.fillna(profiled[column])
            )
    if {"step_kernel_time_ms_median", "step_ms_median"} <= set(wide):
        wide["busy_timed"] = wide["step_kernel_time_ms_median"] / wide["step_ms_median"]
    return wide


def with_profile_cost(wide: pd.DataFrame) -> pd.DataFrame:
    """`profile_cost`: how many times as long a profiled step took as a timed one; `processing_share`, of the whole attempt."""
    if {"profiled_step_ms", "step_ms_median"} <= set(wide):
        wide["profile_cost"] = wide["profiled_step_ms"] / wide["step_ms_median"]
    if "processing_ms" in wide:
        wide["processing_share"] = wide["processing_ms"] / (wide["wall_s"] * 1e3)
    return wide
