"""Tables of step times: by phase, against the GPU's peak, CPU-bound steps, and scaling."""

from __future__ import annotations

from orchestrator.report.tables.cell_filters import both, having, of_task, varying
from orchestrator.report.tables.formatters import (
    col,
    gib,
    mean_sd,
    median_interval,
    ms,
    number,
    of_steps,
    peak_bytes_per_pair,
    ratio,
    step_ms,
    text,
    total_step,
    yes_or_no,
)
from orchestrator.report.tables.layouts import (
    CellRows,
    CompareColumns,
    PhaseRows,
    ScalingExponents,
)
from orchestrator.report.tables.table import Table

TIMINGS = Table(
    "timings",
    "Step time",
    "Milliseconds, mean ± sample standard deviation. The timing waits at the end of each phase, but"
    " not between the phases of a whole step, so the phases may add up to more than the total."
    " Backward / forward and tokens/s use medians, which one slow step does not change."
    " Without warm-up steps the total waits too: the steps that do not wait come later, when"
    " everything is warm. SM MHz: the GPU's clock after the timing. Capped s: how long the power"
    " limit slowed it down.",
    CellRows(
        (
            ("forward", of_steps(mean_sd("forward_ms"))),
            ("backward", of_steps(mean_sd("backward_ms"))),
            ("optimizer step", of_steps(mean_sd("optimizer_ms"))),
            ("total", of_steps(total_step)),
            # One slow step would move a quotient of means, and hardly a quotient of medians.
            ("backward / forward", ratio("backward_ms_median", "forward_ms_median")),
            ("tokens/s", number("tokens_per_s", ",.0f")),
            ("SM MHz", number("sm_clock_after", ".0f")),
            ("capped s", number("power_capped_ns", ".1f", 1e-9)),
        )
    ),
    of_task("train_step"),
    first=("total", "forward", "backward", "optimizer step", "backward / forward", "tokens/s"),
    is_default=True,
)

PHASES = Table(
    "phases",
    "Time of each phase, with its interval",
    "Milliseconds. The interval contains the median with 95 % confidence (order statistics);"
    " std/mean is the relative spread. Total: the timing waits once, after the whole step."
    " Total, waited for: it waits after each phase. Rows without a size are the matrix product"
    " whose speed is the ceiling in the table utilisation.",
    PhaseRows(
        (
            ("forward", "forward"),
            ("backward", "backward"),
            ("optimizer", "optimizer"),
            ("step_synced", "total, waited for"),
            ("step", "total"),
        ),
        (
            ("n", lambda phase: number(f"{phase}_ms_n", ".0f")),
            ("mean ± sd", lambda phase: of_steps(mean_sd(f"{phase}_ms"))),
            ("median [95 % interval]", lambda phase: of_steps(median_interval(f"{phase}_ms"))),
            ("min", lambda phase: of_steps(ms(f"{phase}_ms_min"))),
            ("std/mean", lambda phase: ratio(f"{phase}_ms_sd", f"{phase}_ms_mean", ".2%")),
        ),
    ),
    of_task("train_step", "matmul"),
    first=("n", "mean ± sd", "median [95 % interval]"),
)

WARMUP = Table(
    "warmup",
    "Warm-up",
    "The whole step after different numbers of warm-up steps. A step that is not warm has a larger"
    " spread.",
    CompareColumns(
        ("warmup_steps",),
        (
            ("warm-up: mean ± sd", of_steps(mean_sd("step_synced_ms"))),
            ("std/mean", ratio("step_synced_ms_sd", "step_synced_ms_mean", ".2%")),
        ),
    ),
    varying("warmup_steps", "train_step"),
)

UTILISATION = Table(
    "utilisation",
    "Utilisation",
    "TFLOP/s counts the model's own FLOPs. MFU is their share of the GPU's dense peak in that"
    " precision, if a source gives this peak. The ceiling is the speed of one large matrix product"
    " of random matrices in the same run, under the GPU's power limit: the rows without a size.",
    CellRows(
        (
            ("step ms", step_ms),
            ("TFLOP/s", number("achieved_tflops", ".1f")),
            ("peak TFLOP/s", number("peak_tflops", ".1f")),
            col("mfu", "MFU"),
            col("ceiling_share", "of ceiling"),
            ("tf32 allowed", text("matmul_allow_tf32")),
            ("autocast dtype", text("autocast_dtype")),
            ("stored", text("parameter_dtype")),
        )
    ),
    both(of_task("train_step", "matmul"), having("achieved_tflops")),
    first=("step ms", "TFLOP/s", "MFU", "of ceiling"),
    is_default=True,
)

CPU_BOUND = Table(
    "cpu-bound",
    "CPU-bound and GPU-bound steps",
    "Median of the whole step in milliseconds: synced, the timing waits after each phase; pipelined,"
    " once after the step. If the CPU is hardly ahead of the GPU at the end of a phase, the GPU"
    " waited for the CPU to launch its kernels. A step is CPU-bound if such phases take more than a"
    " tenth of it: another CPU gives another time. Other cells: how many ran on the same host."
    " Waited for a core: the share of the timing in which other processes had the core. Operations"
    " a ms: how many small torch operations the CPU dispatched before and after the timing.",
    CellRows(
        (
            ("synced", of_steps(median_interval("step_synced_ms"))),
            ("pipelined", of_steps(median_interval("step_pipelined_ms"))),
            ("synced / pipelined", ratio("step_synced_ms_median", "step_pipelined_ms_median")),
            ("CPU ahead, at most ms", ms("host_lead_ms")),
            ("phases that wait", number("cpu_bound_share", ".0%")),
            ("CPU-bound", yes_or_no("cpu_bound")),
            ("drain ms", ms("drain_ms")),
            ("other cells", number("concurrent_attempts")),
            ("waited for a core", number("waited_for_core", ".1%")),
            ("operations a ms before", number("host_pace_before", ".0f")),
            ("after", number("host_pace_after", ".0f")),
        )
    ),
    # Without pipelined steps it is unknown how far the CPU was ahead.
    having("step_pipelined_ms_median"),
    first=("synced", "pipelined", "phases that wait", "CPU-bound", "CPU ahead, at most ms"),
)

SCALING = Table(
    "scaling",
    "Scaling with context length",
    "Each exponent is computed from a row and the row above it: 1 is linear in the context length,"
    " 2 is quadratic. Peak bytes / pair, for attention alone: bytes per pair of positions of one"
    " sequence, constant if memory is quadratic.",
    ScalingExponents(
        (
            ("step ms", "step_ms_median", step_ms),
            ("forward ms", "forward_ms_median", of_steps(ms("forward_ms_median"))),
            ("backward ms", "backward_ms_median", of_steps(ms("backward_ms_median"))),
            ("peak GiB", "peak_allocated_bytes", gib("peak_allocated_bytes")),
        ),
        (("peak bytes / pair", peak_bytes_per_pair),),
    ),
    varying("context_length", "train_step", "attention"),
    first=("step ms", "exponent of step ms", "peak GiB", "exponent of peak GiB"),
    is_default=True,
)
