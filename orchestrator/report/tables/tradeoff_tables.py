"""The table of what each option of a training step saves in memory and costs in time."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.analysis.axes import NOTHING, Row, axis_text, has_value, key_axes
from orchestrator.analysis.options import OPTIMIZER_ARGS, WITHOUT, option_pairs, texts_without
from orchestrator.analysis.results import Results
from orchestrator.report.tables.cell_filters import of_task
from orchestrator.report.tables.formatters import NOISE_NOTE, number, peak_gib, speed_up, step_ms
from orchestrator.report.tables.layouts import grid_of
from orchestrator.report.tables.table import MISSING, Entry, Table, TableGrid, quantity, quotient

_peak = peak_gib()
_tokens_per_s = number("tokens_per_s", ",.0f")
_mfu = number("mfu", ".1%")


def _option_rows(results: Results) -> TableGrid:
    """Return one row per cell and option, if another cell differs from it in this option alone."""
    axes = key_axes(results)
    shown = [axis for axis in axes if not _is_of_options(axis)]
    found = []
    for option, row, baseline in option_pairs(results):
        words = [option.replace("_", " "), axis_text(baseline[option])]
        name = Entry(f"{': '.join(words)} → {axis_text(row[option])}")
        names = {"option": name, "with": _others(row, axes, option)}
        found.append((row, {**names, **_compared(row, baseline)}))
    return grid_of(shown, found, ["option", "with"], "option")


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


def _compared(row: Row, baseline: Row) -> dict[str, Entry]:
    time, time_without = step_ms(row), step_ms(baseline)
    peak, peak_without = _peak(row), _peak(baseline)
    costs, saves, peak_ratio = MISSING, MISSING, MISSING
    if time.number is not None and time_without.number is not None:
        costs = quantity(time.number - time_without.number, "+,.2f", "ms")
    if peak.number is not None and peak_without.number is not None:
        saves = quantity(peak_without.number - peak.number, "+.2f", "GiB")
        peak_ratio = quotient(peak.number, peak_without.number)
    return {
        "saves GiB": saves, "costs ms": costs, "peak ratio": peak_ratio,
        "step ratio": speed_up(baseline, row), "peak GiB": peak, "step ms": time,
        "without: peak GiB": peak_without, "without: step ms": time_without,
        "tokens/s": _tokens_per_s(row), "MFU": _mfu(row),
    }  # fmt: skip


TRADEOFFS = Table(
    "tradeoffs",
    "What each option saves and costs",
    "Medians of the whole step and peaks, each with the cell that does without the option and has"
    " the same settings otherwise. Saves: GiB of the peak. Ratios are to the cell without the"
    " option. Micro-batches are compared with one batch of as many sequences, optimizers with the"
    " first AdamW of the run, whatever their arguments. On a CPU, the peak is that of the resident"
    " set, which includes the interpreter." + NOISE_NOTE,
    _option_rows,
    of_task("train_step"),
)
