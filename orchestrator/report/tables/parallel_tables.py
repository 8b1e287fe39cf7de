"""Tables of cells with several ranks: collectives, strategies, and each rank."""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.axes import RANK_AXES, Row, each, key_axes, ranks_of
from orchestrator.analysis.pairs import counterpart_among
from orchestrator.analysis.results import Results
from orchestrator.report.tables import formatters as show
from orchestrator.report.tables import layouts
from orchestrator.report.tables.layouts import Measure
from orchestrator.report.tables.table import MISSING, Entry, Table, TableGrid, quotient

_STRATEGY_COLUMNS: tuple[Measure, ...] = (
    ("peak GiB", show.gib("peak_allocated_bytes")),
    ("MFU", show.number("mfu", ".1%")),
    ("compute ms", show.ms("compute_ms")),
    ("exposed transfer", show.ms("exposed_transfer_ms")),
    ("exposed wait", show.ms("exposed_wait_ms")),
    ("copies", show.ms("exposed_copies_ms")),
    ("idle", show.ms("overlap_idle_ms")),
    ("tokens/s", show.number("tokens_per_s", ",.0f")),
    ("tokens/s per GPU", show.number("tokens_per_s_per_gpu", ",.0f")),
    ("transfer", show.ms("transfer_ms")),
    ("wait", show.ms("wait_ms")),
    ("without communication", show.ms("exposed_off_ms")),
    ("predicted GiB", show.gib_predicted("predicted_peak_allocated_bytes")),
    ("skew ms", show.ms("step_skew_ms")),
    ("slowest rank", show.number("slowest_rank", ".0f")),
    ("slowest in", show.number("slowest_rank_share", ".0%")),
    ("second step GiB", show.gib("second_peak_allocated_bytes")),
)
_STEP = show.of_steps(show.median_interval("step_ms"))
_RANK_COLUMNS: tuple[Measure, ...] = (
    ("rank", show.number("rank", ".0f")),
    ("step ms", show.ms("step_ms")),
    ("slowest in", show.number("slowest", ".0f")),
    ("wait ms", show.ms("wait_ms")),
    ("peak GiB", show.gib("peak_allocated_bytes")),
    ("SM MHz", show.number("sm_clock", ".0f")),
    ("W", show.number("power", ".0f")),
    ("cores", show.text("pinned_cores")),
)


def _strategies(results: Results) -> TableGrid:
    """Return a row for each cell, with its efficiency by the cell that does the same alone."""
    others = [axis for axis in results.axes if axis in results.cells and axis not in RANK_AXES]
    alone = [row for row in each(results.cells) if ranks_of(row) == 1]
    counterpart = counterpart_among(alone, others)
    found = []
    for row in layouts.each_cell(results):
        first = {"step ms": _STEP(row), "efficiency": efficiency(row, counterpart(row))}
        found.append((row, first | layouts.shown_by(_STRATEGY_COLUMNS, row)))
    return layouts.grid_of(key_axes(results), found)


def efficiency(row: Row, alone: Row | None) -> Entry:
    """Return the scaling efficiency: 1 if n GPUs do n times the work of one in the same time.

    It is the speed-up, which `batch: global` divides by n. The interval comes from the ends of both
    intervals. On a CPU it is missing: the ranks share the cores that one process has alone.
    """
    if alone is None or ranks_of(row) == 1 or row["device"] == "cpu":
        return MISSING
    speed_up = show.speed_up(row, alone)
    if speed_up.number is None:
        return speed_up
    work = 1 if row.get("batch") == "per_gpu" else ranks_of(row)
    entry = quotient(speed_up.number, work)._replace(is_cpu_bound=speed_up.is_cpu_bound)
    if speed_up.low is None or speed_up.high is None:
        return entry
    low, high = quotient(speed_up.low, work), quotient(speed_up.high, work)
    return entry._replace(spread=f" [{low.text}, {high.text}]", low=low.number, high=high.number)


def _with_strategies(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the training steps of several ranks, with those of one that are in the same run."""
    cells = layouts.of_task("train_step")(cells)
    if "parallel" not in cells or not (cells["parallel"] != "none").any():
        return cells.iloc[:0]
    return cells


PARALLEL_TABLES: tuple[Table, ...] = (
    Table(
        "collectives",
        "Collectives",
        "Milliseconds of one call, the median of all steps on the slowest rank, and the bandwidths of"
        " nccl-tests: algbw is the size over the time, busbw what each link must carry. Each"
        " element of a result was checked.",
        layouts.cell_rows(
            ("call ms", show.ms("call_ms")),
            ("busbw GB/s", show.number("busbw_gb_s", ".1f")),
            ("of link", show.number("of_link", ".0%")),
            ("algbw GB/s", show.number("algbw_gb_s", ".1f")),
            ("step ms", show.of_steps(show.median_interval("step_ms"))),
            ("link", show.text("link")),
        ),
        layouts.of_task("collectives"),
        column_notes={
            "of link": "Of link: busbw over the peak of the slowest pair of GPUs, one way; above"
            " 100% where the switch reduces (NVLink SHARP)."
        },
    ),
    Table(
        "parallel",
        "Several GPUs",
        "A step is as long as on its slowest rank. Compute, exposed transfer, exposed wait, copies and"
        " idle add up to a step under the profiler, of the rank with the slowest steps. A CPU has no"
        " kernels to tell them apart.",
        _strategies,
        _with_strategies,
        column_notes={
            "exposed transfer": "Exposed: no kernel computes at the same time.",
            "(exposed )?wait": "Wait: for the rank that comes last; the transfer of a collective is"
            " its shortest duration over the ranks.",
            "without communication": "Without communication: by how much it lengthens a step, without"
            " a profiler; a dash where a strategy cannot compute without it.",
            "efficiency": "Efficiency: 1 if n GPUs do n times the work of one GPU in the same time."
            " A dash on a CPU, whose cores the ranks share.",
            "peak GiB": "Peak GiB: of the rank that needs most, in a steady step.",
            "skew ms": "Skew: a step on the slowest rank less that on the fastest one, the median.",
            "slowest in": "Slowest rank: the one that was slowest in most timed steps, and in which"
            " share of them.",
            "second step GiB": "Second step: DDP then has its buckets twice.",
        },
    ),
    Table(
        "ranks",
        "Ranks",
        "One row for each rank. Slowest in: the number of timed steps in which it ended last.",
        lambda results: layouts.child_rows(results, results.ranks(), _RANK_COLUMNS, ("rank",)),
        lambda cells: cells[[ranks_of(row) > 1 for row in each(cells)]],
        column_notes={
            "wait ms": "Wait: for ranks that came later to a collective, in a step under the"
            " profiler. The rank with the least is the one that the others wait for."
        },
    ),
)
