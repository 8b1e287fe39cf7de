"""Tables of attention: measured alone, and as an axis of the whole Transformer."""

from __future__ import annotations

from orchestrator.report.tables.cell_filters import both, having, of_task, varying
from orchestrator.report.tables.formatters import (
    NOISE_NOTE,
    gib,
    gib_predicted,
    mean_sd,
    ms,
    number,
    of_steps,
    peak_bytes_per_pair,
    speed_up,
    squares,
    step_ms,
    text,
)
from orchestrator.report.tables.layouts import (
    CellRows,
    CompareColumns,
    CompareRows,
    PhaseRows,
    ScalingExponents,
)
from orchestrator.report.tables.table import Table

ATTENTION = Table(
    "attention",
    "Attention",
    "Milliseconds, mean ± sample standard deviation. The timing waits after each pass; `both` runs"
    " both passes without waiting between them. GiB: the inputs and weights, what is allocated when"
    " the backward pass begins and ends, and the peak.",
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
)

ATTENTION_COMPILE = Table(
    "attention-compile",
    "Attention, eager and compiled",
    "Median milliseconds. The timing waits after the forward and after the backward pass; `both`"
    " runs them without waiting in between. The speed-up is that of `both`." + NOISE_NOTE,
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
)

ATTENTION_LADDER = Table(
    "attention-ladder",
    "Implementations of attention",
    "The timing waits after the forward and after the backward pass; `both` runs them without"
    " waiting in between, as training does. The speed-up is that of `both` over naive. Squares are"
    " the tensors of length × length that are saved for the backward pass, counted in eager mode."
    " GiB: what the forward pass saved, what is allocated when the backward pass begins, and the"
    " peak." + NOISE_NOTE,
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
)

ATTENTION_MEMORY = Table(
    "attention-memory",
    "The squares of attention",
    "GiB of tensors of length × length: saved for the backward pass, and the peak of each pass"
    " above what was allocated after the build, which includes all other tensors. The formula"
    " counts tensors of B sequences of n × n, in the dtype of the inputs (math: fp32).",
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
)

ATTENTION_AXIS = Table(
    "attention-axis",
    "The Transformer by its attention",
    "Median of the whole step in milliseconds, peak memory in GiB, the backend that the kernels"
    " belong to, and the speed-up over naive." + NOISE_NOTE,
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
)

ATTENTION_SCALING = Table(
    "attention-scaling",
    "Attention: scaling with length",
    "Each exponent is computed from a row and the row above it: 1 is linear in the length, 2 is"
    " quadratic. Peak bytes / pair: bytes per pair of positions of one sequence, constant if memory"
    " is quadratic.",
    ScalingExponents(
        "context_length",
        (
            ("forward ms", "forward_ms_median", of_steps(ms("forward_ms_median"))),
            ("backward ms", "backward_ms_median", of_steps(ms("backward_ms_median"))),
            ("peak GiB", "peak_allocated_bytes", gib("peak_allocated_bytes")),
        ),
        (("peak bytes / pair", peak_bytes_per_pair),),
    ),
    varying("attention", "context_length"),
)
