"""Tables of attention: measured alone, and as an axis of the whole Transformer."""

from __future__ import annotations

from orchestrator.report.tables.cell_filters import both, having, of_task, varying
from orchestrator.report.tables.entries import Entry
from orchestrator.report.tables.formatters import (
    NOISE_NOTE,
    gib,
    gib_predicted,
    mean_sd,
    ms,
    number,
    of_steps,
    predicted,
    speed_up,
    step_ms,
    text,
)
from orchestrator.report.tables.layouts import CellRows, CompareColumns, CompareRows, PhaseRows
from orchestrator.report.tables.table import Table

_FORWARD_MS = of_steps(ms("forward_ms_median"))
_BACKWARD_MS = of_steps(ms("backward_ms_median"))
_SPEED_UP = ("speed-up", speed_up("step_ms_median"))
_WAITING_NOTE = (
    "Median milliseconds. The timing waits after the forward and after the backward pass; `both`"
    " runs them without waiting in between, as training does. The speed-up is that of `both`"
)


def _squares(count: float) -> Entry:
    return Entry(f"{count:.0f}·Bn²", count, "Bn²")


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
    first=("forward", "backward", "both", "peak GiB", "before backward GiB"),
    is_default=True,
)

ATTENTION_COMPILE = Table(
    "attention-compile",
    "Attention, eager and compiled",
    f"{_WAITING_NOTE}.{NOISE_NOTE}",
    # Both axes: compiled with tf32 is compared with eager fp32, as there is no eager tf32 cell.
    CompareColumns(
        ("compile", "precision"),
        (("forward", _FORWARD_MS), ("backward", _BACKWARD_MS), ("both", step_ms)),
        (_SPEED_UP,),
    ),
    varying("compile", "attention"),
)

ATTENTION_LADDER = Table(
    "attention-ladder",
    "Implementations of attention",
    f"{_WAITING_NOTE} over naive. For a Transformer, `both` is the whole step. Squares are the"
    " tensors of length × length that are saved for the backward pass, counted in eager mode."
    " GiB: what the forward pass saved, what is allocated when the backward pass begins, and the"
    f" peak. Backend seen: the one that the kernels belong to.{NOISE_NOTE}",
    CompareRows(
        "attention",
        "naive",
        (
            ("forward ms", _FORWARD_MS),
            ("backward ms", _BACKWARD_MS),
            ("both ms", step_ms),
            ("squares saved", number("saved_squares", ".0f")),
            ("saved GiB", gib("saved_bytes")),
            ("before backward GiB", gib("forward_held_allocated_bytes")),
            ("peak GiB", gib("peak_allocated_bytes")),
            ("backend seen", text("attention_seen")),
        ),
        (_SPEED_UP,),
    ),
    varying("attention", "attention", "train_step"),
    first=("forward ms", "backward ms", "both ms", "speed-up", "saved GiB", "peak GiB"),
)

ATTENTION_MEMORY = Table(
    "attention-memory",
    "Memory of the squares of attention",
    "GiB of tensors of length × length: saved for the backward pass, and the peak of each pass"
    " above what was allocated after the build, which includes all other tensors. The formula"
    " counts tensors of B sequences of n × n, in the dtype of the inputs (math: fp32).",
    PhaseRows(
        (("saved", "saved"), ("forward", "in forward"), ("backward", "in backward")),
        (
            ("formula", lambda what: predicted(f"formula_{what}_squares", _squares)),
            ("formula GiB", lambda what: gib_predicted(f"formula_{what}_squares_bytes")),
            ("predicted GiB", lambda what: gib_predicted(f"predicted_{what}_squares_bytes")),
            ("measured GiB", lambda what: gib(f"{what}_squares_bytes")),
        ),
        ("formula_{}_squares",),
        "what",
    ),
    both(of_task("attention"), having("square_bytes")),
)
