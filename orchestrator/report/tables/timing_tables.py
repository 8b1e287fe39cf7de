"""Tables of times: steps and phases, precision, compiling, utilisation, scaling, and failed cells."""

from __future__ import annotations

import math
from collections.abc import Callable

from orchestrator.analysis.axes import Row, has_value, key_axes
from orchestrator.analysis.results import Results
from orchestrator.report.tables import formatters as show
from orchestrator.report.tables import layouts
from orchestrator.report.tables.formatters import Value
from orchestrator.report.tables.layouts import Measure
from orchestrator.report.tables.table import MISSING, Entry, Table, TableGrid, quantity
from tasks.spec.tables import STEP_PHASES

_PHASE_TITLES = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("optimizer step", "optimizer"),  # `optimizer` is the parameter
)
_SPEED_UP_NOTES = {
    "speed-up of kernels": "The speed-up of kernels, where their time was measured, is what the GPU"
    " alone gains, independent of its CPU.",
    # Not `speed-up` alone, which is the key of the note on what a table compares with.
    "speed-up( of kernels)?": show.NOISE_NOTE.strip(),
}
_SPEED_UPS = (("speed-up", show.speed_up), ("speed-up of kernels", show.kernels_speed_up))


def _of_phases(title: str, make: Callable[[str], Value]) -> list[Measure]:
    """Return a column for the whole step and one for each phase."""
    phases = [(f"{name} {title}".strip(), make(f"{stem}_ms")) for name, stem in _PHASE_TITLES]
    return [(f"total {title}".strip(), show.of_whole_step(make)), *phases]


_LENGTH = "context_length"
_GROWING = (
    ("step ms", "step_ms_median", show.step_ms),
    ("peak GiB", "peak_allocated_bytes", show.gib("peak_allocated_bytes")),
    ("forward ms", "forward_ms_median", show.of_steps(show.ms("forward_ms_median"))),
    ("backward ms", "backward_ms_median", show.of_steps(show.ms("backward_ms_median"))),
)


def _growth(results: Results) -> TableGrid:
    """Return each value that grows with the context length, and its exponent since the row above."""
    axes = key_axes(results, without=(_LENGTH,))
    found = []
    for group in layouts.groups(results.cells, axes, (_LENGTH,)):
        if len(group) < 2:
            continue
        for row, previous in zip(group, [None, *group], strict=False):
            entries = {}
            for name, column, value in _GROWING:
                entries[name] = value(row)
                entries[f"exponent of {name}"] = _exponent(row, previous, column)
            found.append((row, {**entries, "peak bytes / pair": show.peak_bytes_per_pair(row)}))
    return layouts.grid_of([*axes, _LENGTH], found, (), _LENGTH)


def _exponent(row: Row, previous: Row | None, column: str) -> Entry:
    """Return log(y2 / y1) / log(x2 / x1) for y along x."""
    if previous is None or not (has_value(row, column) and has_value(previous, column)):
        return MISSING
    if not 0 < row[column] * previous[column] < math.inf:
        return MISSING
    growth = math.log(row[column]) - math.log(previous[column])
    return quantity(growth / math.log(row[_LENGTH] / previous[_LENGTH]), ".2f")


def _tokens_per_s(stem: str) -> Value:
    return show.ratio("tokens", f"{stem}_median", ",.0f", 1e3)


TIMING_TABLES: tuple[Table, ...] = (
    Table(
        "timings",
        "Step time",
        "Milliseconds, mean ± sample standard deviation. Of cells without warm-up, the total is of"
        " the first timing, which has the cold steps and waits after each phase.",
        layouts.cell_rows(
            *_of_phases("", lambda stem: show.of_steps(show.mean_sd(stem))),
            ("over repetitions", show.of_steps(show.over_repetitions)),
            # One slow step would move a quotient of means, and hardly a quotient of medians.
            ("backward / forward", show.ratio("backward_ms_median", "forward_ms_median")),
            ("tokens/s", show.of_whole_step(_tokens_per_s)),
            show.col("sm_clock_after", "SM MHz"),
            show.col("power_capped_ns", "capped s"),
            ("synced", show.of_steps(show.mean_sd("step_synced_ms"))),
            *_of_phases(
                "median [95 % interval]", lambda stem: show.of_steps(show.median_interval(stem))
            ),
            *_of_phases("n", lambda stem: show.number(f"{stem}_n", ".0f")),
            *_of_phases("min", lambda stem: show.of_steps(show.ms(f"{stem}_min"))),
            *_of_phases("std/mean", lambda stem: show.ratio(f"{stem}_sd", f"{stem}_mean", ".2%")),
        ),
        layouts.of_task("train_step"),
        is_default=True,
        column_notes={
            "forward|backward|optimizer step": "The timing of the phases waits at the end of each, that"
            " of the total only after a step: the phases may add up to more or to less.",
            "over repetitions": "Over repetitions: of the median of each attempt, the median and the"
            " range. The other columns are of the last attempt.",
            "backward / forward": "Backward / forward: of the medians, which one slow step does not"
            " change.",
            "tokens/s": "Tokens/s: by the median of the total, not the mean.",
            "SM MHz": "SM MHz: the GPU's clock after the timing.",
            "capped s": "Capped s: how long the power limit slowed the GPU down.",
            "synced": "Synced: the whole step with waits between its phases.",
            ".* median": "The interval contains the median with 95 % confidence (order"
            " statistics).",
        },
    ),
    Table(
        "warmup",
        "Warm-up",
        "The whole step after different numbers of warm-up steps. A step that is not warm has a"
        " larger spread.",
        layouts.compare_columns(
            "warmup_steps",
            ("warm-up: mean ± sd", show.of_steps(show.mean_sd("step_synced_ms"))),
            extra=(("std/mean", show.ratio("step_synced_ms_sd", "step_synced_ms_mean", ".2%")),),
        ),
        layouts.varying("warmup_steps", "train_step"),
    ),
    Table(
        "precision",
        "Precision",
        "Median of the whole step in milliseconds.",
        layouts.compare_columns(
            "precision",
            ("ms", show.step_ms),
            _SPEED_UPS,
            (show.col("peak_allocated_bytes", "peak GiB"),),
        ),
        layouts.varying("precision", "train_step"),
        is_default=True,
        column_notes={
            "speed-up": "Speed-up: over the first column.",
            **_SPEED_UP_NOTES,
            "peak GiB": "Peak GiB: peak memory.",
        },
    ),
    Table(
        "utilisation",
        "Utilisation",
        "TFLOP/s counts the model's own FLOPs.",
        layouts.cell_rows(
            ("step ms", show.step_ms),
            show.col("achieved_tflops", "TFLOP/s"),
            show.col("mfu", "MFU"),
            show.col("ceiling_share", "of ceiling"),
            ("J/token", show.number("joules_per_token", ".3g")),
            ("tokens/J", show.number("tokens_per_joule", ".3g")),
            show.col("timed_power_w", "mean W"),
            show.col("peak_tflops", "peak TFLOP/s"),
            show.col("matmul_allow_tf32", "tf32 allowed"),
            show.col("autocast_dtype"),
            show.col("parameter_dtype", "stored"),
        ),
        layouts.both(layouts.of_task("train_step", "matmul"), layouts.having("achieved_tflops")),
        is_default=True,
        column_notes={
            "MFU": "MFU is their share of the GPU's dense peak in that precision, if a source gives"
            " this peak.",
            "of ceiling": "The ceiling is the speed of one large matrix product of random matrices"
            " in the same run, under the GPU's power limit: the rows without a size.",
            "J/token|tokens/J|mean W": "Energy: of the GPU with its memory by its own counter,"
            " without CPU and host, while steps were timed.",
        },
    ),
    Table(
        "compile",
        "Eager and compiled",
        "Median of the whole step in milliseconds.",
        layouts.compare_columns(
            "compile",
            ("ms", show.step_ms),
            (_SPEED_UPS[0], ("breaks even after", show.break_even), _SPEED_UPS[1]),
            (
                ("first step s", show.number("compile_step_ms", ".1f", 1e-3)),
                show.col("peak_allocated_bytes", "GiB"),
                show.col("compile_cache_seen", "cache"),
                ("first forward s", show.number("compile_forward_ms", ".1f", 1e-3)),
                ("first backward s", show.number("compile_backward_ms", ".1f", 1e-3)),
                ("until ready s", show.number("compile_total_ms", ".1f", 1e-3)),
                show.col("compile_graphs", "graphs"),
                show.col("compile_graph_breaks", "breaks"),
                show.col("compile_recompiles", "recompiled"),
                show.col("compile_recompile_reasons", "why"),
                show.col("compile_skipped_cuda_graphs", "CUDA graphs skipped"),
            ),
            baseline="eager",
        ),
        layouts.compiled_with_eager,
        is_default=True,
        column_notes={
            "speed-up": "Speed-up: over eager.",
            "breaks even after": "Breaks even after: the number of steps after which a compilation"
            " with a cold cache has paid off.",
            **_SPEED_UP_NOTES,
            "first step s": "First step: in seconds, including its compilation.",
            "GiB": "GiB: peak memory.",
            "first forward s|first backward s|until ready s": "Then the cost of compiling each"
            " pass.",
            "graphs|breaks|recompiled": "Then the graphs, graph breaks and recompilations that"
            " torch counted.",
        },
    ),
    Table(
        "bound",
        "CPU-bound and GPU-bound steps",
        "Median of the whole step in milliseconds. If the CPU is hardly ahead of the GPU at the end"
        " of a phase, the GPU waited for the CPU to launch its kernels. A step is CPU-bound if such"
        " phases take more than a tenth of it: another CPU gives another time.",
        layouts.cell_rows(
            ("step", show.of_steps(show.median_interval("step_ms"))),
            show.col("cpu_bound", "CPU-bound"),
            show.col("cpu_bound_share", "phases that wait"),
            ("kernels", show.median_interval("step_kernel_time_ms")),
            show.col("busy_timed", "busy"),
            show.col("host_lead_ms", "CPU ahead, at most ms"),
            ("synced", show.of_steps(show.median_interval("step_synced_ms"))),
            ("pipelined", show.of_steps(show.median_interval("step_pipelined_ms"))),
            ("synced / pipelined", show.ratio("step_synced_ms_median", "step_pipelined_ms_median")),
            *(
                (f"kernels of {one}", show.ms(f"{one}_kernel_time_ms_median"))
                for one in STEP_PHASES
            ),
            show.col("drain_ms"),
            show.col("concurrent_attempts", "other cells"),
            show.col("waited_for_core", "waited for a core"),
            show.col("host_pace_before", "operations per ms before"),
            show.col("host_pace_after", "after"),
        ),
        # Without pipelined steps it is unknown how far the CPU was ahead.
        layouts.having("step_pipelined_ms_median", "step_kernel_time_ms_median"),
        column_notes={
            "kernels": "Kernels: their time in a step, which does not depend on the CPU.",
            "busy": "Busy: the time of kernels over the step's.",
            "synced": "Synced: the timing waits after each phase.",
            "pipelined": "Pipelined: it waits once, after the step.",
            "other cells": "Other cells: how many ran on the same host.",
            "waited for a core": "Waited for a core: the share of the timing in which other"
            " processes had the core.",
            "operations per ms": "Operations per ms: how many small torch operations the CPU dispatched"
            " before and after the timing.",
        },
    ),
    Table(
        "scaling",
        "Scaling with context length",
        "Each exponent is computed from a row and the row above it: 1 is linear in the context"
        " length, 2 is quadratic. Peak bytes / pair, for attention alone: bytes per pair of"
        " positions of one sequence, constant if memory is quadratic.",
        _growth,
        layouts.varying("context_length", "train_step", "attention"),
        is_default=True,
    ),
    Table(
        "time-spent",
        "Time spent measuring",
        "Seconds of an attempt: starting and ending its process, building (device included),"
        " compiling and warming up, timed steps, and all other instruments.",
        layouts.cell_rows(
            show.col("wall_s", "all"),
            show.col("time_process_s", "process"),
            show.col("time_build_s", "build"),
            show.col("time_warm_up_s", "warm-up"),
            show.col("time_timing_s", "timed steps"),
            show.col("time_instruments_s", "instruments"),
        ),
        layouts.having("time_process_s"),
    ),
    Table(
        "failures",
        "Cells without a result",
        "`sweep show RUN CELL` prints everything that is known about a cell.",
        layouts.cell_rows(
            show.col("status"),
            ("where", show.end_location),
            ("why", show.why_failed),
            show.col("cell"),
        ),
        lambda cells: cells[cells["status"] != "ok"],
        is_default=True,
    ),
)
