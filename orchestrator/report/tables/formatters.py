"""Formatters: functions that make the entry of a table from one cell.

A formatter (`Value`) takes a row of `cells` and returns an `Entry`. `@formatter` marks functions that
return one: they are called with their other arguments, such as `ms("step_ms_median")`. If the cell failed, the entry is
its status, so that a reader sees OOM and not an empty field. Columns are named as in
`docs/columns.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Concatenate, ParamSpec

from orchestrator.analysis.axes import NOTHING, Row, has_value, is_null, number_in
from orchestrator.analysis.column_docs import declared_unit
from orchestrator.common.text import failure_reason
from orchestrator.common.units import GIB, MIB
from orchestrator.hardware.gpu_catalog import smallest_fitting
from orchestrator.report.tables.table import MISSING, Entry, milliseconds, quantity, quotient
from orchestrator.report.text.numbers import NOISE_MARK, confidence
from tasks.spec.messages import shorten

Value = Callable[[Row], Entry]
P = ParamSpec("P")

SAVED_RANKS = range(1, 6)  # ranks of the operations that save most for the backward pass
# Characters of a kernel's name. Names that CUTLASS makes of its template arguments run to 2,000.
_LONGEST_NAME = 100
_SMALLEST_GIB = GIB / 100  # smaller sizes are written in MiB, since two digits would show 0.00
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


def missing(row: Row, *columns: str) -> Entry:
    """Return what replaces a missing value: the status of a failed cell, otherwise a dash."""
    # A column that the whole run lacks says nothing about this cell: with a status in it, it would
    # not be empty, and the table would show it.
    status = str(row["status"])
    if status == "ok" or not all(column in row for column in columns):
        return MISSING
    return Entry(_STATUS_WORDS.get(status, status), status=status)


def formatter(make: Callable[Concatenate[Row, P], Entry]) -> Callable[P, Value]:
    """Turn a function of a row and of settings into one of the settings that returns a formatter."""

    def with_settings(*args: P.args, **settings: P.kwargs) -> Value:
        return lambda row: make(row, *args, **settings)

    return with_settings


# ---------------------------------------------------------------------- a value of one column


@formatter
def measured(row: Row, column: str, show: Callable[[Any], Entry]) -> Entry:
    """Return the value of one column as `show` makes it, or the cell's status."""
    # One look-up: a report of 10,000 cells calls this half a million times.
    found = row.get(column)
    return missing(row, column) if is_null(found) else show(found)


@formatter
def predicted(row: Row, column: str, show: Callable[[Any], Entry]) -> Entry:
    """Return a value that exists however the cell ended, such as a prediction."""
    return show(row[column]) if has_value(row, column) else MISSING


def _yes_or_no(flag: object) -> Entry:
    return Entry("yes" if flag else "no", bool(flag))


def number(column: str, form: str = ".1f", scale: float = 1.0) -> Value:
    """Return a formatter of a number, multiplied by `scale` and written with the format `form`."""
    return measured(column, lambda found: quantity(found * scale, form))


def to_gib(nbytes: float | None, form: str = ".2f") -> Entry:
    """Return an entry in GiB; the missing one for None."""
    return quantity(None if nbytes is None else nbytes / GIB, form, "GiB")


def to_mib(nbytes: float, form: str = ",.2f") -> Entry:
    """Return an entry in MiB."""
    return quantity(nbytes / MIB, form, "MiB")


def _plain(found: Any, form: str = ".2f") -> Entry:
    """Return an entry of a text, a flag, a whole number, or another one with the notation `form`."""
    if isinstance(found, bool):
        return _yes_or_no(found)
    if isinstance(found, str):
        return Entry(found)
    return quantity(found, ",d" if isinstance(found, int) else form)


# How values of each unit are shown.
_BY_UNIT: Mapping[str, Callable[[Any], Entry]] = {
    "ms": milliseconds,
    "bytes": to_gib,
    "ns": lambda ns: quantity(ns / 1e9, ".1f", "s"),
    "ratio": partial(_plain, form=".1%"),
    "TFLOP/s": partial(_plain, form=".1f"),
    **dict.fromkeys(("tokens/s", "MHz", "1/ms", "tensors", "events"), partial(_plain, form=",.0f")),
}


def col(column: str, title: str = "") -> tuple[str, Value]:
    """Return title and formatter of a column. Its declared unit says how it is shown.

    Raise LookupError if it is not declared.
    """
    show = _BY_UNIT.get(declared_unit(column), _plain)
    return title or column.replace("_", " "), measured(column, show)


text = partial(measured, show=Entry)
yes_or_no = partial(measured, show=_yes_or_no)
ms = partial(measured, show=milliseconds)
gib = partial(measured, show=to_gib)
mib = partial(measured, show=to_mib)
gib_predicted = partial(predicted, show=to_gib)


@formatter
def ratio(
    row: Row, numerator: str, denominator: str, form: str = ".2f", scale: float = 1.0
) -> Entry:
    """Return the ratio of two columns, multiplied by `scale`."""
    if has_value(row, numerator) and has_value(row, denominator):
        return quotient(row[numerator] * scale, row[denominator], form)
    return missing(row, numerator, denominator)


@formatter
def first_of(row: Row, *values: Value) -> Entry:
    """Return the first value that a row has, such as a measured or a predicted one."""
    found = (value(row) for value in values)
    return next((one for one in found if not (one.is_missing or one.status)), MISSING)


# ---------------------------------------------------------------------- times of steps


@formatter
def of_steps(row: Row, time: Value) -> Entry:
    """Return a step time that says whether the cell is CPU-bound."""
    return _marked(time(row), row)


def _marked(entry: Entry, *rows: Row) -> Entry:
    return entry if entry.number is None else entry._replace(is_cpu_bound=is_cpu_bound(*rows))


def is_cpu_bound(*rows: Row) -> bool | None:
    """Return True if the steps of one of these rows are CPU-bound, None if that is unknown."""
    known = [bool(row["cpu_bound"]) for row in rows if has_value(row, "cpu_bound")]
    return any(known) or (False if len(known) == len(rows) else None)


step_ms = of_steps(ms("step_ms_median"))


@formatter
def mean_sd(row: Row, stem: str) -> Entry:
    """Return mean ± sample standard deviation. `stem`: such as `forward_ms`."""
    mean, sd = ms(f"{stem}_mean")(row), milliseconds(row.get(f"{stem}_sd"))
    if mean.number is None:
        return mean
    return mean._replace(spread=f" ± {sd.text}", deviation=sd.number)


@formatter
def of_whole_step(row: Row, make: Callable[[str], Value]) -> Entry:
    """Return a value of the whole step. `make`: from the stem of columns, such as `step_ms`.

    All statistics of a row are of the same steps: without warm-up, those of the first timing, which
    has the cold steps.
    """
    is_cold = has_value(row, "warmup_steps") and row["warmup_steps"] == 0
    is_cold = is_cold and has_value(row, "step_synced_ms_mean")
    return make("step_synced_ms" if is_cold else "step_ms")(row)


@formatter
def median_interval(row: Row, stem: str) -> Entry:
    """Return a median with its 95 % interval, which a single sample does not have."""
    median = ms(f"{stem}_median")(row)
    low, high = (milliseconds(row.get(f"{stem}_ci_{end}")) for end in ("low", "high"))
    if low.number is None:
        return median
    # With fewer than six samples even the interval from the smallest to the largest contains the
    # median with less than 95 % confidence.
    spread = f" [{low.text}, {high.text}]{confidence(row[f'{stem}_coverage'])}"
    return median._replace(spread=spread, low=low.number, high=high.number)


def over_repetitions(row: Row) -> Entry:
    """Return the median over the repetitions of a cell, with the smallest and the largest."""
    ends = ("median", "min", "max")
    median, low, high = (milliseconds(row.get(f"repeated_ms_{end}")) for end in ends)
    if median.number is None:
        return MISSING
    spread = f" ({low.text} to {high.text})"
    return median._replace(spread=spread, low=low.number, high=high.number)


# ---------------------------------------------------------------------- comparisons of two rows


def speed_up(row: Row, baseline: Row) -> Entry:
    """Return how many times faster the steps of a row are than those of its baseline."""
    if not has_value(row, "step_ms_median"):
        return missing(row)
    return _marked(_times_faster("step_ms_median", row, baseline), row, baseline)


def _times_faster(column: str, row: Row, baseline: Row) -> Entry:
    if not has_value(row, column):
        return missing(row, column)
    if not has_value(baseline, column):
        return MISSING
    factor = quotient(baseline[column], row[column])
    if factor.number is None:
        return factor
    factor = factor._replace(text=f"{factor.text}×")
    low, high = (column.replace("median", end) for end in ("ci_low", "ci_high"))
    has_intervals = all(has_value(one, end) for one in (row, baseline) for end in (low, high))
    if row is baseline or not has_intervals:
        return factor
    # From the ends of both intervals, which is conservative.
    return factor._replace(
        low=quotient(baseline[low], row[high]).number,
        high=quotient(baseline[high], row[low]).number,
        is_within_noise=bool(row[low] < baseline[high] and row[high] >= baseline[low]),
    )


# The speed-up of the kernels of a step, which does not depend on the CPU.
kernels_speed_up = partial(_times_faster, "step_kernel_time_ms_median")


def break_even(row: Row, baseline: Row) -> Entry:
    """Return after how many steps a compilation with a cold cache has paid off.

    That is the cost of the compilation divided by the time that each step gains.
    """
    if not (has_value(row, "compile_cost_ms") and has_value(baseline, "step_ms_median")):
        return missing(row, "step_ms_median")
    if str(row.get("compile_cache_seen")) != "cold":
        return MISSING  # the code came from the cache, so that the cost of compiling is unknown
    gain = baseline["step_ms_median"] - row["step_ms_median"]
    return quantity(row["compile_cost_ms"] / gain, ",.0f") if gain > 0 else Entry("never")


# ---------------------------------------------------------------------- memory


@formatter
def peak_gib(row: Row, stem: str = "") -> Entry:
    """Return a peak in GiB: the allocator's on a GPU, the resident set on a CPU."""
    which = "rss" if has_value(row, f"{stem}peak_rss_bytes") else "allocated"
    return gib(f"{stem}peak_{which}_bytes")(row)


def saving_operation(stem: str) -> Value:
    """Return a formatter of the operation at a rank of saved bytes: measured, or else predicted."""
    return first_of(text(f"{stem}_operation"), text(f"predicted_{stem}_operation"))


@formatter
def saved_mib_predicted(row: Row, stem: str) -> Entry:
    """Return the predicted bytes of the operation that `saving_operation` names."""
    operation, stems = saving_operation(stem)(row), [f"predicted_{stem}"]
    if not operation.is_missing:
        # The prediction may give this operation another rank than the measurement does.
        ranks = [f"predicted_saved_{rank}" for rank in SAVED_RANKS]
        stems = [one for one in ranks if str(row.get(f"{one}_operation")) == operation.text]
    return predicted(f"{stems[0]}_bytes", to_mib)(row) if stems else MISSING


def share_of_block(stem: str) -> Value:
    """Return a formatter of a share of the bytes that one block saves: measured, else predicted."""
    columns = [(f"{one}{stem}_bytes", f"{one}saved_block_bytes") for one in ("", "predicted_")]
    return first_of(*(ratio(part, whole, ".1%") for part, whole in columns))


def peak_bytes_per_pair(row: Row) -> Entry:
    """Return an attention cell's peak in bytes per pair of positions of one sequence."""
    if row["task"] != "attention":
        return MISSING
    pairs = row["batch_size"] * row["context_length"] ** 2
    peak = number_in(row, "peak_allocated_bytes")
    if peak is None:
        return missing(row, "peak_allocated_bytes")
    return quantity(peak / pairs, ".1f", "bytes")


def memory_need(row: Row) -> Entry:
    """Return a cell's peak with the smallest GPU that has this memory, or OOM; and the prediction."""
    need, predicted_bytes = _measured_need(row), number_in(row, "predicted_peak_reserved_bytes")
    if predicted_bytes is None:
        return need
    verdict = f", {row['predicted_verdict']}" if has_value(row, "predicted_verdict") else ""
    spread = f"{need.spread}; predicted {to_gib(predicted_bytes, '.1f')} GiB{verdict}"
    return need._replace(spread=spread)


def _measured_need(row: Row) -> Entry:
    if row["status"] == "oom":
        asked, nbytes = "", number_in(row, "asked_bytes")
        if nbytes is not None:
            size = to_gib(nbytes) if nbytes >= _SMALLEST_GIB else to_mib(nbytes, ".2f")
            asked = f" (asked {size.text} {size.unit} more)"
        return Entry("OOM", spread=asked, status="oom")
    if has_value(row, "peak_reserved_bytes"):
        # The precision counts too: a T4 has neither tf32 nor bf16.
        smallest = smallest_fitting(row["peak_reserved_bytes"], row.get("precision"))
        need = to_gib(row["peak_reserved_bytes"], ".1f")
        return need._replace(spread=f" GiB: {smallest}")
    if has_value(row, "peak_rss_bytes"):
        return to_gib(row["peak_rss_bytes"])._replace(spread=" GiB resident")
    return missing(row)


# ---------------------------------------------------------------------- kernels and failures


def short_kernel_name(name: str) -> str:
    """Return a kernel's name without the prefixes that most kernels share, shortened."""
    short = re.sub(r"^void |at::native::|\(anonymous namespace\)::|<unnamed>::|c10::", "", name)
    return shorten(short, _LONGEST_NAME)


def kernel_name(name: str) -> Entry:
    """Return an entry of a kernel's name, which is complete in files."""
    return Entry(short_kernel_name(name), full=name)


def end_location(row: Row) -> Entry:
    """Return the stage and phase in which an attempt ended, such as `warm-up / backward`."""
    names = [str(row[name]) for name in ("stage", "phase") if has_value(row, name)]
    return Entry(" / ".join(filter(None, names)) or NOTHING)


def why_failed(row: Row) -> Entry:
    """Return the first line of the reason or of the error message of a failed attempt."""
    names = ("reason", "exception", "message")
    evidence: dict[str, object] = {name: str(row[name]) for name in names if has_value(row, name)}
    # A failed allocation is described by its sizes. The rank of an imported trace is a text.
    numbers = ("asked_bytes", "limit_bytes", "free_bytes", "total_bytes", "rank")
    known = [name for name in numbers if has_value(row, name) and not isinstance(row[name], str)]
    evidence |= {name: int(row[name]) for name in known}
    return Entry(failure_reason(evidence) or NOTHING)
