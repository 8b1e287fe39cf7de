"""Which steps are CPU-bound, here or with a slower CPU: another host of the same GPU then makes other numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from model.config import SIZES
from orchestrator.analysis.concurrency import SOME
from tasks.spec.axes import Affects
from tasks.spec.registry import all_axes

_HARDLY_AHEAD = 0.1  # of a phase
_AHEAD_MS = 15.0  # enough, however long the phase: full queues of small kernels let the host be no further ahead of a long one
_WAITING = 0.1  # of a step
_THROUGHOUT = 0.9  # of a step, which then takes what its host takes
_LEAD = "_lead_ms"
_SLACK = 3.0  # hosts of one kind of GPU were seen to differ by 2.7, in one step by 3.09
_OF_LAYERS = frozenset(("size", "year", "d_model", "d_ff", "num_layers", "num_heads"))
_GRAPHS = (
    "reduce-overhead",
    "max-autotune",
)  # where torch records CUDA graphs, of which each is one launch
MOST_WAITED = 0.1  # of the timing that a thread waited for a core: on two cores up to 0.09 alone, 0.5 beside two processes


class Decides(StrEnum):
    """What decides how long a step takes: one that is GPU-bound takes the same on another machine that has the same GPU, and one
    that is CPU-bound, whose GPU waits for the CPU that launches its kernels, takes what that CPU takes, or in part what it takes.
    """

    GPU = "GPU-bound"
    SLOWER_HOST = "CPU-bound with a slower CPU"
    HOST = "CPU-bound"


def with_host(wide: pd.DataFrame, axes: Sequence[str]) -> pd.DataFrame:
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
        wide = _with_slack(wide, axes)
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


def _changes_launches(axis: str) -> bool:
    declared = all_axes().get(axis)
    return declared is None or bool(declared.affects & Affects.LAUNCHES)


def _with_slack(wide: pd.DataFrame, axes: Sequence[str]) -> pd.DataFrame:
    """`host_step_ms`: what the host takes for a step, as those of the run tell that wait for it and have the same launches: no
    less than the shortest of the same model, and than the shortest a layer of any model. Those tell it that wait throughout, or
    where there is none those that wait in part, which take longer than their host does.

    `host_slack`: how many times as long the step takes; `may_wait_for_host`: whether it would wait for a host a third as fast,
    where it does not here. By how much the host is ahead does not tell: no further than the device's queue holds.

    On one H200 the eager forward and backward pass of small, medium, large, xl and 2.7B, where they wait throughout, took 2.16,
    2.13, 2.01, 2.33 and 2.43 ms a layer at the least.
    """
    timed = wide[wide["waits_for_host"].notna()]
    waits = timed["waits_for_host"].astype(bool)
    if not waits.any():
        return wide
    layers = _layers(timed)
    told_by = ["task", *(name for name in axes if _changes_launches(name))]

    def shortest(of: pd.Series[float], names: Iterable[str]) -> pd.Series[float]:
        return of.groupby([timed[name].astype(str) for name in names], dropna=False).transform(
            "min"
        )

    def of_host(telling: pd.Series[bool]) -> pd.Series[float]:
        steps = timed["step_ms_median"].where(telling)
        of_layer = shortest(steps / layers, [name for name in told_by if name not in _OF_LAYERS])
        return pd.concat([shortest(steps, told_by), of_layer * layers], axis=1).max(axis=1)

    wide["host_step_ms"] = of_host(timed["waiting_share"] > _THROUGHOUT).fillna(of_host(waits))
    wide["host_slack"] = wide["step_ms_median"] / wide["host_step_ms"]
    wide["may_wait_for_host"] = (
        ((wide["host_slack"] < _SLACK) & ~waits).astype("boolean").where(wide["host_slack"].notna())
    )
    return wide


def _layers(cells: pd.DataFrame) -> pd.Series[float]:
    """How many layers each model of the course has, all with the same launches. Null of what is no such model, and of what is
    launched as graphs.
    """
    layers = pd.Series(np.nan, index=cells.index)
    if {"size", "year"} <= set(cells):
        sizes = {
            (year, size): one.num_layers
            for year, of_year in SIZES.items()
            for size, one in of_year.items()
        }
        layers = pd.Series(
            [sizes.get(size) for size in zip(cells["year"], cells["size"], strict=True)],
            cells.index,
            dtype=float,
        )
    if "num_layers" in cells:
        layers = layers.fillna(cells["num_layers"].astype(float))
    return layers.where(~cells["compile_mode"].isin(_GRAPHS)) if "compile_mode" in cells else layers


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
    if "host_slack" in cells:
        found[cells["host_slack"].ge(_SLACK).fillna(False).astype(bool)] = Decides.GPU
    found[_is_true(cells, "may_wait_for_host")] = Decides.SLOWER_HOST
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
