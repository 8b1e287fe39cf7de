"""Findings about cells with several ranks: what several GPUs gain, and how fast they exchange data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

import pandas as pd

from orchestrator.analysis.axes import RANK_AXES, each, has_value, ranks_of, ranks_text
from orchestrator.analysis.pairs import is_gpu_bound, measured, pairs
from orchestrator.analysis.results import Results
from orchestrator.common.text import counted
from orchestrator.report.findings import finding
from orchestrator.report.findings.finding import Finding
from orchestrator.report.tables.formatters import is_cpu_bound
from orchestrator.report.text.cell_names import scope_of
from orchestrator.report.text.numbers import number, percent

_LAG = 0.03  # of a step: less is within what steps differ by
_TIMES_LESS = 4  # does the last rank wait less than each of the others
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
    row = finding.extreme(bound if len(bound) else found, "ratio", largest=True)
    share = row["ratio"] / row["gpus"]
    found_pair = finding.of_pair(
        row,
        f"{row['gpus']:.0f} GPUs",
        f"{row['gpus']:.0f} GPUs with {row['parallel']} train {number(row['ratio'])} times as fast as "
        "one with the same batch.",
        f"That is {percent(share)} of {row['gpus']:.0f} times, the best of {len(found)} pairs"
        + (f"; {len(bound)} of them are GPU-bound." if len(bound) else ", all CPU-bound."),
    )
    # More GPUs are no gain that a reader overlooked.
    yield replace(found_pair, scope="", gain=0.0)


def about_stragglers(results: Results) -> Iterator[Finding]:
    """Yield the rank that the others wait for, if it is the same one in most cells."""
    cells = measured(results, "train_step", "overlap_step_ms")
    ranks = results.ranks() if len(cells) else cells
    if "wait_ms" not in ranks:
        return
    ranks = ranks.dropna(subset="wait_ms").sort_values("wait_ms")
    count, late = 0, defaultdict(list)
    for row in each(cells):
        own = ranks[ranks["cell"] == row["cell"]]
        if len(own) != ranks_of(row):
            continue
        count += 1
        least, other = own["wait_ms"].iloc[:2]
        lag_ms = float(other - least)
        if lag_ms >= _LAG * row["overlap_step_ms"] and least <= other / _TIMES_LESS:
            late[int(own["rank"].iloc[0])].append((lag_ms / row["overlap_step_ms"], lag_ms, row))
    for rank, found in late.items():
        if len(found) * 2 <= count:
            continue
        share, lag_ms, row = max(found, key=itemgetter(0))
        yield Finding(
            f"rank {rank} is late",
            f"{number(lag_ms)} ms",
            f"{percent(share)} of a step",
            f"The other ranks wait for rank {rank}: {number(lag_ms)} ms of a step of "
            f"{number(row['overlap_step_ms'])} ms under the profiler.",
            f"It is the one that comes last in {len(found)} of {counted(count, 'cell')}.",
            scope_of(row),
            basis=[(row["cell"],)],
            is_cpu_bound=bool(is_cpu_bound(row)),
        )


def about_collectives(results: Results) -> Iterator[Finding]:
    """Yield the bus bandwidth of the largest all-reduce."""
    largest = _largest_all_reduce(results)
    if largest.empty:
        return
    row = largest.iloc[0]
    details = [f"One call takes {number(row['call_ms'])} ms."]
    if has_value(row, "of_link"):
        peak = f"the {number(row['link_peak_gb_s'])} GB/s of the link ({row['link']})"
        details.insert(0, f"That is {percent(row['of_link'])} of {peak}, one way.")
    yield Finding(
        "all-reduce",
        f"{number(row['busbw_gb_s'])} GB/s",
        f"{number(row['size_mb'])} MB",
        f"At {number(row['size_mb'])} MB, an all-reduce over {ranks_text(row)} has a bus bandwidth of "
        f"{number(row['busbw_gb_s'])} GB/s.",
        " ".join(details),
        basis=finding.basis_of_cells(largest),
    )


def about_hiding(results: Results) -> Iterator[Finding]:
    """Yield on how many GPUs a backward pass takes as long as the exchange of its gradients.

    With P parameters and B tokens of a micro-batch, it computes 4BP/n on each of n GPUs, at the rate C, and a ring
    exchanges 2(n-1)/n times the gradients at the bus bandwidth W.
    """
    link = _largest_all_reduce(results)
    cells = measured(results, "train_step", "achieved_tflops", "tokens")
    cells = cells[cells["pass"] == "train_step"] if len(cells) else cells
    if link.empty or cells.empty or link["device"].iloc[0] != "cuda":
        return
    gpu, bandwidth = str(link.iloc[0].get("gpu")), link["busbw_gb_s"].iloc[0]
    is_alike = [ranks_of(row) == 1 and str(row.get("gpu")) == gpu for row in each(cells)]
    row = finding.extreme(cells[is_alike], "achieved_tflops", True)
    if row is None:
        return
    width = 2 if "16" in str(row.get("parameter_dtype")) else 4  # bytes of a gradient
    # Only the last micro-batch has an exchange.
    tokens = row["tokens"] / row.get("gradient_accumulation", 1)
    gpus = 1 + 2 * tokens * bandwidth / (width * row["achieved_tflops"] * 1e3)
    yield Finding(
        "hidden exchange",
        f"{number(gpus)} GPUs",
        f"{tokens:,.0f} tokens",
        f"With {tokens:,.0f} tokens a micro-batch, a backward pass can hide the exchange of its "
        f"gradients on up to {number(gpus)} GPUs.",
        f"1 + {'tokens × W / C' if width == 2 else 'tokens × W / 2C'}, with {width} bytes for each "
        f"gradient, W = {number(bandwidth)} GB/s of an all-reduce and C = "
        f"{number(row['achieved_tflops'])} TFLOP/s of a whole step on one GPU.",
        scope_of(row),
        basis=[(row["cell"],), *finding.basis_of_cells(link)],
        is_cpu_bound=bool(is_cpu_bound(row)),
    )


def _largest_all_reduce(results: Results) -> pd.DataFrame:
    """Return the fastest all-reduce of the largest size, if that is large."""
    cells = measured(results, "collectives", "busbw_gb_s", "size_mb")
    if len(cells):
        cells = cells[(cells["collective"] == "all_reduce") & (cells["size_mb"] >= _LARGE_MB)]
    return cells.sort_values(["size_mb", "busbw_gb_s"]).tail(1) if len(cells) else cells
