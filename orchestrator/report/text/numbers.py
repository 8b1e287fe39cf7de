"""Numbers as texts: of sentences with three significant digits, and of tables with a format."""

from __future__ import annotations

import math

import pandas as pd

from orchestrator.analysis.axes import NOTHING, is_null
from orchestrator.common.units import GIB

# After a time, or a ratio of times, of CPU-bound steps: another CPU with this GPU gives another one.
HOST_MARK = "†"
# After a ratio of times whose intervals overlap, so that the difference may be chance.
NOISE_MARK = "~"
_DIGITS = 3
_HUGE = 1e12  # from here on, a number in fixed notation would fill a column with digits


def number(value: float | None, digits: int = _DIGITS) -> str:
    """Return a value with a few significant digits, such as 78.7, 575 or 2,279."""
    if value is None or is_null(value):
        return NOTHING
    value = float(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    # 9.996 rounds to 10.00, which has a digit too many.
    if abs(round(value, decimals)) >= 10 ** (digits - decimals):
        decimals = max(decimals - 1, 0)
    return f"{value:,.{decimals}f}"


def ratio(value: float | None) -> str:
    """Return a ratio with two decimals, such as 3.96×, or with fewer from 10 on."""
    if value is None or is_null(value):
        return NOTHING
    return f"{value:.2f}×" if value < 10 else f"{number(value)}×"


def interval(low: float | None, high: float | None, coverage: float = 1.0) -> str:
    """Return the interval of a ratio in brackets, with its confidence if that is below 95 %."""
    return f"[{ratio(low)}, {ratio(high)}]".replace("×", "") + confidence(coverage)


def confidence(coverage: float) -> str:
    """Return the confidence of an interval, such as ` (50%)`; empty if it is at least 95 %."""
    return "" if coverage >= 0.95 else f" ({percent(coverage)})"


def percent(share: float | None) -> str:
    return NOTHING if share is None or is_null(share) else f"{100 * share:.0f}%"


def gibibytes(count: float | None) -> str:
    return NOTHING if count is None or is_null(count) else f"{number(count / GIB)} GiB"


def rounded(values: pd.Series[float], digits: int = 5) -> pd.Series[float]:
    """Return numbers with few digits: more are invisible, and make charts and the page larger."""
    return values.astype(float).map(lambda value: float(f"{value:.{digits}g}"))


def marks(is_cpu_bound: bool | None, is_within_noise: bool) -> str:
    """Return the marks behind a number that may be chance, or that another CPU changes."""
    return f"{NOISE_MARK if is_within_noise else ''}{HOST_MARK if is_cpu_bound else ''}"


def span(values: pd.Series[float]) -> str:
    """Return the smallest and the largest of several values, such as `1.77 to 2.40`."""
    return f"{values.min():.2f} to {values.max():.2f}" if len(values) > 1 else ""


def format_number(value: float, form: str) -> str:
    """Return a formatted number, in scientific notation if it is huge."""
    is_regular = math.isfinite(value) and abs(value) < _HUGE
    return format(value, form if is_regular else ".3g")


def format_ms(ms: float) -> str:
    """Return milliseconds with about four significant digits."""
    if ms < 10:
        return format_number(ms, ".3f")
    return format_number(ms, ".2f" if ms < 100 else ".1f")
