"""The tables, as data. Adding one is one entry in TABLES.

No column is called as a parameter is, `optimizer` for example: that is the name of the parameter's own, where it varies.
"""

from __future__ import annotations

from orchestrator.analysis.machine_variation import Machines, of_several_runs
from orchestrator.report.tables.allocation_tables import ALLOCATION_TABLES
from orchestrator.report.tables.cell_filters import (
    both,
    having,
    marked,
    of_task,
    varying,
    with_baseline,
)
from orchestrator.report.tables.formatters import (
    NOISE_MARK,
    break_even,
    end_location,
    failure_reason,
    gib,
    gib_predicted,
    interval_in_additions,
    kernels_speed_up,
    mean_sd,
    measured,
    median_interval,
    ms,
    number,
    of_steps,
    per_pair,
    ratio,
    relative_sd,
    speed_up,
    squares,
    step_ms,
    text,
)
from orchestrator.report.tables.kernel_tables import KERNEL_TABLES
from orchestrator.report.tables.layouts import (
    CellRows,
    CompareColumns,
    CompareRows,
    PhaseRows,
    ScalingExponents,
)
from orchestrator.report.tables.memory_tables import MEMORY_TABLES
from orchestrator.report.tables.table import Table

_OF_KERNELS = " Where the kernels of a step were timed, their speed-up is what the GPU alone gains, whatever its CPU."
# Of a speed-up, which may be chance.
_NOISE = f" {NOISE_MARK}: within noise, since the intervals of the two medians overlap."

TABLES: tuple[Table, ...] = (
    Table(
        "timings",
        "End to end",
        "Milliseconds, mean ± sample standard deviation. Each phase is waited for at its end; the total is of steps that run "
        "on, as in training, so that the phases may sum to more. Backward / forward and tokens/s are of the medians, which one "
        "slow step does not move. SM MHz: the GPU's clock after the timing; capped s: how long the power limit held it down.",
        CellRows(
            (
                ("forward", of_steps(mean_sd("forward_ms"))),
                ("backward", of_steps(mean_sd("backward_ms"))),
                ("optimizer step", of_steps(mean_sd("optimizer_ms"))),
                ("total", of_steps(mean_sd("step_ms"))),
                ("backward / forward", ratio("backward_ms_median", "forward_ms_median")),
                ("tokens/s", number("tokens_per_s", ",.0f")),
                ("SM MHz", number("sm_clock_after", ".0f")),
                ("capped s", number("power_capped_ns", ".1f", 1e-9)),
            )
        ),
        of_task("train_step"),
    ),
    Table(
        "phases",
        "Each phase, with its interval",
        "Milliseconds. The interval holds the median with 95 % confidence, by order statistics; std/mean is the spread.",
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
                ("std/mean", lambda phase: relative_sd(f"{phase}_ms")),
            ),
        ),
        of_task("train_step"),
    ),
    Table(
        "warmup",
        "Warm-up",
        "The whole step measured after so many warm-up steps: what is not warm shows in the spread.",
        CompareColumns(
            ("warmup_steps",),
            (
                ("warm-up: mean ± sd", of_steps(mean_sd("step_synced_ms"))),
                ("std/mean", relative_sd("step_synced_ms")),
            ),
        ),
        varying("train_step", "warmup_steps"),
    ),
    Table(
        "precision",
        "Precision",
        "Median of the whole step in milliseconds, the speed-up over the first column, and the peak memory."
        + _OF_KERNELS
        + _NOISE,
        CompareColumns(
            ("precision",),
            (("ms", step_ms), ("peak GiB", gib("peak_allocated_bytes"))),
            (("speed-up", speed_up("step_ms_median")), ("speed-up of kernels", kernels_speed_up)),
        ),
        varying("train_step", "precision"),
    ),
    Table(
        "utilisation",
        "How much of the possible",
        "TFLOP/s of the model's own FLOPs; MFU is their share of the GPU's dense peak in that precision, where a source "
        "gives it; the ceiling is what one large matrix product reached in the same run.",
        CellRows(
            (
                ("step ms", step_ms),
                ("TFLOP/s", number("achieved_tflops", ".1f")),
                ("peak TFLOP/s", number("peak_tflops", ".1f")),
                ("MFU", number("mfu", ".1%")),
                ("of ceiling", number("of_ceiling", ".1%")),
                ("tf32 allowed", text("matmul_allow_tf32")),
                ("autocast dtype", text("autocast_dtype")),
                ("stored", text("parameter_dtype")),
            )
        ),
        both(of_task("train_step"), having("achieved_tflops")),
    ),
    Table(
        "ceiling",
        "The ceiling of matrix products",
        "One large product of random matrices, repeated; its best precision is what this GPU reaches under its power cap.",
        CellRows(
            (
                ("ms", of_steps(median_interval("step_ms"))),
                ("TFLOP/s", number("achieved_tflops", ".1f")),
                ("peak TFLOP/s", number("peak_tflops", ".1f")),
                ("of peak", number("mfu", ".1%")),
            )
        ),
        of_task("matmul"),
    ),
    Table(
        "compile",
        "Eager against compiled",
        "Median of the whole step in milliseconds, peak memory in GiB, the speed-up over eager, the seconds that the first "
        "step took with its compilation, and after how many steps that has paid, if the cache was cold."
        + _OF_KERNELS
        + _NOISE,
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
        with_baseline("compile", "eager", ("compile_mode", "compile_cache")),
    ),
    Table(
        "compilation",
        "What compiling did",
        "Seconds of the first forward and backward pass; whether the compiled code came from a warm cache; graphs, breaks "
        "and recompilations as torch counted them.",
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
    ),
    Table(
        "jit",
        "Eager against JIT, with memory",
        "One row a way to run it: median step in milliseconds, peak memory in GiB, the speed-up over eager."
        + _NOISE,
        CompareRows(
            ("compile", "compile_mode", "compile_cache"),
            "eager",
            (("step ms", step_ms), ("peak GiB", gib("peak_allocated_bytes"))),
            (("speed-up", speed_up("step_ms_median")),),
        ),
        varying("train_step", "compile"),
    ),
    Table(
        "attention",
        "Attention",
        "Milliseconds, mean ± sample standard deviation: each pass waited for, both together as they run on. GiB that the "
        "inputs and weights take, that are held when the backward pass begins, and at most.",
        CellRows(
            (
                ("forward", of_steps(mean_sd("forward_ms"))),
                ("backward", of_steps(mean_sd("backward_ms"))),
                ("both", of_steps(mean_sd("step_ms"))),
                ("built GiB", gib("built_held_allocated_bytes")),
                ("before backward GiB", gib("forward_held_allocated_bytes")),
                ("after backward GiB", gib("backward_held_allocated_bytes")),
                ("peak GiB", gib("peak_allocated_bytes")),
            )
        ),
        of_task("attention"),
    ),
    Table(
        "attention-compile",
        "Attention, eager against compiled",
        "Median milliseconds of the forward and of the backward pass, each waited for, and of both together, which run on; the "
        "speed-up is of both." + _NOISE,
        CompareColumns(
            ("compile", "precision"),
            (
                ("forward", of_steps(ms("forward_ms_median"))),
                ("backward", of_steps(ms("backward_ms_median"))),
                ("both", step_ms),
            ),
            (("speed-up", speed_up("step_ms_median")),),
        ),
        varying("attention", "compile"),
    ),
    Table(
        "attention-ladder",
        "The ladder of attention",
        "Forward and backward are waited for, both together run on as in training; the speed-up is of both, over naive. "
        "Squares are the tensors of length × length that wait for the backward pass, counted in eager mode; GiB are what the "
        "forward pass saved, what is held when the backward pass begins, and at most." + _NOISE,
        CompareRows(
            ("attention",),
            "naive",
            (
                ("forward ms", of_steps(ms("forward_ms_median"))),
                ("backward ms", of_steps(ms("backward_ms_median"))),
                ("both ms", step_ms),
                ("squares saved", number("saved_squares", ".0f")),
                ("saved GiB", gib("saved_bytes")),
                ("before backward GiB", gib("forward_held_allocated_bytes")),
                ("peak GiB", gib("peak_allocated_bytes")),
                ("backend seen", text("attention_seen")),
            ),
            (("speed-up", speed_up("step_ms_median")),),
        ),
        varying("attention", "attention"),
    ),
    Table(
        "attention-memory",
        "The squares of attention",
        "GiB of tensors of length × length: saved for the backward pass, and at most in each pass beyond what was built, with "
        "what else there is. By formula, so many tensors of B sequences of n × n, as wide as the inputs (math: fp32).",
        PhaseRows(
            (("saved", "saved"), ("forward", "in forward"), ("backward", "in backward")),
            (
                ("formula", squares),
                ("formula GiB", lambda what: gib_predicted(f"formula_{what}_squares_bytes")),
                ("predicted GiB", lambda what: gib_predicted(f"predicted_{what}_squares_bytes")),
                ("measured GiB", lambda what: gib(f"{what}_squares_bytes")),
            ),
            ("formula_{}_squares",),
            "what",
        ),
        both(of_task("attention"), having("square_bytes")),
    ),
    Table(
        "attention-axis",
        "The Transformer by its attention",
        "Median of the whole step in milliseconds, peak memory in GiB, the backend that its kernels belong to, "
        "and the speed-up over naive." + _NOISE,
        CompareRows(
            ("attention",),
            "naive",
            (
                ("step ms", step_ms),
                ("squares saved", number("saved_squares", ".0f")),
                ("peak GiB", gib("peak_allocated_bytes")),
                ("backend seen", text("attention_seen")),
            ),
            (("speed-up", speed_up("step_ms_median")),),
        ),
        varying("train_step", "attention"),
    ),
    Table(
        "modes",
        "Waiting at each phase, or once",
        "Median of the whole step in milliseconds in both modes. In a phase at whose end the CPU is hardly ahead of the GPU, the "
        "GPU waits for the CPU to launch its kernels. Where such phases make up more than a tenth of a step, it is CPU-bound.",
        CellRows(
            (
                ("synced", of_steps(median_interval("step_synced_ms"))),
                ("pipelined", of_steps(median_interval("step_pipelined_ms"))),
                ("synced / pipelined", ratio("step_synced_ms_median", "step_pipelined_ms_median")),
                ("CPU ahead, at most ms", ms("host_lead_ms")),
                ("phases that wait", number("waiting_share", ".0%")),
                ("CPU-bound", measured("waits_for_host", lambda waits: "yes" if waits else "no")),
                ("step / CPU's", number("host_slack", ".1f")),
                ("drain ms", ms("drain_ms")),
            )
        ),
        having("step_pipelined_ms_median"),
    ),
    Table(
        "host",
        "CPU-bound steps",
        "Phases in which the GPU waits for the CPU that launches its kernels make up more than a tenth of each, so that another "
        "CPU gives another time. What that CPU did "
        "meanwhile: how many other cells ran on it, for how much of the timing something else had a thread's core, and how many "
        "small operations a ms it handed to torch, before the timing and after. Told in additions, which the CPU launched beside "
        "each step, the time of a step depends less on how fast the CPU happened to be.",
        CellRows(
            (
                ("step", of_steps(median_interval("step_ms"))),
                ("in additions", interval_in_additions("step")),
                ("CPU ahead, at most ms", ms("host_lead_ms")),
                ("phases that wait", number("waiting_share", ".0%")),
                ("other cells", number("neighbours")),
                ("waited for a core", number("waited_for_core", ".1%")),
                ("operations a ms before", number("host_pace_before", ".0f")),
                ("after", number("host_pace_after", ".0f")),
            )
        ),
        marked("waits_for_host"),
    ),
    *MEMORY_TABLES,
    Table(
        "scaling",
        "Scaling with context length",
        "An exponent of 1 is linear in the context length, 2 is quadratic; each is from the row above.",
        ScalingExponents(
            "context_length",
            (
                ("step ms", "step_ms_median", step_ms),
                ("peak GiB", "peak_allocated_bytes", gib("peak_allocated_bytes")),
            ),
        ),
        varying("train_step", "context_length"),
    ),
    Table(
        "attention-scaling",
        "Attention: scaling with length",
        "An exponent of 1 is linear in the length, 2 is quadratic; each is from the row above. Bytes per pair of positions, "
        "of one sequence, stay the same where memory is quadratic.",
        ScalingExponents(
            "context_length",
            (
                ("forward ms", "forward_ms_median", of_steps(ms("forward_ms_median"))),
                ("backward ms", "backward_ms_median", of_steps(ms("backward_ms_median"))),
                ("peak GiB", "peak_allocated_bytes", gib("peak_allocated_bytes")),
            ),
            (("peak bytes / pair", per_pair),),
        ),
        varying("attention", "context_length"),
    ),
    Table(
        "accumulation",
        "Adding up in narrow dtypes",
        "The sum that was found, and how far it is off. `upcast`: cast by hand before it is added; `at_once`: torch's "
        "sum, which accumulates in fp32 whatever the dtype of its result.",
        CellRows((("sum", number("sum", ".9f")), ("error", number("error", "+.9f")))),
        of_task("accumulation"),
    ),
    Table(
        "autocast-dtypes",
        "What autocast makes of each part",
        "The dtypes of a small model, on the device named: CPU and CUDA do not treat the norm alike.",
        CellRows(
            (
                ("on", text("device")),
                *(
                    (title, text(f"dtype_{part}"))
                    for part, title in (
                        ("parameters", "parameters"),
                        ("fc1", "first linear"),
                        ("relu", "ReLU"),
                        ("norm", "norm's result"),
                        ("logits", "logits"),
                        ("loss", "loss"),
                        ("gradients", "gradients"),
                    )
                ),
            )
        ),
        of_task("autocast_dtypes"),
    ),
    Table(
        "norms",
        "What a norm loses in a narrow dtype",
        "The largest error over the root mean square of the exact result, and the share of elements that are no number: all "
        "in the dtype, in fp32 and rounded once, and by torch's own kernel.",
        CellRows(
            tuple(
                column
                for way in ("narrow", "wide", "library")
                for column in (
                    (f"{way} error", number(f"{way}_error", ".2e")),
                    (f"{way} not finite", number(f"{way}_nonfinite", ".0%")),
                )
            )
        ),
        of_task("norm_sensitivity"),
    ),
    *ALLOCATION_TABLES,
    *KERNEL_TABLES,
    Table(
        "machines",
        "What another machine makes of it",
        "By what at most the time of a step and that of the same cell in another run differ, in 95 % of all such pairs of runs "
        "on one kind of GPU with one torch: the interval of a number for whoever measures it elsewhere; beside it, of how many "
        "runs. Of each run, the factors of the others among themselves, and how many of the pairs of one of its cells with the "
        "same cell of another run are within them: a cell is in as many pairs as other runs have it. CPU-bound: the GPU waits "
        "for the CPU that launches its kernels. Kernels alone: the same of what the kernels of any step take.",
        Machines(),
        of_several_runs,
    ),
    Table(
        "took",
        "What measuring took",
        "Seconds of an attempt: how its process came and went, reaching the device and building, compiling and warm-up, the "
        "steps that were timed, and all other instruments.",
        CellRows(
            (
                ("all", number("wall_s", ".2f")),
                ("process", number("took_process_s", ".2f")),
                ("build", number("took_build_s", ".2f")),
                ("warm-up", number("took_warm_up_s", ".2f")),
                ("timed steps", number("took_timing_s", ".2f")),
                ("instruments", number("took_instruments_s", ".2f")),
            )
        ),
        having("took_process_s"),
    ),
    Table(
        "failures",
        "What did not end well",
        "`sweep show` prints all the evidence of a cell.",
        CellRows(
            (
                ("cell", text("cell")),
                ("status", text("status")),
                ("where", end_location),
                ("why", failure_reason),
            )
        ),
        lambda cells: cells[cells["status"] != "ok"],
    ),
)
