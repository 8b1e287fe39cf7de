"""Steps that are CPU-bound, and attempts that shared the CPU of their host.

The GPU waits for the CPU that launches its kernels. Such a step takes another time on another host with the same GPU, so tables mark its time with †.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import pandas as pd

from orchestrator.analysis.derived_fields import derived, quotients

# The GPU waits for the CPU in a phase if the CPU is ahead by less than this share of the phase...
_SMALL_LEAD = 0.1
# ...and by less than this time. The launch queue is finite: with small kernels a CPU that is as far
# ahead as possible is still less than a tenth ahead of a long phase.
_ENOUGH_LEAD_MS = 15.0
# Kernels fill at least this share of a GPU-bound step (see `cpu_bound_share`).
FILLED = 0.9
_MAX_WAITING = 0.1  # share of a step in such phases from which the step counts as CPU-bound
# Share of the timing in which a thread waits for a core. On a host with two cores it reached 0.09
# without other processes, and 0.5 with two others.
MAX_CORE_WAIT = 0.1
# Attempts that shared a host with at least this many others, on average over their time, count as
# having had company. A short overlap with the next attempt's start is not enough.
_SOME = 0.5


class BoundBy(StrEnum):
    """The limit of the speed of a step: GPU or CPU.

    A GPU-bound step takes the same time on another machine with the same GPU. The time of a
    CPU-bound step depends on the CPU, at least in part.
    """

    GPU = "GPU-bound"
    CPU = "CPU-bound"


@derived(
    "cpu_bound_share",
    "share of a step in phases at whose end the CPU is ahead by less than a tenth and 15 ms",
    "ratio",
    needs=("host_lead_ms", "step_ms_median"),
)
def cpu_bound_share(cells: pd.DataFrame) -> pd.Series[float]:
    """Return the share of a step in which the GPU waits for the CPU.

    If the lead of no phase is known, the lead and time of the whole step are used.
    """
    # By phase, because an optimizer step of few large kernels lets the CPU run ahead, however long
    # the GPU waited in the other phases: of 432 steps on an H200 with known kernel times, the
    # kernels fill at least 90 % of each of the 216 steps with a share of at most a tenth, but only
    # 72 to 96 % of 22 others whose CPU was well ahead at the end of one phase.
    leads = cells.filter(regex="_lead_ms$").drop(columns="host_lead_ms")
    ahead = leads.astype(float).rename(columns=lambda name: name.removesuffix("_lead_ms"))
    times = pd.DataFrame({phase: _phase_time(cells, str(phase)) for phase in ahead})
    times = times.where(ahead.notna())
    if "step" in times:
        has_no_phase = times.drop(columns="step").isna().all(axis=1)
        times["step"] = times["step"].where(has_no_phase)
    waits = (ahead < _SMALL_LEAD * times) & (ahead < _ENOUGH_LEAD_MS)
    return quotients(times.where(waits).sum(axis=1), times.sum(axis=1))


def _phase_time(cells: pd.DataFrame, phase: str) -> pd.Series[float]:
    time = pd.Series(np.nan, index=cells.index)
    for name in (f"{phase}_pipelined_ms_median", f"{phase}_ms_median"):
        if name in cells:
            time = time.fillna(cells[name].astype(float))
    return time


@derived(
    "cpu_bound",
    "true if `cpu_bound_share` is above a tenth: the step is CPU-bound (†)",
    needs=("cpu_bound_share",),
)
def cpu_bound(cells: pd.DataFrame) -> pd.Series[bool]:
    """Return for each cell if its step is CPU-bound, null if that is unknown."""
    share = cells["cpu_bound_share"]
    return (share > _MAX_WAITING).astype("boolean").where(share.notna())


@derived(
    "cpu_contended",
    "true if a step depends on the CPU and `waited_for_core` is above a tenth",
    needs=("waited_for_core", "cpu_bound?"),
)
def cpu_contended(cells: pd.DataFrame) -> pd.Series[bool]:
    """Return for each cell if other processes may have made its steps longer."""
    waited = cells["waited_for_core"]
    is_contended = depends_on_cpu(cells) & (waited > MAX_CORE_WAIT)
    return is_contended.astype("boolean").where(waited.notna())


def depends_on_cpu(cells: pd.DataFrame) -> pd.Series[bool]:
    """Return for each cell if a slower CPU makes its steps longer: cells on a CPU, or CPU-bound."""
    is_bound = is_true(cells, "cpu_bound")
    if "device" in cells:
        return (cells["device"] == "cpu") | is_bound
    return is_bound


def bound_by(cells: pd.DataFrame) -> pd.Series:
    """Return the `BoundBy` of each cell, or None if it is unknown."""
    found = pd.Series([None] * len(cells), cells.index, dtype=object)
    if "cpu_bound" in cells:
        found[cells["cpu_bound"].notna()] = BoundBy.GPU
    found[is_true(cells, "cpu_bound")] = BoundBy.CPU
    return found


def ran_with_others(cells: pd.DataFrame) -> pd.Series[bool]:
    """Return for each cell if other attempts on its host may have made its steps longer."""
    if not {"concurrent_attempts", "step_ms_median"} <= set(cells):
        return pd.Series(False, index=cells.index)
    has_company = cells["concurrent_attempts"].ge(_SOME).fillna(False).astype(bool)
    return depends_on_cpu(cells) & has_company & cells["step_ms_median"].notna()


def is_true(cells: pd.DataFrame, column: str) -> pd.Series[bool]:
    """Return for each cell if a column is true or above 0: False where it is null or missing."""
    values = cells.get(column, pd.Series(pd.NA, cells.index)).astype("Float64")
    return (values > 0).fillna(False).astype(bool)


def concurrent_attempts(attempts: pd.DataFrame) -> pd.Series[float]:
    """Return how many other attempts ran on the host of each attempt, on average over its time.

    `attempts` has the columns host, started_at and wall_s. The result is null if the host is
    unknown.
    """
    concurrent = pd.Series(np.nan, index=attempts.index)
    since_epoch = pd.to_datetime(attempts["started_at"], utc=True) - pd.Timestamp(0, tz="UTC")
    begins = since_epoch.dt.total_seconds()
    is_known = (attempts["host"] != "") & np.isfinite(attempts["wall_s"]) & begins.notna()
    for _, on_host in attempts[is_known].groupby("host"):
        begin = begins[on_host.index].to_numpy()
        concurrent[on_host.index] = _mean_concurrency(begin, on_host["wall_s"].to_numpy())
    return concurrent


def _mean_concurrency(begin_s: np.ndarray, wall_s: np.ndarray) -> np.ndarray:
    """Return the mean number of other intervals that are open during each interval."""
    # The number of open intervals is a step function of time. Its integral at an interval's end
    # less that at its begin is the time spent by all of them, including `wall_s` by itself.
    edges = np.concatenate([begin_s, begin_s + wall_s])
    order = np.argsort(edges, kind="stable")
    open_after = np.cumsum(np.repeat([1, -1], len(begin_s))[order])
    integral = np.cumsum(open_after[:-1] * np.diff(edges[order]))
    spent = np.interp(edges, edges[order], np.concatenate([[0.0], integral]))
    by_others = spent[len(begin_s) :] - spent[: len(begin_s)] - wall_s
    mean = np.divide(by_others, wall_s, out=np.zeros_like(wall_s), where=wall_s > 0)
    concurrent: np.ndarray = np.maximum(mean, 0)
    return concurrent
