"""Formatters: functions that write one value of a cell as text.

A formatter (`Value`) takes a row of `cells` and returns text. If the cell failed, the text is its
status, so that a reader sees OOM and not an empty field. Columns are named as in `docs/columns.md`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from orchestrator.analysis.axes import NOTHING, Row, has_value, is_null
from orchestrator.common.units import GIB, MIB
from orchestrator.hardware.gpu_catalog import smallest_fitting

Value = Callable[[Row], str]

KERNEL_TIME = "step_kernel_time_ms_median"
SAVED_RANKS = range(1, 6)  # ranks of the operations that save most for the backward pass
# Characters of a kernel's name. Names that CUTLASS makes of its template arguments run to 2,000.
_LONGEST_NAME = 100
_LONGEST_REASON = 160
_SMALLEST_GIB = GIB / 100  # smaller sizes are written in MiB, since two digits would show 0.00
# After a time, or a ratio of times, of CPU-bound steps: another CPU with this GPU gives another one.
HOST_MARK = "†"
# After a ratio of times whose intervals overlap, so that the difference may be chance.
NOISE_MARK = "~"
NOISE_NOTE = (
    f" {NOISE_MARK}: within noise, since the intervals of the two medians overlap. They do not"
    " include the noise between processes, which `sweep compare` does."
)
_STATUS_WORDS = {
    "oom": "OOM",
    "oom_inferred": "OOM (inferred)",
    "host_oom": "host OOM",
    "timeout": "time-out",
}


def missing_text(row: Row, *columns: str) -> str:
    """Return what replaces a missing value: the status of a failed cell, otherwise a dash."""
    # A column that the whole run lacks says nothing about this cell: with a status in it, it would
    # not be empty, and the table would show it.
    if row["status"] == "ok" or not all(column in row for column in columns):
        return NOTHING
    return _STATUS_WORDS.get(row["status"], str(row["status"]))


def format_ms(ms: float) -> str:
    """Return milliseconds with about four significant digits."""
    if ms < 10:
        return f"{ms:.3f}"
    return f"{ms:.2f}" if ms < 100 else f"{ms:.1f}"


def quotient(numerator: float, denominator: float, form: str = ".2f") -> str:
    """Return a formatted ratio, a dash if the divisor is not above 0 or the result not finite."""
    if not denominator > 0 or not math.isfinite(numerator / denominator):
        return NOTHING
    return format(numerator / denominator, form)


# ---------------------------------------------------------------------- a value of one column


def measured(column: str, show: Callable[[Any], str]) -> Value:
    """Return a formatter of one column: its value as `show` writes it, or the cell's status."""

    def value(row: Row) -> str:
        # One look-up: a report of 10,000 cells calls this half a million times.
        found = row.get(column)
        return missing_text(row, column) if is_null(found) else show(found)

    return value


def predicted(column: str, show: Callable[[Any], str]) -> Value:
    """Return a formatter of a value that exists however the cell ended, such as a prediction."""
    return lambda row: show(row[column]) if has_value(row, column) else NOTHING


def text(column: str) -> Value:
    return measured(column, str)


def yes_or_no(column: str) -> Value:
    return measured(column, lambda flag: "yes" if flag else "no")


def number(column: str, form: str = ".1f", scale: float = 1.0) -> Value:
    """Return a formatter of a number, multiplied by `scale` and written with the format `form`."""
    return measured(column, lambda found: format(found * scale, form))


def gib(column: str) -> Value:
    return number(column, ".2f", 1 / GIB)


def gib_predicted(column: str) -> Value:
    return predicted(column, lambda nbytes: f"{nbytes / GIB:.2f}")


def mib_measured(column: str) -> Value:
    return number(column, ",.2f", 1 / MIB)


def ms(column: str) -> Value:
    return measured(column, format_ms)


def ratio(numerator: str, denominator: str, form: str = ".2f") -> Value:
    """Return a formatter of the ratio of two columns."""

    def value(row: Row) -> str:
        if has_value(row, numerator) and has_value(row, denominator):
            return quotient(row[numerator], row[denominator], form)
        return missing_text(row, numerator, denominator)

    return value


# ---------------------------------------------------------------------- times of steps


def of_steps(time: Value) -> Value:
    """Return a formatter of a step time that adds the mark of CPU-bound cells."""

    def show(row: Row) -> str:
        shown = time(row)
        return shown + mark(row) if shown[0].isdigit() else shown

    return show


def mark(*rows: Row) -> str:
    """Return the mark † if the steps of one of these rows are CPU-bound, else an empty text."""
    is_cpu_bound = any(has_value(row, "cpu_bound") and row["cpu_bound"] for row in rows)
    return HOST_MARK if is_cpu_bound else ""


step_ms = of_steps(ms("step_ms_median"))


def mean_sd(stem: str) -> Value:
    """Return a formatter of mean ± sample standard deviation. `stem`: such as `forward_ms`."""

    def show(row: Row) -> str:
        if not has_value(row, f"{stem}_mean"):
            return missing_text(row, f"{stem}_mean")
        spread = format_ms(row[f"{stem}_sd"]) if has_value(row, f"{stem}_sd") else NOTHING
        return f"{format_ms(row[f'{stem}_mean'])} ± {spread}"

    return show


def total_step(row: Row) -> str:
    """Return mean ± standard deviation of the whole step, of the first steps without warm-up."""
    is_known = has_value(row, "warmup_steps") and has_value(row, "step_synced_ms_mean")
    is_cold = is_known and row["warmup_steps"] == 0
    return mean_sd("step_synced_ms" if is_cold else "step_ms")(row)


def median_interval(stem: str) -> Value:
    """Return a formatter of a median with its 95 % interval, which a single sample does not have."""

    median_ms = ms(f"{stem}_median")

    def show(row: Row) -> str:
        median = median_ms(row)
        if not has_value(row, f"{stem}_ci_low"):
            return median
        low, high = format_ms(row[f"{stem}_ci_low"]), format_ms(row[f"{stem}_ci_high"])
        # With fewer than six samples even the interval from the smallest to the largest contains
        # the median with less than 95 % confidence.
        coverage = row[f"{stem}_coverage"]
        label = "" if coverage >= 0.95 else f" ({coverage:.0%})"
        return f"{median} [{low}, {high}]{label}"

    return show


# ---------------------------------------------------------------------- comparisons of two rows


def speed_up(column: str) -> Callable[[Row, Row], str]:
    """Return a function that writes how many times faster a row is than its baseline."""

    def compare(row: Row, baseline: Row) -> str:
        if not has_value(row, column):
            return missing_text(row)
        return _times_faster(column, row, baseline, mark(row, baseline))

    return compare


def kernels_speed_up(row: Row, baseline: Row) -> str:
    """Return the speed-up of the kernels of a step, which does not depend on the CPU."""
    if not has_value(row, KERNEL_TIME):
        return missing_text(row, KERNEL_TIME)
    return _times_faster(KERNEL_TIME, row, baseline)


def _times_faster(column: str, row: Row, baseline: Row, cpu_mark: str = "") -> str:
    if not has_value(baseline, column):
        return NOTHING
    noise_mark = NOISE_MARK if _intervals_overlap(column, row, baseline) else ""
    factor = quotient(baseline[column], row[column])
    return factor if factor == NOTHING else f"{factor}×{noise_mark}{cpu_mark}"


def _intervals_overlap(median_column: str, row: Row, baseline: Row) -> bool:
    low, high = (median_column.replace("median", end) for end in ("ci_low", "ci_high"))
    has_intervals = all(has_value(one, end) for one in (row, baseline) for end in (low, high))
    if row is baseline or not has_intervals:
        return False
    return bool(row[low] < baseline[high] and row[high] >= baseline[low])


def break_even(row: Row, baseline: Row) -> str:
    """Return after how many steps a compilation with a cold cache has paid off.

    That is the cost of the compilation divided by the time that each step gains.
    """
    if not (has_value(row, "compile_cost_ms") and has_value(baseline, "step_ms_median")):
        return missing_text(row, "step_ms_median")
    if str(row.get("compile_cache_seen")) != "cold":
        return NOTHING  # the code came from the cache, so that the cost of compiling is unknown
    gain = baseline["step_ms_median"] - row["step_ms_median"]
    return f"{row['compile_cost_ms'] / gain:,.0f}" if gain > 0 else "never"


# ---------------------------------------------------------------------- memory


def peak_gib(stem: str = "") -> Value:
    """Return a formatter of a peak in GiB: the allocator's on a GPU, the resident set on a CPU.

    stem: beginning of the column, such as `forward_`.
    """
    on_gpu, on_cpu = gib(f"{stem}peak_allocated_bytes"), gib(f"{stem}peak_rss_bytes")
    return lambda row: on_cpu(row) if has_value(row, f"{stem}peak_rss_bytes") else on_gpu(row)


def saving_operation(stem: str) -> Value:
    """Return a formatter of the operation at a rank of saved bytes: measured, or else predicted."""
    return lambda row: str(_saving_operation(row, stem) or NOTHING)


def _saving_operation(row: Row, stem: str) -> Any:
    for column in (f"{stem}_operation", f"predicted_{stem}_operation"):
        if has_value(row, column):
            return row[column]
    return None


def saved_mib_predicted(stem: str) -> Value:
    """Return a formatter of the predicted bytes of the operation that `saving_operation` names."""

    def show(row: Row) -> str:
        operation = _saving_operation(row, stem)
        column = f"predicted_{stem}_bytes"
        # The prediction may give this operation another rank than the measurement does.
        if operation is not None:
            column = f"{_predicted_rank(row, operation)}_bytes"
        return f"{row[column] / MIB:,.2f}" if has_value(row, column) else NOTHING

    return show


def _predicted_rank(row: Row, operation: str) -> str:
    """Return the column stem of the rank at which an operation was predicted, or an empty text."""
    stems = [f"predicted_saved_{rank}" for rank in SAVED_RANKS]
    return next((stem for stem in stems if str(row.get(f"{stem}_operation")) == operation), "")


def share_of_block(stem: str) -> Value:
    """Return a formatter of a share of the bytes that one block saves: measured, else predicted."""

    def show(row: Row) -> str:
        for prefix in ("", "predicted_"):
            part, whole = f"{prefix}{stem}_bytes", f"{prefix}saved_block_bytes"
            if has_value(row, part) and has_value(row, whole):
                return quotient(row[part], row[whole], ".1%")
        return NOTHING

    return show


def peak_bytes_per_pair(row: Row) -> str:
    """Return an attention cell's peak in bytes per pair of positions of one sequence."""
    if row["task"] != "attention":
        return NOTHING
    column = "peak_allocated_bytes"
    if not has_value(row, column):
        return missing_text(row, column)
    return f"{row[column] / row['batch_size'] / row['context_length'] ** 2:.1f}"


def memory_need(row: Row) -> str:
    """Return a cell's peak with the smallest GPU that has this memory, or OOM; and the prediction."""
    return _measured_need(row) + _predicted_need(row)


def _measured_need(row: Row) -> str:
    if row["status"] == "oom":
        has_size = has_value(row, "asked_bytes")
        return f"OOM (asked {_size(row['asked_bytes'])} more)" if has_size else "OOM"
    if has_value(row, "peak_reserved_bytes"):
        # The precision counts too: a T4 has neither tf32 nor bf16.
        smallest = smallest_fitting(row["peak_reserved_bytes"], row.get("precision"))
        return f"{row['peak_reserved_bytes'] / GIB:.1f} GiB: {smallest}"
    if has_value(row, "peak_rss_bytes"):
        return f"{row['peak_rss_bytes'] / GIB:.2f} GiB resident"
    return missing_text(row)


def _size(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= _SMALLEST_GIB else f"{nbytes / MIB:.2f} MiB"


def _predicted_need(row: Row) -> str:
    if not has_value(row, "predicted_peak_reserved_bytes"):
        return ""
    verdict = f", {row['predicted_verdict']}" if has_value(row, "predicted_verdict") else ""
    return f"; predicted {row['predicted_peak_reserved_bytes'] / GIB:.1f} GiB{verdict}"


# ---------------------------------------------------------------------- kernels and failures


def short_kernel_name(name: str) -> str:
    """Return a kernel's name without the prefixes that most kernels share, shortened."""
    short = re.sub(r"^void |at::native::|\(anonymous namespace\)::|<unnamed>::|c10::", "", name)
    return _shortened(short, _LONGEST_NAME)


def end_location(row: Row) -> str:
    """Return the stage and phase in which an attempt ended, such as `warm-up / backward`."""
    names = [str(row[name]) for name in ("stage", "phase") if has_value(row, name)]
    return " / ".join(filter(None, names)) or NOTHING


def failure_reason(row: Row) -> str:
    """Return the first line of the reason or of the error message of a failed attempt."""
    named = [str(row[name]) for name in ("reason", "message") if has_value(row, name)]
    if not named or not named[0]:
        return NOTHING
    return _shortened(named[0].splitlines()[0], _LONGEST_REASON)


def _shortened(text: str, longest: int) -> str:
    """Return a text of at most `longest` characters; an ellipsis shows that it was cut."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
