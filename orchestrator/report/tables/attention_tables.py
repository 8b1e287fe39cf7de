"""Tables of attention: measured alone, and as an axis of the whole Transformer."""

from __future__ import annotations

import pandas as pd

from orchestrator.report.tables import formatters as show
from orchestrator.report.tables.cell_filters import both, having, of_task, varying
from orchestrator.report.tables.layouts import Baseline, CompareRows, PhaseRows
from orchestrator.report.tables.table import Entry, Table

_SPEED_UP = show.speed_up("step_ms_median")


def _squares(count: float) -> Entry:
    return Entry(f"{count:.0f}·Bn²", count, "Bn²")


def _with_attention(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells of attention alone, and training steps if their attention varies."""
    parts = [of_task("attention")(cells), varying("attention", "train_step")(cells)]
    return pd.concat([part for part in parts if len(part)]) if any(map(len, parts)) else parts[0]


ATTENTION = Table(
    "attention",
    "Attention",
    "Milliseconds, mean ± sample standard deviation. The timing waits after the forward and after"
    " the backward pass; `both` runs them without waiting in between, as training does; for a"
    " Transformer it is the whole step. The speed-ups are those of the medians of `both`, over"
    " naive attention and over the same cell in eager mode (in fp32 if there is none)."
    " GiB: what the forward pass saved, the inputs and weights, what is allocated when the backward"
    " pass begins and ends, and the peak. Squares: tensors of length × length that are saved for"
    " the backward pass, counted in eager mode. Backend seen: the one that the kernels belong to."
    + show.NOISE_NOTE,
    CompareRows(
        (
            ("forward", show.of_steps(show.mean_sd("forward_ms"))),
            ("backward", show.of_steps(show.mean_sd("backward_ms"))),
            ("both", show.of_steps(show.mean_sd("step_ms"))),
        ),
        (
            Baseline("over naive", ("attention",), "naive", _SPEED_UP),
            Baseline("over eager", ("compile", "compile_mode"), "eager", _SPEED_UP),
        ),
        (
            ("peak GiB", show.gib("peak_allocated_bytes")),
            ("saved GiB", show.gib("saved_bytes")),
            ("before backward GiB", show.gib("forward_held_allocated_bytes")),
            ("squares saved", show.number("saved_squares", ".0f")),
            ("built GiB", show.gib("built_held_allocated_bytes")),
            ("after backward GiB", show.gib("backward_held_allocated_bytes")),
            ("backend seen", show.text("attention_seen")),
            ("forward median", show.of_steps(show.median_interval("forward_ms"))),
            ("backward median", show.of_steps(show.median_interval("backward_ms"))),
            ("both median", show.of_steps(show.median_interval("step_ms"))),
        ),
    ),
    _with_attention,
    is_default=True,
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
            ("formula", lambda what: show.predicted(f"formula_{what}_squares", _squares)),
            ("formula GiB", lambda what: show.gib_predicted(f"formula_{what}_squares_bytes")),
            ("predicted GiB", lambda what: show.gib_predicted(f"predicted_{what}_squares_bytes")),
            ("measured GiB", lambda what: show.gib(f"{what}_squares_bytes")),
        ),
        ("formula_{}_squares",),
        "what",
    ),
    both(of_task("attention"), having("square_bytes")),
)
