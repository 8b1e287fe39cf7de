"""How one number of a row is printed. A cell that failed prints its status where its number would be."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from orchestrator.analysis.axes import GIB, MIB, NOTHING, Row, has_value, is_null
from orchestrator.hardware.gpu_catalog import smallest_fitting

Value = Callable[[Row], str]

KERNEL_TIME = "step_kernel_time_ms_median"
SAVED_RANKS = range(1, 6)  # of the operations that save most
_PREDICTED_RANKS = tuple(f"predicted_saved_{rank}" for rank in SAVED_RANKS)
LONGEST_NAME = 100
_LONGEST_REASON = 160
_SHOWN_IN_GIB = GIB / 100  # of which less is none in two digits
HOST_MARK = "†"  # after a time, or a ratio of times, that is CPU-bound: another CPU with the same GPU gives another
SLOWER_HOST_MARK = "‡"  # after one that is GPU-bound here, and CPU-bound with a CPU a third as fast
NOISE_MARK = "~"  # after a ratio of times whose intervals overlap: which is the shorter is not told
_MARKS = {HOST_MARK: "waits_for_host", SLOWER_HOST_MARK: "may_wait_for_host"}
STATUS_WORDS = {
    "oom": "OOM",
    "oom_inferred": "OOM (inferred)",
    "host_oom": "host OOM",
    "timeout": "time-out",
}


def missing_text(row: Row, column: str = "status") -> str:
    """What stands in place of a number that is not there: how the cell ended, if the column is one of this run at all."""
    if column not in row:
        return NOTHING
    status = row["status"]
    return NOTHING if status == "ok" else STATUS_WORDS.get(status, str(status))


def format_ms(ms: float) -> str:
    return f"{ms:.3f}" if ms < 10 else f"{ms:.2f}" if ms < 100 else f"{ms:.1f}"


def where_known(column: str, show: Value) -> Value:
    """`show`, for the rows that have a number in `column`; how the cell ended for the others."""
    return lambda row: show(row) if has_value(row, column) else missing_text(row, column)


def measured(column: str, show: Callable[[Any], str]) -> Value:
    """The number in `column`, as `show` prints it; how the cell ended where there is none."""

    def value(row: Row) -> str:
        found = row.get(column)
        return missing_text(row, column) if is_null(found) else show(found)

    return value


def text(column: str) -> Value:
    return measured(column, str)


def number(column: str, form: str = ".1f", scale: float = 1.0) -> Value:
    return measured(column, lambda found: format(found * scale, form))


def gib(column: str) -> Value:
    return number(column, ".2f", 1 / GIB)


def predicted(column: str, show: Callable[[Any], str]) -> Value:
    """For what is known of a cell however it ended."""
    return lambda row: show(row[column]) if has_value(row, column) else NOTHING


def gib_predicted(column: str) -> Value:
    return predicted(column, lambda nbytes: f"{nbytes / GIB:.2f}")


def _mib(nbytes: Any) -> str:
    return f"{nbytes / MIB:,.2f}"


def mib_measured(column: str) -> Value:
    return measured(column, _mib)


def saving_operation(stem: str) -> Value:
    """What saves so much: as measured, else as predicted."""
    return lambda row: str(_saving_operation(row, stem) or NOTHING)


def _saving_operation(row: Row, stem: str) -> Any:
    columns = (f"{stem}_operation", f"predicted_{stem}_operation")
    return next((row[column] for column in columns if has_value(row, column)), None)


def saved_mib_predicted(stem: str) -> Value:
    """Of the same operation, which may be of another rank."""

    def show(row: Row) -> str:
        operation, column = _saving_operation(row, stem), f"predicted_{stem}"
        if operation is not None:
            ranks = [rank for rank in _PREDICTED_RANKS if has_value(row, f"{rank}_operation")]
            column = next((rank for rank in ranks if row[f"{rank}_operation"] == operation), "")
        return _mib(row[f"{column}_bytes"]) if has_value(row, f"{column}_bytes") else NOTHING

    return show


def share_of_block(stem: str) -> Value:
    """As measured, else as predicted."""

    def show(row: Row) -> str:
        pairs = (
            (f"{prefix}{stem}_bytes", f"{prefix}saved_block_bytes") for prefix in ("", "predicted_")
        )
        return next(
            (
                f"{row[part] / row[whole]:.1%}"
                for part, whole in pairs
                if has_value(row, part) and has_value(row, whole)
            ),
            NOTHING,
        )

    return show


def squares(what: str) -> Value:
    return predicted(f"formula_{what}_squares", lambda count: f"{count:.0f}·Bn²")


def over(numerator: str, denominator: str) -> Value:
    """A ratio close to one."""
    return where_known(
        denominator,
        lambda row: (
            f"{row[numerator] / row[denominator]:.4f}" if has_value(row, numerator) else NOTHING
        ),
    )


def ms(column: str) -> Value:
    return measured(column, format_ms)


def of_steps(time: Value) -> Value:
    """A time of a cell's steps, which says so where they are CPU-bound, or would be with a slower CPU."""

    def show(row: Row) -> str:
        text = time(row)
        return text + mark(row) if text[0].isdigit() else text

    return show


def mark(*rows: Row) -> str:
    """What stands after a number that is of the steps of these."""
    return next(
        (
            sign
            for sign, flag in _MARKS.items()
            if any(has_value(row, flag) and row[flag] for row in rows)
        ),
        "",
    )


step_ms = of_steps(ms("step_ms_median"))


def mean_sd(stem: str) -> Value:
    """`stem` such as `forward_ms`: mean ± sample standard deviation."""

    def show(row: Row) -> str:
        evenly_spaced = format_ms(row[f"{stem}_sd"]) if has_value(row, f"{stem}_sd") else NOTHING
        return f"{format_ms(row[f'{stem}_mean'])} ± {evenly_spaced}"

    return where_known(f"{stem}_mean", show)


def median_interval(stem: str) -> Value:
    """Median with its 95 % interval; where there are too few samples for 95 %, with the coverage there is, if any."""

    def show(row: Row) -> str:
        if not has_value(row, f"{stem}_ci_low"):
            return format_ms(row[f"{stem}_median"])
        low, high = format_ms(row[f"{stem}_ci_low"]), format_ms(row[f"{stem}_ci_high"])
        coverage = row[f"{stem}_coverage"]
        label = "" if coverage >= 0.95 else f" ({coverage:.0%})"
        return f"{format_ms(row[f'{stem}_median'])} [{low}, {high}]{label}"

    return where_known(f"{stem}_median", show)


def interval_in_additions(phase: str) -> Value:
    """Median with its interval."""

    def show(row: Row) -> str:
        low, middle, high = (
            row[f"{phase}_additions_{which}"] for which in ("ci_low", "median", "ci_high")
        )
        return f"{middle:.0f} [{low:.0f}, {high:.0f}]"

    return where_known(f"{phase}_additions_median", show)


def relative_sd(stem: str) -> Value:
    return where_known(f"{stem}_sd", lambda row: f"{row[f'{stem}_sd'] / row[f'{stem}_mean']:.2%}")


def speed_up(column: str) -> Callable[[Row, Row], str]:
    """How many times faster a row's steps are than those of its baseline, by their medians."""

    def compare(row: Row, baseline: Row) -> str:
        return (
            _times_faster(column, row, baseline, mark(row, baseline))
            if has_value(row, column)
            else missing_text(row)
        )

    return compare


def kernels_speed_up(row: Row, baseline: Row) -> str:
    """The same of what the kernels of a step take, which does not depend on the host."""
    return (
        _times_faster(KERNEL_TIME, row, baseline)
        if has_value(row, KERNEL_TIME)
        else missing_text(row, KERNEL_TIME)
    )


def _times_faster(column: str, row: Row, baseline: Row, whose: str = "") -> str:
    if not has_value(baseline, column):
        return NOTHING
    return f"{baseline[column] / row[column]:.2f}×{_noise(column, row, baseline)}{whose}"


def _noise(column: str, row: Row, baseline: Row) -> str:
    ends = [column.replace("median", end) for end in ("ci_low", "ci_high")]
    if row is baseline or not all(has_value(one, end) for one in (row, baseline) for end in ends):
        return ""
    (low, high), (base_low, base_high) = ([one[end] for end in ends] for one in (row, baseline))
    return NOISE_MARK if low < base_high and high >= base_low else ""


def break_even(row: Row, baseline: Row) -> str:
    """After how many steps compiling has paid: what it cost from a cold cache, over what each step gains."""
    if not (has_value(row, "compile_cost_ms") and has_value(baseline, "step_ms_median")):
        return missing_text(row, "step_ms_median")
    if not has_value(row, "compile_cache_seen") or row["compile_cache_seen"] != "cold":
        return NOTHING
    gain = baseline["step_ms_median"] - row["step_ms_median"]
    return f"{row['compile_cost_ms'] / gain:,.0f}" if gain > 0 else "never"


def ratio(numerator: str, denominator: str, form: str = ".2f") -> Value:
    def value(row: Row) -> str:
        if not (has_value(row, numerator) and has_value(row, denominator)):
            return missing_text(row, numerator)
        return format(row[numerator] / row[denominator], form)

    return value


def short_kernel_name(name: str) -> str:
    """Without what all names have in common, and cut."""
    short = re.sub(r"^void |at::native::|\(anonymous namespace\)::|<unnamed>::|c10::", "", name)
    return short if len(short) <= LONGEST_NAME else f"{short[: LONGEST_NAME - 1]}…"


def per_pair(row: Row) -> str:
    column = "peak_allocated_bytes"
    if not has_value(row, column):
        return missing_text(row, column)
    return f"{row[column] / row['batch_size'] / row['context_length'] ** 2:.1f}"


def memory_need(row: Row) -> str:
    """What a cell needs: its peak and the smallest GPU that has it, or that it ran out of memory; and what was predicted."""
    return _measured_need(row) + _predicted_need(row)


def _measured_need(row: Row) -> str:
    if row["status"] == "oom":
        asked = (
            f" (asked {_size(row['asked_bytes'])} more)" if has_value(row, "asked_bytes") else ""
        )
        return f"OOM{asked}"
    if has_value(row, "peak_reserved_bytes"):
        smallest = smallest_fitting(row["peak_reserved_bytes"], row.get("precision"))
        return f"{row['peak_reserved_bytes'] / GIB:.1f} GiB: {smallest}"
    if has_value(row, "peak_rss_bytes"):
        return f"{row['peak_rss_bytes'] / GIB:.2f} GiB resident"
    return missing_text(row)


def _size(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= _SHOWN_IN_GIB else f"{nbytes / MIB:.2f} MiB"


def _predicted_need(row: Row) -> str:
    if not has_value(row, "predicted_peak_reserved_bytes"):
        return ""
    verdict = f", {row['predicted_verdict']}" if has_value(row, "predicted_verdict") else ""
    return f"; predicted {row['predicted_peak_reserved_bytes'] / GIB:.1f} GiB{verdict}"


def end_location(row: Row) -> str:
    return (
        " / ".join(
            str(row[name]) for name in ("stage", "phase") if has_value(row, name) and row[name]
        )
        or "–"
    )


def failure_reason(row: Row) -> str:
    said = next((str(row[name]) for name in ("reason", "message") if has_value(row, name)), "")
    first = said.splitlines()[0] if said else NOTHING
    return first if len(first) <= _LONGEST_REASON else f"{first[: _LONGEST_REASON - 1]}…"
