"""Findings about cells with several ranks: what several GPUs gain, and how fast they exchange data."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from orchestrator.analysis.axes import RANK_AXES, ranks_text
from orchestrator.analysis.pairs import is_clear, is_gpu_bound, measured, pairs
from orchestrator.analysis.results import Results
from orchestrator.report.findings.finding import Finding, basis_of_cells, basis_of_pairs
from orchestrator.report.text.numbers import number, percent

_LARGE_MB = 100  # below, the cost of a call dominates


def about_several_gpus(results: Results) -> Iterator[Finding]:
    """Yield by how much the best strategy on several GPUs is faster than one GPU with the same batch."""
    cells = measured(results, "train_step", "step_ms_median")
    if not {"gpus", "parallel", "batch"} <= set(cells) or cells.empty:
        return
    cells = cells[cells["batch"] != "per_gpu"]
    axes = [axis for axis in results.axes if axis == "gpus" or axis not in RANK_AXES]
    found = pairs(cells, axes, "gpus", sorted(cells["gpus"].dropna().unique()))
    if found.empty:
        return
    found = found.assign(parallel=cells.set_index("cell")["parallel"].loc[found["cell"]].to_numpy())
    bound = found[is_gpu_bound(found)]
    best = (bound if len(bound) else found).nlargest(1, "ratio")
    row = best.iloc[0]
    share = row["ratio"] / row["gpus"]
    yield Finding(
        "parallel",
        f"{row['gpus']:.0f} GPUs",
        f"{number(row['ratio'])}×",
        f"[{number(row['low'])}, {number(row['high'])}]",
        f"{row['gpus']:.0f} GPUs with {row['parallel']} train {number(row['ratio'])} times as fast as "
        "one with the same batch.",
        f"That is {percent(share)} of {row['gpus']:.0f} times, the best of {len(found)} pairs"
        + (f"; {len(bound)} of them are GPU-bound." if len(bound) else ", all CPU-bound."),
        basis=basis_of_pairs(best),
        is_cpu_bound=bool(row["is_cpu_bound"]),
        is_clear=bool(is_clear(best).iloc[0]),
    )


def about_collectives(results: Results) -> Iterator[Finding]:
    """Yield the bus bandwidth of the largest all-reduce."""
    cells = measured(results, "collectives", "busbw_gb_s", "size_mb")
    if len(cells):
        cells = cells[(cells["collective"] == "all_reduce") & (cells["size_mb"] >= _LARGE_MB)]
    if cells.empty:
        return
    largest: pd.DataFrame = cells.sort_values(["size_mb", "busbw_gb_s"]).tail(1)
    row = largest.iloc[0]
    yield Finding(
        "parallel",
        "all-reduce",
        f"{number(row['busbw_gb_s'])} GB/s",
        f"{number(row['size_mb'])} MB",
        f"At {number(row['size_mb'])} MB, an all-reduce over {ranks_text(row)} has a bus bandwidth of "
        f"{number(row['busbw_gb_s'])} GB/s.",
        f"One call takes {number(row['call_ms'])} ms.",
        basis=basis_of_cells(largest),
    )
