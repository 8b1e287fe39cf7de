"""Text that commands print: functions that turn results into lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.common.units import GIB


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain table, without the columns that are empty in every row."""
    # 60 ms to import, which most commands need not spend.
    from tabulate import tabulate

    columns = [column for column in zip(header, *rows, strict=True) if any(column[1:])]
    used_header, *used_rows = zip(*columns, strict=True)
    return tabulate(used_rows, used_header, disable_numparse=True)  # numbers are texts already


def format_gib(nbytes: float | None, digits: int = 2) -> str:
    """Return a size in GiB, or an empty text for none."""
    return f"{nbytes / GIB:.{digits}f}" if nbytes else ""


def format_counts(counts: Iterable[tuple[str, int]]) -> str:
    """Return counts by status, such as "3 ok, 1 oom"."""
    return ", ".join(f"{count} {status}" for status, count in counts)
