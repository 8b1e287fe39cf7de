"""Tables that compare each cell with one that differs in a setting: attention, and options."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from orchestrator.analysis.axes import (
    COMPILE_AXES,
    NOTHING,
    Row,
    axis_text,
    each,
    has_value,
    key_axes,
)
from orchestrator.analysis.options import OPTIMIZER_ARGS, WITHOUT, option_pairs, texts_without
from orchestrator.analysis.pairs import counterpart_among
from orchestrator.analysis.results import Results
from orchestrator.report.tables import formatters as show
from orchestrator.report.tables import layouts
from orchestrator.report.tables.formatters import Value
from orchestrator.report.tables.layouts import Measure
from orchestrator.report.tables.table import MISSING, Entry, Table, TableGrid, quantity, quotient


def _with_attention(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells of attention alone, and training steps if their attention varies."""
    parts = [layouts.of_task("attention")(cells), layouts.varying("attention", "train_step")(cells)]
    return pd.concat([part for part in parts if len(part)]) if any(map(len, parts)) else parts[0]


_TIMES: tuple[Measure, ...] = (
    ("forward", show.of_steps(show.mean_sd("forward_ms"))),
    ("backward", show.of_steps(show.mean_sd("backward_ms"))),
    ("both", show.of_steps(show.mean_sd("step_ms"))),
)
_OTHERS: tuple[Measure, ...] = (
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
    speed_ups: list[Measure] = []
    compared = ""
    for axis, baseline, without in _BASELINES:
        if axis in axes:
            compared = compared or axis
            bases = [row for row in cells if row[axis] == baseline]
            strict = [one for one in axes if one not in (axis, *without)]
            speed_ups.append((f"over {baseline}", _over(bases, strict)))
    columns = (*_TIMES, *speed_ups, *_OTHERS)
    return layouts.grid_of(
        axes, ((row, layouts.shown_by(columns, row)) for row in cells), (), compared
    )


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
    layouts.phase_rows(
        "what",
        (("saved", "saved"), ("forward", "in forward"), ("backward", "in backward")),
        (
            (
                "formula",
                lambda what: show.predicted(
                    f"formula_{what}_squares", lambda count: Entry(f"{count:.0f}·Bn²", count, "Bn²")
                ),
            ),
            ("formula GiB", lambda what: show.gib_predicted(f"formula_{what}_squares_bytes")),
            ("predicted GiB", lambda what: show.gib_predicted(f"predicted_{what}_squares_bytes")),
            ("measured GiB", lambda what: show.gib(f"{what}_squares_bytes")),
        ),
        ("formula_{}_squares",),
    ),
    layouts.both(layouts.of_task("attention"), layouts.having("square_bytes")),
)


_peak = show.peak_gib()
_SPEEDS: tuple[Measure, ...] = (show.col("tokens_per_s", "tokens/s"), show.col("mfu", "MFU"))


def _option_rows(results: Results) -> TableGrid:
    """Return one row per cell and option, if another cell differs from it in this option alone."""
    axes = key_axes(results)
    shown = [axis for axis in axes if not _is_of_options(axis)]
    found = []
    for option, row, baseline in option_pairs(results):
        words = [option.replace("_", " "), axis_text(baseline[option])]
        name = Entry(f"{': '.join(words)} → {axis_text(row[option])}")
        time, time_without = show.step_ms(row), show.step_ms(baseline)
        peak, peak_without = _peak(row), _peak(baseline)
        costs, saves, peak_ratio = MISSING, MISSING, MISSING
        if time.number is not None and time_without.number is not None:
            costs = quantity(time.number - time_without.number, "+,.2f", "ms")
        if peak.number is not None and peak_without.number is not None:
            saves = quantity(peak_without.number - peak.number, "+.2f", "GiB")
            peak_ratio = quotient(peak.number, peak_without.number)
        entries = {
            "option": name, "with": _others(row, axes, option),
            "saves GiB": saves, "costs ms": costs, "peak ratio": peak_ratio,
            "step ratio": show.speed_up(baseline, row), "peak GiB": peak, "step ms": time,
            "without: peak GiB": peak_without, "without: step ms": time_without,
            **layouts.shown_by(_SPEEDS, row),
        }  # fmt: skip
        found.append((row, entries))
    return layouts.grid_of(shown, found, ["option", "with"], "option")


def _is_of_options(axis: str) -> bool:
    return axis in WITHOUT or axis.startswith(OPTIMIZER_ARGS)


def _others(row: Row, axes: Sequence[str], option: str) -> Entry:
    """Return the other options of a cell, such as `lora=16, loss=chunked`."""
    words = []
    for axis in axes:
        is_shown = _is_of_options(axis) and axis != option and has_value(row, axis)
        if is_shown and axis_text(row[axis]) not in texts_without(axis)[:1]:
            words.append(f"{axis.removeprefix(OPTIMIZER_ARGS)}={axis_text(row[axis])}")
    return Entry(", ".join(words) or NOTHING)


TRADEOFFS = Table(
    "tradeoffs",
    "What each option saves and costs",
    "Medians of the whole step and peaks, each with the cell that does without the option and has"
    " the same settings otherwise. Saves: GiB of the peak. Ratios are to the cell without the"
    " option. Micro-batches are compared with one batch of as many sequences, optimizers with the"
    " first AdamW of the run, whatever their arguments. On a CPU, the peak is that of the resident"
    " set, which includes the interpreter." + show.NOISE_NOTE,
    _option_rows,
    layouts.of_task("train_step"),
)
