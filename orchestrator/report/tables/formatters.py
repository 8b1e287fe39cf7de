"""How one value of a cell is written in a table.

A formatter (`Value`) takes a row of `cells` and returns text. If the cell failed, the text is its
status, so that a reader sees OOM and not an empty field. Columns are named as in `docs/columns.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from orchestrator.analysis.axes import GIB, MIB, NOTHING, Row, has_value, is_null
from orchestrator.hardware.gpu_catalog import smallest_fitting

Value = Callable[[Row], str]

KERNEL_TIME = "step_kernel_time_ms_median"
SAVED_RANKS = range(1, 6)  # ranks of the operations that save most for the backward pass
_PREDICTED_RANKS = tuple(f"predicted_saved_{rank}" for rank in SAVED_RANKS)
LONGEST_NAME = 100  # characters of a kernel's name: templates of CUTLASS run to 2,000
_LONGEST_REASON = 160
_SMALLEST_GIB = GIB / 100  # smaller sizes are written in MiB, since two digits would show 0.00
# After a time, or a ratio of times, of CPU-bound steps: another CPU with this GPU gives another one.
HOST_MARK = "†"
# After a ratio of times whose intervals overlap, so that the difference may be chance.
NOISE_MARK = "~"
NOISE_NOTE = f" {NOISE_MARK}: within noise, since the intervals of the two medians overlap."
STATUS_WORDS = {
    "oom": "OOM",
    "oom_inferred": "OOM (inferred)",
    "host_oom": "host OOM",
    "timeout": "time-out",
}


def missing_text(row: Row, column: str = "status") -> str:
    """Return what replaces a missing value: the cell's status, or a dash if the run lacks the
    column.
    """
    if column not in row or row["status"] == "ok":
        return NOTHING
    return STATUS_WORDS.get(row["status"], str(row["status"]))


def format_ms(ms: float) -> str:
    """Return milliseconds with about four significant digits."""
    if ms < 10:
        return f"{ms:.3f}"
    return f"{ms:.2f}" if ms < 100 else f"{ms:.1f}"


# ---------------------------------------------------------------------- a value of one column


def where_known(column: str, show: Value) -> Value:
    """Return a formatter that uses `show` if the row has a value in `column`."""

    def value(row: Row) -> str:
        return show(row) if has_value(row, column) else missing_text(row, column)

    return value


def measured(column: str, show: Callable[[Any], str]) -> Value:
    """Return a formatter of one column: its value as `show` writes it, or the cell's status."""

    def value(row: Row) -> str:
        found = row.get(column)
        return missing_text(row, column) if is_null(found) else show(found)

    return value


def predicted(column: str, show: Callable[[Any], str]) -> Value:
    """Return a formatter of a value that exists however the cell ended, such as a prediction."""

    def value(row: Row) -> str:
        return show(row[column]) if has_value(row, column) else NOTHING

    return value


def text(column: str) -> Value:
    return measured(column, str)


def number(column: str, form: str = ".1f", scale: float = 1.0) -> Value:
    """Return a formatter of a number, multiplied by `scale` and written with the format `form`."""
    return measured(column, lambda found: format(found * scale, form))


def gib(column: str) -> Value:
    return number(column, ".2f", 1 / GIB)


def gib_predicted(column: str) -> Value:
    return predicted(column, lambda nbytes: f"{nbytes / GIB:.2f}")


def mib_measured(column: str) -> Value:
    return measured(column, _mib)


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.2f}"


def ms(column: str) -> Value:
    return measured(column, format_ms)


# ---------------------------------------------------------------------- times of steps


def of_steps(time: Value) -> Value:
    """Return a formatter of a step time that adds the mark of CPU-bound cells."""

    def show(row: Row) -> str:
        shown = time(row)
        return shown + mark(row) if shown[0].isdigit() else shown

    return show


def mark(*rows: Row) -> str:
    """Return the mark † if the steps of one of these rows are CPU-bound, else an empty text."""
    flag = "cpu_bound"
    is_cpu_bound = any(has_value(row, flag) and row[flag] for row in rows)
    return HOST_MARK if is_cpu_bound else ""


step_ms = of_steps(ms("step_ms_median"))


def mean_sd(stem: str) -> Value:
    """Return a formatter of mean ± sample standard deviation. `stem`: such as `forward_ms`."""

    def show(row: Row) -> str:
        spread = format_ms(row[f"{stem}_sd"]) if has_value(row, f"{stem}_sd") else NOTHING
        return f"{format_ms(row[f'{stem}_mean'])} ± {spread}"

    return where_known(f"{stem}_mean", show)


def median_interval(stem: str) -> Value:
    """Return a formatter of a median with its 95 % interval.

    If there are too few samples for 95 %, the interval's own coverage is added in parentheses. With
    a single sample there is no interval.
    """

    def show(row: Row) -> str:
        median = format_ms(row[f"{stem}_median"])
        if not has_value(row, f"{stem}_ci_low"):
            return median
        low, high = format_ms(row[f"{stem}_ci_low"]), format_ms(row[f"{stem}_ci_high"])
        coverage = row[f"{stem}_coverage"]
        label = "" if coverage >= 0.95 else f" ({coverage:.0%})"
        return f"{median} [{low}, {high}]{label}"

    return where_known(f"{stem}_median", show)


def relative_sd(stem: str) -> Value:
    return where_known(f"{stem}_sd", lambda row: f"{row[f'{stem}_sd'] / row[f'{stem}_mean']:.2%}")


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
    return f"{baseline[column] / row[column]:.2f}×{noise_mark}{cpu_mark}"


def _intervals_overlap(median_column: str, row: Row, baseline: Row) -> bool:
    if row is baseline:
        return False
    low, high = (median_column.replace("median", end) for end in ("ci_low", "ci_high"))
    for one in (row, baseline):
        if not (has_value(one, low) and has_value(one, high)):
            return False
    return bool(row[low] < baseline[high] and row[high] >= baseline[low])


def break_even(row: Row, baseline: Row) -> str:
    """Return after how many steps a compilation with a cold cache has paid off.

    That is the cost of the compilation divided by the time that each step gains.
    """
    if not (has_value(row, "compile_cost_ms") and has_value(baseline, "step_ms_median")):
        return missing_text(row, "step_ms_median")
    if not has_value(row, "compile_cache_seen") or row["compile_cache_seen"] != "cold":
        return NOTHING
    gain = baseline["step_ms_median"] - row["step_ms_median"]
    return f"{row['compile_cost_ms'] / gain:,.0f}" if gain > 0 else "never"


def ratio(numerator: str, denominator: str, form: str = ".2f") -> Value:
    """Return a formatter of the ratio of two columns."""

    def value(row: Row) -> str:
        if not (has_value(row, numerator) and has_value(row, denominator)):
            return missing_text(row, numerator)
        return format(row[numerator] / row[denominator], form)

    return value


def over(numerator: str, denominator: str) -> Value:
    """Return a formatter of a ratio that is close to one, such as predicted over measured."""

    def show(row: Row) -> str:
        if not has_value(row, numerator):
            return NOTHING
        return f"{row[numerator] / row[denominator]:.4f}"

    return where_known(denominator, show)


# ---------------------------------------------------------------------- memory


def saving_operation(stem: str) -> Value:
    """Return a formatter of the operation at a rank of saved bytes: measured, or else predicted."""
    return lambda row: str(_saving_operation(row, stem) or NOTHING)


def _saving_operation(row: Row, stem: str) -> Any:
    for column in (f"{stem}_operation", f"predicted_{stem}_operation"):
        if has_value(row, column):
            return row[column]
    return None


def saved_mib_predicted(stem: str) -> Value:
    """Return a formatter of the predicted bytes of the operation that `saving_operation` names.

    The prediction may give this operation another rank than the measurement does.
    """

    def show(row: Row) -> str:
        operation = _saving_operation(row, stem)
        column = f"predicted_{stem}"
        if operation is not None:
            column = _predicted_rank(row, operation)
        return _mib(row[f"{column}_bytes"]) if has_value(row, f"{column}_bytes") else NOTHING

    return show


def _predicted_rank(row: Row, operation: str) -> str:
    """Return the column stem of the rank at which an operation was predicted, or an empty string."""
    for rank in _PREDICTED_RANKS:
        column = f"{rank}_operation"
        if has_value(row, column) and row[column] == operation:
            return rank
    return ""


def share_of_block(stem: str) -> Value:
    """Return a formatter of a share of the bytes that one block saves: measured, or else predicted."""

    def show(row: Row) -> str:
        for prefix in ("", "predicted_"):
            part, whole = f"{prefix}{stem}_bytes", f"{prefix}saved_block_bytes"
            if has_value(row, part) and has_value(row, whole):
                return f"{row[part] / row[whole]:.1%}"
        return NOTHING

    return show


def squares(what: str) -> Value:
    """Return a formatter of a closed form, in tensors of B sequences of n × n."""
    return predicted(f"formula_{what}_squares", lambda count: f"{count:.0f}·Bn²")


def peak_bytes_per_pair(row: Row) -> str:
    """Return the peak in bytes per pair of positions of one sequence."""
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
    return short if len(short) <= LONGEST_NAME else f"{short[: LONGEST_NAME - 1]}…"


def end_location(row: Row) -> str:
    """Return the stage and phase in which an attempt ended, such as `warm-up / backward`."""
    names = [str(row[name]) for name in ("stage", "phase") if has_value(row, name)]
    return " / ".join(filter(None, names)) or NOTHING


def failure_reason(row: Row) -> str:
    """Return the first line of the reason or of the error message of a failed attempt."""
    named = [str(row[name]) for name in ("reason", "message") if has_value(row, name)]
    if not named or not named[0]:
        return NOTHING
    first = named[0].splitlines()[0]
    return first if len(first) <= _LONGEST_REASON else f"{first[: _LONGEST_REASON - 1]}…"
