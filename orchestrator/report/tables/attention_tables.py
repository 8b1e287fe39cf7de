"""Tables of attention: measured alone, and as an axis of the whole Transformer."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from orchestrator.analysis.axes import COMPILE_AXES, Row, each, key_axes
from orchestrator.analysis.pairs import counterpart_among
from orchestrator.analysis.results import Results
from orchestrator.report.tables import formatters as show
from orchestrator.report.tables.cell_filters import both, having, of_task, varying
from orchestrator.report.tables.formatters import Value
from orchestrator.report.tables.layouts import Column, PhaseRows, grid_of, shown_by
from orchestrator.report.tables.table import MISSING, Entry, Table, TableGrid


def _squares(count: float) -> Entry:
    return Entry(f"{count:.0f}·Bn²", count, "Bn²")


def _with_attention(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells of attention alone, and training steps if their attention varies."""
    parts = [of_task("attention")(cells), varying("attention", "train_step")(cells)]
    return pd.concat([part for part in parts if len(part)]) if any(map(len, parts)) else parts[0]


_TIMES: tuple[Column, ...] = (
    ("forward", show.of_steps(show.mean_sd("forward_ms"))),
    ("backward", show.of_steps(show.mean_sd("backward_ms"))),
    ("both", show.of_steps(show.mean_sd("step_ms"))),
)
_OTHERS: tuple[Column, ...] = (
    show.col("peak_allocated_bytes", "peak GiB"),
    show.col("saved_bytes", "saved GiB"),
    show.col("forward_held_allocated_bytes", "before backward GiB"),
    show.col("saved_squares", "squares saved"),
    show.col("built_held_allocated_bytes", "built GiB"),
    show.col("backward_held_allocated_bytes", "after backward GiB"),
    show.col("attention_seen", "backend seen"),
    ("forward median", show.of_steps(show.median_interval("forward_ms"))),
    ("backward median", show.of_steps(show.median_interval("backward_ms"))),
    ("both median", show.of_steps(show.median_interval("step_ms"))),
)
# Axes with the value that is compared with, and the axes that a cell with it does not have.
_BASELINES = (("attention", "naive", ()), ("compile", "eager", COMPILE_AXES))


def _compared_rows(results: Results) -> TableGrid:
    """Return one row per cell, with its speed-ups over naive attention and over eager mode."""
    axes = key_axes(results)
    # One list: a row that is its own baseline has no interval.
    cells = list(each(results.cells, axes))
    speed_ups: list[Column] = []
    compared = ""
    for axis, baseline, without in _BASELINES:
        if axis in axes:
            compared = compared or axis
            bases = [row for row in cells if row[axis] == baseline]
            strict = [one for one in axes if one not in (axis, *without)]
            speed_ups.append((f"over {baseline}", _over(bases, strict)))
    columns = (*_TIMES, *speed_ups, *_OTHERS)
    return grid_of(axes, ((row, shown_by(columns, row)) for row in cells), (), compared)


def _over(bases: Sequence[Row], strict: list[str]) -> Value:
    """Return a formatter of the speed-up of a row over the base that agrees with it in some axes.

    Without such a base, the precision may differ.
    """
    loose = [axis for axis in strict if axis != "precision"]
    same, similar = counterpart_among(bases, strict), counterpart_among(bases, loose)

    def show_speed_up(row: Row) -> Entry:
        base = same(row) or similar(row)
        return show.speed_up(row, base) if base else MISSING

    return show_speed_up


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
    _compared_rows,
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
