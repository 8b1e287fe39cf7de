"""Tables that compare precisions and ways of compiling."""

from __future__ import annotations

from orchestrator.report.tables.cell_filters import having, varying, with_eager_baseline
from orchestrator.report.tables.formatters import (
    NOISE_NOTE,
    break_even,
    gib,
    kernels_speed_up,
    number,
    speed_up,
    step_ms,
    text,
)
from orchestrator.report.tables.layouts import CellRows, CompareColumns
from orchestrator.report.tables.table import Table

_KERNELS_NOTE = (
    " The speed-up of kernels, where their time was measured, is what the GPU alone gains,"
    " independent of its CPU."
)

PRECISION = Table(
    "precision",
    "Precision",
    "Median of the whole step in milliseconds, speed-up over the first column, and peak memory."
    + _KERNELS_NOTE
    + NOISE_NOTE,
    CompareColumns(
        ("precision",),
        (("ms", step_ms), ("peak GiB", gib("peak_allocated_bytes"))),
        (("speed-up", speed_up("step_ms_median")), ("speed-up of kernels", kernels_speed_up)),
    ),
    varying("precision", "train_step"),
    first=("ms", "speed-up", "speed-up of kernels"),
    is_default=True,
)

COMPILE = Table(
    "compile",
    "Eager and compiled",
    "Median of the whole step in milliseconds, peak memory in GiB, speed-up over eager, and the"
    " seconds of the first step including its compilation. Breaks even after: the number of steps"
    " after which a compilation with a cold cache has paid off." + _KERNELS_NOTE + NOISE_NOTE,
    CompareColumns(
        ("compile",),
        (("ms", step_ms), ("GiB", gib("peak_allocated_bytes"))),
        (
            ("speed-up", speed_up("step_ms_median")),
            ("speed-up of kernels", kernels_speed_up),
            ("breaks even after", break_even),
        ),
        (
            ("first step s", number("compile_step_ms", ".1f", 1e-3)),
            ("cache", text("compile_cache_seen")),
        ),
    ),
    with_eager_baseline,
    first=("ms", "speed-up", "first step s", "breaks even after", "speed-up of kernels"),
    is_default=True,
)

COMPILATION = Table(
    "compilation",
    "Cost of compiling",
    "Seconds of the first forward and backward pass, whether the compiled code came from a warm"
    " cache, and the graphs, graph breaks and recompilations that torch counted.",
    CellRows(
        (
            ("first forward s", number("compile_forward_ms", ".1f", 1e-3)),
            ("first backward s", number("compile_backward_ms", ".1f", 1e-3)),
            ("until ready s", number("compile_total_ms", ".1f", 1e-3)),
            ("cache", text("compile_cache_seen")),
            ("graphs", text("compile_graphs")),
            ("breaks", text("compile_graph_breaks")),
            ("recompiled", text("compile_recompiles")),
            ("why", text("compile_recompile_reasons")),
            ("CUDA graphs skipped", text("compile_skipped_cuda_graphs")),
            ("step ms", step_ms),
        )
    ),
    having("compile_graphs"),
    first=(
        "first forward s",
        "first backward s",
        "until ready s",
        "graphs",
        "breaks",
        "recompiled",
    ),
)
